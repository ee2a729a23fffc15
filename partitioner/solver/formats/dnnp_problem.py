"""An instance of msr-fiddle/dnn-partitioning as a problem, and a plan of it as a solution."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from partitioner.solver.formats.dnnp import Instance, Value
from partitioner.solver.problem import Choice, Edge, Hold, Item, Problem


def to_problem(instance: Instance) -> Problem:
    """The instance as a problem: choice = device, of those that run the node."""
    return _Writer(instance).run()


@dataclass
class _Writer:
    instance: Instance

    def run(self) -> Problem:
        instance = self.instance
        count = len(instance.members)
        self.devices = instance.accelerators + instance.cpus
        self.items: list[Item] = []
        self.runs = [
            range(instance.accelerators if math.isinf(seconds) else 0, self.devices)
            for seconds in instance.accelerator_s
        ]
        nodes = tuple(tuple(self._choice(v, d) for d in self.runs[v]) for v in range(count))
        holds = tuple(self._hold(v) for v in range(count) if instance.size_bytes[v])
        edges = tuple(edge for value in instance.values for edge in self._edges(value))
        no_limit = (math.inf,) * instance.cpus
        return Problem(
            devices=self.devices,
            limit_bytes=(instance.limit_bytes,) * instance.accelerators + no_limit,
            nodes=nodes,
            names=tuple("+".join(map(str, own)) for own in instance.members),
            edges=edges,
            holds=holds,
            items=tuple(self.items),
            interchangeable=(
                tuple(range(instance.accelerators)),
                tuple(range(instance.accelerators, self.devices)),
            ),
        )

    def _on(self, device: int, value: float) -> tuple[float, ...]:
        return tuple(value if d == device else 0.0 for d in range(self.devices))

    def _choice(self, node: int, device: int) -> Choice:
        accelerator = device < self.instance.accelerators
        seconds = (self.instance.accelerator_s if accelerator else self.instance.cpu_s)[node]
        return Choice(self._on(device, seconds), device, str(device))

    def _item(self, load_s: tuple[float, ...], size: tuple[float, ...]) -> int:
        self.items.append(Item(load_s, size, 0, len(self.instance.members) - 1))
        return len(self.items) - 1

    def _hold(self, node: int) -> Hold:
        size = self.instance.size_bytes[node]
        held = [
            (self._item(self._on(0, 0.0), self._on(d, size)),)
            if d < self.instance.accelerators
            else ()
            for d in self.runs[node]
        ]
        return Hold(node, tuple(held))

    def _edges(self, value: Value) -> Iterable[Edge]:
        """A value pays one item to leave an accelerator and one to come to each other one."""
        nothing = self._on(0, 0.0)
        leaves, comes = (
            [
                (self._item(self._on(d, value.cost_s), nothing),)
                if d < self.instance.accelerators
                else ()
                for d in range(self.devices)
            ]
            for _ in ("out", "in")
        )
        sent = {
            (a, b): leaves[a] + comes[b]
            for a in range(self.devices)
            for b in range(self.devices)
            if a != b
        }
        back = {(b, a): paid for (a, b), paid in sent.items()}
        for reader in value.readers:
            u, v = min(value.producer, reader), max(value.producer, reader)
            items = sent if value.producer < reader else back
            yield Edge(u, v, tuple(self.runs[u]), tuple(self.runs[v]), items)


def to_solution(instance: Instance, chosen: Sequence[int]) -> dict[str, list[dict[str, list[int]]]]:
    """A plan in the form in which the authors' programs print it.

    Args:
        instance: The instance.
        chosen: One choice index a node of `to_problem(instance)`.
    """
    devices: list[list[int]] = [[] for _ in range(instance.accelerators + instance.cpus)]
    for own, seconds, choice in zip(instance.members, instance.accelerator_s, chosen, strict=True):
        first = instance.accelerators if math.isinf(seconds) else 0
        devices[first + choice] += own
    listed = [{"nodes": sorted(own)} for own in devices]
    return {"fpgas": listed[: instance.accelerators], "cpus": listed[instance.accelerators :]}
