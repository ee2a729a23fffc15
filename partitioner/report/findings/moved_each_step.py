"""Stored values that a plan moves each step because no stored value is cut as it is used.

Stored values are DTensors, which are cut like `torch.chunk`: 7 samples over 3 devices as 3, 3 and
1. Operators are cut in balanced parts, as 3, 2 and 2. Where a size is no multiple of the number of
devices, a cache or a parameter is stored in another way than it is used.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from partitioner.ir.graph import Graph
from partitioner.ir.layout import DimLayout, Sharding
from partitioner.ir.ops import is_stored, row_of
from partitioner.ir.plan import PlacedNode, Plan, resolve


def moved_notes(graph: Graph, plan: Plan) -> tuple[str, ...]:
    """A line on the first stored value that is moved each step for its uneven parts, if any is."""
    if not any(is_stored(node) for node in graph.nodes):
        return ()
    uses = _Uses()
    for placed in resolve(graph, plan):
        uses.add(placed)
    if not uses.moved:
        return ()
    (value, (dim, used)), *others = uses.moved.items()
    more = f" (and {len(others)} more)" if others else ""
    note = (
        f"{value!r}{more} is moved each step: dim {dim}, of {used.size}, is cut as "
        f"{_listed(used.sizes())} where it is used, and stored values only like torch.chunk, as "
        f"{_listed(_chunks(used))}; a size that {len(used.sizes())} divides stays in place"
    )
    return (note,)


def _chunks(layout: DimLayout) -> tuple[int, ...]:
    parts = len(layout.sizes())
    chunk = -(-layout.size // parts)
    return tuple(max(0, min(chunk, layout.size - part * chunk)) for part in range(parts))


def _listed(sizes: tuple[int, ...]) -> str:
    return ", ".join(map(str, sizes))


@dataclass
class _Uses:
    """Follows where stored values lie and how they are used."""

    #: The layout of each stored value, and the stored value that other names stand for.
    homes: dict[str, Sharding] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    made: dict[str, Sharding] = field(default_factory=dict)  #: The layouts of what nodes make.
    #: The first dim that is cut unevenly for a use, with its layout, by stored value.
    moved: dict[str, tuple[int, DimLayout]] = field(default_factory=dict)

    def add(self, placed: PlacedNode) -> None:
        row, operands, results = row_of(placed.node), placed.operands(), placed.results()
        self.made.update((value, at.sharding) for value, at in results)
        if row is not None and row.stored:
            self.homes.update((value, at.sharding) for value, at in results)
            self.names.update((value, value) for value, _ in results)
        elif row is not None and row.again and operands[0][0] in self.names:
            self.names[results[0][0]] = self.names[operands[0][0]]
        elif row is not None and row.in_place is not None:
            stored = placed.node.inputs[row.in_place]
            new = placed.node.inputs[0]
            if new in self.made:
                self._note(stored, self.made[new])
        else:
            for value, at in operands:
                self._note(value, at.sharding)

    def _note(self, value: str, used: Sharding) -> None:
        stored = self.names.get(value)
        if stored is None or stored in self.moved:
            return
        for dim, (home, cut) in enumerate(zip(self.homes[stored].dims, used.dims, strict=True)):
            is_balanced = bool(cut.axes) and not cut.is_chunked and not cut.windows
            if is_balanced and cut != home and tuple(cut.sizes()) != _chunks(cut):
                self.moved[stored] = dim, cut
                return
