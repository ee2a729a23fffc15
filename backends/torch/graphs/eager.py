"""Passes that run without `torch.compile`, which plans the memory of collectives itself.

Graphs are functional, as they are read, saved and compiled. Here an all-reduce writes over an
operand that nothing else reads, a write to a stored value that the program does in place
(`RankProgram.in_place`) is done so, and an all-gather gets the memory for its result. The last is
needed: with gloo, `all_gather_into_tensor` calls `allgather_coalesced`, which spoils the heap if
several are on their way (PyTorch 2.13, `tests/benchmarks/gathers.py`). Both gradients of a layer
norm are one call (see `joined`), so are copies into one memory (`packed`), and gradients are added
to sums where they are made (`totals`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, fx
from torch.fx.graph import _BoxedCodeGen

from partitioner.backends.torch.graphs.emit import IN_PLACE
from partitioner.backends.torch.graphs.joined import join_norms
from partitioner.backends.torch.graphs.packed import pack_at_once
from partitioner.backends.torch.graphs.totals import add_to_sums
from partitioner.backends.torch.graphs.views import shorten_views
from partitioner.backends.torch.graphs.writes import WRITES

aten = torch.ops.aten
c10d = torch.ops._c10d_functional

#: Operators that return their operand's elements, in its memory or in a copy.
_PASSING_ON = frozenset(
    {
        *(aten.reshape.default, aten.view.default, aten._unsafe_view.default),
        *(aten.t.default, aten.transpose.int, aten.permute.default),
        *(c10d.wait_tensor.default, c10d.isend.default, c10d.irecv.default),
        c10d.all_reduce_.default,
    }
)


def eager(
    module: fx.GraphModule, *, boxed: bool = False, summed: Sequence[int] = ()
) -> fx.GraphModule:
    """The same pass, to be called without compilation; parameters and buffers are shared.

    Args:
        boxed: Whether the result takes a list, which it empties, so that each argument is freed
            after its last reader.
        summed: Positions of results that it adds to their sums, which it takes as last arguments.
    """
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    shorten_views(graph)
    # an exported program's own codegen unpacks its arguments
    graph.set_codegen(_BoxedCodeGen() if boxed else module.graph._codegen)
    for node in graph.nodes:
        if node.target is c10d.all_gather_into_tensor.default:
            node.target = gathered
        elif node.target is c10d.all_reduce.default and _is_free(node.all_input_nodes[0]):
            node.target = c10d.all_reduce_.default
        elif node.meta.get(IN_PLACE):
            node.target = WRITES[node.target]
    join_norms(graph)
    pack_at_once(graph)
    add_to_sums(graph, summed)
    return fx.GraphModule(module, graph)


def gathered(operand: Tensor, ranks: int, group: str) -> Tensor:
    """Start an all-gather of dense tensors along their first dim; see `wait_tensor`."""
    whole = operand.new_empty((ranks * operand.shape[0], *operand.shape[1:]))
    sent: Tensor = c10d.all_gather_into_tensor_out(operand, ranks, group, out=whole)
    return sent


def _is_free(node: fx.Node) -> bool:
    """Test whether the only reader of a node may write over its result's memory."""
    if len(node.users) != 1:
        return False
    if node.target is gathered:
        return True
    if node.target in _PASSING_ON or (node.op == "call_method" and node.target == "contiguous"):
        return _is_free(node.all_input_nodes[0])
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    results = node.target._schema.returns
    return len(results) == 1 and results[0].alias_info is None
