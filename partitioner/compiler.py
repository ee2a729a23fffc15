"""`compile`: a model in, a planned and lowered program out."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from partitioner.compiled.onnx_model import Compiled, Source
from partitioner.compiled.summary import facts
from partitioner.cost_model.cluster import Cluster
from partitioner.cost_model.errors import ClusterOptionError
from partitioner.cost_model.evaluate import best_single
from partitioner.cost_model.resolve import resolve_cluster
from partitioner.frontends.model import GivenModule, given_model
from partitioner.frontends.onnx.load import Traced
from partitioner.ir.checks import is_a
from partitioner.ir.errors import OptionError
from partitioner.ir.graph import Graph
from partitioner.ir.ops import row_of
from partitioner.ir.plan import Plan
from partitioner.no_gc import no_collection
from partitioner.search.explicit import Request, search
from partitioner.search.limits import MOST_EXPLICIT
from partitioner.search.what_would_fit import relaxations, relaxed
from partitioner.solver import Infeasible, Objective
from partitioner.strategies.constraints import Constraints
from partitioner.strategies.derive import Rules
from partitioner.strategies.spaces import check_space

if TYPE_CHECKING:
    import onnx
    from torch import nn

    from partitioner.compiled.module import ModuleProgram
    from partitioner.search.explicit import Outcome

Progress = Callable[[str], None]


def _silent(_text: str) -> None:
    """Say nothing."""


def compile(  # noqa: A001 - the public name
    model: str | Path | onnx.ModelProto | nn.Module,
    example_inputs: Any = None,
    devices: int | None = None,
    *,
    training: bool = False,
    optimizer: str = "adamw",
    parallel: str | None = None,
    recompute: bool | Literal["auto"] = "auto",
    cluster: str | Path | Cluster | None = None,
    memory: int | str | None = None,
    objective: Objective = "throughput",
    strategy: str = "auto",
    mesh: Mapping[str, int] | None = None,
    dims: Mapping[str, int] | None = None,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    constraints: Constraints | Plan | str | Path | None = None,
    time_limit_s: float = 30.0,
    gap: float = 0.01,
    solver: str = "highs",
    seed: int = 0,
    progress: Progress | None = None,
) -> Compiled | ModuleProgram:
    """Plan a model over devices and lower the plan to one program a rank.

    Args:
        model: Path of an ONNX file, the ONNX model itself, or a PyTorch module. A module's weights
            may be fake, or on the meta device: it is planned without them. Also a module's
            exported program ("model.pt2"), or "package.module:factory": a function, which is
            called, and returns the module and its example inputs.
        example_inputs: For a module itself: a tensor, a tuple of positional arguments, or a dict of
            keyword arguments.
        training: For a module: plan its forward and backward passes. The module must return its
            loss first, a floating scalar.
        optimizer: For training: what is kept of each parameter, "adamw", "adam", "sgd",
            "momentum" (SGD with momentum), "rmsprop" or "adagrad".
        parallel: For training a module: the kind of parallelism, instead of the cheapest: "dp",
            "zero1", "zero2", "zero3", "tp", or two joined by "+" (then with `mesh`).
        recompute: For training: whether the plan may compute values of the
            forward pass again in the backward pass instead of keeping them. "auto" allows it if
            no plan that keeps all of them fits the devices' memory, or, above 16 devices, if memory
            forbids a cheaper one.
        devices: Number of devices (default: the cluster's, or 1).
        cluster: Preset name, TOML file or Cluster; default: `devices` reference accelerators.
        memory: Memory limit of each device, in bytes or as text ("8GiB").
        objective: "throughput" (least load of the busiest device), "latency" or "memory".
        strategy: "intra" (shard operators), "inter" (place whole operators), or "auto".
        mesh: Axis sizes of the mesh for intra plans, as {"dp": 2, "tp": 2}; None searches.
        dims: Sizes of symbolic dims by symbol.
        shapes: Shapes of inputs by name.
        constraints: Pins, a plan whose decisions are kept, or the file of either.
        time_limit_s: Limit of the search, in seconds; above 0.
        gap: Relative gap between cost and lower bound at which the search may stop; below 1.
        solver: MILP solver, any that PuLP finds: "highs", "cbc", "gurobi", "cplex", ...
        seed: Of all random choices; at least 0.
        progress: Called with a line of text at each stage.

    Returns:
        The compiled model: `.plan`, `.cost`, `.verify()`, `.save(directory)`, and `.run(inputs)`
        for an ONNX model; a module's program is called like the module, and `.module()` is each
        rank's part under torchrun.

    Raises:
        PartitionerError: The model or the constraints are wrong; `OptionError` for an option that
            means nothing or contradicts another, `Infeasible` if no plan fits the devices' memory.

    >>> import partitioner
    >>> result = partitioner.compile("resnet50.onnx", devices=4)  # doctest: +SKIP
    >>> result.save("resnet50.partition")  # doctest: +SKIP
    """
    say = progress or _silent
    clock = Clock(say)
    target = target_cluster(cluster, devices, memory)
    pins = constraints_of(constraints)
    request = Request(objective, strategy, mesh, pins, time_limit_s, gap, solver, seed)
    check_space(
        strategy, len(target), mesh
    )  # refuses a mesh of another size before anything is read
    given = given_model(
        model,
        example_inputs,
        training=training,
        optimizer=optimizer,
        parallel=parallel,
        recompute=recompute,
        dims=dims,
        shapes=shapes,
    )
    if isinstance(given, GivenModule):
        from partitioner.frontends.torch.trace import compile_module

        return compile_module(given, target, request, clock)
    with clock("reading the model"):
        traced = given.traced
    source = Source.of(given.model, traced.graph, given.dims, given.shapes)
    return compile_traced(traced, source, target, request, clock)


def compile_traced(
    traced: Traced, source: Source, cluster: Cluster, request: Request, clock: Clock | None = None
) -> Compiled:
    """Plan and lower a graph that is already traced (see `compile`)."""
    timed = clock or Clock(_silent)
    outcome, found = plan_graph(traced.graph, traced.notes, cluster, request, timed)
    result = Compiled(
        traced=traced,
        source=source,
        cluster=cluster,
        plan=outcome.plan,
        evaluation=outcome.evaluation,
        summary=found,
        seconds=timed.seconds,
    )
    if len(cluster) <= MOST_EXPLICIT:
        with timed("lowering"):
            result.programs  # noqa: B018 - made on first use
    return result


def plan_graph(
    graph: Graph,
    said: tuple[str, ...],
    cluster: Cluster,
    request: Request,
    timed: Clock,
    offered: Callable[[], tuple[Graph, Request] | None] | None = None,
) -> tuple[Outcome, dict[str, Any]]:
    """The best plan of a traced graph, and the facts of it.

    Args:
        graph: The graph.
        said: Notes of the front end.
        cluster: The devices.
        request: What is asked for.
        timed: Says what is going on.
        offered: Gives a graph with offers, and the request for it, to plan if nothing fits, or by
            levels where memory binds; or None if there are no offers.

    Raises:
        PartitionerError: As `compile`.
    """
    with timed("deriving strategies"):
        rules = Rules.of(graph)
    begun = time.perf_counter()
    with timed("searching"):
        try:
            outcome = search(graph, cluster, request, rules, timed.say, yields=offered is not None)
        except Infeasible as error:
            if offered is not None:
                more = offered()
                if more is None:
                    return plan_graph(graph, said, cluster, request, timed)
                timed.say("allowing values to be computed again")
                why = "no plan that keeps all values for the backward pass was found to fit"
                return plan_graph(more[0], (*said, why), cluster, more[1], timed)
            timed.say("looking for what would fit")
            ways = relaxations(graph, cluster, request, error, rules)
            raise relaxed(error, ways) from None
        if outcome.tight and offered is not None:
            timed.say("allowing values to be computed again")
            more, limit_s = offered(), request.time_limit_s
            left_s = max(limit_s / 2, limit_s + begun - time.perf_counter())
            other = _cheaper(*more, cluster, left_s, outcome, timed) if more is not None else None
            if more is None or other is None:  # the search was left early
                return plan_graph(graph, said, cluster, request, timed)
            graph, outcome = more[0], other
            said = (*said, "memory forbids the cheapest plan that keeps all values")
    notes = (*said, *_again_notes(graph, outcome), *_opaque_notes(rules), *_size_notes(cluster))
    pinned = request.constraints.bound
    with no_collection():
        known = rules.by_node if outcome.graph is graph else None
        _, single = best_single(outcome.graph, cluster, request.objective, known)
    return outcome, facts(outcome, single, len(cluster), notes, pinned=pinned)


def _cheaper(
    graph: Graph,
    request: Request,
    cluster: Cluster,
    time_limit_s: float,
    best: Outcome,
    timed: Clock,
) -> Outcome | None:
    """A plan of a graph with offers that is cheaper than the best one without, if there is one."""
    asked, best_s = replace(request, time_limit_s=time_limit_s), best.evaluation.step_s
    try:
        found = search(graph, cluster, asked, Rules.of(graph), timed.say, best_s=best_s)
    except Infeasible:
        return None
    return found if found.evaluation.step_s < best_s else None


@dataclass
class Clock:
    """Says what is going on and keeps how long it took."""

    say: Progress

    def __post_init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def __call__(self, what: str) -> Clock:
        """Begin a stage."""
        self.what = what
        self.say(what)
        return self

    def __enter__(self) -> None:
        self.start = time.perf_counter()
        self.inner = self.what

    def __exit__(self, *_: object) -> None:
        self.seconds[self.inner] = time.perf_counter() - self.start


def target_cluster(
    cluster: str | Path | Cluster | None, devices: int | None, memory: int | str | None
) -> Cluster:
    """The cluster that `compile`'s arguments ask for.

    Raises:
        CostError: There is no such cluster, or the arguments contradict each other.
    """
    from partitioner.cost_model.cluster import parse_bytes

    count = 1 if cluster is None and devices is None else devices
    if not isinstance(cluster, Cluster):
        found = resolve_cluster(cluster, count)
    elif devices in (None, len(cluster)):
        found = cluster
    else:
        raise ClusterOptionError(
            f"cluster {cluster.name} has {len(cluster)} devices, not {devices!r}"
        )
    return found if memory is None else found.with_memory(parse_bytes(memory))


def constraints_of(given: Constraints | Plan | str | Path | None) -> Constraints:
    """The constraints in `compile`'s argument.

    Raises:
        PartitionerError: It is none, or its file cannot be read.
    """
    if given is None:
        return Constraints()
    if isinstance(given, Constraints):
        return given
    if isinstance(given, Plan):
        return Constraints(plan=given)
    if not is_a(given, str, Path):
        raise OptionError(
            f"constraints is {given!r}; give Constraints, a Plan, or a file of either"
        )
    return Constraints.read(Path(given))


def _size_notes(cluster: Cluster) -> tuple[str, ...]:
    if len(cluster) <= MOST_EXPLICIT:
        return ()
    note = (
        f"{len(cluster)} devices: the plan and its summary are all that is written; rank files, "
        f"timelines and reports are made for up to {MOST_EXPLICIT} devices"
    )
    return (note,)


def _again_notes(graph: Graph, outcome: Outcome) -> tuple[str, ...]:
    """How many operators are computed again, where that was offered."""
    if not graph.optional:
        return ()
    there = [node for node in outcome.graph.nodes if node.name in graph.optional]
    count = sum(1 for node in there if (row := row_of(node)) is None or not row.view)
    return (f"{count} operators of the forward pass are computed again in the backward pass",)


def _opaque_notes(rules: Rules) -> tuple[str, ...]:
    """One line a reason, with the nodes it keeps whole."""
    by_reason: dict[str, list[str]] = {}
    for name, why in rules.opaque.items():
        by_reason.setdefault(why, []).append(name)
    notes = []
    for why, names in by_reason.items():
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        notes.append(f"kept whole on one device: {', '.join(names[:3])}{more}: {why}")
    return tuple(notes)
