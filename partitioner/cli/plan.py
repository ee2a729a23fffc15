"""`partition plan MODEL`, for which `partition MODEL` is short."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

from partitioner.api.option_table import CompileOptions, DumpOptions, described, flag_of
from partitioner.cli import options, pictures
from partitioner.cli.options import listed, wrong
from partitioner.cli.terminal import aside, progress
from partitioner.foundations.files import check_target
from partitioner.frontends.model_names import config_file, module_name
from partitioner.report.text.tables import fitted

#: Options of the command that need a plan.
_OF_PLANS = ("output", "force", "as_json", "dot", "graph", "timeline", "annotate")


@options.takes(CompileOptions)
def plan(
    model: options.Model,
    devices: options.Devices = None,
    output: Annotated[str | None, listed("plan", "output")] = None,
    force: Annotated[bool, listed("plan", "force")] = False,
    *,
    dump_problem: Annotated[Path | None, listed("plan", "dump_problem")] = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
    dot: pictures.Dot = None,
    graph: pictures.Graph = None,
    timeline: pictures.Timeline = None,
    annotate: pictures.Annotate = None,
    **values: Any,
) -> int:
    """Split a model over devices: a plan with a bound, and one runnable subgraph for each.

    `partition MODEL ...` is short for `partition plan MODEL ...`.
    """
    args = SimpleNamespace(**locals())
    chosen = options.given(model, CompileOptions, values)
    if annotate is not None and module_name(model) is not None:
        options.refuse_kind("--annotate", is_module=True)
    return _plan(args, chosen) if dump_problem is None else _dump(args, chosen)


def _plan(args: SimpleNamespace, chosen: CompileOptions) -> int:
    name = module_name(args.model) or Path(args.model).stem
    target = Path(args.output) if args.output else Path(f"{name}.partition")
    pictures.check_pictures(args, options.check_model(args.model))
    with progress(args.quiet) as say:
        say("loading the compiler")
        from partitioner.api.compiler import check_options
        from partitioner.api.compiler import compile as compile_model

        planned_for, _ = check_options(args.devices, chosen)
        is_given = args.devices is not None or "cluster" in chosen
        if not is_given and len(planned_for) == 1 and not args.quiet:
            aside("planning for one device: pass --devices N to split over N of them")
        check_target(target, force=args.force)
        chosen = {**chosen, "progress": say}
        result = compile_model(args.model, devices=args.devices, **chosen)
        say(f"writing {target}")
        plan_only = "plan_only" in chosen
        if not plan_only and config_file(args.model) is not None:
            plan_only = True
            if not args.quiet:
                aside("a configuration has no weights: no rank files are written, only the plan")
        result.save(target, force=args.force, plan_only=plan_only, progress=say)
        pictures.write_pictures(result, args, say, aside)
    if args.as_json:
        print(json.dumps({**result.summary, "directory": str(target)}, indent=1, allow_nan=False))
    elif not args.quiet:
        print(fitted(str(result)))
        print(f"  written to  {target}; next: partition show {target}")
        print(f"  report      {target / 'report.html'}")
    return 0


def _dump(args: SimpleNamespace, chosen: CompileOptions) -> int:
    table, taken = described(CompileOptions), described(DumpOptions)
    of_plans = [table[name].flag_of(name) for name in chosen if name not in taken]
    of_plans += [flag_of(name.removeprefix("as_")) for name in _OF_PLANS if getattr(args, name)]
    if of_plans:
        wrong(f"--dump-problem plans nothing: leave out {' and '.join(of_plans)}")
    options.check_model(args.model)
    with progress(args.quiet) as say:
        say("loading the compiler")
        from partitioner.api.compiler import dump_problem

        problem: dict[str, Any] = {"strategy": "auto", "progress": say, **chosen}
        dumped = dump_problem(args.model, args.dump_problem, args.devices, **problem)
    if not args.quiet:
        print(fitted(str(dumped)))
    return 0
