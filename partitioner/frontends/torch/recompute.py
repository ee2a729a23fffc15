"""A backward pass that offers to compute again what it reads of the forward pass.

What the backward pass reads is taken either as it was kept or from a clone of the node that made
it; the clone reads the backward pass's own names of its operands, so that chains of clones lead
back to what is kept. Views are made again in any case: they cost nothing. All that only clones
read is optional (`Graph.optional`).

A clone stands before the first reader of its results, and so does all that it reads. Chains would
lead from the last layer to the first, and all of it would be computed where the backward pass
begins. So the forward pass is cut into regions, and what passes from one to another is kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from partitioner.frontends.torch.passes import Passes
from partitioner.frontends.torch.regions import Life, regions
from partitioner.ir.graph import Node
from partitioner.ir.ops import row_of
from partitioner.ir.repeats import Stretch, numbered, repetitions


@dataclass
class Again(Passes):
    """As `Passes`, with offers.

    Attributes:
        outputs: Results of the graph: they stay to the end.
    """

    outputs: frozenset[str]

    def __post_init__(self) -> None:
        super().__post_init__()
        self.local = self._local()
        self.clones: dict[str, dict[str, str]] = {}

    def run(self) -> tuple[list[Node], frozenset[str]]:
        """The nodes of the backward pass, clones among them, and the names of optional ones."""
        nodes, _ = super().run()
        own = {node.name for node in self.backward}
        return list(_wanted(nodes, own)), frozenset(_optional(nodes, own))

    def _local(self) -> frozenset[str]:
        """Values that are not read in another region than they are made in."""
        read = {value for node in self.backward for value in node.reads}
        position = {node.name: at for at, node in enumerate(self.forward)}
        last: dict[str, int] = {}
        for node in reversed(self.forward):
            end = max([position[node.name], *(last.get(value, -1) for value in node.writes)])
            for value in node.reads:
                at = end if self._is_view(node) else position[node.name]
                last[value] = max(last.get(value, -1), at)
            if self._is_view(node):
                read.update(node.reads if read.intersection(node.writes) else ())
        lives = {
            value: Life(
                position[node.name],
                max(position[node.name], last.get(value, -1)),
                self.types[value].nbytes,
                value in read,
            )
            for value, node in self.made.items()
            if value not in self.derived and not self._is_view(node) and value not in self.outputs
        }
        of = regions(tuple(lives.values()), len(self.forward), self._repeated())
        return frozenset(v for v, life in lives.items() if of[life.first] == of[life.last])

    def _repeated(self) -> tuple[Stretch, ...]:
        """Where the forward pass repeats."""
        kinds = numbered(
            (
                node.op,
                repr(sorted(node.attrs.items())),
                *(str(self.types[value]) for value in (*node.reads, *node.writes)),
            )
            for node in self.forward
        )
        return tuple(repetitions(kinds))

    def _is_view(self, node: Node) -> bool:
        row = row_of(node)
        return row is not None and row.view and row.in_place is None

    def _again(self, value: str) -> bool:
        view = self._is_view(self.made[value]) and value not in self.outputs
        return view or super()._again(value)

    def _before(self, value: str) -> list[str]:
        reads = self.made[value].reads
        if not self._again(value) and not self._offered(value):
            return []
        return [read for read in reads if read in self.made]

    def _offered(self, value: str) -> bool:
        """Whether the node that makes a value may be cloned."""
        return value in self.local and row_of(self.made[value]) is not None

    def _emit(self, value: str) -> None:
        node = self.made[value]
        row = row_of(node)
        plain = value in self.outputs or value in self.derived
        if self._again(value) or plain or row is None or row.in_place is not None:
            super()._emit(value)
            return
        inputs: tuple[str, ...] = (value,)
        if self._offered(value):
            if node.name not in self.clones:
                self.clones[node.name] = {v: self._name(v, "again") for v in node.writes}
                self._repeat(node, self.clones[node.name])
            inputs = (value, self.clones[node.name][value])
        self._take(f"{node.name}/taken", "partitioner::either", value, inputs)


def _optional(nodes: list[Node], own: set[str]) -> Iterator[str]:
    """Names of what only clones need."""
    needed: set[str] = set()
    for node in reversed(nodes):
        if node.name not in own and not needed.intersection(node.writes):
            yield node.name
        elif node.op != "partitioner::either":
            needed.update(node.reads)


def _wanted(nodes: list[Node], own: set[str]) -> Iterator[Node]:
    """The nodes; clones without results that nothing reads."""
    read = {value for node in nodes for value in node.reads}
    for node in nodes:
        outputs = tuple(value if value in read else "" for value in node.outputs)
        yield node if node.name in own else replace(node, outputs=outputs)
