"""A pass as it runs without `torch.compile`, which plans the memory of collectives itself.

Graphs are functional: they are read, saved and compiled. Here an all-reduce writes over an operand
that nothing else reads, and an all-gather gets the memory for its result. The latter is needed:
with gloo, `all_gather_into_tensor` goes by `allgather_coalesced`, which spoils the heap if several
are on their way (PyTorch 2.13, `tests/benchmarks/gathers.py`).
"""

from __future__ import annotations

import torch
from torch import fx
from torch.fx.graph import _BoxedCodeGen

aten = torch.ops.aten
c10d = torch.ops._c10d_functional

#: What gives its operand's memory, or a copy of it; of communications the schemas do not say so.
_SAME = frozenset(
    {
        *(aten.reshape.default, aten.view.default, aten._unsafe_view.default),
        *(c10d.wait_tensor.default, c10d.isend.default, c10d.irecv.default),
        c10d.all_reduce_.default,
    }
)


def eager(module: fx.GraphModule, *, boxed: bool = False) -> fx.GraphModule:
    """The same pass, to be called as it is; parameters and buffers are shared.

    Args:
        module: The pass.
        boxed: Whether it is called with a list, which it empties: its arguments are freed after
            their last readers. A caller of another pass holds them until it ends.
    """
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    # that of an exported program says how it is called
    graph.set_codegen(_BoxedCodeGen() if boxed else module.graph._codegen)
    for node in graph.nodes:
        if node.target is c10d.all_gather_into_tensor.default:
            node.target = gathered
        elif node.target is c10d.all_reduce.default and _own(node.all_input_nodes[0]):
            node.target = c10d.all_reduce_.default
    return fx.GraphModule(module, graph)


def gathered(operand: torch.Tensor, ranks: int, group: str) -> torch.Tensor:
    """Start an all-gather of dense tensors along their first dim; see `wait_tensor`."""
    whole = operand.new_empty((ranks * operand.shape[0], *operand.shape[1:]))
    found: torch.Tensor = c10d.all_gather_into_tensor_out(operand, ranks, group, out=whole)
    return found


def _own(node: fx.Node) -> bool:
    """Whether what a node gives is memory that its one reader may write over."""
    if len(node.users) != 1:
        return False
    if node.target is gathered:
        return True
    if node.target in _SAME or (node.op == "call_method" and node.target == "contiguous"):
        return _own(node.all_input_nodes[0])
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    results = node.target._schema.returns
    return len(results) == 1 and results[0].alias_info is None
