"""Bytes that PyTorch's kernels take for themselves, beside operands and results.

On a processor PyTorch hands most convolutions to oneDNN, which computes in *blocked* layouts:
channels lie in blocks of as many as a vector of the processor has and are filled up to whole ones.
A kernel reorders what it reads, and its result once more, so that both forms lie there at once.
Strided convolutions in one group are spread (transposed ones, and gradients of the data) with
channels last. A single small image is computed by PyTorch itself, from *columns* that hold each
window. Any of them, and some others, first copy an operand that is a strided part of another
tensor, or pad a part of it.

The rules are those of PyTorch 2.13 with oneDNN 3.12 (`ConvParams::use_mkldnn`), and were compared
with the allocations that PyTorch's profiler records on a processor with AVX-512. On one thread
kernels of one element take less. Images whose channels lie last in memory are not reordered, but
weights are, and the other operand of their gradient is copied if its channels do not.

A processor's steps of optimizers go over one parameter after the other, and hold what they computed
of the one before until that of the next one is there. Of GPUs only the steps of optimizers are
known: they go over all parameters at once there (PyTorch's `foreach`), so that what they compute on
the way lies there for all of them. What cuBLAS and cuDNN take is not.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from partitioner.cost_model.memory.cpu_kernels import CHANNEL_BLOCK, Tensor
from partitioner.cost_model.memory.lifetimes import Curve, Curves
from partitioner.cost_model.schedule.task_list import Schedule
from partitioner.cost_model.schedule.tasks import LocalKey
from partitioner.ir.graph import Graph, Node
from partitioner.ir.nodes.local_node import local_op
from partitioner.ir.ops import is_view, row_of
from partitioner.ir.plan import PlacedNode
from partitioner.ir.types import dense_bytes, item_bytes

#: Elements of an image up to which PyTorch convolves it by itself (`ConvParams::use_mkldnn`).
SMALL_IMAGE = 20_480
#: Kernels of more elements along each of the last dims are always oneDNN's.
SMALL_KERNEL = 3
#: Channels of which the gradient of the weights reads no blocked form.
FEW_CHANNELS = 3
#: Channels of a block where the gradient of the weights reads more, but no whole block.
HALF_BLOCK = 8
#: Threads of a kernel that are counted.
THREADS = 2
#: Rows and columns of a resized image up to which PyTorch resizes it with its channels last
#: (`_use_vectorized_kernel_cond_2d`), and the modes of which it does.
SMALL_RESIZED = 128
_RESIZED_LAST = ("nearest", "nearest-exact", "linear")
#: Blocked weights that their gradient takes where channels of images lie last.
SUMS_LAST = 3
_IMAGE_DIMS = 4  # of a batch of images: those that `use_mkldnn` multiplies
_FULL_BYTES = 4  # of an element in which norms compute

_UPDATE = "partitioner::update"
#: Tensors of a parameter's size that an optimizer's step over all of them takes (PyTorch 2.13,
#: `torch/optim`): the square roots of second moments and, of Adagrad, products of gradients.
_STEP_TENSORS = {
    "adamw": 1,
    "adam": 1,
    "sgd": 0,
    "momentum": 0,
    "rmsprop": 1,
    "adagrad": 2,
    "muon": 0,
}
#: The same of a step over one: the square roots and, of Adam, their quotients; of Muon at most, as
#: its products are as large as the matrix is wide (2.2 to 4.1 times were measured).
_TENSORS_OF_ONE = {
    "adamw": 2,
    "adam": 2,
    "sgd": 0,
    "momentum": 0,
    "rmsprop": 1,
    "adagrad": 1,
    "muon": 4,
}

_Point = Mapping[str, int]


@dataclass(frozen=True)
class _Call:
    """A node on a device."""

    node: Node
    operands: tuple[Tensor | None, ...]  #: Its operands; None where absent.
    results: tuple[Tensor | None, ...]  #: Its results; None where absent.
    strided: tuple[bool, ...]  #: Whether each operand is a strided part of another tensor.
    last: tuple[bool, ...]  #: Whether the channels of each operand lie last.

    def operand(self, index: int) -> Tensor:
        tensor = self.operands[index]
        assert tensor is not None
        return tensor

    @property
    def made(self) -> Tensor:
        tensor = self.results[0]
        assert tensor is not None
        return tensor

    def copied(self, *indices: int) -> int:
        """Bytes of contiguous copies of some operands."""
        return sum(self.operand(index).nbytes for index in indices if self.strided[index])

    def setting(self, name: str) -> tuple[int, ...]:
        """An attribute of a convolution: a number for each dim of space, or one for all."""
        value = self.node.attrs[name]
        assert isinstance(value, tuple)
        return tuple(number for number in value if isinstance(number, int))

    @property
    def is_transposed(self) -> bool:
        return bool(self.node.attrs["transposed"])

    @property
    def groups(self) -> int:
        groups = self.node.attrs["groups"]
        assert isinstance(groups, int)
        return groups


def scratch_curves(
    graph: Graph,
    schedule: Schedule,
    gpus: Container[int],
    last: Collection[LocalKey] = frozenset(),
    ends: Mapping[LocalKey, int] = MappingProxyType({}),
) -> Curves:
    """Bytes that kernels take for themselves at each position of a task, by device with any.

    Of the tensors in `last`, channels lie last in memory; those in `ends` go behind a position.
    Steps of optimizers are those of `gpus`, where the last parameter is updated.
    """
    curves: dict[int, Curve] = defaultdict(lambda: np.zeros(len(schedule.tasks), np.int64))
    for position, task in enumerate(schedule.tasks):
        if task.placed is None or task.placed.node.op not in _KERNELS:
            continue
        points = dict(task.placed.mesh.coords())
        keys = task.placed.operands()
        for device in task.devices:
            own = [key[0] for key in keys if (device, key) in last]
            ending = [key[0] for key in keys if ends.get((device, key)) == position]
            if device not in gpus and (
                taken := scratch_bytes(graph, task.placed, points[device], own, ending)
            ):
                curves[device][position] = taken
    for device, (position, updates) in updates_of(schedule).items():
        if device in gpus and (taken := _step_bytes_of_all(graph, updates, device)):
            curves[device][position] = taken
    return curves


def updates_of(schedule: Schedule) -> Mapping[int, tuple[int, Sequence[PlacedNode]]]:
    """List the updates of parameters of each device, behind the position of the last."""
    updates: dict[int, tuple[int, list[PlacedNode]]] = {}
    for position, task in enumerate(schedule.tasks):
        if task.placed is not None and task.placed.node.op == _UPDATE:
            for device in task.devices:
                _, before = updates.get(device, (0, []))
                updates[device] = position, [*before, task.placed]
    return updates


def _step_bytes_of_all(graph: Graph, updates: Sequence[PlacedNode], device: int) -> int:
    updated = [*_updated(graph, updates, device)]
    # Muon takes one parameter after the other there, too
    of_one = max((_TENSORS_OF_ONE[name] * n for name, n in updated if name == "muon"), default=0)
    return max(of_one, sum(_STEP_TENSORS[name] * nbytes for name, nbytes in updated))


def whole_step_bytes(graph: Graph) -> int:
    """Bytes that an optimizer's step over all parameters of a graph takes on GPUs together."""
    updates = [node for node in graph.nodes if node.op == _UPDATE]
    known = [node for node in updates if node.attrs.get("optimizer") in _STEP_TENSORS]
    return sum(
        _STEP_TENSORS[str(node.attrs["optimizer"])] * graph.types[node.inputs[1]].nbytes
        for node in known
    )


def step_bytes(graph: Graph, updates: Sequence[PlacedNode], device: int) -> int:
    """Bytes that an optimizer's step over one parameter after the other takes."""
    place = {value: at for at, node in enumerate(graph.nodes) for value in node.writes}
    in_order = sorted(updates, key=lambda placed: place.get(placed.node.inputs[1], -1))
    most = before = 0
    for name, nbytes in _updated(graph, in_order, device):
        tensors = _TENSORS_OF_ONE[name]
        most = max(most, before + tensors * nbytes)
        before = nbytes if tensors else 0
    return most


def _updated(graph: Graph, updates: Sequence[PlacedNode], device: int) -> Iterator[tuple[str, int]]:
    """Yield the optimizer of each update and the bytes of its parameter on a device."""
    for placed in updates:
        name = str(placed.node.attrs.get("optimizer"))
        (_, parameter), (_, at) = placed.node.inputs, placed.ins
        if name in _STEP_TENSORS and not placed.absent:
            assert at is not None
            shape = at.sharding.local_shape(at.mesh, dict(placed.mesh.coords())[device])
            yield name, Tensor(shape, graph.types[parameter].dtype).nbytes


def scratch_bytes(
    graph: Graph,
    placed: PlacedNode,
    point: _Point,
    last: Collection[str] = (),
    ends: Collection[str] = (),
) -> int:
    """Bytes that a node's kernels take beside operands and results on a processor, if known.

    Of the operands in `last`, channels lie last in memory; nothing reads those in `ends` later.
    """
    if placed.node.op not in _KERNELS or placed.absent:
        return 0
    node, types = placed.node, graph.types
    sides = zip((*node.inputs, *node.outputs), (*placed.ins, *placed.outs), strict=True)
    tensors = {
        value: Tensor(at.sharding.local_shape(at.mesh, point), types[value].dtype)
        for value, at in sides
        if at is not None
    }
    local = local_op(graph, placed, point)
    tensors |= {name: Tensor(of.shape, of.dtype) for name, of in local.types.items()}
    read_last = {value: at for at, step in enumerate(local.nodes) for value in step.inputs}
    to_come = sum(tensors[value].nbytes for value in node.outputs if value)
    most = beside = 0
    ordered = set(last)
    for at, step in enumerate(local.nodes):
        call = _Call(
            step,
            tuple(map(tensors.get, step.inputs)),
            tuple(map(tensors.get, step.outputs)),
            tuple(value in types and _is_strided(graph, value) for value in step.inputs),
            tuple(value in ordered for value in step.inputs),
        )
        if is_view(step):
            continue
        for value in filter(None, step.outputs):
            if value in local.types:
                beside += tensors[value].nbytes
            else:
                to_come -= tensors[value].nbytes
            if ordered.intersection(step.inputs[:1]):
                ordered.add(value)
        kernel = _KERNELS.get(step.op)
        most = max(most, beside - to_come + (0 if kernel is None else kernel(call)))
        gone = {value for value in step.inputs if read_last[value] == at}
        beside -= sum(tensors[value].nbytes for value in gone & {*local.types, *ends})
    return most


def _is_strided(graph: Graph, value: str) -> bool:
    """Test whether a value is a view whose elements do not follow each other in memory."""
    node = graph.producers.get(value)
    if node is None or not row_of(node).view:
        return False
    if node.op in ("aten::slice.Tensor", "aten::select.int", "aten::split.Tensor"):
        dim, shape = node.attrs.get("dim", 0), graph.types[node.inputs[0]].shape
        assert isinstance(dim, int)
        if any(size > 1 for size in shape[: dim % max(len(shape), 1)]):
            return True
    elif node.op in ("aten::permute", "aten::t", "aten::transpose.int", "aten::expand"):
        return True
    return _is_strided(graph, node.inputs[0])


# Convolutions ------------------------------------------------------------------------------------


def _convolution(call: _Call) -> int:
    """``data, weights, bias -> result``."""
    data, weights = call.operand(0), call.operand(1)
    if call.last[0]:
        return call.copied(0) + _with_channels_last(call, data, weights, call.made)
    convolve = _spread if call.is_transposed else _gathered
    return call.copied(0) + convolve(call, data, weights, call.made)


def _grad_input(call: _Call) -> int:
    """``gradient, weights -> gradient of the data``.

    oneDNN has it as a convolution of the gradient; else memory of the data's size is taken for it.
    """
    gradient, weights, data = call.operand(0), call.operand(1), call.made
    if call.last[0] and not _is_point(weights) and _is_of_onednn(call, gradient, weights):
        taken = _with_channels_last(call, gradient, weights, data)
        return call.copied(0) + max(data.nbytes, taken)  # a copy in order
    if call.last[0]:
        return gradient.nbytes + _grad_input(replace(call, last=(False, False)))
    convolve = _gathered if call.is_transposed else _spread
    if _is_of_onednn(call, gradient, weights):
        return call.copied(0) + convolve(call, gradient, weights, data)
    return data.nbytes + call.copied(0) + convolve(call, gradient, weights, data, image=data)


def _grad_weight(call: _Call) -> int:
    """``gradient, data -> gradient of the weights``, for which memory of its size is allocated."""
    gradient, data, weights = call.operand(0), call.operand(1), call.made
    if call.last[1] and not call.last[0]:
        return gradient.nbytes + _grad_weight(replace(call, last=(True, True)))
    if call.last[0] and not call.last[1]:
        return gradient.nbytes + _grad_weight(replace(call, last=(False, False)))
    copies = weights.nbytes + call.copied(0, 1)
    if call.last[1] and not _is_of_onednn(call, data, weights):
        copies += weights.nbytes
    elif call.last[1]:
        return copies + SUMS_LAST * _half_blocked(call, weights)
    if not _is_of_onednn(call, data, weights):
        swept, over = (gradient, data) if call.is_transposed else (data, gradient)
        return copies + _columns(call, swept, weights, over)
    read, met = (gradient, data) if call.is_transposed else (data, gradient)
    channels = read.shape[1]
    fills = channels > FEW_CHANNELS or call.groups > 1 or _is_point(weights)
    is_half = fills and channels < CHANNEL_BLOCK and call.groups == 1 and not _is_point(weights)
    block = HALF_BLOCK if is_half else CHANNEL_BLOCK
    blocked = _blocked_weights(call, weights, block, fills=fills)
    reads = _blocked(read, block) + _unstrided(call, read, weights, met) if fills else 0
    sums = THREADS * blocked  # each thread has its own
    scratch = max(reads + _blocked(met, block) + sums - weights.nbytes, blocked)
    if is_half and _is_dilated(call):
        scratch = max(scratch, _columns(call, read, weights, met))
    return copies + scratch


def _with_channels_last(call: _Call, read: Tensor, weights: Tensor, made: Tensor) -> int:
    """Count the bytes of a convolution that reads and makes images without reordering them."""
    copied = 0 if _is_point(weights) or weights.shape[1] == 1 else weights.nbytes
    if not _is_of_onednn(call, read, weights):
        return copied + _columns(call, read, weights, made)
    return copied + _blocked_weights(call, weights, fills=False)


def _gathered(
    call: _Call, read: Tensor, weights: Tensor, made: Tensor, image: Tensor | None = None
) -> int:
    """A convolution in which each element of the result reads a window."""
    if not _is_of_onednn(call, image or read, weights):
        return _columns(call, read, weights, made)
    is_few = call.groups == 1 and read.shape[1] < CHANNEL_BLOCK and not _is_point(weights)
    reads = 0 if is_few else _blocked(read) + _unstrided(call, read, weights, made)
    return _reordered(reads + _blocked_weights(call, weights, fills=not is_few), made)


def _spread(
    call: _Call, read: Tensor, weights: Tensor, made: Tensor, image: Tensor | None = None
) -> int:
    """Count the bytes of a kernel that adds each element read to a window of the result."""
    is_gradient = image is not None
    if not _is_of_onednn(call, image or read, weights):
        has_columns = not is_gradient or len(read.shape) > _IMAGE_DIMS or _is_dilated(call)
        return _columns(call, made, weights, read) if has_columns else 0
    if call.groups == 1 and any(step > 1 for step in call.setting("stride")):
        return max(read.nbytes + _blocked_weights(call, weights, fills=True), 2 * made.nbytes)
    others = _blocked(read) + _blocked_weights(call, weights, fills=True)
    if call.is_transposed and any(bias is not None for bias in call.operands[2:]):
        return others + _blocked(made)  # what it read lies there until the bias is added
    return _reordered(others, made)


def _reordered(others: int, made: Tensor) -> int:
    """Bytes beside a result that is made in a blocked form beside others, and then reordered."""
    return max(others + _blocked(made) - made.nbytes, _blocked(made))


def _is_point(weights: Tensor) -> bool:
    return max(weights.shape[2:]) == 1


def _unstrided(call: _Call, read: Tensor, weights: Tensor, over: Tensor) -> int:
    """Bytes of what a strided kernel of one element reads, gathered by each thread first."""
    if math.prod(call.setting("stride")) == 1 or not _is_point(weights):
        return 0
    return THREADS * _blocked(Tensor((1, read.shape[1], *over.shape[2:]), read.dtype))


def _is_of_onednn(call: _Call, image: Tensor, weights: Tensor) -> bool:
    """Test whether oneDNN convolves a batch of images."""
    if image.dtype in ("bfloat16", "float16"):
        return True
    if image.dtype != "float32":
        return False
    # PyTorch gives images of one dim a second one, of one element.
    kernel = (1, *weights.shape[2:])[-2:]
    is_small = image.shape[0] == 1 and math.prod(image.shape[:_IMAGE_DIMS]) <= SMALL_IMAGE
    return not is_small or call.groups > 1 or min(kernel) > SMALL_KERNEL


def _is_dilated(call: _Call) -> bool:
    return any(step > 1 for step in call.setting("dilation"))


def _columns(call: _Call, swept: Tensor, weights: Tensor, over: Tensor) -> int:
    """Bytes of the windows of a tensor that are swept, one for each position of another."""
    kernel, is_plane = weights.shape[2:], len(weights.shape) <= _IMAGE_DIMS
    is_alone = {*kernel, *call.setting("stride")} == {1} and not any(call.setting("padding"))
    if is_alone and is_plane and not call.is_transposed:
        return 0
    elements = swept.shape[1] * math.prod(kernel) * math.prod(over.shape[2:])
    return dense_bytes(elements * swept.shape[0], swept.dtype)


def _blocked(image: Tensor, block: int = CHANNEL_BLOCK) -> int:
    """Bytes of a tensor whose channels are filled up to whole blocks."""
    batch, channels, *space = image.shape
    return dense_bytes(math.prod((batch, _filled(channels, block), *space)), image.dtype)


def _filled(channels: int, block: int) -> int:
    return -(-channels // block) * block


def _blocked_weights(
    call: _Call, weights: Tensor, block: int = CHANNEL_BLOCK, *, fills: bool
) -> int:
    """Bytes of blocked weights; `fills` says whether channels that are read are filled up, too."""
    first, second, *kernel = weights.shape
    groups, dims = call.groups, [first, second]
    if groups > 1:  # each group by itself; oneDNN keeps those of one channel in one block
        return math.ceil(weights.nbytes / groups) * _filled(groups, block)
    for at, is_filled in enumerate((True, fills)):
        index = 1 - at if call.is_transposed else at
        if is_filled:
            dims[index] = _filled(dims[index], block)
    return dense_bytes(math.prod((*dims, *kernel)), weights.dtype)


def _half_blocked(call: _Call, weights: Tensor) -> int:
    """Bytes of weights whose gradient is made of images with channels last."""
    made, read, *kernel = weights.shape
    if call.groups > 1:
        return _blocked_weights(call, weights, fills=True)
    block = HALF_BLOCK if read < CHANNEL_BLOCK else CHANNEL_BLOCK
    channels = _filled(read, block) if read > FEW_CHANNELS else read
    filled = _filled(made, HALF_BLOCK), channels, *kernel
    return dense_bytes(math.prod(filled), weights.dtype)


# Norms, pools and others -------------------------------------------------------------------------


def _in_full(*indices: int) -> Callable[[_Call], int]:
    """A norm that computes in float32: tensors of fewer bits have copies of two at once."""

    def scratch(call: _Call) -> int:
        copied, made = call.copied(*indices), call.made
        if item_bytes(made.dtype) >= _FULL_BYTES:
            return copied
        return copied + 2 * _FULL_BYTES * math.prod(made.shape)

    return scratch


def _pool_gradient(call: _Call) -> int:
    """``gradient, data, ... -> gradient of the data``: all others are copied into its order."""
    orders = zip(call.operands, call.last, strict=True)
    return sum(x.nbytes for x, last in orders if x is not None and last != call.last[0])


def _pool_of_part(call: _Call) -> int:
    """A padded image, and indices of maxima split into a coordinate for each dim, and shifted."""
    indices, pads = call.results[1], call.setting("pads")
    assert indices is not None
    space, image = len(pads) // 2, call.operand(0)
    sides = zip(image.shape[-space:], pads[:space], pads[space:], strict=True)
    padded = math.prod((*image.shape[:-space], *(sum(side) for side in sides)))
    taken = dense_bytes(padded, image.dtype) if any(pads) else 0
    return taken + (2 * space + 1) * indices.nbytes


def _pool_gradient_of_part(call: _Call) -> int:
    """``gradient, indices -> gradient of the part``: coordinates, places, which are inside."""
    gradient, indices = call.operand(0), call.operand(1)
    coordinates = (len(call.setting("sizes")) + 1) * indices.nbytes
    return coordinates + math.prod(indices.shape) + gradient.nbytes


def _resized(call: _Call) -> int:
    """A small image is copied with its channels last, and so is what is made of it."""
    (data, *_), made = call.operands, call.made
    is_copied = str(call.node.attrs.get("mode")) in _RESIZED_LAST and not call.last[0]
    if data is None or not is_copied or len(made.shape) != _IMAGE_DIMS:
        return call.copied(0)
    return data.nbytes + made.nbytes if sum(made.shape[2:]) <= SMALL_RESIZED else call.copied(0)


def _in_order(call: _Call) -> int:
    """A kernel whose first operand is copied unless its dims lie in order."""
    return call.operand(0).nbytes if call.strided[0] or call.last[0] else 0


def _copying(*indices: int) -> Callable[[_Call], int]:
    return lambda call: call.copied(*indices)


_KERNELS: Mapping[str, Callable[[_Call], int]] = {
    "aten::convolution": _convolution,
    "partitioner::convolution_grad_input": _grad_input,
    "partitioner::convolution_grad_weight": _grad_weight,
    "partitioner::batch_norm_grad_input": _in_full(),
    "partitioner::group_norm_grad_planes": _in_full(0, 1),
    "partitioner::group_norm_apply": _copying(0),
    "partitioner::group_norm_sums": _copying(0),
    "partitioner::group_norm_grad_input": _copying(0, 1),
    "partitioner::group_norm_grad_sums": _copying(0, 1),
    "partitioner::group_norm_grad_weight": _copying(0, 1),
    "aten::native_layer_norm": _copying(0),
    "aten::_log_softmax": _copying(0),
    "aten::_log_softmax_backward_data": _copying(0),
    "aten::_softmax": _copying(0),
    "aten::_softmax_backward_data": _copying(0),
    "aten::max_pool2d_with_indices": _copying(0),
    "aten::max_pool3d_with_indices": _copying(0),
    "aten::avg_pool2d": _copying(0),
    "aten::avg_pool3d": _in_order,
    "aten::max_pool2d_with_indices_backward": _pool_gradient,
    "aten::max_pool3d_with_indices_backward": _pool_gradient,
    "aten::avg_pool2d_backward": _pool_gradient,
    "partitioner::max_pool_part": _pool_of_part,
    "partitioner::max_pool_grad_part": _pool_gradient_of_part,
    "partitioner::upsample": _resized,
    "aten::avg_pool3d_backward": _in_order,
}
