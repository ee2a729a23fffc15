"""What a rule builder sees of a node, its tensors' types, and the notation for its rules."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypedDict, Unpack

from partitioner.ir.errors import IRError
from partitioner.ir.rule import Rule
from partitioner.ir.types import DTYPE_BITS, TensorType

Shape = tuple[int, ...]
Shapes = tuple[Shape | None, ...]  #: None where a tensor is absent.
Dims = str | Sequence[str] | None  #: Of one tensor: "b m k" or ["b", "m", "k"].
Tensors = str | Sequence[Dims]  #: Dims of several: "b m k, k n".
Names = str | Iterable[str]  #: Of factors: "m k" or ["m", "k"].


class OpaqueError(IRError):
    """This node's form has no rule (say why in one clause); it stays whole on one device."""


class Options(TypedDict, total=False):
    """Options of a rule; see `Rule.of`.

    Names of factors may be a text. Factors that are reduced are summed unless a mapping says
    otherwise, and `sums` are operands that are `linear` if their element types allow it.
    """

    sizes: Mapping[str, int]
    whole: Names
    reduce: Names | Mapping[str, str]
    halo: Names
    dropped: Names
    addends: Iterable[int]
    linear: Iterable[int]
    sums: Iterable[int]
    points: Names
    flops: float


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
    def shapes(self) -> Shapes:
        """Sizes of the operands."""
        return tuple(None if kind is None else kind.shape for kind in self.types)

    @property
    def out_shapes(self) -> Shapes:
        """Sizes of the results."""
        return tuple(None if kind is None else kind.shape for kind in self.out_types)

    def type(self, index: int) -> TensorType | None:
        """Type of operand `index`."""
        return self.types[index] if index < len(self.types) else None

    def shape(self, index: int = 0) -> Shape:
        """Sizes of operand `index`.

        Raises:
            OpaqueError: It is absent.
        """
        kind = self.type(index)
        if kind is None:
            raise OpaqueError(f"operand {index} is absent")
        return kind.shape

    def rank(self, index: int = 0) -> int:
        """Number of dims of operand `index`.

        Raises:
            OpaqueError: It is absent.
        """
        return len(self.shape(index))

    @property
    def out_type(self) -> TensorType:
        """Type of the first result that is there."""
        return next(kind for kind in self.out_types if kind is not None)

    @property
    def out_shape(self) -> Shape:
        """Sizes of the first result that is there."""
        return self.out_type.shape

    def sums(self, operands: Iterable[int]) -> tuple[int, ...]:
        """Operands in which the op is jointly linear; none of them if element types forbid it.

        A sum of parts is their sum only while no part is rounded or wrapped: element types stay as
        they are, or floats become wider ones. Truth values have no sums.
        """
        indices, after = tuple(operands), self.out_type.dtype
        kinds = [kind.dtype for index in indices if (kind := self.type(index)) is not None]
        return indices if all(_keeps_sums(before, after) for before in kinds) else ()

    def rule(self, operands: Tensors, results: Tensors, **options: Unpack[Options]) -> Rule:
        """The rule of dims: ``rule("n c s.., c", "n c s..", whole="s..", flops=2)``.

        In texts, ``s..`` is as many dims as are left of the tensor's, ``s0 s1`` for an image; they
        are aligned at the last, as in broadcasting. Dims of absent tensors are left out, operands
        without dims are outside the loops.
        """
        shapes, out_shapes = self.shapes, self.out_shapes
        ins, outs = _listed(operands, shapes), _listed(results, out_shapes)
        widths = _widths((*zip(ins, shapes, strict=True), *zip(outs, out_shapes, strict=True)))
        reduce = options.get("reduce", ())
        if not isinstance(reduce, Mapping):
            reduce = dict.fromkeys(_named(reduce, widths), "sum")
        return Rule.of(
            [_expanded(dims, shape, widths) for dims, shape in zip(ins, shapes, strict=True)],
            [_expanded(dims, shape, widths) for dims, shape in zip(outs, out_shapes, strict=True)],
            shapes,
            out_shapes,
            sizes=options.get("sizes"),
            reduce=reduce,
            whole=_named(options.get("whole", ()), widths),
            halo=_named(options.get("halo", ()), widths),
            dropped=_named(options.get("dropped", ()), widths),
            addends=options.get("addends", ()),
            linear=(*options.get("linear", ()), *self.sums(options.get("sums", ()))),
            points=_named(options["points"], widths) if "points" in options else None,
            flops=options.get("flops", 0.0),
        )


def pattern(text: str, **options: Unpack[Options]) -> Callable[[Signature], Rule]:
    """Rule builder of one form: ``pattern("n c s.., c -> n c s..", whole="s..", flops=2)``."""
    operands, _, results = text.partition("->")
    return lambda signature: signature.rule(operands, results, **options)


def _keeps_sums(before: str, after: str) -> bool:
    if before == after:
        return before != "bool"
    widens = DTYPE_BITS[after] > DTYPE_BITS[before]
    return widens and "float" in before and "float" in after


def _tokens(text: str) -> list[str]:
    return re.findall(r"\([^)]*\)|\S+", text)


def _listed(side: Tensors, shapes: Shapes) -> list[list[str] | None]:
    """Dims of each tensor that is there and has a place in the loops."""
    tensors = side.split(",") if isinstance(side, str) else side
    padded = (*tensors, *[None] * len(shapes))
    listed = (_tokens(dims) if isinstance(dims, str) else dims for dims in padded)
    return [
        None if shape is None or dims is None or dims == ["_"] else list(dims)
        for dims, shape in zip(listed, shapes, strict=False)
    ]


def _widths(tensors: Iterable[tuple[list[str] | None, Shape | None]]) -> dict[str, int]:
    """The most dims that each ``s..`` stands for."""
    widths: dict[str, int] = {}
    for dims, shape in tensors:
        for name in dims or ():
            if name.endswith(".."):
                width = len(shape or ()) - len(dims or ()) + 1
                widths[name] = max(width, widths.get(name, 0))
    return widths


def _expanded(
    dims: list[str] | None, shape: Shape | None, widths: Mapping[str, int]
) -> list[str] | None:
    if dims is None or not widths:
        return dims
    width = len(shape or ()) - len(dims) + 1
    return [part for name in dims for part in _run(name, widths, width)]


def _run(name: str, widths: Mapping[str, int], width: int) -> list[str]:
    """The last names that ``s..`` stands for; any other name alone."""
    if not name.endswith(".."):
        return [name]
    most = widths.get(name, 0)
    return [f"{name[:-2]}{index}" for index in range(max(most - width, 0), most)]


def _named(names: Names, widths: Mapping[str, int]) -> list[str]:
    listed = names.split() if isinstance(names, str) else names
    return [part for name in listed for part in _run(name, widths, widths.get(name, 0))]
