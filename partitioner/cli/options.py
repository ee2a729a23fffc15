"""The parser of all commands, the types of their options, and progress on stderr."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeVar

from partitioner.frontends.model_names import module_name
from partitioner.ir.errors import PartitionerError

if TYPE_CHECKING:
    from partitioner.options import ModelOptions, SearchOptions, TargetOptions
    from partitioner.search.request import MicroBatchCount, Say

Item = TypeVar("Item")

#: Help of MODEL.
MODEL = "an .onnx file, an exported program (.pt2), or package.module:factory"
#: Help of DIR.
WRITTEN = "folder that `partition MODEL` wrote"


class Parser(argparse.ArgumentParser):
    """argparse with one line for a usage error, and exit code 2."""

    def error(self, message: str) -> NoReturn:
        """Print the message and exit with 2."""
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def command(name: str, about: str, **places: str) -> Parser:
    """The parser of ``partition NAME``.

    Args:
        name: The command.
        about: Its description.
        places: Help of each positional argument by metavar; the argument has its lower-case name.
    """
    parser = Parser(prog=f"partition {name}", description=about, allow_abbrev=False)
    for metavar, text in places.items():
        parser.add_argument(metavar.lower(), metavar=metavar, help=text)
    return parser


def one_line(error: Exception) -> str:
    """An error's message in one line."""
    return safe(" ".join(str(error).split()))


def safe(text: str) -> str:
    """Text that may hold a model's names, with "?" for each control character."""
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text)


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.rpartition("=")
    if not equals or not name or not value:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def dim(text: str) -> tuple[str, int]:
    """The symbol and size of ``NAME=SIZE``."""
    name, value = _pair(text)
    return name, count(value, text, least=0)


def shape(text: str) -> tuple[str, tuple[int, ...]]:
    """The input and shape of ``NAME=D,D``."""
    name, value = _pair(text)
    return name, tuple(count(part, text, least=0) for part in value.split(","))


def mesh(text: str) -> dict[str, int]:
    """The axis sizes of ``dp=2,tp=2``."""
    pairs = [_pair(part) for part in text.split(",")]
    axes = {name: count(value, text, least=1) for name, value in pairs}
    if len(axes) != len(pairs):
        raise argparse.ArgumentTypeError(f"{text!r} names an axis twice")
    if any(not name.isidentifier() for name in axes):
        raise argparse.ArgumentTypeError(f"{text!r}: axis names are letters, digits and _")
    return axes


def count(value: str, text: str, least: int = 1) -> int:
    """A whole number of at least `least`; `text` is the option's whole value."""
    if not value.strip().isdigit() or int(value) < least:
        where = "" if value == text else f"{text!r}: "
        raise argparse.ArgumentTypeError(
            f"{where}{value!r} is not a whole number of at least {least}"
        )
    return int(value)


def positive(text: str) -> int:
    """A whole number of at least 1."""
    return count(text, text)


def natural(text: str) -> int:
    """A whole number of at least 0."""
    return count(text, text, least=0)


def memory(text: str) -> int:
    """Bytes, like ``8GiB``."""
    from partitioner.cost_model.cluster import parse_bytes  # loads NumPy
    from partitioner.cost_model.errors import CostError

    try:
        return parse_bytes(text)
    except CostError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def seconds(text: str) -> float:
    """Seconds above 0."""
    try:
        value = float(text.removesuffix("s"))
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return value


def micro_batches(text: str) -> MicroBatchCount:
    """A number of micro-batches, or ``auto``."""
    return "auto" if text == "auto" else positive(text)


def fraction(text: str) -> float:
    """A gap, like ``1%`` or ``0.01``."""
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a gap like 1% or 0.01")
    return value


def several(item: Callable[[str], Item]) -> Callable[[str], tuple[Item, ...]]:
    """A list with commas, of items of a type of option."""

    def read(text: str) -> tuple[Item, ...]:
        return tuple(item(part.strip()) for part in text.split(","))

    return read


def output_file(suffixes: Sequence[str]) -> Callable[[str], Path]:
    """A file to write, whose name ends in one of `suffixes`."""

    def read(text: str) -> Path:
        path = Path(text)
        if path.suffix.lower() not in suffixes:
            raise argparse.ArgumentTypeError(f"{text!r} does not end in {' or '.join(suffixes)}")
        return path

    return read


def model_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of reading an ONNX model and of the search."""
    add = parser.add_argument
    add("--objective", choices=("throughput", "latency", "memory"), default="throughput")
    strategy_option(parser)
    shape_options(parser)
    time_limit(parser, 30.0, "for the search")
    add(
        "--gap",
        type=fraction,
        default=0.01,
        metavar="1%",
        help="stop at this gap to the lower bound",
    )
    solver_options(parser)


def strategy_option(parser: argparse.ArgumentParser) -> None:
    """Add the choice of what is searched."""
    parser.add_argument(
        "--strategy",
        choices=("auto", "intra", "inter"),
        default="auto",
        help="shard operators, place them, or both",
    )


def shape_options(parser: argparse.ArgumentParser) -> None:
    """Add the sizes and shapes of an ONNX model's inputs."""
    add = parser.add_argument
    add(
        "--dim",
        type=dim,
        action="append",
        default=[],
        metavar="NAME=SIZE",
        help="size of a symbolic dim",
    )
    add(
        "--shape",
        type=shape,
        action="append",
        default=[],
        metavar="NAME=D,D",
        help="shape of an input",
    )


def time_limit(parser: argparse.ArgumentParser, default_s: float, of: str) -> None:
    """Add a limit in seconds."""
    parser.add_argument(
        "--time-limit",
        type=seconds,
        default=default_s,
        metavar="S",
        help=f"seconds {of} (default {default_s:g})",
    )


def profile_option(parser: argparse.ArgumentParser) -> None:
    """Add the file of measurements."""
    parser.add_argument(
        "--profile",
        type=Path,
        metavar="FILE",
        help="measurements of this machine, for --cluster local (default: in the cache folder)",
    )


def solver_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of every search: the MILP solver, the seed."""
    add = parser.add_argument
    add(
        "--solver",
        default="highs",
        metavar="NAME",
        help="MILP solver that PuLP finds: highs (default), cbc, gurobi, cplex, ...",
    )
    add("--seed", type=natural, default=0, metavar="N", help="of the search (default 0)")


def module_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of PyTorch modules."""
    training_options(parser)
    parser.add_argument(
        "--parallel",
        metavar="KIND",
        help="dp, tp, spatial, of modules also zero3 and pp, of --training also zero1 and zero2, "
        "or several joined by + (with --mesh)",
    )


def pipeline_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of stages and micro-batches."""
    add = parser.add_argument
    add(
        "--schedule",
        metavar="NAME|FILE",
        help="of stages: forward, gpipe, 1f1b, interleaved, zb1, zbv, dualpipev, or a table "
        "(see partition schedule)",
    )
    add(
        "--micro-batches",
        type=micro_batches,
        metavar="M|auto",
        help="run each batch in so many parts; auto: of a module, in as many as memory wants, even "
        "if that changes results (default: if it does not); of an ONNX model, in as many as are "
        "fastest",
    )


def training_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of training a PyTorch module."""
    add = parser.add_argument
    add("--training", action="store_true", help="of a module: plan its backward pass too")
    add(
        "--optimizer",
        metavar="NAME",
        help="of --training: adamw (default), adam, sgd, momentum, rmsprop or adagrad",
    )


def read_options(args: argparse.Namespace, say: Say) -> ModelOptions:
    """Keyword arguments of `compile` for reading a model."""
    return {
        "training": args.training,
        "optimizer": args.optimizer or "adamw",
        "parallel": getattr(args, "parallel", None),
        "dims": dict(args.dim),
        "shapes": dict(args.shape),
        "progress": say,
    }


def search_options(args: argparse.Namespace) -> SearchOptions:
    """Keyword arguments of `compile` for the search."""
    return {
        "objective": args.objective,
        "strategy": args.strategy,
        "time_limit_s": args.time_limit,
        "gap": args.gap,
        "solver": args.solver,
        "seed": args.seed,
    }


def target_options(args: argparse.Namespace) -> TargetOptions:
    """Keyword arguments of `compile` for the devices and the constraints on them."""
    return {
        "cluster": args.cluster,
        "memory": args.memory,
        "profile": args.profile,
        "mesh": args.mesh,
        "constraints": args.constraints,
    }


#: Options of only one of the two front ends.
_OF_ONNX = ("dim", "shape", "annotate")
_OF_MODULES = ("training", "optimizer", "recompute")
#: Of those, the ones of training alone.
_OF_TRAINING = ("optimizer", "recompute")


def check_kind(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuse options of PyTorch modules for an ONNX model, and the reverse."""
    is_module = module_name(args.model) is not None
    for name in _OF_ONNX if is_module else _OF_MODULES:
        if getattr(args, name, None):
            models = (
                "ONNX models" if is_module else "PyTorch modules (.pt2, package.module:factory)"
            )
            parser.error(f"--{name.replace('_', '-')} is for {models}")
    for name in _OF_TRAINING:
        if getattr(args, name, None) and not args.training:
            parser.error(f"--{name} is of --training")


def check_model(text: str) -> Path | None:
    """The file of a model; None for a factory.

    Raises:
        PartitionerError: There is no such model file.
    """
    if module_name(text) is not None and ":" in text:
        return None
    model = Path(text)
    try:
        if (model / "plan.json").is_file():
            raise PartitionerError(
                f"{model} is a partition, not a model; look at it with: partition show {model}"
            )
        if not model.is_file():
            why = ": no such file" if not model.exists() else " is not a file"
            raise PartitionerError(f"{model}{why}")
    except OSError as error:
        raise PartitionerError(f"{model}: {error.strerror}") from None
    return model


def aside(line: str) -> None:
    """Print a line on stderr."""
    print(f"partition: {safe(line)}", file=sys.stderr)


def warn(lines: Iterable[str]) -> None:
    """Print a saved plan's warnings on stderr."""
    for line in lines:
        aside(f"warning: {line}")


def progress(quiet: bool) -> Callable[[str], None]:
    """A function that prints a stage on stderr; silent if `quiet`."""

    def say(text: str) -> None:
        if not quiet:
            print(f"partition: {safe(text)} ...", file=sys.stderr, flush=True)

    return say
