"""What the devices of a lane run, in words: "wte, layers 0-2, layer 3 to attn".

A layer that several lanes share is told by the parts where a lane begins and ends in it. Without
names of modules, runs of nodes are told by their first and last.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from partitioner.foundations import units
from partitioner.ir.pieces.folding import Path, is_name
from partitioner.report.page.modules import Modules, layer_at

#: A lane with a larger share of a module's seconds runs it.
WHOLE = 0.98
#: What takes a smaller share of a lane's seconds, and of its layer's, is counted but not named.
LEAST = 0.02
#: Runs of nodes without names that are told, and letters of the name of a node.
MOST_RUNS, MOST_LETTERS = 3, 24

#: A layer: what comes before its number, and its number; or what is outside layers, and None.
_Unit: TypeAlias = tuple[str, int | None]


@dataclass(frozen=True)
class LaneWords:
    """The modules of a graph's nodes, of which each lane runs some.

    Attributes:
        names: Of all nodes of the graph.
        types: Operator types of all nodes.
        paths: Module paths of all nodes.
        seconds: Of the nodes that lanes may run, by number, in graph order.
    """

    names: Sequence[str]
    types: Sequence[str]
    paths: Sequence[Path]
    seconds: Mapping[int, float]

    def text(self, own: Collection[int]) -> str:
        """Tell what a lane runs of the nodes; "" if it runs none of them."""
        told, rest = self._modules(own) if self._named else self._runs(own)
        if not told:
            return units.count(rest, "operator") if rest else ""
        if rest:
            told.append(f"{rest:,} more operator{'s' if rest > 1 else ''}")
        return ", ".join(told)

    @cached_property
    def _named(self) -> bool:
        named = [node for node in self.seconds if self.paths[node] and is_name(self.paths[node][0])]
        return 2 * len(named) >= len(self.seconds)

    def _runs(self, own: Collection[int]) -> tuple[list[str], int]:
        """The longest runs of nodes, in order, and the number of other nodes."""
        runs: list[list[int]] = []
        follows = False
        for node in self.seconds:
            if node in own and follows:
                runs[-1].append(node)
            elif node in own:
                runs.append([node])
            follows = node in own
        most = sorted(sorted(runs, key=self._sum, reverse=True)[:MOST_RUNS])
        told = [
            self._name(run[0]) + (f" to {self._name(run[-1])}" if len(run) > 1 else "")
            for run in most
        ]
        return told, sum(map(len, runs)) - sum(map(len, most))

    def _name(self, node: int) -> str:
        name = self.names[node]
        return name if len(name) <= MOST_LETTERS else f"{name[: MOST_LETTERS - 1]}\u2026"

    def _modules(self, own: Collection[int]) -> tuple[list[str], int]:
        """The modules of a lane, runs of whole layers as one, and the number of other nodes."""
        told: list[str] = []
        whole: list[list[_Unit]] = []  # runs of layers of one kind that follow each other
        rest, all_s = 0, self._sum(own)

        def close() -> None:
            if whole:
                told.append(self._layers(whole))
                whole.clear()

        for unit, nodes in self._members.items():
            here = [node for node in nodes if node in own]
            here_s, module_s = self._sum(here), self._sum(nodes)
            is_layer = unit[1] is not None
            few = here_s < LEAST * all_s and not (is_layer and here_s >= LEAST * module_s)
            if few or not here:
                rest += len(here)
            elif not is_layer:
                close()
                part = "" if here_s >= WHOLE * module_s else "part of "
                told.append(part + unit[0])
            elif here_s >= WHOLE * module_s:
                if whole and whole[-1][-1][0] != unit[0]:
                    close()
                if whole and self._follow(whole[-1][-1], unit):
                    whole[-1].append(unit)
                else:
                    whole.append([unit])
            else:
                close()
                told.append(self._part(unit, nodes, here))
        close()
        return told, rest

    def _part(self, unit: _Unit, nodes: Sequence[int], here: Sequence[int]) -> str:
        """A layer of which a lane runs some nodes: "layer 3 to attn", "layer 3 from mlp"."""
        first, last = nodes.index(here[0]), nodes.index(here[-1])
        layer, least_s = self._layers([[unit]]), LEAST * self._sum(nodes)
        begins, ends = self._inside(here[0]), self._inside(here[-1])
        if self._sum(nodes[first : last + 1]) - self._sum(here) > least_s:
            return f"part of {layer}"
        if self._sum(nodes[:first]) <= least_s:
            return f"{layer} to {ends}"
        if self._sum(nodes[last + 1 :]) <= least_s:
            return f"{layer} from {begins}"
        return f"{begins} {'' if begins == ends else f'to {ends} '}of {layer}"

    def _inside(self, node: int) -> str:
        """The part of its layer that a node is in, else its operator type."""
        path, at = self.paths[node], layer_at(self.paths[node])
        inside = path[at + 1 : at + 2]
        return inside[0] if inside else self.types[node].rsplit("::", 1)[-1].split(".")[0]

    def _layers(self, runs: Sequence[Sequence[_Unit]]) -> str:
        """Runs of layers of one kind: "layers 0-11, 372-383"."""
        ends = ", ".join(
            f"{run[0][1]}" + (f"-{run[-1][1]}" if len(run) > 1 else "") for run in runs
        )
        if len(self._numbers) > 1:
            return f"{runs[0][0][0]}.{ends}"
        return f"layer{'s' if sum(map(len, runs)) > 1 else ''} {ends}"

    def _follow(self, before: _Unit, after: _Unit) -> bool:
        numbers = self._numbers[after[0]]
        if before[0] != after[0]:
            return False
        return numbers.index(after[1] or 0) == numbers.index(before[1] or 0) + 1

    @cached_property
    def _members(self) -> Mapping[_Unit, Sequence[int]]:
        """The nodes of each layer, of each other module, and of each operator outside modules."""
        members: dict[_Unit, list[int]] = {}
        for node in self.seconds:
            members.setdefault(self._unit(node), []).append(node)
        return members

    def _unit(self, node: int) -> _Unit:
        path = self._tree.unit(self.paths[node])
        if not path:
            return re.split(r"[/.]", self.names[node])[-1][:MOST_LETTERS], None
        if layer_at(path) == len(path):
            return path[-1], None
        stem, number = path[-1].rsplit(".", 1)
        return self._tree.text((*path[:-1], stem)), int(number)

    @cached_property
    def _tree(self) -> Modules:
        return Modules([self.paths[node] for node in self.seconds])

    @cached_property
    def _numbers(self) -> Mapping[str, Sequence[int]]:
        """The numbers of the layers of each kind, in order."""
        numbers: dict[str, list[int]] = {}
        for stem, number in self._members:
            if number is not None:
                numbers.setdefault(stem, []).append(number)
        return {stem: sorted(found) for stem, found in numbers.items()}

    def _sum(self, nodes: Iterable[int]) -> float:
        return sum(self.seconds[node] for node in nodes if node in self.seconds)
