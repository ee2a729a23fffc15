"""`partition plan MODEL`, for which `partition MODEL` is short."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Literal

from partitioner.cli import options, pictures
from partitioner.cli.options import DEVICES, OUTPUT, SEARCH, TRAINING, flag, option, wrong
from partitioner.cli.terminal import aside, progress
from partitioner.frontends.model_names import module_name
from partitioner.report.text.tables import safe

if TYPE_CHECKING:
    from partitioner.options import CompileOptions

#: The values of --recompute as the option of `compile`.
_RECOMPUTE: Mapping[str, bool | Literal["auto"]] = {"auto": "auto", "yes": True, "no": False}
#: Options of the command that need a plan.
_OF_PLANS = (
    *("output", "plan_only", "tune", "schedule", "micro_batches", "force", "json"),
    *("dot", "graph", "timeline", "annotate"),
)


def plan(
    model: options.Model,
    dim: options.Dims = None,
    shape: options.Shapes = None,
    devices: options.Devices = None,
    cluster: options.Clusters = None,
    memory: options.Memory = None,
    profile: options.Profile = None,
    tune: Annotated[
        int | None,
        option(
            options.positive,
            "K",
            "With --cluster local: run the K best plans on this machine, and keep the fastest.",
            panel=DEVICES,
        ),
    ] = None,
    objective: options.ObjectiveChoice = "throughput",
    strategy: options.Strategy = "auto",
    mesh: options.Mesh = None,
    constraints: Annotated[
        str | None,
        option(
            None,
            "FILE",
            "Named dims, pins and loads of experts (TOML), or a plan (JSON).",
            panel=SEARCH,
        ),
    ] = None,
    time_limit: options.TimeLimit = 30.0,
    gap: options.Gap = 0.01,
    solver: options.Solver = "highs",
    seed: options.Seed = 0,
    training: options.Training = False,
    optimizer: options.Optimizer = None,
    parallel: options.Parallel = None,
    schedule: options.Schedule = None,
    micro_batches: options.MicroBatches = None,
    recompute: Annotated[
        Literal["auto", "yes", "no"] | None,
        option(
            None,
            None,
            "With --training: whether the backward pass may recompute values instead of keeping "
            "them (default: auto, if memory is short).",
            panel=TRAINING,
        ),
    ] = None,
    output: Annotated[
        str | None,
        option(
            None,
            "DIR",
            "Folder to write (default: MODEL.partition, without MODEL's suffix).",
            "--output",
            "-o",
            panel=OUTPUT,
        ),
    ] = None,
    force: Annotated[bool, flag("Replace DIR if it is there.", "--force", panel=OUTPUT)] = False,
    plan_only: Annotated[
        bool,
        flag(
            "Write the plan and the report, but no rank files; files of weights may be missing.",
            "--plan-only",
            panel=OUTPUT,
        ),
    ] = False,
    dump_problem: Annotated[
        Path | None,
        option(
            None,
            "FILE",
            "Write the problem of --strategy intra or inter for other solvers; plan nothing.",
            panel=OUTPUT,
        ),
    ] = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
    dot: pictures.Dot = None,
    graph: pictures.Graph = None,
    timeline: pictures.Timeline = None,
    annotate: pictures.Annotate = None,
) -> int:
    """Split a model over devices: a plan with a bound, and one runnable subgraph for each.

    `partition MODEL ...` is short for `partition plan MODEL ...`.
    """
    args = SimpleNamespace(**locals())
    args.json = as_json
    options.check_kind(args)
    return _dump(args) if dump_problem is not None else _plan(args)


def _plan(args: SimpleNamespace) -> int:
    from partitioner.files import check_target

    name = module_name(args.model) or Path(args.model).stem
    target = Path(args.output) if args.output else Path(f"{name}.partition")
    pictures.check_pictures(args, options.check_model(args.model))
    with progress(args.quiet) as say:
        say("loading the compiler")
        from partitioner.compiler import check_options
        from partitioner.compiler import compile as compile_model

        chosen: CompileOptions = {
            "recompute": _RECOMPUTE[args.recompute or "auto"],
            "plan_only": args.plan_only,
            "tune": args.tune,
            "schedule": args.schedule,
            "micro_batches": args.micro_batches,
            **options.target_options(args),
            **options.read_options(args, say),
            **options.search_options(args),
        }
        planned_for, _ = check_options(args.devices, chosen)
        is_given = args.devices is not None or args.cluster is not None
        if not is_given and len(planned_for) == 1 and not args.quiet:
            aside("planning for one device: pass --devices N to split over N of them")
        check_target(target, force=args.force)
        result = compile_model(args.model, devices=args.devices, **chosen)
        say(f"writing {target}")
        result.save(target, force=args.force, plan_only=args.plan_only, progress=say)
        pictures.write_pictures(result, args, say, aside)
    if args.json:
        print(json.dumps({**result.summary, "directory": str(target)}, indent=1, allow_nan=False))
    elif not args.quiet:
        from partitioner.report.summary import text

        print(safe(text(result.summary, result.search_s)))
        print(f"  written to  {target}; next: partition show {target}")
        print(f"  report      {target / 'report.html'}")
    return 0


def _dump(args: SimpleNamespace) -> int:
    for name in _OF_PLANS:
        if getattr(args, name):
            wrong(f"--dump-problem plans nothing: leave out --{name.replace('_', '-')}")
    options.check_model(args.model)
    with progress(args.quiet) as say:
        say("loading the compiler")
        from partitioner.compiler import dump_problem

        dumped = dump_problem(
            args.model,
            args.dump_problem,
            args.devices,
            strategy=args.strategy,
            **options.target_options(args),
            **options.read_options(args, say),
        )
    if not args.quiet:
        print(safe(str(dumped)))
    return 0
