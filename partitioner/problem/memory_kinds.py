"""Bytes of a device at its memory peak, by kind: weights, gradients, activations, ..."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from partitioner.cost_model.cluster.topology import Cluster
from partitioner.cost_model.evaluate import observed_schedule
from partitioner.cost_model.memory.lifetimes import (
    Lifetime,
    exact_lifetimes,
    loaded_among_activations,
    safe_lifetimes,
    with_headroom,
)
from partitioner.cost_model.memory.lives import Moments, StepLives
from partitioner.cost_model.schedule.task_list import Schedule
from partitioner.foundations import units
from partitioner.ir.graph import Graph
from partitioner.ir.ops import row_of
from partitioner.ir.plan import Plan, resolve
from partitioner.ir.types import DTYPE_BITS
from partitioner.solver.referee import triggered

if TYPE_CHECKING:
    from partitioner.problem.build import Built


_WEIGHTS, _PARAMETERS, _STATE = "weights", "parameters", "optimizer's state"
_ZEROS = "zeros"  #: Of a pending sum, on the devices that add nothing to it.
_RESIDENT = (_WEIGHTS, _PARAMETERS, _STATE, _ZEROS)


@dataclass(frozen=True)
class Holdings:
    """Bytes of a graph's values by kind, along the schedule of a plan."""

    graph: Graph
    schedule: Schedule
    #: The device with tasks in the schedule that each device equals; itself if left out.
    first: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, graph: Graph, plan: Plan, cluster: Cluster) -> Holdings:
        """The holdings of a plan."""
        placed = resolve(graph, plan)
        return cls(graph, *observed_schedule(graph, placed, cluster, plan.pipeline))

    def at_peak(
        self, device: int, *, exact: bool = False, headroom: bool | None = None
    ) -> Mapping[str, int]:
        """Bytes of each kind at the peak of a device; their sum is the peak.

        Args:
            exact: Whether by liveness; else by the safe formula.
            headroom: Whether activations have head-room; None: by the safe formula alone.
        """
        headroom = not exact if headroom is None else headroom
        lifetimes = exact_lifetimes if exact else safe_lifetimes
        return self._at(device, lifetimes, lambda moments: moments.peak, headroom=headroom)

    def at_end(self, device: int) -> Mapping[str, int]:
        """Bytes of each kind, by liveness, when the last task of a request or step has run."""
        return self._at(device, exact_lifetimes, lambda moments: len(moments.run) - 1)

    def _at(
        self,
        device: int,
        lifetimes: Callable[[Schedule], Iterable[Lifetime]],
        moment: Callable[[Moments], int],
        *,
        headroom: bool = False,
    ) -> Mapping[str, int]:
        kinds, device = Kinds(self.graph), self.first.get(device, device)
        parts: Counter[str] = Counter()
        for key, nbytes in self.schedule.residents.items():
            where, (value, _) = key
            if key in self.schedule.loads:
                continue
            if where == device and key in self.schedule.zeros:
                parts[_ZEROS] += nbytes
            elif where == device:
                parts.update(kinds.resident(value, nbytes))
        lives = [life for life in lifetimes(self.schedule) if life.device == device]
        loaded = loaded_among_activations(self.schedule)
        lives += [life for life in loaded if life.device == device]
        moments = StepLives.of(self.schedule, lives).moments(device)
        for life, count in moments.at(moment(moments)):
            if life in loaded:
                parts.update(kinds.resident(life.value, loaded[life]))
                continue
            parts[kinds.passing(life.value, buffer=life.buffer)] += count * life.nbytes
        return {
            kind: with_headroom(nbytes) if headroom and kind not in _RESIDENT else nbytes
            for kind, nbytes in parts.items()
        }

    def text(self, device: int, *, exact: bool = False, headroom: bool | None = None) -> str:
        """``"96 MiB parameters, 192 MiB optimizer's state, ..."``, the largest first."""
        return parts_text(self.at_peak(device, exact=exact, headroom=headroom))


def parts_text(parts: Mapping[str, int]) -> str:
    """``"96 MiB parameters, 192 MiB optimizer's state, ..."``, the largest first."""
    ranked = sorted(parts.items(), key=lambda part: -part[1])
    return ", ".join(f"{units.size(nbytes)} {kind}" for kind, nbytes in ranked if nbytes)


def planned_parts(
    graph: Graph, built: Built, chosen: Sequence[int], position: int
) -> Mapping[str, int]:
    """Bytes of each kind that a problem's first device holds at a node, as the search counts."""
    problem, kinds = built.problem, Kinds(graph)
    by_nodes = {item for hold in problem.holds for item in hold.items[chosen[hold.node]]}
    parts: Counter[str] = Counter()
    for index in sorted(triggered(problem, chosen)):
        item, value = problem.items[index], built.values[index]
        nbytes = round(item.bytes[0])
        if not item.first <= position <= item.last:
            continue
        if index in built.zeros:
            parts[_ZEROS] += nbytes
        elif index in built.resident:
            parts.update(kinds.resident(value, nbytes))
        else:
            buffer = index not in by_nodes and any(item.load_s)
            parts[kinds.passing(value, buffer=buffer)] += nbytes
    return parts


@dataclass(frozen=True)
class Kinds:
    """Kinds of the bytes that a graph's values take."""

    graph: Graph

    def resident(self, value: str, nbytes: int) -> Mapping[str, int]:
        """Bytes that are held all the time: the value itself, and its optimizer's state."""
        node = self.graph.producers.get(value)
        extra = node.attrs.get("state_bytes", 0) if node is not None else 0
        assert isinstance(extra, int)
        bits = DTYPE_BITS[self.graph.types[value].dtype]
        apart = node is not None and bool(node.attrs.get("apart"))  # columns count as state here
        itself = 0 if apart else nbytes * bits // (bits + 8 * extra)
        return {_PARAMETERS if self.graph.backward else _WEIGHTS: itself, _STATE: nbytes - itself}

    def passing(self, value: str, *, buffer: bool) -> str:
        """The kind of bytes that are held for a time."""
        if value in self._gradients:
            return "gradients"
        return "buffers of communications" if buffer else "activations"

    @cached_property
    def _gradients(self) -> frozenset[str]:
        """The gradients of parameters, where they are updated and what they are views of."""
        left = [n.outputs[0] for n in self.graph.nodes if n.attrs.get("role") == "gradient"]
        gradients: set[str] = set()
        while left:
            value = left.pop()
            gradients.add(value)
            node = self.graph.producers.get(value)
            if node is not None and row_of(node).view:
                left.append(node.inputs[0])
        return frozenset(gradients)
