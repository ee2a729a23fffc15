"""Random inputs that a model accepts: indices within the tables that they index.

The values that an input may hold follow from where it flows, never from its name. Each integer
input is followed through ops that keep or shift its elements until it reaches an operand with a
meaning.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from partitioner.ir.graph import Graph, Node
from partitioner.ir.ops import is_view
from partitioner.ir.ops.table import OpView
from partitioner.ir.types import DTYPE_BITS, TensorType, numpy_dtype

#: Integers that meet no known limit are drawn from 1 .. 7: no zero to divide by.
_FREE = (1, 8)
#: Share of ones in masks; the first element of each row is always one, so no row is all masked.
_MASK_ONES = 0.9


@dataclass(frozen=True)
class _Use:
    """An input's elements, shifted by `shift`, arriving at operand `index` of `node`."""

    node: Node
    index: int
    shift: int


#: The number of valid indices of a node.
_Limit = Callable[[OpView], int]


def _shape(view: OpView, operand: int) -> tuple[int, ...]:
    type_ = view.types[operand]
    return () if type_ is None else type_.shape


def _dim(table: int, attr: str = "", default: int = 0) -> _Limit:
    """Size of a dim, by attribute `attr` or fixed, of operand `table`."""
    return lambda view: _shape(view, table)[view.int_attr(attr, default)]


def _leading(view: OpView) -> int:
    """Least of the dims that an index tuple (GatherND, ScatterND) addresses."""
    batch = view.int_attr("batch_dims", 0)
    return min(_shape(view, 0)[batch : batch + _shape(view, 1)[-1]], default=1)


def _number(attr: str) -> _Limit:
    return lambda view: view.int_attr(attr, 0)


def _classes(logits: int) -> _Limit:
    """Classes of PyTorch's losses: dim 1 of operand `logits`, or its only one."""
    return lambda view: _shape(view, logits)[min(1, len(_shape(view, logits)) - 1)]


#: Most dims that PyTorch's advanced indices are looked for in.
_MOST_INDICES = 8

#: Operands that hold indices, by op and operand number.
INDEX_OPERANDS: Mapping[tuple[str, int], _Limit] = MappingProxyType(
    {
        ("Gather", 1): _dim(0, "axis"),
        ("GatherElements", 1): _dim(0, "axis"),
        ("GatherND", 1): _leading,
        ("Scatter", 1): _dim(0, "axis"),
        ("ScatterElements", 1): _dim(0, "axis"),
        ("ScatterND", 1): _leading,
        ("TensorScatter", 2): _dim(0, "axis", -2),
        ("RotaryEmbedding", 3): _dim(1),
        ("ReverseSequence", 1): _dim(0, "time_axis"),
        ("NegativeLogLikelihoodLoss", 1): _dim(0, default=1),
        ("SoftmaxCrossEntropyLoss", 1): _dim(0, default=1),
        ("ai.onnx.ml::ArrayFeatureExtractor", 1): _dim(0, default=-1),
        ("com.microsoft::EmbedLayerNormalization", 0): _dim(2),
        ("com.microsoft::EmbedLayerNormalization", 1): _dim(4),
        ("com.microsoft::GatherBlockQuantized", 1): _dim(0, "gather_axis"),
        # places of the cosine cache; a single one is that of the first row
        ("com.microsoft::RotaryEmbedding", 1): lambda view: (
            _shape(view, 2)[0] - (_shape(view, 0)[-2] - 1 if len(_shape(view, 1)) == 1 else 0)
        ),
        **{
            (f"aten::{op}", 1 + dim): _dim(0, default=dim)
            for op in ("_unsafe_index.Tensor", "_unsafe_index_put", "index.Tensor", "index_put")
            for dim in range(_MOST_INDICES)
        },
        **{
            (f"aten::{op}", 1): _dim(0, "dim")
            for op in (
                *("gather", "index_add", "index_copy", "index_select", "scatter.src"),
                *("scatter.value", "scatter_add", "scatter_reduce.two"),
            )
        },
        ("aten::embedding", 1): _dim(0),
        ("aten::embedding_dense_backward", 1): _number("num_weights"),
        ("partitioner::embedding_part", 1): _number("size"),
        # the last index of a shard of these pieces, and one
        ("partitioner::embedding_part_backward", 1): lambda view: max(
            map(sum, zip(view.ints("starts") or (), view.ints("lengths") or (), strict=True)),
            default=1,
        ),
        **{
            (f"partitioner::embedding_bag{call}", indices + behind): limit
            for call, indices in (
                *(("", 1), ("_backward", 1), ("_max_backward", 2), ("_places", 2)),
                ("_weights_backward", 2),
            )
            # offsets of bags, which must not fall, are 0: the last bag has all indices
            for behind, limit in enumerate((_number("size"), lambda _: 1))
        },
        **{
            (f"partitioner::{layer}{call}", ids): _number("size")
            for layer in ("experts", "experts_biased")
            for call, ids in (("", 1), ("_backward", 2))
        },
        ("partitioner::max_pool_grad_part", 1): lambda view: math.prod(view.ints("whole") or ()),
        ("aten::max_pool2d_with_indices_backward", 2): lambda v: math.prod(_shape(v, 1)[-2:]),
        ("aten::max_pool3d_with_indices_backward", 2): lambda v: math.prod(_shape(v, 1)[-3:]),
        **{(f"aten::{op}_forward", 1): _classes(0) for op in ("nll_loss", "nll_loss2d")},
        **{(f"aten::{op}_backward", 2): _classes(1) for op in ("nll_loss", "nll_loss2d")},
        ("partitioner::cross_entropy_parts", 2): _classes(0),
        ("partitioner::cross_entropy_grad", 4): _classes(2),
    }
)

#: An attention whose operands are the last position of each row, and the number of positions, which
#: is that of its present keys.
_GROUPED, _LENGTHS = "com.microsoft::GroupQueryAttention", (5, 6)

#: First integer above an integer type's range.
_INT_ENDS = {
    dtype: 1 << (DTYPE_BITS[dtype] - (dtype[0] == "i")) for dtype in DTYPE_BITS if "int" in dtype
}

#: Most elements of a constant that lists the classes of a one-hot vector.
_MOST_CLASSES = 1 << 20

#: Ops whose first result holds the elements of operand 0 (or of any operand), moved or cast.
_MOVES_FIRST = frozenset((
    "Cast", "Expand", "Flatten", "Gather", "GatherElements", "GatherND", "Identity", "Reshape",
    "Slice", "Squeeze", "Tile", "Transpose", "Unsqueeze", "aten::_to_copy", "aten::clone",
    "aten::gather", "aten::index.Tensor", "aten::index_select", "aten::masked_fill.Scalar",
))  # fmt: skip
_MOVES_ALL = frozenset({"Concat", "Max", "Min"})
#: Operands that read an integer as yes or no.
_AS_TRUTH = frozenset((
    "And", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Not", "Or", "Xor",
))  # fmt: skip
#: Operands that divide: never zero.
_DIVISORS = frozenset({("Div", 1), ("Mod", 1)})
#: Ops that take an angle, and those that lead from places in a sequence to angles.
_TURNS = frozenset({"Cos", "Sin"})
_SCALES = _MOVES_FIRST | {"Add", "Concat", "Div", "Einsum", "MatMul", "Mul", "Neg", "Sub"}


@dataclass(frozen=True)
class InputRange:
    """The values that an input may hold."""

    type: TensorType  #: Type of the input.
    #: Integers [low, high) of an input of integers; None for a mask (zeros and ones).
    span: tuple[int, int] | None


def input_ranges(graph: Graph) -> dict[str, InputRange]:
    """The values that every graph input may hold, as `random_inputs` draws them."""
    return {name: InputRange(graph.types[name], _range(graph, name)) for name in graph.inputs}


def drawn_inputs(ranges: Mapping[str, InputRange], seed: int) -> dict[str, np.ndarray]:
    """Values within ranges by name; those of an input depend on `seed` and its position only."""
    return {
        name: _draw(np.random.default_rng([seed, index]), of.type, of.span)
        for index, (name, of) in enumerate(ranges.items())
    }


def random_inputs(graph: Graph, seed: int) -> dict[str, np.ndarray]:
    """Values for every graph input.

    Floats are drawn from N(0, 1). Integers that reach an index operand lie within what is
    indexed, and those that become one-hot vectors within their classes; integers that become
    angles (rotary embeddings) are places in a sequence as long as the input; other integers that
    are compared or cast, and booleans, are masks of mostly ones; all others lie in 1 .. 7. What
    divides is not zero. An input's values depend on `seed` and its position only. `seed` is at
    least 0.
    """
    return drawn_inputs(input_ranges(graph), seed)


def _draw(rng: np.random.Generator, type_: TensorType, span: tuple[int, int] | None) -> np.ndarray:
    dtype, shape = numpy_dtype(type_.dtype), type_.shape
    if span is None:
        mask = np.asarray(rng.random(shape) < _MASK_ONES)
        if mask.ndim:
            mask[..., :1] = True
        return mask.astype(dtype)
    if "int" in type_.dtype:
        return np.asarray(rng.integers(*span, size=shape)).astype(dtype)
    drawn = np.asarray(rng.standard_normal(shape))
    if type_.dtype.startswith("complex"):
        return np.asarray(drawn + 1j * rng.standard_normal(shape)).astype(dtype)
    return drawn.astype(dtype)


def _range(graph: Graph, name: str) -> tuple[int, int] | None:
    """Valid integers [low, high) of an input; None for a mask (zeros and ones)."""
    dtype = graph.types[name].dtype
    if dtype == "bool":
        return None
    if "int" not in dtype:
        return _FREE
    uses = tuple(_uses(graph, name))
    low = max((1 - use.shift for use in uses if (use.node.op, use.index) in _DIVISORS), default=0)
    spans = [span for use in uses if (span := _limit_of(graph, use)) is not None]
    if any(_becomes_angle(graph, use) for use in uses):
        spans.append((0, max(_FREE[1], *graph.types[name].shape[-1:])))
    if spans:
        low = max(0, low, *(low for low, _ in spans))
        high = min(_INT_ENDS[dtype], *(high for _, high in spans))
        return low, max(high, low + 1)
    if low <= 0 and any(_reads_truth(graph, use) for use in uses):
        return None
    first = max(_FREE[0], low)
    return first, first + _FREE[1] - _FREE[0]


def _limit_of(graph: Graph, use: _Use) -> tuple[int, int] | None:
    """Integers [low, high) that an index operand allows the input."""
    if use.node.op == _GROUPED and use.index in _LENGTHS:
        present = graph.types[use.node.outputs[1]].shape[2]
        low = 0 if use.index == _LENGTHS[0] else present
        return low - use.shift, max(present, low + 1) - use.shift
    if use.node.op in ("Equal", "OneHot"):
        return _one_hot(graph, use)
    limit = INDEX_OPERANDS.get((use.node.op, use.index))
    return None if limit is None else (-use.shift, limit(OpView(use.node, graph)) - use.shift)


def _one_hot(graph: Graph, use: _Use) -> tuple[int, int] | None:
    """Integers [low, high) that one-hot vectors are made of: a depth, or what is compared with."""
    other = graph.constants.get(use.node.inputs[1 - use.index]) if use.index < 2 else None
    if other is None or "int" not in other.type.dtype or other.type.numel > _MOST_CLASSES:
        return None
    if use.node.op == "OneHot":
        return (-use.shift, int(other.load().max()) - use.shift) if use.index == 0 else None
    classes = np.unique(other.load())
    if classes.size < 2:
        return None
    return int(classes[0]) - use.shift, int(classes[-1]) + 1 - use.shift


def _reads_truth(graph: Graph, use: _Use) -> bool:
    if use.node.op == "Cast":
        result = graph.types[use.node.outputs[0]].dtype
        return result == "bool" or "float" in result
    return use.node.op in _AS_TRUTH


def _becomes_angle(graph: Graph, use: _Use) -> bool:
    """Test whether an input is cast to a float that is scaled to an angle."""
    if use.node.op != "Cast" or "float" not in graph.types[use.node.outputs[0]].dtype:
        return False
    todo = [use.node.outputs[0]]
    seen = set(todo)
    while todo:
        for node in graph.consumers.get(todo.pop(), ()):
            if node.op in _TURNS:
                return True
            new = set(node.writes) - seen if node.op in _SCALES else set()
            seen |= new
            todo += sorted(new)
    return False


def _uses(graph: Graph, name: str) -> Iterator[_Use]:
    """Operands that an input's elements reach, through ops that move or shift them."""
    todo: list[tuple[str, int]] = [(name, 0)]
    seen = set(todo)
    while todo:
        value, shift = todo.pop()
        for node in graph.consumers.get(value, ()):
            for index, read in enumerate(node.inputs):
                if read == value:
                    use = _Use(node, index, shift)
                    yield use
                    for step in _results(graph, use):
                        if step not in seen:
                            seen.add(step)
                            todo.append(step)


def _results(graph: Graph, use: _Use) -> Iterator[tuple[str, int]]:
    """Results that hold the elements of an operand, with the shift that they then have."""
    node = use.node
    if not node.outputs[0] or "int" not in graph.types[node.outputs[0]].dtype:
        return
    if (
        node.op in _MOVES_ALL
        or (use.index == 0 and (node.op in _MOVES_FIRST or is_view(node)))
        or (use.index > 0 and node.op in {"Where", "aten::where.self"})
    ):
        yield node.outputs[0], use.shift
    elif node.op == "Split" and use.index == 0:
        yield from ((name, use.shift) for name in node.writes)
    elif node.op == "Add" or (node.op == "Sub" and use.index == 0):
        other = graph.constant(node.inputs[1 - use.index])  # only small ones are read
        if other is not None and other.size:
            sign = 1 if node.op == "Add" else -1
            for extreme in {int(other.min()), int(other.max())}:
                yield node.outputs[0], use.shift + sign * extreme
