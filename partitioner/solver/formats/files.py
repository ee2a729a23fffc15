"""The formats of problem files: how each is told apart, read, solved and evaluated."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from partitioner.solver.formats import dnnp, iopddl, json_files, piper
from partitioner.solver.formats.dnnp import Instance
from partitioner.solver.formats.json_files import FormatError
from partitioner.solver.joint.solve import THOROUGH
from partitioner.solver.joint.solve import solve as solve_placement
from partitioner.solver.milp.engines import Engine
from partitioner.solver.outcome import Infeasible, Status, relative_gap
from partitioner.solver.pairwise.problem import Pairwise
from partitioner.solver.pairwise.problem import evaluate as evaluate_pairwise
from partitioner.solver.pairwise.solve import solve as solve_pairwise
from partitioner.solver.problem import Choice, Edge, Hold, Item, Problem
from partitioner.solver.stages.graph import PlannedStage, StageGraph
from partitioner.solver.stages.graph_search import plan_stages
from partitioner.solver.work import Work, now_s


def to_problem(instance: Instance) -> Problem:
    """The problem of an instance: a choice is a device that can run the node."""
    accelerators, devices = instance.accelerators, instance.accelerators + instance.cpus
    items: list[Item] = []

    def on(device: int, value: float) -> tuple[float, ...]:
        return tuple(value if d == device else 0.0 for d in range(devices))

    def item(device: int, load_s: float, size_bytes: float) -> tuple[int, ...]:
        """Adds an item of an accelerator; CPUs pay no transfer and have no limit."""
        if device >= accelerators:
            return ()
        last = len(instance.members) - 1
        items.append(Item(on(device, load_s), on(device, size_bytes), 0, last))
        return (len(items) - 1,)

    def choice(node: int, device: int) -> Choice:
        by_node = instance.accelerator_s if device < accelerators else instance.cpu_s
        return Choice(on(device, by_node[node]), device)

    homes = [_homes(instance, seconds) for seconds in instance.accelerator_s]
    nodes = tuple(tuple(choice(node, d) for d in home) for node, home in enumerate(homes))
    holds = tuple(
        Hold(node, tuple(item(d, 0.0, size) for d in homes[node]))
        for node, size in enumerate(instance.size_bytes)
        if size
    )
    edges = []
    for value in instance.values:
        leaves = [item(d, value.cost_s, 0.0) for d in range(devices)]
        arrives = [item(d, value.cost_s, 0.0) for d in range(devices)]
        sent = {
            (a, b): leaves[a] + arrives[b] for a, b in itertools.permutations(range(devices), 2)
        }
        turned = {(b, a): paid for (a, b), paid in sent.items()}
        for reader in value.readers:
            u, v = sorted((value.producer, reader))
            paid = sent if u == value.producer else turned
            edges.append(Edge(u, v, tuple(homes[u]), tuple(homes[v]), paid))
    return Problem(
        devices=devices,
        limit_bytes=(instance.limit_bytes,) * accelerators + (math.inf,) * instance.cpus,
        nodes=nodes,
        names=tuple("+".join(map(str, group)) for group in instance.members),
        edges=tuple(edges),
        holds=holds,
        items=tuple(items),
        interchangeable=(tuple(range(accelerators)), tuple(range(accelerators, devices))),
    )


def _homes(instance: Instance, accelerator_s: float) -> range:
    """The devices that can run a node of so many seconds on an accelerator."""
    first = instance.accelerators if math.isinf(accelerator_s) else 0
    return range(first, instance.accelerators + instance.cpus)


def to_solution(instance: Instance, chosen: Sequence[int]) -> dict[str, list[dict[str, list[int]]]]:
    """The plan of one choice a node of `to_problem`, as the authors' programs print it."""
    devices: list[list[int]] = [[] for _ in range(instance.accelerators + instance.cpus)]
    for group, seconds, choice in zip(
        instance.members, instance.accelerator_s, chosen, strict=True
    ):
        devices[_homes(instance, seconds)[choice]] += group
    entries = [{"nodes": sorted(nodes)} for nodes in devices]
    return {"fpgas": entries[: instance.accelerators], "cpus": entries[instance.accelerators :]}


#: The least time that is left for the search of a file that takes long to read, in seconds.
LEAST_S = 0.001


@dataclass(frozen=True)
class Search:
    """Options of a search; `deadline` is a second of `now_s`, `engine` solves the MILPs."""

    deadline: float
    gap: float
    seed: int
    engine: Engine

    @property
    def left_s(self) -> float:
        """Seconds until the deadline."""
        return max(LEAST_S, self.deadline - now_s())


@dataclass(frozen=True)
class Solved:
    """The result of a search, in any format."""

    objective: str  #: The minimised quantity, in words.
    cost: float | None  #: Of the best solution; None if none was found.
    bound: float | None  #: No solution costs less; None if none is feasible.
    gap: float | None  #: (cost - bound) / cost; None without a solution.
    status: Status
    seconds: float  #: Time of the search, without that of compiling the solver.
    solver: str  #: Methods that found the solution / proved the bound.
    solution: Any  #: JSON content of the solution's file; None if none was found.
    reason: str = ""  #: Why nothing is feasible; empty otherwise.
    #: (seconds, cost, bound) at every improvement, where the search keeps it.
    trace: tuple[tuple[float, float | None, float | None], ...] = ()


@dataclass(frozen=True)
class Priced:
    """A referee's answer: figures by name, and why the solution is infeasible ("" if it is not)."""

    figures: tuple[tuple[str, str], ...]
    fault: str


@dataclass(frozen=True)
class Format:
    """A format of problem files."""

    #: Fields, with their types, that JSON content in this format has and in others lacks.
    marks: Mapping[str, type]
    parse: Callable[[Any], Any]  #: A problem from JSON content.
    solve: Callable[[Any, Search], Solved]  #: Searches for the best solution of a problem.
    parse_solution: Callable[[Any], Any]  #: A solution from JSON content.
    #: Prices a solution of a problem, apart from the search.
    evaluate: Callable[[Any, Any], Priced]


def read_problem(path: Path) -> tuple[Format, Any]:
    """The format that a file's content shows, and the problem.

    Raises:
        FormatError: The file cannot be read, is in no known format or breaks it.
    """
    return json_files.read(path, _parse)


def _parse(data: Any) -> tuple[Format, Any]:
    for known in FORMATS if isinstance(data, dict) else ():
        if all(name in data and isinstance(data[name], of) for name, of in known.marks.items()):
            return known, known.parse(data)
    raise FormatError(
        'no known kind of problem (iopddl has a "problem" object, dnn-partitioning "nodes" and '
        '"maxFPGAs", piper "nodes" and "maxDevices")'
    )


def _solve_iopddl(problem: Pairwise, search: Search) -> Solved:
    answer = solve_pairwise(problem, search.left_s, search.gap, search.seed, engine=search.engine)
    known = answer.cost is not None
    return Solved(
        "costs of nodes and edges",
        answer.cost,
        _whole(answer.bound),
        answer.gap if known else None,
        answer.status,
        answer.seconds,
        answer.solver,
        {"solution": list(answer.chosen)} if known else None,
        answer.reason,
        tuple((spent, _whole(cost), _whole(bound)) for spent, cost, bound in answer.trace),
    )


def _whole(value: float) -> int | None:
    """Costs and bounds of whole costs are whole; infinite ones are none."""
    return int(value) if math.isfinite(value) else None


def _evaluate_iopddl(problem: Pairwise, chosen: list[int]) -> Priced:
    outcome = evaluate_pairwise(problem, chosen)
    limit = "no limit" if outcome.limit is None else f"limit {outcome.limit}"
    figures = (("cost", str(outcome.cost)), ("peak usage", f"{outcome.peak_usage} ({limit})"))
    return Priced(figures, outcome.fault)


def _solved(objective: str, solve: Callable[[], tuple[float, float, Status, str, Any]]) -> Solved:
    """The result of a function that gives cost, bound, status, solver and the file's content."""
    start = now_s()
    try:
        cost, bound, status, solver, content = solve()
    except Infeasible as error:
        status = "infeasible" if error.proven else "time_limit"
        spent_s = now_s() - start
        return Solved(objective, None, None, None, status, spent_s, "none", None, str(error))
    gap = relative_gap(cost, bound)
    return Solved(objective, cost, bound, gap, status, now_s() - start, solver, content)


def _solve_dnnp(instance: dnnp.Instance, search: Search) -> Solved:
    def solve() -> tuple[float, float, Status, str, Any]:
        answer = solve_placement(
            to_problem(instance),
            work=Work(search.deadline),
            gap=search.gap,
            seed=search.seed,
            effort=THOROUGH,
            engine=search.engine,
        )
        content = to_solution(instance, answer.chosen)
        return answer.cost, answer.bound, answer.status, answer.solver, content

    return _solved("throughput (largest load of a device)", solve)


def _evaluate_dnnp(instance: dnnp.Instance, split: dnnp.Split) -> Priced:
    outcome = dnnp.evaluate(instance, split)
    if outcome.cost_s is None:
        return Priced((), outcome.fault)
    return _priced(outcome.cost_s, outcome.fullest_bytes, instance.limit_bytes, outcome.fault)


def _priced(cost_s: float, fullest_bytes: float, limit_bytes: float, fault: str) -> Priced:
    size = f"{fullest_bytes:.12g} (limit {limit_bytes:.12g})"
    return Priced((("cost", f"{cost_s:.12g}"), ("peak usage", size)), fault)


def _solve_piper(graph: StageGraph, search: Search) -> Solved:
    def solve() -> tuple[float, float, Status, str, Any]:
        work = Work(search.deadline)
        answer = plan_stages(graph, work, gap=search.gap, seed=search.seed, engine=search.engine)
        content = piper.to_solution(answer.stages)
        return answer.load_s, answer.bound_s, answer.status, answer.solver, content

    return _solved("time per sample (largest of a stage)", solve)


def _evaluate_piper(graph: StageGraph, plan: tuple[PlannedStage, ...]) -> Priced:
    outcome = piper.evaluate_plan(graph, plan)
    fault = next(iter(outcome.faults), "")
    if not outcome.time_s:
        return Priced((), fault)
    return _priced(max(outcome.time_s), max(outcome.held_bytes), graph.limit_bytes, fault)


FORMATS = (
    Format({"problem": dict}, iopddl.parse, _solve_iopddl, iopddl.parse_solution, _evaluate_iopddl),
    Format(
        {"nodes": list, "maxFPGAs": object},
        dnnp.parse,
        _solve_dnnp,
        dnnp.parse_split,
        _evaluate_dnnp,
    ),
    Format(
        {"nodes": list, "maxDevices": object},
        piper.parse,
        _solve_piper,
        piper.parse_plan,
        _evaluate_piper,
    ),
)
