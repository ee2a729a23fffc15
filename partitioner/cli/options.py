"""The options of all commands: their types, their help and the panels that it stands in."""

import difflib
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn, TypeVar

import typer

from partitioner.frontends.model_names import module_name, unusable
from partitioner.ir.errors import PartitionerError

if TYPE_CHECKING:
    from partitioner.options import ModelOptions, SearchOptions, TargetOptions
    from partitioner.search.request import MicroBatchCount, Say

Item = TypeVar("Item")

# Panels of the help.
MODEL, DEVICES, SEARCH, TRAINING = "Model", "Devices", "Search", "Training and stages"
OUTPUT, PICTURES = "Output", "Pictures"


def wrong(message: str) -> NoReturn:
    """Refuse an option: one line, exit code 2.

    Raises:
        typer.BadParameter: Always.
    """
    raise typer.BadParameter(message)


def _pair(text: str, form: str, whole: str = "") -> tuple[str, str]:
    """Both sides of an equals sign; `whole` is the option's whole value, `form` how it looks."""
    name, equals, value = text.rpartition("=")
    if not equals or not name or not value:
        wrong(f"{whole or text!r} is not like {form}")
    return name, value


def dim(text: str) -> tuple[str, int]:
    """The symbol and size of ``NAME=SIZE``."""
    name, value = _pair(text, "batch=8")
    return name, count(value, text, least=0)


def shape(text: str) -> tuple[str, tuple[int, ...]]:
    """The input and shape of ``NAME=D,D``."""
    name, value = _pair(text, "x=8,16")
    return name, tuple(count(part, text, least=0) for part in value.split(","))


def mesh(text: str) -> dict[str, int]:
    """The axis sizes of ``dp=2,tp=2``."""
    pairs = [_pair(part, "dp=2,tp=2", text) for part in text.split(",")]
    axes = {name: count(value, text, least=1) for name, value in pairs}
    if len(axes) != len(pairs):
        wrong(f"{text!r} names an axis twice")
    if any(not name.isidentifier() for name in axes):
        wrong(f"{text!r}: axis names are letters, digits and _")
    return axes


def count(value: str, text: str, least: int = 1) -> int:
    """A whole number of at least `least`; `text` is the option's whole value."""
    if not value.strip().isdecimal() or int(value) < least:
        where = "" if value == text else f"{text!r}: "
        wrong(f"{where}{value!r} is not a whole number of at least {least}")
    return int(value)


def positive(text: str) -> int:
    """A whole number of at least 1."""
    return count(text, text)


def natural(text: str) -> int:
    """A whole number of at least 0."""
    return count(text, text, least=0)


def memory(text: str) -> int:
    """Bytes, like ``8GiB``."""
    from partitioner.cost_model.cluster.topology import parse_bytes  # loads NumPy
    from partitioner.cost_model.errors import CostError

    try:
        return parse_bytes(text)
    except CostError as error:
        wrong(str(error))


def seconds(text: str) -> float:
    """Seconds above 0."""
    try:
        value = float(text.removesuffix("s"))
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        wrong(f"{text!r} is not a number of seconds above 0")
    return value


def micro_batches(text: str) -> "MicroBatchCount":
    """A number of micro-batches, or ``auto``."""
    return "auto" if text == "auto" else positive(text)


def fraction(text: str) -> float:
    """A gap, like ``1%`` or ``0.01``."""
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        wrong(f"{text!r} is not a gap like 1% or 0.01")
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
            wrong(f"{text!r} does not end in {' or '.join(suffixes)}")
        return path

    return read


def _presets(incomplete: str) -> list[str]:
    """Clusters that begin like what was typed, for the shell's completion."""
    from partitioner.cost_model.cluster.presets import PRESETS

    before, times, _ = incomplete.rpartition("x")
    names = (f"{before}{times}{name}" for name in (*PRESETS, "local"))
    return [name for name in names if name.startswith(incomplete)]


def option(
    parser: Callable[[str], Any] | None, metavar: str | None, text: str, *names: str, panel: str
) -> Any:
    """An option with a value; `names` where its parameter has another name.

    A default of the parameter is not shown: `text` says it where it matters.
    """

    def read(value: Any) -> Any:  # Typer parses defaults too
        return parser(value) if parser is not None and isinstance(value, str) else value

    return typer.Option(
        *names,
        parser=None if parser is None else read,
        metavar=metavar,
        help=text,
        rich_help_panel=panel,
        show_default=False,
    )


def flag(text: str, name: str, *names: str, panel: str) -> Any:
    """An option without a value."""
    return typer.Option(name, *names, help=text, rich_help_panel=panel, show_default=False)


Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="An .onnx file, an exported program (.pt2), or package.module:factory.",
    ),
]
Written = Annotated[
    Path, typer.Argument(metavar="DIR", help="The folder that `partition MODEL` wrote.")
]

Dims = Annotated[
    list[Any] | None,
    option(dim, "NAME=SIZE", "Size of a symbolic dim; may be repeated.", "--dim", panel=MODEL),
]
Shapes = Annotated[
    list[Any] | None,
    option(
        shape,
        "NAME=D,D",
        "Shape of an input, or of a tensor inside; may be repeated.",
        "--shape",
        panel=MODEL,
    ),
]

Devices = Annotated[
    int | None,
    option(positive, "N", "Number of devices (default: the cluster's, or 1).", panel=DEVICES),
]
Clusters = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        metavar="NAME|FILE",
        help="Devices and links: a preset, as 4xh100, 2x4xh200 (two machines of four), 4xcpu, "
        "local or ideal, or a TOML file (default: h100).",
        rich_help_panel=DEVICES,
        show_default=False,
        autocompletion=_presets,
    ),
]
Memory = Annotated[
    int | None,
    option(memory, "SIZE", "Memory limit of each device, like 8GiB.", panel=DEVICES),
]
Profile = Annotated[
    Path | None,
    option(
        None,
        "FILE",
        "Measurements of this machine, for --cluster local (default: in the cache folder).",
        panel=DEVICES,
    ),
]

ObjectiveChoice = Annotated[
    Literal["throughput", "latency", "memory"],
    option(
        None,
        None,
        "Minimise the time between requests of a stream (throughput, default), the time of one "
        "request (latency), or the peak memory.",
        panel=SEARCH,
    ),
]
Strategy = Annotated[
    Literal["auto", "intra", "inter"],
    option(
        None,
        None,
        "intra: cut operators over devices; inter: place whole operators; auto (default): the best "
        "of these and of mixtures.",
        panel=SEARCH,
    ),
]
Mesh = Annotated[
    dict[str, int] | None,
    option(
        mesh,
        "dp=2,tp=2",
        "Mesh of all devices to cut over, by its axes (default: searched).",
        panel=SEARCH,
    ),
]
TimeLimit = Annotated[
    float,
    option(seconds, "S", "Seconds for the search (default: 30).", panel=SEARCH),
]
Gap = Annotated[
    float,
    option(
        fraction,
        "1%",
        "Stop once the plan is proven to be this close to the best (default: 1%).",
        panel=SEARCH,
    ),
]
Solver = Annotated[
    str,
    option(
        None,
        "NAME",
        "MILP solver that PuLP finds: highs (default), cbc, gurobi, cplex, ...",
        panel=SEARCH,
    ),
]
Seed = Annotated[
    int, option(natural, "N", "Seed of the search's random choices (default: 0).", panel=SEARCH)
]
InputSeed = Annotated[int, option(natural, "N", "Seed of random inputs (default: 0).", panel=MODEL)]

Training = Annotated[
    bool,
    flag("For a module: plan a training step, forward and backward.", "--training", panel=TRAINING),
]
Optimizer = Annotated[
    str | None,
    option(
        None,
        "NAME",
        "With --training: the optimizer whose state is counted, adamw (default), adam, sgd, "
        "momentum, rmsprop or adagrad.",
        panel=TRAINING,
    ),
]
Parallel = Annotated[
    str | None,
    option(
        None,
        "KIND",
        "Kind of parallelism, in place of the cheapest: dp (data), tp (tensor), cp (sequences), ep "
        "(experts), spatial (images), pp (stages); for modules also ring, dispatch and zero3, with "
        "--training also zero1 and zero2. Join several by + and give --mesh.",
        panel=TRAINING,
    ),
]
Schedule = Annotated[
    str | None,
    option(
        None,
        "NAME|FILE",
        "Order of the micro-batches in stages: forward, gpipe, 1f1b, interleaved, zb1, zbv, "
        "dualpipev, or a file (see partition schedule).",
        panel=TRAINING,
    ),
]
MicroBatches = Annotated[
    Any,
    option(
        micro_batches,
        "M|auto",
        "Run each batch in M equal parts. auto: a module in as many as fit in memory, even if that "
        "changes results; an ONNX model in as many as are fastest. Default: the whole batch; a "
        "module whose batch does not fit runs in parts if results stay the same.",
        panel=TRAINING,
    ),
]

Json = Annotated[bool, flag("Print the facts as JSON.", "--json", panel=OUTPUT)]
Quiet = Annotated[bool, flag("No progress and no summary.", "--quiet", "-q", panel=OUTPUT)]


def read_options(args: SimpleNamespace, say: "Say") -> "ModelOptions":
    """Keyword arguments of `compile` for reading a model."""
    return {
        "training": args.training,
        "optimizer": args.optimizer or "adamw",
        "parallel": getattr(args, "parallel", None),
        "dims": dict(args.dim or ()),
        "shapes": dict(args.shape or ()),
        "progress": say,
    }


def search_options(args: SimpleNamespace) -> "SearchOptions":
    """Keyword arguments of `compile` for the search."""
    return {
        "objective": args.objective,
        "strategy": args.strategy,
        "time_limit_s": args.time_limit,
        "gap": args.gap,
        "solver": args.solver,
        "seed": args.seed,
    }


def target_options(args: SimpleNamespace) -> "TargetOptions":
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


def check_kind(args: SimpleNamespace) -> None:
    """Refuse options of PyTorch modules for an ONNX model, and the reverse.

    Raises:
        typer.BadParameter: There is such an option.
    """
    is_module = module_name(args.model) is not None
    for name in _OF_ONNX if is_module else _OF_MODULES:
        if getattr(args, name, None):
            models = (
                "ONNX models" if is_module else "PyTorch modules (.pt2, package.module:factory)"
            )
            wrong(f"--{name.replace('_', '-')} is for {models}")
    for name in _OF_TRAINING:
        if getattr(args, name, None) and not args.training:
            wrong(f"--{name} is of --training")


def _near(model: Path) -> str:
    """The name that was meant, of the models in the folder of a file that does not exist."""
    if not model.parent.is_dir():
        return ""
    files = [path for path in model.parent.iterdir() if path.suffix in (".onnx", ".pt2")]
    names = {path.stem: path.name for path in sorted(files)}
    stem = model.name if model.name in names else model.stem
    near = difflib.get_close_matches(stem, names, n=1)
    return f"; did you mean {names[near[0]]!r}?" if near else ""


def check_model(text: str) -> Path | None:
    """The file of a model; None for a factory.

    Raises:
        PartitionerError: There is no such model file, or it is of a kind that holds no graph.
    """
    if module_name(text) is not None and ":" in text:
        return None
    model = Path(text)
    try:
        if (model / "plan.json").is_file() and (model / "request.json").is_file():
            raise PartitionerError(
                f"{model} is a partition, not a model; look at it with: partition show {model}"
            )
        if not model.is_file():
            why = f": no such file{_near(model)}" if not model.exists() else " is not a file"
            raise PartitionerError(f"{model}{why}")
    except OSError as error:
        raise PartitionerError(f"{model}: {error.strerror}") from None
    if hint := unusable(text):
        raise PartitionerError(f"{model}: {hint}")
    return model
