"""The command line: `partition MODEL ...`, `partition COMMAND ...`.

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
from typing import Literal

from partitioner import __version__
from partitioner.cli import pictures as cli_pictures
from partitioner.cli.options import (
    MODEL,
    WRITTEN,
    Parser,
    aside,
    check_kind,
    check_model,
    command,
    memory,
    mesh,
    model_options,
    module_options,
    natural,
    one_line,
    pipeline_options,
    positive,
    profile_option,
    progress,
    read_options,
    safe,
    search_options,
    target_options,
    warn,
)
from partitioner.cli.profile import calibrate_command, profile_command
from partitioner.cli.report import diff, explain, report, sweep
from partitioner.cli.schedule import schedule_command
from partitioner.cli.solve import evaluate_command, solve_command
from partitioner.frontends.model_names import module_name
from partitioner.ir.errors import PartitionerError

_EPILOG = """commands on a folder that `partition MODEL` wrote:
  partition run DIR [--inputs in.npz] [--outputs out.npz] [--requests N] [--profile [--calibrate]]
  partition calibrate DIR [--profile FILE]
  partition verify DIR [--seed N]
  partition show DIR [--all]
  partition explain DIR [NODE]
  partition report DIR [-o FILE]
  partition diff DIR_A DIR_B [-o FILE]
  partition draw DIR [--dot F] [--graph F] [--timeline F] [--annotate F]

on a model:
  partition sweep MODEL --devices 1,2,4,8 [--memory SIZE,...] [--clusters NAME,...] [-o FILE]
                        [--training] [--parallel KIND]
  partition profile MODEL [--devices N] [--training] [--time-limit S] [--profile FILE]
  partition check FILE

commands on a problem file (google/iopddl, msr-fiddle/dnn-partitioning or msr-fiddle/piper):
  partition solve FILE [--time-limit S] [--gap P] [-o SOLUTION]
  partition evaluate FILE SOLUTION

on a pipeline:
  partition schedule NAME --stages S --micro-batches M [--lanes 0,1,0] [--edges 0-1,1-2]
  partition schedule FILE [--edges 0-1,1-2]

A model file called like a command: partition ./run
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: Arguments without the program's name; None: those of the process.

    Returns:
        The exit code.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    try:
        is_command = bool(args) and args[0] in _COMMANDS
        code = _COMMANDS[args[0]](args[1:]) if is_command else _partition(args)
        sys.stdout.flush()  # here, where a closed pipe is caught
        return code
    except PartitionerError as error:
        print(f"partition: {one_line(error)}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print("partition: interrupted", file=sys.stderr)
        return 130


def _partition_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="partition",
        description="Split a model over devices: a plan, a subgraph a rank, a proof.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help=MODEL)
    add(
        "--devices",
        type=positive,
        metavar="N",
        help="number of devices (default: the cluster's, or 1)",
    )
    add(
        "--cluster",
        metavar="NAME|FILE",
        help="preset like 4xh100, 2x4xh200, 4xcpu, ideal, local; or a TOML file",
    )
    add("--memory", type=memory, metavar="SIZE", help="memory limit of each device, like 8GiB")
    profile_option(parser)
    model_options(parser)
    add(
        "--tune",
        type=positive,
        metavar="K",
        help="of --cluster local: run the K best plans here and keep the one measured fastest",
    )
    add("--mesh", type=mesh, metavar="dp=2,tp=2", help="mesh of intra plans (default: searched)")
    add("--constraints", metavar="FILE", help="pins (TOML) or a plan (JSON) to keep")
    add(
        "--dump-problem",
        type=Path,
        metavar="FILE",
        help="write the problem of --strategy intra or inter for other solvers, and plan nothing",
    )
    module_options(parser)
    pipeline_options(parser)
    add(
        "--recompute",
        choices=tuple(_RECOMPUTE),
        help="of --training: whether the backward pass may compute values again instead of keeping "
        "them (default: auto, where memory is short)",
    )
    add(
        "--plan-only",
        action="store_true",
        help="write no rank files; the files of weights may be missing",
    )
    add("--force", action="store_true", help="replace DIR if it is there")
    add(
        "-o", "--output", metavar="DIR", help="folder to write (default: MODEL's stem + .partition)"
    )
    cli_pictures.add_pictures(parser)
    add("--json", action="store_true", help="print the facts as JSON")
    add("-q", "--quiet", action="store_true", help="no progress and no summary")
    add("--version", action="version", version=f"partition {__version__}")
    return parser


def _check_command(parser: argparse.ArgumentParser, argv: Sequence[str]) -> None:
    """Refuse a first argument that can only be a misspelt command, with the commands there are."""
    word = argv[0] if argv else ""
    if not word.isalpha() or os.path.lexists(word):
        return
    near = difflib.get_close_matches(word, _COMMANDS, n=1)
    has_operand = len(argv) > 1 and not argv[1].startswith("-")
    if near or has_operand:
        hint = f"; did you mean {near[0]!r}?" if near else ""
        parser.error(f"unknown command {word!r} (there are {', '.join(_COMMANDS)}){hint}")


def _partition(argv: Sequence[str]) -> int:
    parser = _partition_parser()
    _check_command(parser, argv)
    args = parser.parse_args(argv)
    from partitioner.files import check_target

    check_kind(parser, args)
    if args.dump_problem is not None:
        return _dump(parser, args)
    name = module_name(args.model) or Path(args.model).stem
    target = Path(args.output) if args.output else Path(f"{name}.partition")
    model = check_model(args.model)
    check_target(target, force=args.force)
    cli_pictures.check_pictures(parser, args, model)
    say = progress(args.quiet)
    say("loading the compiler")
    from partitioner.compiler import compile as compile_model
    from partitioner.report.summary import text

    result = compile_model(
        args.model,
        devices=args.devices,
        recompute=_RECOMPUTE[args.recompute or "auto"],
        plan_only=args.plan_only,
        tune=args.tune,
        schedule=args.schedule,
        micro_batches=args.micro_batches,
        **target_options(args),
        **read_options(args, say),
        **search_options(args),
    )
    say(f"writing {target}")
    result.save(target, force=args.force, plan_only=args.plan_only, progress=say)
    cli_pictures.write_pictures(result, args, say, aside)
    if args.json:
        print(json.dumps({**result.summary, "directory": str(target)}, indent=1, allow_nan=False))
    elif not args.quiet:
        print(safe(text(result.summary, result.search_s)))
        print(f"  written to  {target}")
    return 0


#: The values of --recompute as the option of `compile`.
_RECOMPUTE: Mapping[str, bool | Literal["auto"]] = {"auto": "auto", "yes": True, "no": False}
#: Options of the command that need a plan.
_OF_PLANS = (
    *("output", "plan_only", "tune", "schedule", "micro_batches", "force", "json"),
    *("dot", "graph", "timeline", "annotate"),
)


def _dump(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    for name in _OF_PLANS:
        if getattr(args, name):
            option = name.replace("_", "-")
            parser.error(f"--dump-problem plans nothing: leave out --{option}")
    check_model(args.model)
    say = progress(args.quiet)
    say("loading the compiler")
    from partitioner.compiler import dump_problem

    dumped = dump_problem(
        args.model,
        args.dump_problem,
        args.devices,
        strategy=args.strategy,
        **target_options(args),
        **read_options(args, say),
    )
    if not args.quiet:
        print(safe(str(dumped)))
    return 0


def _run(argv: Sequence[str]) -> int:
    from partitioner.backends.observed import STEPS

    parser = command("run", "Run a plan, one local process a rank.", DIR=WRITTEN)
    parser.add_argument(
        "--inputs", metavar="in.npz", help="whole inputs by name (default: random valid ones)"
    )
    parser.add_argument("--outputs", metavar="out.npz", help="where to write the whole outputs")
    parser.add_argument(
        "--requests", type=positive, default=1, metavar="N", help="requests in flight"
    )
    parser.add_argument("--seed", type=natural, default=0, help="of random inputs")
    parser.add_argument(
        "--profile",
        action="store_true",
        help="record every kernel and communication, and show them beside the prediction, also in "
        "DIR/report.html",
    )
    parser.add_argument(
        "--steps",
        type=positive,
        metavar="N",
        help=f"steps of one request each that --profile records (default: {STEPS})",
    )
    parser.add_argument(
        "--calibrate",
        nargs="?",
        type=Path,
        const=True,
        metavar="FILE",
        help="add what --profile measures to the measurements of this machine (default: those in "
        "the cache folder), as `partition calibrate` does",
    )
    args = parser.parse_args(argv)
    if args.steps and not args.profile:
        parser.error("--steps is of --profile: give that too")
    if args.calibrate and not args.profile:
        parser.error("--calibrate is of --profile: give that too")
    if isinstance(args.calibrate, Path):
        from partitioner.cost_model.profile import check_writable

        check_writable(args.calibrate)
    from partitioner.run.local import run_directory

    report = run_directory(
        Path(args.dir),
        Path(args.inputs) if args.inputs else None,
        Path(args.outputs) if args.outputs else None,
        requests=args.requests,
        seed=args.seed,
        steps=(args.steps or STEPS) if args.profile else 0,
    )
    print(safe(report))
    if args.calibrate:
        from partitioner.profiling.calibrate import calibrate

        file = None if args.calibrate is True else args.calibrate
        print(safe(str(calibrate(Path(args.dir), profile=file))))
    return 0


def _verify(argv: Sequence[str]) -> int:
    parser = command("verify", "Compare all ranks with the whole model.", DIR=WRITTEN)
    parser.add_argument("--seed", type=natural, default=0, help="of the random inputs")
    args = parser.parse_args(argv)
    from partitioner.compiled.reload import load

    verification = load(args.dir).verify_written(Path(args.dir), seed=args.seed)
    print(safe(str(verification)))
    return 0 if verification.equal else 1


def _show(argv: Sequence[str]) -> int:
    parser = command("show", "A plan as text.", DIR=WRITTEN)
    parser.add_argument(
        "--all",
        action="store_true",
        help="a line for each node, names in full, the factors of each operator, all tensors",
    )
    args = parser.parse_args(argv)
    from partitioner.compiled.reload import load
    from partitioner.report.text.show import show

    result = load(args.dir)
    warn(result.warnings)
    print(safe(show(result, everything=args.all)))
    if result.comparison is not None:
        print(safe(f"\n{result.comparison}"))
    return 0


_COMMANDS: Mapping[str, Callable[[Sequence[str]], int]] = {
    "run": _run,
    "verify": _verify,
    "show": _show,
    "explain": explain,
    "report": report,
    "diff": diff,
    "sweep": sweep,
    "profile": profile_command,
    "calibrate": calibrate_command,
    "draw": cli_pictures.draw,
    "check": cli_pictures.check,
    "solve": solve_command,
    "evaluate": evaluate_command,
    "schedule": schedule_command,
}


if __name__ == "__main__":
    raise SystemExit(main())
