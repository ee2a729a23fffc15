"""Words for what the loops of operators run over: batch, heads, columns of features, positions.

The factor rule of an operator says which dims of its operands and results are one loop, so the word
for a loop follows a value from the graph's inputs through all operators. Words begin at inputs (dim
0 is the batch, further dims of indices are positions) and at weights, whose own loops are columns.
A dim that a reshape takes apart is told by its parts: of columns, the major one is heads.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from partitioner.ir.graph import Graph
from partitioner.ir.loops.factors import FactorKind, Term
from partitioner.ir.plan import PlacedNode
from partitioner.ir.rule import Rule

#: Words for the parts of a dim, major first; () if nothing tells.
Words = tuple[str, ...]
BATCH, HEADS, COLUMNS, POSITIONS = ("batch",), ("heads",), ("columns",), ("positions",)


@dataclass(frozen=True)
class LoopWords:
    """Words for the loops of each operator of a plan."""

    #: Values that depend on no graph input: weights and what is made of them alone.
    static: Collection[str]
    loops: Mapping[str, Mapping[str, Words]]  #: By node and factor.

    @classmethod
    def of(cls, graph: Graph, placed: Collection[PlacedNode], static: Collection[str]) -> LoopWords:
        """The words of a graph whose nodes are placed in an order of its data."""
        dims: dict[str, list[Words]] = {}
        for name in graph.inputs:
            kind = graph.types[name]
            rest = () if kind.dtype.startswith(("float", "bfloat")) else POSITIONS
            dims[name] = [rest if at else BATCH for at in range(len(kind.shape))]
        loops = {}
        for node in placed:
            words: dict[str, Words] = {}
            if node.rule is not None:
                words = _of_factors(node.rule, node.node.inputs, dims, static)
                for value, exprs in zip(node.node.outputs, node.rule.results, strict=True):
                    if value and value not in static and exprs is not None:
                        # Of terms that lie one after the other, the first tells.
                        dims[value] = [
                            tuple(word for name in expr[0] for word in words.get(name, ()))
                            for expr in exprs
                        ]
            loops[node.node.name] = words
        return cls(static, loops)

    def cut(self, placed: PlacedNode, axis: str) -> str:
        """The part of a node that an axis cuts, in the words of `schema.CutRow`."""
        results = placed.results()
        if not any(axis in at.sharding.axes for _, at in (*placed.operands(), *results)):
            return "replicated"
        if results and all(value in self.static for value, _ in results):
            return "weights"
        rule = placed.rule
        cut = [name for name, layout in placed.layouts.items() if axis in layout.axes]
        loops = [name for name in cut if rule and rule.factors[name].kind != FactorKind.LINEAR]
        if rule is None or not loops:
            return "sums"
        name = min(loops, key=lambda name: rule.factors[name].kind == FactorKind.REDUCE)
        words = self.loops[placed.node.name].get(name)
        if not words:  # nothing tells: dim 0 is the batch
            tensors = [exprs for exprs in (*rule.results, *rule.operands) if exprs]
            first = any(name in term for exprs in tensors for term in exprs[0])
            words = BATCH if first else POSITIONS
        word = words[-1] if words[-1:] == COLUMNS else words[0]
        reduced = rule.factors[name].kind == FactorKind.REDUCE
        return "rows" if reduced and word == "columns" else word


def _of_factors(
    rule: Rule,
    inputs: Collection[str],
    dims: Mapping[str, list[Words]],
    static: Collection[str],
) -> dict[str, Words]:
    words: dict[str, Words] = {}
    of_weights: dict[str, None] = {}
    for value, exprs in zip(inputs, rule.operands, strict=True):
        for at, expr in enumerate(exprs or ()):
            if value in static:
                of_weights |= dict.fromkeys(name for term in expr for name in term)
                continue
            told = dims.get(value, [])
            for term in expr:
                for name, word in _apart(term, told[at] if at < len(told) else ()):
                    words[name] = words.get(name) or word
    for name in of_weights:
        if not words.get(name):
            words[name] = COLUMNS
    return words


def _apart(term: Term, told: Words) -> list[tuple[str, Words]]:
    """The words of the factors of a dim, major first."""
    if len(term) < 2:
        return [(name, told) for name in term]
    if len(told) == len(term):
        return [(name, (word,)) for name, word in zip(term, told, strict=True)]
    if told[-1:] == COLUMNS:
        return [(name, COLUMNS if at else HEADS) for at, name in enumerate(term)]
    return [(name, told[-1:] if at else told[:1]) for at, name in enumerate(term)]
