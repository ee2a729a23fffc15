"""The command line: `partition MODEL ...`, `partition run|verify|show DIR`.

Exit codes: 0 ok, 1 bad input, 2 usage, 3 infeasible. Results go to stdout, progress to stderr.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from partitioner import __version__
from partitioner.ir.errors import PartitionerError

_EPILOG = """commands on a folder that `partition MODEL` wrote:
  partition run DIR [--inputs in.npz] [--outputs out.npz] [--requests N]
  partition verify DIR [--seed N]
  partition show DIR [--all]

commands on a problem file of the contest on intra-operator parallelism (google/iopddl):
  partition solve FILE [--time-limit S] [--gap P] [-o SOLUTION]
  partition evaluate FILE SOLUTION

A model file called like a command: partition ./run
"""


class _Parser(argparse.ArgumentParser):
    """argparse with one line for a usage error, and exit code 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: Arguments without the program's name; default: the process's own.

    Returns:
        The exit code.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    try:
        known = bool(args) and args[0] in _COMMANDS
        code = _COMMANDS[args[0]](args[1:]) if known else _partition(args)
        sys.stdout.flush()  # here, where a closed pipe is caught
        return code
    except PartitionerError as error:
        print(f"partition: {_one_line(error)}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print("partition: interrupted", file=sys.stderr)
        return 130


def _one_line(error: Exception) -> str:
    return _safe(" ".join(str(error).split()))


def _safe(text: str) -> str:
    """Text with a model's names in it, without control characters for the terminal."""
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text)


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.rpartition("=")
    if not equals or not name or not value:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def _dim(text: str) -> tuple[str, int]:
    name, value = _pair(text)
    return name, _count(value, text, least=0)


def _shape(text: str) -> tuple[str, tuple[int, ...]]:
    name, value = _pair(text)
    return name, tuple(_count(part, text, least=0) for part in value.split(","))


def _mesh(text: str) -> dict[str, int]:
    pairs = [_pair(part) for part in text.split(",")]
    mesh = {name: _count(value, text, least=1) for name, value in pairs}
    if len(mesh) != len(pairs):
        raise argparse.ArgumentTypeError(f"{text!r} names an axis twice")
    if any(not name.isidentifier() for name in mesh):
        raise argparse.ArgumentTypeError(f"{text!r}: axis names are letters, digits and _")
    return mesh


def _count(value: str, text: str, least: int = 1) -> int:
    if not value.strip().isdigit() or int(value) < least:
        raise argparse.ArgumentTypeError(
            f"{text!r}: {value!r} is not a whole number of at least {least}"
        )
    return int(value)


def _positive(text: str) -> int:
    return _count(text, text)


def _natural(text: str) -> int:
    return _count(text, text, least=0)


def _memory(text: str) -> int:
    from partitioner.cost_model.errors import CostError
    from partitioner.cost_model.specs import parse_bytes  # loads NumPy

    try:
        return parse_bytes(text)
    except CostError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _seconds(text: str) -> float:
    try:
        value = float(text.removesuffix("s"))
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return value


def _fraction(text: str) -> float:
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a gap like 1% or 0.01")
    return value


def _partition_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="partition",
        description="Split an ONNX model over devices: a plan, a subgraph a rank, a proof.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="an .onnx file")
    add(
        "--devices",
        type=_positive,
        metavar="N",
        help="number of devices (default: the cluster's, or 1)",
    )
    add(
        "--cluster",
        metavar="NAME|FILE",
        help="preset like 4xh100, 2x4xh200, 4xcpu, ideal, local; or a TOML file",
    )
    add("--memory", type=_memory, metavar="SIZE", help="memory limit of each device, like 8GiB")
    add("--objective", choices=("throughput", "latency", "memory"), default="throughput")
    add(
        "--strategy",
        choices=("auto", "intra", "inter"),
        default="auto",
        help="shard operators, place them, or both",
    )
    add("--mesh", type=_mesh, metavar="dp=2,tp=2", help="mesh of intra plans (default: searched)")
    add(
        "--dim",
        type=_dim,
        action="append",
        default=[],
        metavar="NAME=SIZE",
        help="size of a symbolic dim",
    )
    add(
        "--shape",
        type=_shape,
        action="append",
        default=[],
        metavar="NAME=D,D",
        help="shape of an input",
    )
    add("--constraints", metavar="FILE", help="pins (TOML) or a plan (JSON) to keep")
    add(
        "--time-limit",
        type=_seconds,
        default=30.0,
        metavar="S",
        help="seconds for the search (default 30)",
    )
    add(
        "--gap",
        type=_fraction,
        default=0.01,
        metavar="1%",
        help="stop at this gap to the lower bound",
    )
    add("--plan-only", action="store_true", help="write no rank files")
    add("--force", action="store_true", help="replace DIR if it is there")
    add(
        "-o", "--output", metavar="DIR", help="folder to write (default: MODEL's stem + .partition)"
    )
    add("--json", action="store_true", help="print the facts as JSON")
    add("-q", "--quiet", action="store_true", help="no progress and no summary")
    add("--version", action="version", version=f"partition {__version__}")
    return parser


def _check_command(parser: argparse.ArgumentParser, argv: Sequence[str]) -> None:
    """Name a command that there is not, where the first argument can be nothing else."""
    word = argv[0] if argv else ""
    if not word.isalpha() or os.path.lexists(word):
        return
    near = difflib.get_close_matches(word, _COMMANDS, n=1)
    two = len(argv) > 1 and not argv[1].startswith("-")
    if near or two:
        hint = f"; did you mean {near[0]!r}?" if near else ""
        parser.error(f"unknown command {word!r} (there are {', '.join(_COMMANDS)}){hint}")


def _partition(argv: Sequence[str]) -> int:
    _check_command(_partition_parser(), argv)
    args = _partition_parser().parse_args(argv)
    from partitioner.directory import check_target

    model = Path(args.model)
    target = Path(args.output) if args.output else Path(f"{model.stem}.partition")
    _check_model(model)
    check_target(target, force=args.force)
    say = _progress(args.quiet)
    say("loading the compiler")
    from partitioner.compiler import compile as compile_model
    from partitioner.summary import text

    result = compile_model(
        model,
        args.devices,
        cluster=args.cluster,
        memory=args.memory,
        objective=args.objective,
        strategy=args.strategy,
        mesh=args.mesh,
        dims=dict(args.dim),
        shapes=dict(args.shape),
        constraints=args.constraints,
        time_limit_s=args.time_limit,
        gap=args.gap,
        progress=say,
    )
    say(f"writing {target}")
    result.save(target, force=args.force, plan_only=args.plan_only)
    if args.json:
        print(json.dumps({**result.summary, "directory": str(target)}, indent=1, allow_nan=False))
    elif not args.quiet:
        print(_safe(text(result.summary)))
        print(f"  written to  {target}")
    return 0


def _check_model(model: Path) -> None:
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


def _run(argv: Sequence[str]) -> int:
    parser = _Parser(
        prog="partition run",
        description="Run a plan, one local process a rank.",
        allow_abbrev=False,
    )
    parser.add_argument("directory", metavar="DIR")
    parser.add_argument(
        "--inputs", metavar="in.npz", help="whole inputs by name (default: random valid ones)"
    )
    parser.add_argument("--outputs", metavar="out.npz", help="where to write the whole outputs")
    parser.add_argument(
        "--requests", type=_positive, default=1, metavar="N", help="requests in flight"
    )
    parser.add_argument("--seed", type=_natural, default=0, help="of random inputs")
    args = parser.parse_args(argv)
    from partitioner.runner import run_directory

    report = run_directory(
        Path(args.directory),
        Path(args.inputs) if args.inputs else None,
        Path(args.outputs) if args.outputs else None,
        requests=args.requests,
        seed=args.seed,
    )
    print(_safe(report))
    return 0


def _verify(argv: Sequence[str]) -> int:
    parser = _Parser(
        prog="partition verify",
        description="Compare all ranks with the whole model.",
        allow_abbrev=False,
    )
    parser.add_argument("directory", metavar="DIR")
    parser.add_argument("--seed", type=_natural, default=0, help="of the random inputs")
    args = parser.parse_args(argv)
    from partitioner.verification import verify_directory

    found = verify_directory(Path(args.directory), seed=args.seed)
    print(_safe(str(found)))
    return 0 if found.equal else 1


def _show(argv: Sequence[str]) -> int:
    parser = _Parser(prog="partition show", description="A plan as text.", allow_abbrev=False)
    parser.add_argument("directory", metavar="DIR")
    parser.add_argument(
        "--all",
        action="store_true",
        help="a line for each node, names in full, the factors of each operator, all tensors",
    )
    args = parser.parse_args(argv)
    from partitioner.result import load
    from partitioner.show import show

    result = load(args.directory)
    for warning in result.warnings:
        print(f"partition: warning: {_safe(warning)}", file=sys.stderr)
    print(_safe(show(result, everything=args.all)))
    return 0


def _solve(argv: Sequence[str]) -> int:
    from partitioner.cli_solve import solve_command

    return solve_command(argv)


def _evaluate(argv: Sequence[str]) -> int:
    from partitioner.cli_solve import evaluate_command

    return evaluate_command(argv)


_COMMANDS: Mapping[str, Callable[[Sequence[str]], int]] = {
    "run": _run,
    "verify": _verify,
    "show": _show,
    "solve": _solve,
    "evaluate": _evaluate,
}


def _progress(quiet: bool) -> Any:
    """A printer of stages on stderr; silent with -q."""

    def say(text: str) -> None:
        if not quiet:
            print(f"partition: {_safe(text)} ...", file=sys.stderr, flush=True)

    return say


if __name__ == "__main__":
    raise SystemExit(main())
