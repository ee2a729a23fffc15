"""The best sharding of the whole model over one mesh of equal devices."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from partitioner.cost_model.cluster.topology import Cluster
from partitioner.cost_model.equal_devices.columns import GroupColumns
from partitioner.cost_model.equal_devices.even_mesh import EvenMesh, EvenResharder, stand_in
from partitioner.ir.graph import Graph, Node
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.plan import PlacedNode, place
from partitioner.ir.rule import Rule
from partitioner.problem.build import Built, build
from partitioner.problem.folding import Folded, fold
from partitioner.problem.memory_kinds import parts_text, planned_parts
from partitioner.search.levels.meshes import device_pools
from partitioner.search.request import Budget
from partitioner.solver.joint.solve import solve
from partitioner.solver.milp.engines import HIGHS, Engine
from partitioner.solver.outcome import Infeasible, Solution, relative_gap, short_of_memory
from partitioner.solver.presolve.simplify import merge_equal
from partitioner.solver.problem import Problem
from partitioner.solver.referee import evaluate_choices
from partitioner.solver.work import Work
from partitioner.strategies.constraints import Constraints
from partitioner.strategies.derive import Rules, strategies

Options = Mapping[str, tuple[PlacedNode, ...]]

#: The least seconds of a search that has begun.
LEAST_S = 0.01
#: Steps of building a problem, for each item.
ITEM_STEPS = 60


@dataclass(frozen=True)
class Sharded:
    """The model on one mesh of equal devices."""

    folded: Folded  #: The model, repeated blocks folded.
    even: EvenMesh  #: The mesh and the stand-in that the strategies are on.
    built: Built  #: The problem of the folded graph, each block counted once.
    tied: Problem  #: The same with every block counted.
    solution: Solution  #: The best plan of `tied`.

    @property
    def cost_s(self) -> float:
        """Seconds that each device would take with the whole model."""
        return self.solution.cost

    @cached_property
    def picks(self) -> tuple[PlacedNode, ...]:
        """Strategy of each node of the folded graph, on the stand-in."""
        nodes = self.folded.graph.nodes
        return tuple(
            self.built.candidates[node.name][pick]
            for node, pick in zip(nodes, self.solution.chosen, strict=True)
        )

    @cached_property
    def loads_s(self) -> tuple[float, ...]:
        """Seconds of each node of the folded graph, and of reducing outputs that nobody reads."""
        picked = zip(self.built.problem.nodes, self.solution.chosen, strict=True)
        return tuple(choices[pick].load_s[0] for choices, pick in picked)

    @cached_property
    def peak_bytes(self) -> float:
        """Most bytes that a device would hold at one time with the whole model."""
        return evaluate_choices(self.tied, self.solution.chosen).peak_bytes[0]

    @cached_property
    def passing_bytes(self) -> float:
        """Most bytes of values that a device holds at one time, what is resident not counted.

        A stage has few of the blocks, and what they hold is passed on; in training all devices
        run all of them, and each keeps something for the backward pass.
        """
        training = bool(self.folded.graph.backward)
        problem = self.tied if training else self.built.problem
        items = tuple(
            replace(item, bytes=(0.0,)) if index in self.built.resident else item
            for index, item in enumerate(problem.items)
        )
        outcome = evaluate_choices(replace(problem, items=items), self.solution.chosen)
        return outcome.peak_bytes[0]


@dataclass(frozen=True)
class Sharder:
    """Shards one model over many meshes; strategies are derived once a stand-in."""

    folded: Folded
    cluster: Cluster
    seed: int = 0
    engine: Engine = HIGHS
    micro_batches: int = 1  #: As of `DeviceColumns`, like the lanes.
    lanes: int = 1
    #: Those on the whole graph, by which `folded` tells its blocks apart.
    constraints: Constraints = field(default_factory=Constraints)
    _strategies: dict[DeviceMesh, Options] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        graph: Graph,
        rules: Rules,
        cluster: Cluster,
        budget: Budget,
        micro_batches: int = 1,
        lanes: int = 1,
        constraints: Constraints | None = None,
    ) -> Sharder:
        """Fold a graph, blocks that are constrained alike."""
        asked = constraints or Constraints()
        folded = fold(graph, rules, asked.demands(graph))
        return cls(folded, cluster, budget.seed, budget.engine, micro_batches, lanes, asked)

    @cached_property
    def rules(self) -> Rules:
        """The rules of the folded graph."""
        return Rules.of(self.folded.graph)

    @cached_property
    def bound_s(self) -> float:
        """Seconds that no plan is below: all nodes' least device seconds, shared by all devices.

        A node on a mesh takes no fewer device seconds than on one device: launches are paid by
        each, and FLOPs and bytes are at best divided. Unlike devices count by their speed. Optional
        nodes may be left out.
        """
        graph, cluster, pools = self.folded.graph, self.cluster, device_pools(self.cluster)
        times, seconds = Counter(self.folded.places), []  # nodes that each folded one stands for
        for pool in pools:
            mesh = DeviceMesh.single(pool.first)
            even = EvenMesh(mesh, mesh, cluster)
            prices = GroupColumns(graph, EvenResharder(cluster, even=even), self.micro_batches)
            alone = (place(graph, n, mesh, {}, self.rule(n)) for n in graph.nodes)
            seconds.append(
                [
                    0.0
                    if placed.node.name in graph.optional
                    else prices.node_seconds(placed)[even.device]
                    for placed in alone
                ]
            )
        whole = [sum(times[node] * s for node, s in enumerate(each)) for each in seconds]
        if not all(whole):
            return 0.0
        speed = sum(pool.count / total for pool, total in zip(pools, whole, strict=True))
        weights = [1 / total / speed for total in whole]
        return sum(
            times[node] * min(w * each[node] for w, each in zip(weights, seconds, strict=True))
            for node in range(len(graph.nodes))
        )

    def rule(self, node: Node) -> Rule | None:
        """The rule of a node of the folded graph."""
        return self.rules.rule(node)

    def shard(
        self, mesh: DeviceMesh, stages: int, work: Work, *, limited: bool, gap: float
    ) -> Sharded:
        """The best sharding over a mesh of equal devices.

        As many groups like it as `stages` share the model: each holds its part of the weights.

        Raises:
            Infeasible: Nothing fits the memory of all stages together.
            ConstraintError: The constraints leave a node without a strategy.
        """
        even = EvenMesh(mesh, stand_in(mesh), self.cluster)
        graph, home = self.folded.graph, DeviceMesh.single(even.model.devices[0])
        if even.model not in self._strategies:  # nodes without any are whole on one device
            derived = strategies(graph, self.rules, even.model)
            self._strategies[even.model] = {
                node.name: derived[node.name] or (place(graph, node, home, {}, None),)
                for node in graph.nodes
            }
        candidates = {
            name: self.kept(name, tuple(filter(even.admits, options)), self.constraints, mesh)
            for name, options in self._strategies[even.model].items()
        }
        resharder = EvenResharder(self.cluster, even=even)
        prices = GroupColumns(graph, resharder, self.micro_batches, self.lanes)
        built = build(graph, tuple(dict.fromkeys((even.model, home))), candidates, prices)
        tied = self.folded.tie(built).problem
        work.spend(ITEM_STEPS * len(tied.items))
        memory_bytes = self.cluster.devices[even.device].memory_bytes
        room = float(memory_bytes) * stages if limited else math.inf
        problem = replace(tied, limit_bytes=(room,))
        solution = solve(
            problem, work=work, gap=gap, seed=self.seed, reason_s=0.0, engine=self.engine
        )
        return Sharded(self.folded, even, built, tied, solution)

    def kept(
        self, name: str, options: Sequence[PlacedNode], constraints: Constraints, mesh: DeviceMesh
    ) -> tuple[PlacedNode, ...]:
        """The strategies of a node that honour constraints."""
        if not constraints.bound and constraints.last is None:
            return tuple(options)
        return constraints.keep(self.folded.graph.by_name[name], options, f"on {mesh}")


def minimised(
    problem: Problem,
    work: Work,
    gap: float,
    rounds: int,
    engine: Engine,
    patience: int,
    start: Sequence[int] | None = None,
    *,
    least_s: float = 0.0,
) -> Solution | None:
    """A plan of little load within the column's memory; None if none was found.

    The clock that stops `work` stops the search, but not before it has taken `least_s` seconds; the
    other arguments are those of `pairwise.solve`. `start` is a plan that fits, so that nothing that
    costs more is of use.
    """
    from partitioner.solver.pairwise.convert import PER_SECOND, convert
    from partitioner.solver.pairwise.solve import solve as solve_pairwise  # they load Numba

    merged = merge_equal(problem)
    if not all(merged.problem.nodes):
        return None
    converted = convert(merged.problem)
    outcome = solve_pairwise(
        converted.pairwise,
        max(work.left_s, least_s, LEAST_S),
        gap,
        rounds=rounds,
        engine=engine,
        patience=patience,
        start=converted.assign(merged.lower(start)) if start is not None else None,
    )
    if outcome.status == "time_limit" and not work.left_s:
        work.stop()
    if outcome.cost is None:
        return None
    chosen = merged.restore(converted.restore(outcome.chosen))
    cost = evaluate_choices(problem, chosen).load_s[0]
    bound = min(cost, outcome.bound / PER_SECOND)
    met = relative_gap(cost, bound) <= gap
    return Solution(chosen, cost, bound, "optimal" if met else "feasible", None, outcome.solver)


def refused(
    graph: Graph, even: EvenMesh, built: Built, chosen: Sequence[int], room: float
) -> Infeasible:
    """The refusal of a plan above a `room`, as if the axes after this one cut all its bytes."""
    outcome = evaluate_choices(built.problem, chosen)
    position = outcome.peak_position[0]
    name = built.problem.names[position]
    limit = even.cluster.devices[even.device].memory_bytes
    lines = room / limit
    held = math.ceil(outcome.peak_bytes[0] / lines)
    parts = planned_parts(graph, built, chosen, position)
    each = parts_text({kind: round(size / lines) for kind, size in parts.items()})
    more = f"; there it holds {each}; this is {even.mesh}"
    return short_of_memory(held, limit, even.device, name, where="on each device", more=more)
