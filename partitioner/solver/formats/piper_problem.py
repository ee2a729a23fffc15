"""A piper instance as a problem of cutting into stages, and a cut of it as a plan.

A *downset* is a set of nodes that holds all that its nodes need. In any plan the nodes of the
first k stages are one, for every k: so positions are downsets, and the stage from I to J is J less
I, where I is a part of J. That loses no plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from partitioner.solver.formats.piper import Instance
from partitioner.solver.formats.piper_arrays import Layout, Saving, fast_and_small, find_savings
from partitioner.solver.formats.piper_referee import PlannedStage
from partitioner.solver.problem import SolverError
from partitioner.solver.stages import Cut, Pool, StageProblem

#: Downsets of a graph that the arrays are meant for.
MOST_DOWNSETS = 500


@dataclass(frozen=True)
class Planner:
    """The problem of an instance, and the way back from its cuts.

    Attributes:
        instance: The instance.
        downsets: Sets of nodes by size; the first is empty, the last has all nodes.
        degrees: (data degree, tensor degree) of each option of the problem.
        savings: Of each tensor degree; a way is an index into an array of their sizes + 1.
        problem: Whose positions are the downsets.
    """

    instance: Instance
    downsets: tuple[frozenset[int], ...]
    degrees: tuple[tuple[int, int], ...]
    savings: Mapping[int, tuple[Saving, ...]]
    problem: StageProblem

    def plan(self, cut: Cut) -> tuple[PlannedStage, ...]:
        """The stages of a cut with the config of each node."""
        return tuple(
            self._stage(self.downsets[s.stop] - self.downsets[s.start], s.option, s.way)
            for s in cut.stages
        )

    def _stage(self, nodes: frozenset[int], option: int, way: int) -> PlannedStage:
        data, tensor = self.degrees[option]
        pairs = {v: fast_and_small(v, self.instance.nodes[v][tensor]) for v in nodes}
        configs = {v: pair[0].name for v, pair in sorted(pairs.items())}
        savings = self.savings[tensor]
        counts = np.unravel_index(way, [len(saving.nodes) + 1 for saving in savings])
        for saving, many in zip(savings, counts, strict=True):
            own = [v for v in saving.nodes if v in nodes]
            configs |= {v: pairs[v][-1].name for v in own[: int(many)]}
        return PlannedStage(configs, data, tensor)


def planner(instance: Instance) -> Planner:
    """State an instance as a problem of cutting into stages.

    Raises:
        SolverError: The graph has too many downsets, or its nodes differ too much in memory.
    """
    downsets = enumerate_downsets(instance)
    layout = Layout(instance, downsets)
    savings = {t: find_savings(instance, t) for t in layout.tensor_degrees}
    degrees, options = [], []
    for tensor in layout.tensor_degrees:
        arrays = layout.arrays(tensor, savings[tensor])
        for data in range(1, min(instance.devices // tensor, instance.microbatches) + 1):
            if instance.microbatches % data == 0:
                degrees.append((data, tensor))
                options.append(arrays.option(data, tensor))
    if not options:
        raise SolverError("no number of devices holds any node")
    pool = Pool(instance.devices, instance.limit_bytes)
    problem = StageProblem(tuple(options), (pool,), most_degrees=instance.microbatches)
    return Planner(instance, downsets, tuple(degrees), savings, problem)


def enumerate_downsets(instance: Instance) -> tuple[frozenset[int], ...]:
    """All downsets by size, then by their nodes."""
    needs: dict[int, set[int]] = {v: set() for v in instance.nodes}
    for source, target in instance.edges:
        needs[target].add(source)
    found: set[frozenset[int]] = {frozenset()}
    last = found
    while last:
        last = {
            downset | {v}
            for downset in last
            for v in needs
            if v not in downset and needs[v] <= downset
        }
        found |= last
        if len(found) > MOST_DOWNSETS:
            raise SolverError(f"the graph has more than {MOST_DOWNSETS} downsets")
    return tuple(sorted(found, key=lambda downset: (len(downset), sorted(downset))))
