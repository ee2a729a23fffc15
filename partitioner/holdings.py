"""What a device holds where it is fullest, by what it is for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

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
        found = dict(self._resident(device))
        lifetimes = exact_lifetimes if exact else safe_lifetimes
        lives = [life for life in lifetimes(self.schedule) if life.device == device]
        for curve in usage_curves(self.schedule, lives).values():
            at = int(np.argmax(curve))
            for life in lives:
                if life.first <= at <= life.last:
                    kind = self._kind(life.value, life.buffer)
                    found[kind] = found.get(kind, 0) + life.nbytes
        moving = {kind for kind in found if kind not in _RESIDENT}
        return {
            kind: nbytes if exact or kind not in moving else with_headroom(nbytes)
            for kind, nbytes in found.items()
        }

    def text(self, device: int, *, exact: bool = False) -> str:
        """``"96 MiB parameters, 192 MiB optimizer's state, ..."``, the largest first."""
        found = sorted(self.at_peak(device, exact=exact).items(), key=lambda part: -part[1])
        return ", ".join(f"{units.size(nbytes)} {kind}" for kind, nbytes in found if nbytes)

    def _resident(self, device: int) -> Iterator[tuple[str, int]]:
        weights, state = 0, 0
        for (where, (value, _)), nbytes in self.schedule.residents.items():
            if where == device:
                own = self._own(value, nbytes)
                weights, state = weights + own, state + nbytes - own
        yield _PARAMETERS if self.graph.backward else _WEIGHTS, weights
        yield _STATE, state

    def _own(self, value: str, nbytes: int) -> int:
        """Of the bytes that are held of a value, those that are not an optimizer's."""
        node = self.graph.producers.get(value)
        extra = node.attrs.get("state_bytes", 0) if node is not None else 0
        assert isinstance(extra, int)
        bits = DTYPE_BITS[self.graph.types[value].dtype]
        return nbytes * bits // (bits + 8 * extra)

    def _kind(self, value: str, buffer: bool) -> str:
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
