"""Local tensors of images whose channels lie last in memory.

PyTorch keeps that order from a copy which makes it (`memory_format=torch.channels_last`) through
convolutions, pools and what is computed element by element, and an input has that of the example.
Communications bring tensors whose dims lie in order, and so do parts of inputs and of parameters.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from partitioner.cost_model.schedule.task_list import Schedule
from partitioner.cost_model.schedule.tasks import LocalKey, Task
from partitioner.ir.graph import Graph

#: Number of the operand whose order a result has, where that is not the first one of its shape.
_DECIDES: Mapping[str, int] = {
    "aten::threshold_backward": 1,
    "partitioner::convolution_grad_weight": 1,
    "partitioner::batch_norm_grad_input": 1,
    **dict.fromkeys(("aten::convolution", "aten::cat", "aten::constant_pad_nd"), 0),
    **dict.fromkeys(("aten::max_pool2d_with_indices", "aten::max_pool3d_with_indices"), 0),
    "aten::avg_pool2d": 0,
}
#: Operators whose results lie in order, or in one of their own.
_OTHERS = frozenset(
    {
        *("partitioner::convolution_grad_input", "aten::avg_pool3d", "aten::avg_pool3d_backward"),
        *("aten::view", "aten::permute", "aten::transpose.int"),
    }
)
_FORMATS = ("channels_last", "channels_last_3d")


def channels_last(graph: Graph, schedule: Schedule) -> Collection[LocalKey]:
    """The local tensors of a schedule whose channels lie last."""
    last = {
        (device, (value, at))
        for device, (value, at) in schedule.feeds
        if value in graph.channels_last and at.sharding.is_replicated
    }
    if not last and not any(node.attrs.get("memory_format") in _FORMATS for node in graph.nodes):
        return last
    for task in schedule.tasks:
        last.update(new for new, old in task.aliases if old in last)
        if task.placed is not None:
            last.update(_written(graph, task, last))
    return last


def _written(graph: Graph, task: Task, last: Collection[LocalKey]) -> Collection[LocalKey]:
    assert task.placed is not None
    node, results = task.placed.node, [(device, key) for device, key, _ in task.writes]
    kept = node.attrs.get("memory_format", "preserve_format")
    if kept != "preserve_format":
        return results if kept in _FORMATS else ()
    if node.op in _OTHERS:
        return ()
    shape = graph.types[node.writes[0]].shape if node.writes else ()
    like = (value for value in node.inputs if value and graph.types[value].shape == shape)
    decides = node.inputs[_DECIDES[node.op]] if node.op in _DECIDES else next(like, None)
    own = {device for device, key in task.reads if key[0] == decides and (device, key) in last}
    return [(device, key) for device, key in results if device in own]
