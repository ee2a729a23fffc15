"""A proof that a batch that runs in micro-batches computes what the whole batch does.

M micro-batches are M devices that share the batch and never communicate: the forward pass of the
whole batch is laid out over a mesh of M devices, its inputs cut by samples, and each node must take
its operands as they lie. A node that combines samples does not. A pending sum over the devices is
the sum over the micro-batches; where it is divided by the number of samples, it is their mean,
which is what a step in micro-batches returns.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from partitioner.ir.graph import Graph, Node
from partitioner.ir.layout import DimLayout, LayoutError, Sharding, followed
from partitioner.ir.loops.factors import PENDING, PENDING_SIZE, Dims, FactorKind
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.nodes.local_node import local_op
from partitioner.ir.ops import row_of, rule_of
from partitioner.ir.plan import place
from partitioner.ir.rule import Rule

#: The axis of the mesh whose devices are the micro-batches.
AXIS = "_micro"
#: Attributes that follow from the sizes of results, or say how they lie in memory.
_SIZES = frozenset(
    {"size", "end", "length", "split_size", "split_sizes", "stride", "memory_format"}
)
#: The reason that each sample has random numbers of its own, other ones in another call.
_REDRAWN = "redrawn"
#: Kinds of reasons, the weightiest first.
_KINDS = ("combines", "sum", "size", "writes", "draws", _REDRAWN)


@dataclass(frozen=True)
class Difference:
    """A result that changes if the batch runs in micro-batches."""

    #: Why results may differ, a clause each; empty if they are proven to be the same.
    reasons: tuple[str, ...]
    #: Values that count targets, if the same is proven only for micro-batches in which they are
    #: equal: a mean over the targets that are not ignored weighs all micro-batches alike.
    counted: tuple[str, ...] = ()
    #: Whether the only reason is that each sample has other random numbers, as in a dropout: a step
    #: of the whole batch has others in each call, too.
    redrawn: bool = False
    #: Whether a node of a micro-batch is not that of the whole batch, of another size.
    sized: bool = False


class _Value(NamedTuple):
    """A value of the whole batch, over the micro-batches."""

    sharding: Sharding  #: Its layout over them.
    share: float = 1.0  #: Of a pending sum: the part of a micro-batch's own value that is added up.

    @property
    def is_pending(self) -> bool:
        return bool(self.sharding.partial)


class CombinesError(Exception):
    """A node does not take its operands as they lie."""


def difference(
    whole: Graph,
    part: Graph,
    split: Collection[str],
    results: Sequence[str],
    count: int,
    seed: str,
) -> Difference:
    """Compare a module's step with the same step in at least 2 micro-batches, all of one size.

    Each of these has samples of its own of the graph inputs `split`. The `results` of the module
    are values of both graphs; random numbers are drawn from the graph input `seed`.
    """
    with followed():  # where sequences come first, a part of the batch has a segment for each place
        return _Proof(whole, part, count, seed).run(split, results)


@dataclass
class _Proof:
    """Lays out the forward pass, node by node."""

    whole: Graph
    part: Graph
    count: int
    seed: str
    counted: dict[str, None] = field(default_factory=dict)
    values: dict[str, _Value | None] = field(default_factory=dict)  # None: not known
    reasons: dict[str, str] = field(default_factory=dict)  # the first of each kind

    def run(self, split: Collection[str], results: Sequence[str]) -> Difference:
        for name in (*self.whole.inputs, *self.whole.constants):
            shape = self.whole.types[name].shape
            cut = cut_along(self.mesh, shape, 0) if name in split else Sharding.replicate(shape)
            self.values[name] = _Value(cut)
        for name in self.whole.constants:
            if not is_same_constant(self.whole, self.part, name):
                self.values[name] = None
                self.reasons.setdefault("size", f"{name} depends on the size of the batch")
        for node in self.whole.nodes:
            if node.name not in self.whole.backward:
                self.values.update(zip(node.outputs, self._results(node), strict=True))
        for name in results:  # what a step in micro-batches returns otherwise than the whole batch
            value, shape = self.values[name], self.whole.types[name].shape
            if value and value.is_pending and not math.isclose(value.share * self.count, 1.0):
                why = f"the result {name!r} is a sum over the batch, and not a mean"
                self.reasons.setdefault("sum", why)
            elif value and shape and value.sharding != cut_along(self.mesh, shape, 0):
                self.reasons.setdefault("combines", f"the result {name!r} is not one of samples")
        ordered = tuple(self.reasons[kind] for kind in _KINDS if kind in self.reasons)
        is_redrawn, is_sized = self.reasons.keys() == {_REDRAWN}, "size" in self.reasons
        return Difference(ordered, tuple(self.counted), is_redrawn, is_sized)

    @cached_property
    def mesh(self) -> DeviceMesh:
        return DeviceMesh.line(self.count, AXIS)

    def _results(self, node: Node) -> Sequence[_Value | None]:
        """The results of a node over the micro-batches; notes why they are not known."""
        unknown = [None] * len(node.outputs)
        if node.attrs.get("role") == "next":
            self.reasons.setdefault("writes", f"{node.name} writes {node.inputs[1]!r} in each")
            return unknown
        if any(self.values[value] is None for value in node.reads):
            return unknown
        try:
            results = self._laid_out(node)
        except (LayoutError, CombinesError):
            self.reasons.setdefault("combines", f"{node.name} combines the samples of a batch")
            return unknown
        sizes = all(
            result is None
            or (
                name in self.part.types
                and result.sharding.local_shape(self.mesh, {AXIS: 0}) == self.part.types[name].shape
                and _is_even(result.sharding)
            )
            for name, result in zip(node.outputs, results, strict=True)
        )
        if not sizes or not (self._reads_same_numbers(node) or self._is_local(node)):
            self.reasons.setdefault("size", f"{node.name} depends on the size of the batch")
            return unknown
        if self.seed not in node.reads:
            return results
        if all(result is None or result.sharding.axes for result in results):
            self.reasons.setdefault(_REDRAWN, f"{node.name} draws other random numbers")
            return results
        self.reasons.setdefault(
            "draws", f"{node.name} draws other random numbers, which samples share"
        )
        return unknown

    def _reads_same_numbers(self, node: Node) -> bool:
        """Tell whether a node of both graphs differs in sizes only, or in what `share` counts."""
        other = self.part.by_name.get(node.name)
        if other is None or other.op != node.op or other.attrs.keys() != node.attrs.keys():
            return False
        if other.inputs != node.inputs or other.captures != node.captures:
            return False
        free = _SIZES | ({"other"} if row_of(node).scales else set())
        return all(node.attrs[key] == v for key, v in other.attrs.items() if key not in free)

    def _is_local(self, node: Node) -> bool:
        """Tell whether the other graph's node is what a micro-batch runs in place of it.

        Arguments that repeat sizes of the operands are local then, as a group norm's are.
        """
        rule, other = rule_of(self.whole, node), self.part.by_name.get(node.name)
        if not isinstance(rule, Rule) or other is None or other.inputs != node.inputs:
            return False
        operands = [self.values[value] if value else None for value in node.inputs]
        try:
            placed = place(self.whole, node, self.mesh, self._layouts(rule, operands), rule)
        except (LayoutError, CombinesError):
            return False
        local = local_op(self.whole, placed, {AXIS: 0}).nodes
        return [(each.op, each.attrs) for each in local] == [(other.op, other.attrs)]

    def _laid_out(self, node: Node) -> Sequence[_Value | None]:
        operands = [self.values[value] if value else None for value in node.inputs]
        read = [value for value in map(self.values.get, node.reads) if value is not None]
        if all(value.sharding.is_replicated for value in read):
            return [self._same(node, name) for name in node.outputs]
        rule, captured = rule_of(self.whole, node), map(self.values.get, node.captures)
        if not isinstance(rule, Rule) or any(v is not None and v.sharding.axes for v in captured):
            raise CombinesError
        scale = self._scale(node)
        if any(value.is_pending for value in read):
            return self._pending(node, rule, operands, scale)
        if scale != 1.0:
            raise CombinesError
        # operands are cut by samples, or whole
        ins, outs = rule.shardings(self._layouts(rule, operands), self.mesh)
        moves = any(v is not None and v.sharding != at for v, at in zip(operands, ins, strict=True))
        if moves or any(how != "sum" for at in outs for _, how in at.partial):
            raise CombinesError
        share = 1 / self.count if row_of(node).averages else 1.0
        named = zip(node.outputs, outs, strict=True)
        return [_Value(at, share) if name else None for name, at in named]

    def _layouts(self, rule: Rule, operands: Sequence[_Value | None]) -> Mapping[str, DimLayout]:
        lie = (None if value is None else value.sharding for value in operands)
        return taken(rule, zip(rule.operands, lie, strict=True), self.mesh)

    def _same(self, node: Node, name: str) -> _Value | None:
        """A result that depends on no sample, or one number a sample."""
        if not name:
            return None
        shape = self.whole.types[name].shape
        own = self.part.types[name].shape if name in self.part.types else ()
        dims = [
            dim for dim, (size, less) in enumerate(zip(shape, own, strict=False)) if size > less
        ]
        is_drawn = self.seed in node.reads  # anew for each sample, if there are more of them
        like = row_of(node).uniform or (is_drawn and len(node.reads) == 1)
        if dims and like and shape[dims[0]] % self.count == 0:
            return _Value(cut_along(self.mesh, shape, dims[0]))
        return _Value(Sharding.replicate(shape))

    def _scale(self, node: Node) -> float:
        """The number that the whole batch is multiplied by, over that of a micro-batch."""
        other = self.part.by_name.get(node.name)
        scales = row_of(node).scales
        if not scales or "other" not in node.attrs or other is None:
            return 1.0
        ours, theirs = node.attrs["other"], other.attrs.get("other")
        if ours == theirs:
            return 1.0
        if not (
            isinstance(ours, int | float) and isinstance(theirs, int | float) and ours and theirs
        ):
            raise CombinesError
        return ours / theirs if scales == "times" else theirs / ours

    def _pending(
        self, node: Node, rule: Rule, operands: Sequence[_Value | None], scale: float
    ) -> Sequence[_Value | None]:
        """The results of a node that reads pending sums."""
        pending = [value for value in operands if value is not None and value.is_pending]
        shares = [value.share for value in pending]
        share = shares[0]
        if not all(math.isclose(share, other) for other in shares):
            raise CombinesError
        if row_of(node).scales == "over" and len(pending) == 2 and self._is_count(node.inputs[1]):
            self.counted[node.inputs[1]] = None
            return [_Value(pending[0].sharding, 1 / self.count)]
        is_mean = math.isclose(share * self.count, 1.0)
        if PENDING not in rule.factors:
            is_shifted = row_of(node).shifts and len([*filter(None, node.inputs)]) == 1
            if is_mean and is_shifted:  # by a number, or subtracted from one
                return [_Value(pending[0].sharding, share)]
            raise CombinesError
        cut = DimLayout.even(PENDING_SIZE, (AXIS,), self.mesh)
        ins, outs = rule.shardings({PENDING: cut}, self.mesh)
        for value, at in zip(operands, ins, strict=True):
            # What all micro-batches have alike is the mean of itself, and no part of a sum.
            is_alike = is_mean and value is not None and value.sharding.is_replicated
            if value is not None and value.sharding != at and not is_alike:
                raise CombinesError
        return [
            _Value(at, share * scale) if name else None
            for name, at in zip(node.outputs, outs, strict=True)
        ]

    def _is_count(self, value: str) -> bool:
        """Tell whether a value is the number of true elements of a tensor."""
        node = self.whole.producers[value]
        rule = rule_of(self.whole, node)
        summed = isinstance(rule, Rule) and any(
            factor.kind is FactorKind.REDUCE and factor.reduce == "sum"
            for factor in rule.factors.values()
        )
        is_sum = summed and len(node.inputs) == 1 and not row_of(node).averages
        return is_sum and self.whole.types[node.inputs[0]].dtype == "bool"


def taken(
    rule: Rule, tensors: Iterable[tuple[Dims | None, Sharding | None]], mesh: DeviceMesh
) -> Mapping[str, DimLayout]:
    """Layouts of factors that cut dims ask for; CombinesError if they differ, or none has one."""
    layouts: dict[str, DimLayout] = {}
    for dims, sharding in tensors:
        for expr, layout in zip(dims or (), sharding.dims if sharding else (), strict=False):
            cut = rule.factor_layouts(expr, layout, mesh) if layout.axes else {}
            if cut is None or any(layouts.setdefault(*one) != one[1] for one in cut.items()):
                raise CombinesError
    return layouts


def cut_along(mesh: DeviceMesh, shape: Sequence[int], dim: int) -> Sharding:
    """The layout of a tensor of which each micro-batch has an equal part of a dim."""
    dims = [DimLayout.whole(size) for size in shape]
    dims[dim] = DimLayout.even(shape[dim], (AXIS,), mesh)
    return Sharding(tuple(dims))


def is_same_constant(one: Graph, other: Graph, name: str) -> bool:
    """Tell whether both graphs have a constant of these contents; a weight is the module's own."""
    mine, its = one.constants[name], other.constants.get(name)
    if mine != its or mine.weight or mine.load is its.load:
        return mine == its
    return mine.load().tobytes() == its.load().tobytes()


def _is_even(sharding: Sharding) -> bool:
    """Tell whether all micro-batches have parts of one size; the first has all of `x[:1]`."""
    segments = (segment for dim in sharding.dims for segment in dim.segments)
    return all(len(set(segment)) == 1 for segment in segments)
