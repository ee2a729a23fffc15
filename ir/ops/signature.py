"""The types of a node's operands and results, and the notation in which its rule is written."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypedDict, Unpack

from partitioner.ir.errors import IRError
from partitioner.ir.loops.dispatch import Dispatch
from partitioner.ir.loops.windows import Parts, Window
from partitioner.ir.rule import Rule
from partitioner.ir.types import DTYPE_BITS, TensorType

Shape = tuple[int, ...]
Dims = str | Sequence[str] | None  #: Of one tensor: "b m k" or ["b", "m", "k"].
Tensors = str | Sequence[Dims]  #: Dims of several tensors: "b m k, k n".
Names = str | Iterable[str]  #: Of factors: "m k" or ["m", "k"].


class OpaqueError(IRError):
    """Refuse a node's form for having no rule (say why in one clause): it stays on one device."""


class Options(TypedDict, total=False):
    """Options of `Signature.rule`: those of `Rule.of`, and two more forms.

    Names in `reduce` are summed, unless it maps them to another reduction. Operands in `sums` are
    `linear` if the element types allow it (`Signature.sums`).
    """

    sizes: Mapping[str, int]
    whole: Names
    reduce: Names | Mapping[str, str]
    windows: Mapping[tuple[int, str], Window | Parts]
    dropped: Names
    summed: Names
    rising: str
    addends: Iterable[int]
    linear: Iterable[int]
    sums: Iterable[int]
    points: Names | None
    flops: float
    dispatch: Dispatch


class Signature(ABC):
    """Types of a node's operands and results; None where absent."""

    @property
    @abstractmethod
    def types(self) -> tuple[TensorType | None, ...]:
        """Types of the operands."""

    @property
    @abstractmethod
    def out_types(self) -> tuple[TensorType | None, ...]:
        """Types of the results."""

    @property
    def shapes(self) -> tuple[Shape | None, ...]:
        """Sizes of the operands."""
        return tuple(None if tensor is None else tensor.shape for tensor in self.types)

    @property
    def out_shapes(self) -> tuple[Shape | None, ...]:
        """Sizes of the results."""
        return tuple(None if tensor is None else tensor.shape for tensor in self.out_types)

    def type(self, index: int) -> TensorType | None:
        """Type of operand `index`."""
        return self.types[index] if index < len(self.types) else None

    def shape(self, index: int = 0) -> Shape:
        """Sizes of operand `index`; OpaqueError if it is absent."""
        tensor = self.type(index)
        if tensor is None:
            raise OpaqueError(f"operand {index} is absent")
        return tensor.shape

    def rank(self, index: int = 0) -> int:
        """Number of dims of operand `index`, which must be present."""
        return len(self.shape(index))

    @property
    def out_type(self) -> TensorType:
        """Type of the first result that is present."""
        return next(tensor for tensor in self.out_types if tensor is not None)

    @property
    def out_shape(self) -> Shape:
        """Sizes of the first result that is present."""
        return self.out_type.shape

    def sums(self, operands: Iterable[int]) -> tuple[int, ...]:
        """The operands if the op, jointly linear in them, keeps the sum of their parts; else none.

        It does while no part is rounded or wrapped: element types stay as they are, or floats
        become wider. Booleans have no sums.
        """
        indices, after = tuple(operands), self.out_type.dtype
        tensors = [tensor for index in indices if (tensor := self.type(index)) is not None]
        return indices if all(_keeps_sums(tensor.dtype, after) for tensor in tensors) else ()

    def rule(self, operands: Tensors, results: Tensors, **options: Unpack[Options]) -> Rule:
        """The rule of a node: ``rule("n c s.., c", "n c s..", whole="s..", flops=2)``.

        ``s..`` stands for as many dims as the tensor has beside the others: ``s0 s1`` of an image.
        Dims given for absent tensors are ignored; operands without dims are outside the loops.
        """
        shapes, out_shapes = self.shapes, self.out_shapes
        ins, outs = _listed(operands, shapes), _listed(results, out_shapes)
        assert None not in outs or None in out_shapes, f"a result without dims: {results}"
        runs: dict[str, list[str]] = {}
        for dims, shape in (*zip(ins, shapes, strict=True), *zip(outs, out_shapes, strict=True)):
            for name in dims or ():
                if name.endswith(".."):
                    width = len(shape or ()) - len(dims or ()) + 1
                    runs[name] = [f"{name[:-2]}{i}" for i in range(width)]

        def expanded(names: Names) -> Iterable[str]:
            listed = names.split() if isinstance(names, str) else names
            return [part for name in listed for part in runs.get(name, (name,))] if runs else listed

        given: dict[str, Any] = {name: of for name, of in options.items() if name != "sums"}
        for name in {"whole", "dropped", "summed", "points"} & given.keys():
            given[name] = given[name] if given[name] is None else expanded(given[name])
        reduce = given.get("reduce", ())
        if not isinstance(reduce, Mapping):
            given["reduce"] = dict.fromkeys(expanded(reduce), "sum")
        given["linear"] = *options.get("linear", ()), *self.sums(options.get("sums", ()))
        operand_dims = [dims and [*expanded(dims)] for dims in ins]
        result_dims = [dims and [*expanded(dims)] for dims in outs]
        return Rule.of(operand_dims, result_dims, shapes, out_shapes, **given)


def pattern(text: str, **options: Unpack[Options]) -> Callable[[Signature], Rule]:
    """A rule builder from a text: ``pattern("n c s.., c -> n c s..", whole="s..", flops=2)``."""
    operands, _, results = text.partition("->")
    return lambda signature: signature.rule(operands, results, **options)


def _keeps_sums(before: str, after: str) -> bool:
    if before == after:
        return before != "bool"
    widens = DTYPE_BITS[after] > DTYPE_BITS[before]
    return widens and "float" in before and "float" in after


def _listed(side: Tensors, shapes: Sequence[Shape | None]) -> list[list[str] | None]:
    """Dims of each tensor; None where it is absent or outside the loops."""
    tensors = side.split(",") if isinstance(side, str) else side
    listed: list[list[str] | None] = []
    for dims, shape in zip((*tensors, *[None] * len(shapes)), shapes, strict=False):
        if shape is None or dims is None:
            listed.append(None)
        elif isinstance(dims, str):
            listed.append(None if dims.strip() == "_" else re.findall(r"\([^)]*\)|\S+", dims))
        else:
            listed.append(list(dims))
    return listed
