"""What a device holds where it is fullest, by what it is for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from partitioner import units
from partitioner.cost_model.cluster import Cluster
from partitioner.cost_model.memory import (
    exact_lifetimes,
    safe_lifetimes,
    usage_curves,
    with_headroom,
)
from partitioner.cost_model.schedule import Schedule, schedule
from partitioner.ir.graph import Graph
from partitioner.ir.ops import row_of
from partitioner.ir.plan import Plan, resolve
from partitioner.ir.types import DTYPE_BITS
from partitioner.solver.referee import triggered

if TYPE_CHECKING:
    from partitioner.problem.build import Built


@dataclass(frozen=True)
class Holdings:
    """Bytes of a graph's values by kind, along a schedule.

    Attributes:
        graph: The model.
        schedule: Its plan's schedule.
    """

    graph: Graph
    schedule: Schedule

    @classmethod
    def of(cls, graph: Graph, plan: Plan, cluster: Cluster) -> Holdings:
        """Those of a plan."""
        return cls(graph, schedule(graph, resolve(graph, plan), cluster))

    def at_peak(self, device: int, *, exact: bool = False) -> Mapping[str, int]:
        """Bytes of each kind at the peak of a device; their sum is the peak.

        Args:
            device: The device.
            exact: Whether by liveness; else by the safe formula, with head-room.
        """
        found: dict[str, int] = {}
        for kind, nbytes in self._resident(device):
            found[kind] = found.get(kind, 0) + nbytes
        lifetimes = exact_lifetimes if exact else safe_lifetimes
        lives = [life for life in lifetimes(self.schedule) if life.device == device]
        for curve in usage_curves(self.schedule, lives).values():
            at = int(np.argmax(curve))
            for life in lives:
                if life.first <= at <= life.last:
                    kind = self._kinds.passing(life.value, life.buffer)
                    found[kind] = found.get(kind, 0) + life.nbytes
        moving = {kind for kind in found if kind not in _RESIDENT}
        return {
            kind: nbytes if exact or kind not in moving else with_headroom(nbytes)
            for kind, nbytes in found.items()
        }

    def text(self, device: int, *, exact: bool = False) -> str:
        """``"96 MiB parameters, 192 MiB optimizer's state, ..."``, the largest first."""
        return parts_text(self.at_peak(device, exact=exact))

    def _resident(self, device: int) -> Iterator[tuple[str, int]]:
        for (where, (value, _)), nbytes in self.schedule.residents.items():
            if where == device:
                yield from self._kinds.resident(value, nbytes)

    @cached_property
    def _kinds(self) -> Kinds:
        return Kinds(self.graph)


def parts_text(parts: Mapping[str, int]) -> str:
    """``"96 MiB parameters, 192 MiB optimizer's state, ..."``, the largest first."""
    found = sorted(parts.items(), key=lambda part: -part[1])
    return ", ".join(f"{units.size(nbytes)} {kind}" for kind, nbytes in found if nbytes)


def planned_parts(
    graph: Graph, built: Built, chosen: Sequence[int], position: int
) -> Mapping[str, int]:
    """Bytes of each kind on the first device of a problem, as the search counts them.

    Args:
        graph: Of the problem.
        built: The problem.
        chosen: A plan: one choice index a node.
        position: Node at which they are held.
    """
    problem, kinds = built.problem, Kinds(graph)
    own = {item for hold in problem.holds for item in hold.items[chosen[hold.node]]}
    found: dict[str, int] = {}
    for index in sorted(triggered(problem, chosen)):
        item, value = problem.items[index], built.values[index]
        nbytes = round(item.bytes[0])
        if not item.first <= position <= item.last:
            continue
        parts = [(kinds.passing(value, index not in own and any(item.load_s)), nbytes)]
        if index in built.zeros or (index in own and kinds.stays(value)):
            parts = list(kinds.resident(value, nbytes))
        for kind, size in parts:
            found[kind] = found.get(kind, 0) + size
    return found


@dataclass(frozen=True)
class Kinds:
    """What bytes of a graph's values are for.

    Attributes:
        graph: The graph.
    """

    graph: Graph

    def stays(self, value: str) -> bool:
        """Whether it is there all the time: a weight, or a stored value."""
        node = self.graph.producers.get(value)
        row = row_of(node) if node is not None else None
        return value in self.graph.constants or (row is not None and row.stored)

    def resident(self, value: str, nbytes: int) -> Iterator[tuple[str, int]]:
        """Bytes that are held all the time: the value's own, and its optimizer's state."""
        node = self.graph.producers.get(value)
        extra = node.attrs.get("state_bytes", 0) if node is not None else 0
        assert isinstance(extra, int)
        bits = DTYPE_BITS[self.graph.types[value].dtype]
        own = nbytes * bits // (bits + 8 * extra)
        yield _PARAMETERS if self.graph.backward else _WEIGHTS, own
        yield _STATE, nbytes - own

    def passing(self, value: str, buffer: bool) -> str:
        """The kind of what is held for a time."""
        if value in self._gradients:
            return "gradients"
        return "buffers of communications" if buffer else "activations"

    @cached_property
    def _gradients(self) -> frozenset[str]:
        """Values that are a parameter's gradient, and those that they are views of."""
        left = [n.inputs[0] for n in self.graph.nodes if n.attrs.get("role") == "gradient"]
        found: set[str] = set()
        while left:
            value = left.pop()
            found.add(value)
            node = self.graph.producers.get(value)
            row = row_of(node) if node is not None else None
            if node is not None and row is not None and row.view:
                left.append(node.inputs[0])
        return frozenset(found)


_WEIGHTS, _PARAMETERS, _STATE = "weights", "parameters", "optimizer's state"
_RESIDENT = (_WEIGHTS, _PARAMETERS, _STATE)
