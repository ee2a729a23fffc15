"""Keyword arguments of the public functions: listed in signatures, checked, and what they make."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar, cast, get_type_hints

from partitioner.api.option_table import ModelOptions, filled
from partitioner.backends.runtimes import naming_runtimes
from partitioner.cost_model.cluster.resolve import resolve_cluster
from partitioner.cost_model.cluster.topology import Cluster, parse_bytes
from partitioner.cost_model.errors import ClusterOptionError
from partitioner.foundations.files import read_text
from partitioner.frontends.model import ModuleInput, OnnxInput, open_model
from partitioner.frontends.torch.options import OF_MATRICES, ModuleOptions, Optimizer
from partitioner.ir.checks import is_a
from partitioner.ir.errors import OptionError, meant_keyword
from partitioner.ir.pipeline.generate import SCHEDULES, ScheduleName
from partitioner.ir.pipeline.text import from_csv, to_csv
from partitioner.ir.plan import Plan
from partitioner.search.request import MicroBatchCount, Recompute, Request, Say
from partitioner.solver.milp.engines import SolverName
from partitioner.strategies.constraints import Constraints
from partitioner.strategies.kinds.kind import ModelKind
from partitioner.strategies.kinds.parallel import PIPELINE, at_rest, check_has

Function = TypeVar("Function", bound=Callable[..., Any])


#: The types of other modules that `option_table` names without loading them.
_NAMED: Mapping[str, Any] = {
    "Cluster": Cluster,
    "Constraints": Constraints,
    "MicroBatchCount": MicroBatchCount,
    "Optimizer": Optimizer,
    "Plan": Plan,
    "Recompute": Recompute,
    "Say": Say,
    "ScheduleName": ScheduleName,
    "SolverName": SolverName,
}
#: Defaults of `compile`, where they are not None.
_DEFAULTS: Mapping[str, Any] = {
    **{field.name: field.default for field in (*fields(Request), *fields(ModuleOptions))},
    "plan_only": False,
    "cache": True,
    "constraints": None,
}


def takes(options: type, **defaults: Any) -> Callable[[Function], Function]:
    """Give a function with ``**options`` a signature that lists them, and refuse all others.

    Its docstring describes them below the line ``**options: ...``, if it has one. `defaults` are
    those that are not `compile`'s.
    """
    hints = get_type_hints(options, localns=_NAMED)
    required = options.__required_keys__  # type: ignore[attr-defined]

    def decorate(function: Function) -> Function:
        plain = inspect.signature(function)
        listed = [p for p in plain.parameters.values() if p.kind is not p.VAR_KEYWORD]
        for name, hint in hints.items():
            default = defaults.get(name, _DEFAULTS.get(name))
            if name in required:
                default = inspect.Parameter.empty
            keyword = inspect.Parameter.KEYWORD_ONLY
            listed.append(inspect.Parameter(name, keyword, default=default, annotation=hint))
        signature = plain.replace(parameters=listed)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:
                hint = meant_keyword(error, signature.parameters)
                raise TypeError(f"{function.__name__}() {error}{hint}") from None
            with naming_runtimes():
                return function(*args, **kwargs)

        call.__signature__ = signature  # type: ignore[attr-defined]
        call.__doc__ = filled(function.__doc__ or "", options)
        return cast("Function", call)

    return decorate


def open_with(
    model: Any, example_inputs: Any, options: Mapping[str, Any]
) -> OnnxInput | ModuleInput:
    """Open a model; a PartitionerError also where it has no such kind of parallelism."""
    names = {*ModelOptions.__annotations__, "recompute", "plan_only"} - {"progress"}
    values = {name: value for name, value in options.items() if name in names}
    parallel, training = options.get("parallel"), options.get("training", False)
    optimizer, cuts = options.get("optimizer"), {"tp", "zero1", "zero2", "zero3"}
    if optimizer in OF_MATRICES and cuts & {*str(parallel).split("+")}:
        raise OptionError(
            f"optimizer {optimizer!r} looks at whole matrices, and parallel {parallel!r} stores "
            "parts of them: dp, pp and cp keep them whole"
        )
    stored = at_rest(parallel, training=training)
    loads = _constraints(options.get("constraints")).loads
    source = open_model(model, example_inputs, at_rest=stored, loads=loads, **values)
    in_passes: ModelKind = "training" if training else "inference"
    check_has(parallel, in_passes if isinstance(source, ModuleInput) else "onnx")
    return source


def request_of(options: Mapping[str, Any]) -> Request:
    """The request that options make; a PartitionerError if a value or a file has no meaning."""
    constraints = _constraints(options.get("constraints"))
    if options.get("strategy") == "copies" and options.get("training"):
        raise OptionError(
            "strategy 'copies' serves requests, and training=True has steps: parallel 'dp' trains "
            "whole copies on parts of the batch"
        )
    names = {field.name for field in fields(Request)} - {"constraints", "schedule"}
    values = {name: value for name, value in options.items() if name in names}
    values["schedule"] = _schedule(options.get("schedule"))
    if constraints.plan is not None:
        values = _as_kept(constraints.plan, values)
    return Request(constraints=constraints, **values)


def _as_kept(plan: Plan, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a request that keeps a plan; an OptionError if they contradict it."""
    pipeline, asked = plan.pipeline, dict(values)
    runs, schedule = "the whole batch at once", None
    if pipeline is not None:
        stages, schedule = 1 + max(plan.stages), pipeline.schedule
        named = f"schedule {schedule}" if isinstance(schedule, str) else "a table"
        runs = f"{pipeline.micro_batches} micro-batches through {stages} stages by {named}"
    said: dict[str, Any] = {"micro_batches": plan.micro_batches, "schedule": schedule}
    for name, own in said.items():
        if asked.get(name) not in (None, "auto", own):
            raise OptionError(f"{name} {asked[name]!r}: the plan in constraints runs {runs}")
        asked[name] = own
    mesh: Any = asked.get("mesh")
    parallel: Any = asked.get("parallel")
    if not schedule and is_a(mesh, Mapping) and PIPELINE in mesh:
        raise OptionError(f"mesh {dict(mesh)}: the plan in constraints runs {runs}")
    if not schedule and is_a(parallel, str) and PIPELINE in parallel.split("+"):
        raise OptionError(f"parallel {parallel!r}: the plan in constraints runs {runs}")
    if asked.get("recompute") is True:
        raise OptionError("recompute=True: the plan in constraints says what is recomputed")
    return asked


def _schedule(schedule: str | Path | None) -> str | tuple[str, ...] | None:
    """The name of a schedule, or the rows of a file's table; an OptionError if there is none."""
    if schedule is None or schedule in SCHEDULES:
        return schedule if schedule is None else str(schedule)
    path = Path(schedule)
    if isinstance(schedule, str) and not path.suffix and not path.exists():
        return schedule  # `Request` refuses it
    try:
        text = read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise OptionError(f"schedule {path}: {why}") from None
    return tuple(to_csv(from_csv(text)).splitlines())


def _constraints(
    constraints: Constraints | Plan | Mapping[str, Any] | str | Path | None,
) -> Constraints:
    if constraints is None:
        return Constraints()
    if isinstance(constraints, Constraints):
        return constraints
    if isinstance(constraints, Plan):
        return Constraints(plan=constraints)
    if isinstance(constraints, Mapping):
        return Constraints.of(constraints)
    if not is_a(constraints, str, Path):
        raise OptionError(
            f"constraints is {constraints!r}; give Constraints, a Plan, a mapping, or a file of "
            "one of them"
        )
    return Constraints.read(Path(constraints))


def processes() -> int:
    """Number of processes of torch.distributed or, before it is up, of torchrun; 1 without them."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_world_size())
    return int(os.environ["WORLD_SIZE"]) if "TORCHELASTIC_RUN_ID" in os.environ else 1


def target_cluster(options: Mapping[str, Any], devices: int | None, otherwise: int = 1) -> Cluster:
    """The cluster that options name, with `devices` devices: its own, or `otherwise`, if None."""
    cluster, memory = options.get("cluster"), options.get("memory")
    if not isinstance(cluster, Cluster):
        count = otherwise if cluster is None and devices is None else devices
        file = options.get("profile")
        cluster = resolve_cluster(cluster, count, otherwise, None if file is None else Path(file))
    elif devices not in (None, len(cluster)):
        raise ClusterOptionError(
            f"cluster {cluster.name} has {len(cluster)} devices, not {devices!r}"
        )
    cluster = cluster if memory is None else cluster.with_memory(parse_bytes(memory))
    return with_launches(cluster, options)


def with_launches(cluster: Cluster, options: Mapping[str, Any]) -> Cluster:
    """The cluster whose kernels are submitted as options say, if they do."""
    launches = options.get("launches")
    return cluster if launches is None else cluster.with_launches(launches)
