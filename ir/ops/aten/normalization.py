"""Normalizations and their gradients: the normalised dims are whole, all others are cut.

Gradients of weights and biases are sums over the dims that are not normalised; means and
deviations are given, so the normalised dims may be cut as well. Batch norm in training is in
parts (see `partitioner.backends.torch.operators.normalization`), of which only the sums run over
the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from partitioner.ir.ops.dims import names
from partitioner.ir.ops.normalization import CENTRED, UNCENTRED
from partitioner.ir.ops.spatial import compound, space
from partitioner.ir.ops.table import LocalOp, LocalView, OpRow, OpView, same_node
from partitioner.ir.rule import Rule

Dims = Sequence[str]


def _rule(
    view: OpView,
    operands: Sequence[Dims | None],
    results: Sequence[Dims],
    *,
    flops: float,
    sizes: Mapping[str, int] | None = None,
    reduce: Sequence[str] = (),
    whole: Sequence[str] = (),
    linear: Sequence[int] = (),
) -> Rule:
    """Rule of the operands and results that the node has; the loops are the first operand's."""
    present = view.present(operands)
    wanted = [dims if name else None for dims, name in zip(results, view.node.outputs, strict=True)]
    used = {factor for dims in (*present, *wanted) for dim in dims or () for factor in _of(dim)}
    loops = [factor for dim in operands[0] or () for factor in _of(dim)]
    return Rule.of(
        present,
        wanted,
        view.shapes,
        view.out_shapes,
        sizes=sizes,
        reduce=dict.fromkeys(reduce, "sum"),
        whole={*whole} & used,
        linear=linear,
        points=loops,
        flops=flops,
    )


def _of(dim: str) -> list[str]:
    """Factors of a dim."""
    return [name for name in dim.strip("()").split() if name != "1"]


def _last(view: OpView) -> tuple[list[str], list[str], list[str]]:
    """Dims of the data, of a mean, and of a weight, where the last dims are normalised."""
    count = len(view.ints("normalized_shape") or ())
    dims = names("d", len(view.shape(0)))
    kept = dims[: len(dims) - count]
    return dims, [*kept, *["1"] * count], dims[len(kept) :]


def layer_norm(view: OpView) -> Rule:
    """Data, weight, bias -> result, mean, inverse deviation."""
    dims, one, weight = _last(view)
    results = [dims, one, one]
    return _rule(view, [dims, weight, weight], results, whole=weight, flops=CENTRED)


def rms_norm(view: OpView) -> Rule:
    """Data, weight -> result, inverse root of the mean square."""
    dims, one, weight = _last(view)
    return _rule(view, [dims, weight], [dims, one], whole=weight, flops=UNCENTRED)


def last_grad_input(statistics: int, flops: float) -> Callable[[OpView], Rule]:
    """Rule of the data's gradient: gradient, data, statistics, weight."""

    def rule(view: OpView) -> Rule:
        dims, one, weight = _last(view)
        operands = [dims, dims, *[one] * statistics, weight]
        return _rule(view, operands, [dims], whole=weight, linear=[0], flops=flops)

    return rule


def last_grad_weight(statistics: int, flops: float) -> Callable[[OpView], Rule]:
    """Rule of the gradients of weight and bias: gradient, data, statistics."""

    def rule(view: OpView) -> Rule:
        dims, one, weight = _last(view)
        kept = dims[: len(dims) - len(weight)]
        results = [weight] * len(view.node.outputs)
        operands = [dims, dims, *[one] * statistics]
        return _rule(view, operands, results, reduce=kept, linear=[0], flops=flops)

    return rule


def local_shape(view: OpView, local: LocalView) -> LocalOp:
    """Where the normalised dims are cut, the shape of the weight is the part's."""
    own = next(
        shape for shape, name in zip(local.out_shapes, view.node.outputs, strict=True) if name
    )
    return same_node(view, normalized_shape=tuple(own))


def _grouped(view: OpView) -> tuple[list[str], list[str], dict[str, int]]:
    """Dims of the data and of a mean, and sizes, where channels are in groups."""
    shape, groups = view.shape(0), view.int_attr("group", 1)
    sizes = {"g": groups, "c": shape[1] // groups}
    dims = ["n", compound(**sizes), *space("s", len(shape))]
    return dims, ["n", compound(g=groups)], sizes


def group_norm(view: OpView) -> Rule:
    """Data, weight, bias -> result, mean, inverse deviation; groups are cut."""
    dims, one, sizes = _grouped(view)
    operands = [dims, dims[1:2], dims[1:2]]
    whole = ["c", *dims[2:]]
    return _rule(view, operands, [dims, one, one], sizes=sizes, whole=whole, flops=CENTRED)


def group_grad_input(view: OpView) -> Rule:
    """Gradient, data, mean, inverse deviation, weight -> the data's gradient."""
    dims, one, sizes = _grouped(view)
    operands = [dims, dims, one, one, dims[1:2]]
    whole = ["c", *dims[2:]]
    return _rule(view, operands, [dims], sizes=sizes, whole=whole, linear=[0], flops=CENTRED)


def group_grad_weight(view: OpView) -> Rule:
    """Gradient, data, mean, inverse deviation -> gradients of weight and bias."""
    dims, one, sizes = _grouped(view)
    return _rule(
        view,
        [dims, dims, one, one],
        [dims[1:2], dims[1:2]],
        sizes=sizes,
        reduce=["n", *dims[2:]],
        linear=[0],
        flops=UNCENTRED,
    )


def local_groups(view: OpView, local: LocalView) -> LocalOp:
    """A device normalises its own groups."""
    return same_node(view, **({"group": local.sizes["g"]} if "g" in local.sizes else {}))


def local_images(view: OpView, local: LocalView) -> LocalOp:
    """`native_group_norm` is told the sizes of what it is given."""
    groups = local.sizes.get("g", 1)
    return same_node(view, N=local.shapes[0][0], C=local.shapes[0][1], group=groups)


def _channels(view: OpView) -> list[str]:
    return ["n", "c", *space("s", len(view.shape(0)))]


def batch_norm(view: OpView) -> Rule:
    """Data, weight, bias, mean, variance -> result, and two results without elements."""
    dims = _channels(view)
    operands = [dims, *[["c"]] * 4]
    return _rule(view, operands, [dims, ["z"], ["z"]], whole=["z"], flops=4)


def batch_sums(view: OpView) -> Rule:
    """Data -> sums and sums of squares a channel."""
    dims = _channels(view)
    return _rule(view, [dims], [["t", "c"]], reduce=["n", *dims[2:]], whole=["t"], flops=3)


def batch_apply(view: OpView) -> Rule:
    """Data, mean, variance, weight, bias -> result; linear without mean and bias."""
    dims = _channels(view)
    linear = [0] if view.type(1) is None and view.type(4) is None else []
    return _rule(view, [dims, *[["c"]] * 4], [dims], linear=linear, flops=4)


def batch_statistics(view: OpView) -> Rule:
    """Sums -> mean, variance, inverse deviation."""
    return _rule(view, [["t", "c"]], [["c"]] * 3, whole=["t"], flops=4)


def batch_running(view: OpView) -> Rule:
    """Sums, mean, variance -> next mean, next variance."""
    operands = [["t", "c"], ["c"], ["c"]]
    return _rule(view, operands, [["c"]] * 2, whole=["t"], flops=5)


def batch_grad_sums(view: OpView) -> Rule:
    """Gradient, data, mean, inverse deviation -> gradients of bias and weight."""
    dims = _channels(view)
    return _rule(
        view,
        [dims, dims, ["c"], ["c"]],
        [["t", "c"]],
        reduce=["n", *dims[2:]],
        whole=["t"],
        linear=[0],
        flops=4,
    )


def batch_grad_input(view: OpView) -> Rule:
    """Gradient, data, mean, inverse deviation, weight, sums -> the data's gradient."""
    dims = _channels(view)
    operands = [dims, dims, ["c"], ["c"], ["c"], ["t", "c"]]
    return _rule(view, operands, [dims], whole=["t"], linear=[0, 5], flops=5)


ROWS: Mapping[str, OpRow] = {
    "aten::_fused_rms_norm": OpRow(rms_norm),
    "aten::_native_batch_norm_legit_no_training": OpRow(batch_norm),
    "aten::native_group_norm": OpRow(group_norm, local_images),
    "aten::native_layer_norm": OpRow(layer_norm),
    "partitioner::batch_norm_apply": OpRow(batch_apply),
    "partitioner::batch_norm_grad_input": OpRow(batch_grad_input),
    "partitioner::batch_norm_grad_sums": OpRow(batch_grad_sums),
    "partitioner::batch_norm_running": OpRow(batch_running),
    "partitioner::batch_norm_statistics": OpRow(batch_statistics),
    "partitioner::batch_norm_sums": OpRow(batch_sums),
    "partitioner::group_norm_grad_input": OpRow(group_grad_input, local_groups),
    "partitioner::group_norm_grad_weight": OpRow(group_grad_weight, local_groups),
    "partitioner::layer_norm_grad_input": OpRow(last_grad_input(2, CENTRED)),
    "partitioner::layer_norm_grad_weight": OpRow(last_grad_weight(2, UNCENTRED), local_shape),
    "partitioner::rms_norm": OpRow(rms_norm),
    "partitioner::rms_norm_grad_input": OpRow(last_grad_input(1, CENTRED)),
    "partitioner::rms_norm_grad_weight": OpRow(last_grad_weight(1, UNCENTRED), local_shape),
}
