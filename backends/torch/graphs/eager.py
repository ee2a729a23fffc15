"""Passes that run without `torch.compile`, which plans the memory of collectives itself.

Graphs are functional, as they are read, saved and compiled. Here an all-reduce writes over an
operand that nothing else reads, a write to a stored value that the program does in place
(`RankProgram.in_place`) is done so, and an all-gather gets the memory for its result. The last is
needed: with gloo, `all_gather_into_tensor` calls `allgather_coalesced`, which spoils the heap if
several are on their way (PyTorch 2.13, `tests/benchmarks/gathers.py`). On a processor a pass takes
no more memory than its tensors: where gloo's all-gather takes a buffer as large as its result, each
rank sends its part of the result from and to its place, and where gloo's reduce-scatter adds up a
copy of the operand, the operand is added up, and a part of it kept behind the wait. Gradients are
added to their sums where they are made, and views that undo each other go.

A rank runs such a pass without autograd (`direct`), up to its first communication at once
(`gated`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from operator import getitem
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.distributed.distributed_c10d import GroupName
from torch.fx.graph import _BoxedCodeGen

from partitioner.backends.tensors import torch_dtype
from partitioner.backends.torch.graphs.calls import add_argument, overload
from partitioner.backends.torch.graphs.emit import IN_PLACE
from partitioner.backends.torch.graphs.notes import (
    COMM,
    OPERATOR,
    move_notes,
    note_tasks,
    noted_tasks,
)
from partitioner.backends.torch.operators.registry import KERNELS, SENDING
from partitioner.backends.torch.operators.vocabulary import write_part
from partitioner.ir.types import item_bytes

aten = torch.ops.aten
c10d = torch.ops._c10d_functional
operators = torch.ops.partitioner

#: Operators that return their operand's elements, in its memory or in a copy.
_PASSING_ON = frozenset(
    {
        *(aten.reshape.default, aten.view.default, aten._unsafe_view.default),
        *(aten.t.default, aten.transpose.int, aten.permute.default),
        *(c10d.wait_tensor.default, c10d.isend.default, c10d.irecv.default),
        c10d.all_reduce_.default,
    }
)
#: The namespace of the operators of communications.
_COMMUNICATIONS = "_c10d_functional"


def _slice_write(data: Tensor, source: Tensor, *place: Any, **named: Any) -> Tensor:
    aten.slice.Tensor(data, *place, **named).copy_(source)
    return data


def _select_write(data: Tensor, source: Tensor, dim: int, index: int) -> Tensor:
    data.select(dim, index).copy_(source)
    return data


#: By operator that writes rows to a copy of its first operand: writes to that one, and returns it.
WRITES: Mapping[Any, Callable[..., Tensor]] = {
    aten.index_copy.default: aten.index_copy_.default,
    aten.index_put.default: aten.index_put_.default,
    aten._unsafe_index_put.default: aten.index_put_.default,
    aten.select_scatter.default: _select_write,
    aten.slice_scatter.default: _slice_write,
    operators.index_write_part.default: write_part,
}


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
        elif node.target is c10d.reduce_scatter_tensor.default:
            _add_up(graph, node)
        elif node.meta.get(IN_PLACE):
            node.target = WRITES[node.target]
    add_to_sums(graph, summed)
    return fx.GraphModule(module, graph)


def gathered(operand: Tensor, ranks: int, group: str) -> Tensor:
    """Start an all-gather of dense tensors along their first dim; see `wait_tensor`."""
    whole = operand.new_empty((ranks * operand.shape[0], *operand.shape[1:]))
    if operand.device.type != "cpu":
        sent: Tensor = c10d.all_gather_into_tensor_out(operand, ranks, group, out=whole)
        return sent
    parts = whole.chunk(ranks)
    parts[_rank_in(group)].copy_(operand)
    for source, part in enumerate(parts):
        c10d.broadcast_(part, source, group)
    return whole


def _rank_in(group: str) -> int:
    return torch._C._distributed_c10d._resolve_process_group(GroupName(group)).rank()


def _add_up(graph: fx.Graph, node: fx.Node) -> None:
    """Let a reduce-scatter write over its operand, if it may, and take the part behind its wait."""
    (wait,) = node.users
    operand, reduction, ranks, group = node.args
    node.args = operand, reduction, ranks, group, _is_free(node.all_input_nodes[0])
    node.meta[OPERATOR], node.target = node.target, scattered
    with graph.inserting_after(wait):
        part = graph.call_function(scattered_part, (wait, ranks, group))
    note_tasks([part], noted_tasks(wait))
    wait.replace_all_uses_with(part, delete_user_cb=lambda user: user is not part)


def scattered(operand: Tensor, reduction: str, ranks: int, group: str, is_free: bool) -> Tensor:
    """Start a reduce-scatter along the first dim; a processor's is of all parts."""
    if operand.device.type != "cpu":
        sent: Tensor = c10d.reduce_scatter_tensor(operand, reduction, ranks, group)
        return sent
    whole: Tensor = c10d.all_reduce_(operand if is_free else operand.clone(), reduction, group)
    return whole


def scattered_part(arrived: Tensor, ranks: int, group: str) -> Tensor:
    """Take the rank's part of what `scattered` brought."""
    if arrived.device.type != "cpu":
        return arrived
    return arrived.chunk(ranks)[_rank_in(group)].clone()


def _is_free(node: fx.Node) -> bool:
    """Test whether the only reader of a node may write over its result's memory."""
    if len(node.users) != 1:
        return False
    if node.target in (gathered, scattered_part):
        return True
    if node.target in _PASSING_ON or (node.op == "call_method" and node.target == "contiguous"):
        return _is_free(node.all_input_nodes[0])
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    results = node.target._schema.returns
    return len(results) == 1 and results[0].alias_info is None


# Views --------------------------------------------------------------------------------------------


def shorten_views(graph: fx.Graph) -> None:
    """Let one reshape stand for several in a row, and nothing for what turns a tensor and back."""
    for node in list(graph.nodes):
        before = node.args[0] if node.target in _VIEWS else None
        if not isinstance(before, fx.Node) or before.target is not node.target:
            continue
        if _undoes_call(node, before):
            node.replace_all_uses_with(before.args[0])
            graph.erase_node(node)
        elif node.target is aten.reshape.default and len(before.users) == 1:
            # a reshape may copy, which two readers share
            node.args = (before.args[0], *node.args[1:])
        if not before.users:
            graph.erase_node(before)


def _undoes_call(node: fx.Node, before: fx.Node) -> bool:
    """Test whether one of two calls of a view undoes the other (in plans: `forms.turns_back`)."""
    if node.target is aten.permute.default:
        first, second = (cast("Sequence[int]", one.args[1]) for one in (before, node))
        return [first[dim] % len(first) for dim in second] == [*range(len(first))]
    if node.target is aten.transpose.int:
        return {*node.args[1:]} == {*before.args[1:]}
    return node.target is aten.t.default


_VIEWS = frozenset({aten.reshape.default, aten.t.default, aten.transpose.int, aten.permute.default})


# Sums over micro-batches --------------------------------------------------------------------------
# A pass takes the sum of a result behind its other arguments, None before the first micro-batch,
# and returns the sum in its place. So a gradient is added while the processor has it in its caches,
# and is not held to the end of the pass.


def add_to_sums(graph: fx.Graph, positions: Sequence[int]) -> None:
    """Let a pass add results at some positions to their sums, which become its last arguments."""
    output = graph.output_node()
    results = list(output.args[0])  # type: ignore[arg-type]
    last = next((n for n in reversed(graph.nodes) if n.op == "placeholder"), graph._root)
    for position in positions:
        value = results[position]
        with graph.inserting_after(last):
            total = last = add_argument(graph, f"sum_of_{value.name}")
        is_only = len(value.users) == 1 and results.count(value) == 1
        adding = _ADDING.get(value.target) if is_only else None
        if adding is not None and not value.kwargs:
            value.meta[OPERATOR] = value.target
            value.target, value.args = adding, (total, *value.args)
            continue
        behind = last if value.op == "placeholder" else value
        with graph.inserting_after(behind):
            results[position] = added = graph.call_function(add, (total, value))
        note_tasks([added], noted_tasks(value))
    output.args = (tuple(results),)


def add(total: Tensor | None, value: Tensor) -> Tensor:
    """The sum with a value, or the value if there is no sum yet."""
    return value if total is None else total.add_(value)


def add_product(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """The sum with a product of matrices."""
    return torch.mm(a, b) if total is None else total.addmm_(a, b)


def add_products(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """The sum with a batch of products of matrices."""
    return torch.bmm(a, b) if total is None else total.baddbmm_(a, b)


def add_rows(
    total: Tensor | None,
    gradient: Tensor,
    ids: Tensor,
    rows: int,
    padding: int,
    is_scaled: bool,
) -> Tensor:
    """The sum with a table's gradient; on a CPU, where the order of additions is fixed, by row."""
    if total is None or is_scaled or total.device.type != "cpu":
        whole = aten.embedding_dense_backward.default(gradient, ids, rows, padding, is_scaled)
        return add(total, whole)
    places = ids.reshape(-1)
    parts = gradient.reshape(places.numel(), total.shape[1])
    if padding >= 0:
        parts = parts.masked_fill((places == padding).unsqueeze(1), 0)
    return total.index_add_(0, places, parts)


#: What adds the result of an operator to a sum, by the operator: it takes the sum before its
#: arguments, all of which must be by position.
_ADDING: dict[Any, Callable[..., Tensor]] = {
    aten.mm.default: add_product,
    aten.bmm.default: add_products,
    aten.embedding_dense_backward.default: add_rows,
}


# Without autograd, and up to the first communication at once --------------------------------------


#: Operators for each of which PyTorch has a function of the same name that calls it with the same
#: arguments in the same order. Not all that there are: those of which models call many on small
#: tensors.
_OF_SAME_NAME = (
    *(
        "add.Tensor",
        "addmm",
        "amax",
        "arange",
        "bmm",
        "cat",
        "clone",
        "div.Tensor",
        "embedding",
        "eq.Scalar",
    ),
    *("exp", "log", "logical_not", "masked_fill.Scalar", "mean.dim", "mm", "mul.Tensor"),
    *("native_layer_norm", "neg", "permute", "relu", "reshape", "rsqrt", "select.int", "sigmoid"),
    *("sub.Tensor", "sum.dim_IntList", "t", "tanh", "transpose.int", "unsqueeze"),
)
#: PyTorch's functions by operator.
FUNCTIONS: Mapping[torch._ops.OpOverload, Callable[..., Any]] = {
    **{overload(f"aten::{op}"): getattr(torch, op.partition(".")[0]) for op in _OF_SAME_NAME},
    aten.expand.default: Tensor.expand,
    aten.gelu.default: torch._C._nn.gelu,
    aten.silu.default: torch._C._nn.silu,
}


class Carrier(StrEnum):
    """How the ranks agree together with the first all-reduce of a pass."""

    ROW = "row"  #: Its operand travels with the rows of the ranks.
    MARK = "mark"  #: Its first element is no number if a rank does something else.


@dataclass
class Gate:
    """A place in a pass where the rank waits, when it comes there first."""

    #: Waits; None if there is nothing to wait for. It may be given this rank's part of an
    #: all-reduce, of which it returns the sum if it adds it up, or the error of a pass.
    wait: Callable[..., object] | None = None

    def enter(self, *given: Tensor | Exception) -> object:
        """Wait, if nothing has since `wait` was set."""
        wait, self.wait = self.wait, None
        return None if wait is None else wait(*given)

    def leave(self, error: BaseException) -> None:
        """End a pass that failed.

        The other ranks wait for one with an error. One that is interrupted waits in its next pass.
        """
        if isinstance(error, Exception):
            self.enter(error)
        self.wait = None

    def reduce(self, part: Tensor, reduction: str, group: str) -> Tensor:
        """Wait for the other ranks, and start to add up the parts; see `wait_tensor`."""
        total = self.enter(part)
        if isinstance(total, Tensor):
            return total
        whole: Tensor = _below_autograd(c10d.all_reduce_.default)(part, reduction, group)
        return whole

    def reduced(self, part: Tensor, reduction: str, group: str) -> Tensor:
        """Wait for the other ranks, and add up the parts."""
        total = self.enter(part)
        if isinstance(total, Tensor):
            return total
        whole: Tensor = _below_autograd(c10d.wait_tensor.default)(
            self.reduce(part, reduction, group)
        )
        return whole


def gated(module: fx.GraphModule, gate: Gate, group: str = "") -> fx.GraphModule:
    """The pass, one of `eager`, which is changed: it enters the gate before others may notice it.

    That is before it communicates, or writes to anything that it is given. A first all-reduce over
    the `group` of all ranks carries what they agree on, if it may (`carrier_of`).
    """
    graph = module.graph
    first = next(node for node in graph.nodes if not _is_private(node))
    carrier = _carrier(first, group) if group else None
    if carrier is None:
        with graph.inserting_before(first):
            graph.call_function(gate.enter)
    else:
        module.meta[_CARRIER] = carrier
        first.meta[OPERATOR], first.target = first.target, gate.reduce
        if _is_awaited(first):  # the sum is there
            wait = first.next
            wait.replace_all_uses_with(first)
            move_notes(wait, first)
            graph.erase_node(wait)
            first.target = gate.reduced
    module.recompile()
    return module


def carrier_of(module: object) -> Carrier | None:
    """How the ranks agree in a pass of `gated` with its first all-reduce; None if they do not."""
    return module.meta.get(_CARRIER) if isinstance(module, fx.GraphModule) else None


_CARRIER = "carrier"
#: Bytes of the operands that travel with the rows of ranks.
ROW_BYTES = 64


def _carrier(first: fx.Node, group: str) -> Carrier | None:
    """Choose how ranks agree with a communication of a pass, its first one."""
    if first.target is not c10d.all_reduce_.default or first.args[1:] != ("sum", group):
        return None
    (shape, _), (comm, *_) = first.meta["shapes"], first.meta[COMM]
    is_wide = comm.dtype in ("float32", "float64")
    if is_wide and math.prod(shape) * item_bytes(comm.dtype) <= ROW_BYTES:
        return Carrier.ROW
    is_floating = torch_dtype(comm.dtype).is_floating_point
    return Carrier.MARK if is_floating and _is_awaited(first) else None


def _is_awaited(sent: fx.Node) -> bool:
    """Test whether a pass waits for a communication as soon as it is started."""
    return sent.next.target is c10d.wait_tensor.default and [*sent.users] == [sent.next]


def _is_private(node: fx.Node) -> bool:
    """Test whether a node only computes a value of its own."""
    if node.op in ("placeholder", "get_attr") or node.target in ("contiguous", getitem):
        return True
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    is_local = node.target.namespace in ("aten", "partitioner") and node.target not in SENDING
    return is_local and not node.target._schema.is_mutable


def direct(module: fx.GraphModule) -> fx.GraphModule:
    """The pass, one of `eager`, which is changed: it must run under `torch.no_grad`.

    PyTorch (2.13) has an autograd function in Python for each functional collective, and for each
    operator that was registered with a gradient: without gradients these only pass a call on. It
    looks up the schema of an operator anew at each call of it by name, which takes longer than the
    function of the same operator (`FUNCTIONS`).
    """
    for node in module.graph.nodes:
        target = node.target
        call = KERNELS.get(target) or FUNCTIONS.get(target)
        if target is aten.slice.Tensor and len(node.args) == 4 and node.args[1] == 0:
            tensor, _, start, end = node.args
            call, node.args = getitem, (tensor, slice(start, end))
        elif target in (gathered, scattered) or (
            isinstance(target, torch._ops.OpOverload) and target.namespace == _COMMUNICATIONS
        ):
            call = _below_autograd(target)
        if call is not None:
            node.meta[OPERATOR], node.target = target, call
    module.recompile()
    return module


@cache
def _below_autograd(operator: Callable[..., Any]) -> Callable[..., Any]:
    def communicate(*args: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*args)

    return communicate
