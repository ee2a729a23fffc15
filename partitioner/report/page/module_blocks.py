"""The graph of a training plan as blocks: what a set of devices runs of a module, in one pass.

In a training graph, ranges of the graph's order mix modules: weights are read ahead, updates run
between gradients, and aliases stand before the backward pass. So its blocks are sets of nodes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from partitioner.ir.graph import Graph, Node
from partitioner.ir.pieces.folding import Path
from partitioner.report.page.modules import Modules
from partitioner.report.schema import BlockRow, ranges

#: Fewer nodes of a module, and of one inside another, are shown one by one.
MIN_NODES, MIN_INSIDE = 2, 3


@dataclass(frozen=True)
class ModuleBlocks:
    """The modules of a training graph whose nodes have names.

    Attributes:
        graph: With a backward pass.
        groups: The group of devices of each node.
        paths: The module path of each node, see `blocks.paths`.
    """

    graph: Graph
    groups: Sequence[int]
    paths: Sequence[Path]

    def rows(self) -> list[BlockRow]:
        """The blocks, each after the one around it; outside layers and modules there are none."""
        rows: list[BlockRow] = []
        units: dict[tuple[bool, int, Path], list[int]] = {}
        for node, path in enumerate(self._homes):
            key = self._is_backward(self.graph.nodes[node]), self.groups[node], path
            if path:
                units.setdefault((*key[:2], self._tree.unit(path) or path), []).append(node)
        for (is_backward, _, path), nodes in units.items():
            self._add(rows, path, nodes, -1, "backward" if is_backward else "forward")
        kinds: dict[object, list[BlockRow]] = {}
        for row in rows:
            ops = Counter(self.graph.nodes[node].op for node in _numbers(row["nodes"]))
            shape = re.sub(r"\d+", "#", row["label"]), row["part"], frozenset(ops.items())
            kinds.setdefault(shape, []).append(row)
        for kind, alike in enumerate(kinds.values()):
            for index, row in enumerate(alike):
                row["kind"], row["index"], row["count"] = kind, index, len(alike)
        return rows

    def _add(
        self, rows: list[BlockRow], path: Path, nodes: Sequence[int], parent: int, part: str
    ) -> None:
        if len(nodes) < (MIN_NODES if parent < 0 else MIN_INSIDE):
            return
        own = len(rows)
        rows.append(
            BlockRow(
                label=self._tree.text(path) or path[-1],
                first=nodes[0],
                last=nodes[-1],
                nodes=ranges(nodes),
                parent=parent,
                part=part,  # type: ignore[typeddict-item]
                kind=-1,
                index=0,
                count=1,
            )
        )
        inside: dict[Path, list[int]] = {}
        for node in nodes:
            home = self._homes[node]
            if len(home) > len(path) and home[: len(path)] == path:
                inside.setdefault(home[: len(path) + 1], []).append(node)
        for module, held in inside.items():
            if len(held) < len(nodes):
                self._add(rows, module, held, own, part)

    @cached_property
    def _tree(self) -> Modules:
        return Modules(self.paths)

    @cached_property
    def _homes(self) -> Sequence[Path]:
        """The path of each node; of one without a name that of what makes or reads its values.

        Of several the nearest in order counts: a sum of gradients is of the layer that ends in it.
        """
        homes = list(self.paths)
        nodes, order = self.graph.nodes, self.graph.order

        def adopt(node: int, near: Sequence[Node]) -> None:
            here = self._is_backward(nodes[node]), self.groups[node]
            others = (order[one.name] for one in near)
            for other in sorted(others, key=lambda other: abs(other - node)):
                if not homes[node] and here == (
                    self._is_backward(nodes[other]),
                    self.groups[other],
                ):
                    homes[node] = homes[other]

        for at, node in enumerate(nodes):
            made = [self.graph.producers.get(value) for value in node.reads]
            adopt(at, [one for one in made if one is not None])
        for at, node in reversed(list(enumerate(nodes))):
            adopt(at, [reader for value in node.writes for reader in self.graph.consumers[value]])
        return homes

    def _is_backward(self, node: Node) -> bool:
        return node.name in self.graph.backward


def _numbers(ends: Sequence[int]) -> list[int]:
    """The numbers of the runs that `ranges` gave."""
    runs = zip(ends[::2], ends[1::2], strict=True)
    return [number for first, last in runs for number in range(first, last + 1)]
