"""The types of a node's operands and results, the notation of its rule, and lists of its dims."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypedDict, Unpack

from partitioner.ir.errors import IRError
from partitioner.ir.loops.factors import Dispatch
from partitioner.ir.loops.windows import Parts, Window
from partitioner.ir.rule import Names, Rule, Tensors
from partitioner.ir.types import DTYPE_BITS, TensorType

Shape = tuple[int, ...]
Dims = str | Sequence[str] | None  #: Of one tensor: "b m k" or ["b", "m", "k"].


class OpaqueError(IRError):
    """Refuse a node's form for having no rule (say why in one clause): it stays on one device."""


class Options(TypedDict, total=False):
    """Options of `Rule.of`, and `sums`: operands that are `linear` if element types allow it."""

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
        """The rule of a node: ``rule("n c s.., c", "n c s..", whole="s..", flops=2)``."""
        given: dict[str, Any] = {name: of for name, of in options.items() if name != "sums"}
        given["linear"] = *options.get("linear", ()), *self.sums(options.get("sums", ()))
        return Rule.of(operands, results, self.shapes, self.out_shapes, **given)


def pattern(text: str, **options: Unpack[Options]) -> Callable[[Signature], Rule]:
    """A rule builder from a text: ``pattern("n c s.., c -> n c s..", whole="s..", flops=2)``."""
    operands, _, results = text.partition("->")
    return lambda signature: signature.rule(operands, results, **options)


def _keeps_sums(before: str, after: str) -> bool:
    if before == after:
        return before != "bool"
    widens = DTYPE_BITS[after] > DTYPE_BITS[before]
    return widens and "float" in before and "float" in after


def names(prefix: str, count: int) -> list[str]:
    """``names("d", 3) -> ["d0", "d1", "d2"]``."""
    return [f"{prefix}{i}" for i in range(count)]


def replaced(dims: Sequence[str], index: int, *others: str) -> list[str]:
    """The dims with others, or none, in place of the one at `index`."""
    return [part for i, dim in enumerate(dims) for part in (others if i == index else (dim,))]


def broadcast(shape: Shape, dims: Sequence[str]) -> list[str]:
    """Dims of an operand that broadcasts to `dims`: aligned at the last, ``1`` for sizes of 1."""
    last = dims[len(dims) - len(shape) :]
    return ["1" if size == 1 else name for size, name in zip(shape, last, strict=True)]


def compound(**factors: int) -> str:
    """The product of factors by size, without those of size 1: ``"(g co)"``, ``"g"``, ``"1"``."""
    kept = [name for name, size in factors.items() if size != 1]
    return f"({' '.join(kept)})" if len(kept) > 1 else (kept or ["1"])[0]


def joined(parts: Mapping[str, int]) -> str:
    """The sum of parts by size, without those of size 0, which have nothing to cut."""
    return " + ".join(name for name, size in parts.items() if size) or next(iter(parts))
