"""Communication between processes, whose backward is the transposed communication.

Ranks are counted within `group`, a `torch.distributed` process group (None: the default one), which
for a group of some processes is not their global rank. Element types and shapes travel with the
data, so receivers need not know them.

**Gradients.** The loss of a parallel model is the sum of the losses of all ranks: each rank calls
`backward()` on its own, and the gradient of a tensor on any rank is that of the sum. If a
communication computes (y_1, ..., y_n) = A (x_1, ..., x_n) from the ranks' tensors, its backward
gives (dx_1, ..., dx_n) = A^T (dy_1, ..., dy_n), which is a communication again.

**Backward must run on every rank that took part.** A rank that only sends has no loss: `send` and
`gather` return a *delegate* there, a 0-D tensor of value 0, on which to call `backward()`, which
may be added to a loss, or passed to a later `recv`. Every received tensor must lead to what
`backward()` is called on, if only as `0 * y.sum()`: other ranks wait for its gradient. Where the
graph leaves the order open, autograd runs what was called last first.

**Waiting.** Calls wait for their partners in the order written, `send` included. If a partner
ended, the call raises; if it hangs, after the group's timeout (the argument of
`init_process_group`). Calls of a collective that do not fit together raise on all its ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from partitioner.backends.process_group import Group
from partitioner.backends.tensors import combine
from partitioner.backends.torch.by_hand import wire
from partitioner.backends.torch.by_hand.labels import REDUCTIONS, Label, unlike
from partitioner.backends.torch.by_hand.wire import Call, open_call
from partitioner.ir.errors import hints_keywords

Tensors = Sequence[Tensor]
Device = torch.device | str | None

#: Gradients of sent tensors that arrived before the awaited one, by number of the call.
_EARLY: dict[int, Tensor] = {}


# Between two ranks -------------------------------------------------------------------------------


@hints_keywords
def send(x: Tensor, dst: int, group: Group = None) -> Tensor:
    """Send a tensor to one rank, which calls `recv`. Returns when it has taken the tensor.

    Backward receives the gradient of `x` from `dst`.

    Args:
        x: Dense tensor of any shape and element type.

    Returns:
        A delegate: a float32 0-D tensor of value 0. It needs a gradient if `x` does.

    Raises:
        PartitionerError: `dst` is no other rank of the group, or it is gone.
    """
    call = open_call("send", group)
    peer = call.check_peer(dst, "dst")
    wire.put(call, x, peer).wait()

    def transposed(_: Tensors) -> Tensors:
        while call.number not in _EARLY:  # the gradients of other calls may arrive first
            label, gradient = wire.get(call.transposed(), peer)
            _EARLY[label.number] = gradient
        return [_EARLY.pop(call.number)]

    return linked(transposed, [_zero(x.device)], [x], needs=needs_gradient(x))[0]


@hints_keywords
def recv(
    src: int, group: Group = None, *, delegate: Tensor | None = None, device: Device = None
) -> Tensor:
    """Receive the tensor that one rank passes to `send`.

    Backward sends the gradient of the result to `src`.

    Args:
        delegate: Delegate of earlier calls (add several up). The result depends on it, so that
            backward runs through this call first, and then through those.
        device: Where the result lies; by default where the group carries data.

    Returns:
        The tensor, dense. It needs a gradient if the sent one, or the delegate, does.

    Raises:
        PartitionerError: `src` is no other rank of the group, or it is gone; the tensor was sent to
            another call; it needs a gradient while gradients are off here; integers cannot depend
            on a delegate that needs a gradient.
    """
    call = open_call("recv", group)
    peer = call.check_peer(src, "src")
    label, received = wire.get(call, peer)
    if label.needs and not torch.is_grad_enabled():
        raise call.error(
            f"rank {peer} sent a tensor that needs a gradient while gradients are off here: "
            "turn them off on both ranks, or send x.detach()"
        )
    delegates = [] if delegate is None else [delegate]
    needs = label.needs or any(map(needs_gradient, delegates))
    if needs and not label.smooth:
        raise call.error(f"{label} has no gradient, so pass the delegate to another recv")

    def transposed(gradients: Tensors) -> Tensors:
        if label.needs:
            leaving = wire.put(call.transposed(label.number), gradients[0], peer)
            # here ranks that wait for each other's gradients could not go on
            torch.autograd.Variable._execution_engine.queue_callback(leaving.wait)
        return [torch.zeros_like(x) for x in delegates]

    return linked(transposed, [_moved(received, device)], delegates, needs=needs)[0]


# From and to one rank ----------------------------------------------------------------------------


@hints_keywords
def bcast(x: Tensor | None, src: int, group: Group = None, *, device: Device = None) -> Tensor:
    """Copy one rank's tensor to all ranks.

    y_r = x_src; backward: dx_src = sum of dy_r over all ranks r.

    Args:
        x: The tensor, on rank `src`; ignored elsewhere.
        device: Where the result lies; by default where `x` does, or where the group carries data.

    Returns:
        A copy of the tensor, on every rank.

    Raises:
        PartitionerError: Ranks do not agree on the call, or one is gone.
    """
    call = open_call("bcast", group)
    root = call.check_rank(src, "src")
    labels = wire.agree(call, [x] if call.rank == root else [], root=root)
    operand = x if call.rank == root else None
    copy = wire.broadcast(call, operand, labels[root], root)
    operands = [] if operand is None else [operand]

    def transposed(backward: Call, gradients: Tensors) -> Tensors:
        terms = wire.agree(backward, gradients)
        total = wire.all_reduce(backward, gradients[0], terms, "sum", root)
        return [total] if call.rank == root else []

    moved = _moved(copy, device or (None if operand is None else operand.device))
    return _linked(call, labels, [moved], operands, transposed)[0]


@hints_keywords
def scatter(xs: Tensors | None, src: int, group: Group = None, *, device: Device = None) -> Tensor:
    """Give each rank one of a rank's tensors.

    y_r = xs_src[r]; backward: dxs_src[r] = dy_r, gathered by `src`.

    Args:
        xs: A tensor a rank, on rank `src`; ignored elsewhere. Shapes and element types may differ.
        device: Where the result lies; by default where the group carries data, and on `src` where
            its own tensor does.

    Returns:
        This rank's tensor.

    Raises:
        PartitionerError: Ranks do not agree on the call, or one is gone.
    """
    call = open_call("scatter", group)
    root = call.check_rank(src, "src")
    operands = _listed(xs) if call.rank == root else []
    labels = wire.agree(call, operands, wanted=call.size, root=root)
    part = _scatter(call, operands, root)

    def transposed(backward: Call, gradients: Tensors) -> Tensors:
        wire.agree(backward, gradients)
        return _gather(backward, gradients[0], root)

    return _linked(call, labels, [_moved(part, device)], operands, transposed)[0]


@hints_keywords
def gather(x: Tensor, dst: int, group: Group = None) -> tuple[Tensor, ...] | Tensor:
    """Collect all ranks' tensors on one rank.

    ys_dst[r] = x_r; backward: dx_r = dys_dst[r], scattered by `dst`.

    Args:
        x: This rank's tensor; shapes and element types may differ between ranks.

    Returns:
        On `dst` the tensors by rank, on the device of its own; elsewhere a delegate, as of `send`.

    Raises:
        PartitionerError: Ranks do not agree on the call, or one is gone.
    """
    call = open_call("gather", group)
    root = call.check_rank(dst, "dst")
    labels = wire.agree(call, [x], root=root)
    parts = _gather(call, x, root)

    def transposed(backward: Call, gradients: Tensors) -> Tensors:
        wire.agree(backward, gradients[:1])
        return [_scatter(backward, gradients if call.rank == root else [], root)]

    moved = [part.to(x.device) for part in parts] if call.rank == root else [_zero(x.device)]
    results = _linked(call, labels, moved, [x], transposed)
    return results if call.rank == root else results[0]


# Among all ranks ---------------------------------------------------------------------------------


@hints_keywords
def allgather(x: Tensor, group: Group = None) -> tuple[Tensor, ...]:
    """Collect all ranks' tensors on every rank.

    ys_r[s] = x_s; backward: dx_s = sum of dys_r[s] over all ranks r (`reduce_scatter`).

    Args:
        x: This rank's tensor; shapes and element types may differ between ranks.

    Returns:
        The tensors by rank, on the device of this rank's.

    Raises:
        PartitionerError: Ranks do not agree on the call, or one is gone.
    """
    call = open_call("allgather", group)
    labels = wire.agree(call, [x])
    parts = wire.all_gather(call, x, labels)

    def transposed(backward: Call, gradients: Tensors) -> Tensors:
        terms = wire.agree(backward, gradients, wanted=call.size)
        return [_reduce_scatter(backward, gradients, terms)]

    results = [part.to(x.device) for part in parts]
    return _linked(call, labels, results, [x], transposed)


@hints_keywords
def alltoall(xs: Tensors, group: Group = None) -> tuple[Tensor, ...]:
    """Send a tensor to each rank and receive one from each.

    ys_r[s] = xs_s[r]; backward: dxs_s[r] = dys_r[s], which is `alltoall` again.

    Args:
        xs: A tensor a rank; shapes and element types may differ. All on one device.

    Returns:
        The tensors from each rank, on the device of `xs`.

    Raises:
        PartitionerError: Ranks do not agree on the call, or one is gone.
    """
    call = open_call("alltoall", group)
    operands = _listed(xs)
    labels = wire.agree(call, operands, wanted=call.size)
    parts = _all_to_all(call, operands, labels)

    def transposed(backward: Call, gradients: Tensors) -> Tensors:
        return _all_to_all(backward, gradients, wire.agree(backward, gradients, wanted=call.size))

    results = [part.to(operands[0].device) for part in parts]
    return _linked(call, labels, results, operands, transposed)


@hints_keywords
def allreduce(x: Tensor, op: str = "sum", group: Group = None) -> Tensor:
    """Reduce the ranks' tensors elementwise, on every rank.

    "sum": y_r = sum of x_s over all ranks s; backward: dx_s = sum of dy_r over all ranks r.
    "mean" divides both by the number of ranks. "max", "min": backward gives the sum of dy_r to the
    ranks that have the extreme, in equal parts.

    A loss that every rank computes whole from `y` counts once for each rank: divide it by their
    number, or keep it on one rank.

    Args:
        x: This rank's tensor, of the same shape and element type on all ranks.
        op: "sum", "mean", "max" or "min".

    Returns:
        The reduced tensor, on the device of `x`.

    Raises:
        PartitionerError: Ranks do not agree on the call, its shapes or element types; the
            reduction does not take the element type; or a rank is gone.
    """
    call = open_call("allreduce", group)
    labels = wire.agree(call, [x], reduction=op)
    problem = unlike(labels)
    if problem is None and op == "mean" and not labels[0].smooth:
        problem = f"{labels[0]} has no mean of its own type: use op='sum'"
    if problem is None and op in ("max", "min") and x.is_complex():
        problem = f"{labels[0]} has no order: op is one of {', '.join(REDUCTIONS[:2])}"
    if problem is not None:
        raise call.error(problem)
    result = _reduced(call, x, labels, op).to(x.device)
    winners = x == result if op in ("max", "min") else None

    def transposed(backward: Call, gradients: Tensors) -> Tensors:
        terms = wire.agree(backward, gradients)
        total = _reduced(backward, gradients[0], terms, "mean" if op == "mean" else "sum")
        if winners is not None:
            shares = winners.to(total.device, total.dtype)
            total = total * shares / wire.all_reduce(backward, shares, terms, "sum")
        return [total]

    return _linked(call, labels, [result], [x], transposed)[0]


@hints_keywords
def reduce_scatter(xs: Tensors, group: Group = None) -> Tensor:
    """Sum the ranks' lists of tensors and keep one entry a rank.

    y_r = sum of xs_s[r] over all ranks s; backward: dxs_s[r] = dy_r (`allgather`).

    Args:
        xs: A tensor a rank. Entries may differ in shape from each other, but each has the same
            shape and element type on all ranks.

    Returns:
        The sum of this rank's entries, on their device.

    Raises:
        PartitionerError: Ranks do not agree on the call, its shapes or element types, or one is
            gone.
    """
    call = open_call("reduce_scatter", group)
    operands = _listed(xs)
    labels = wire.agree(call, operands, wanted=call.size)
    problem = unlike(labels)
    if problem is not None:
        raise call.error(problem)
    result = _reduce_scatter(call, operands, labels).to(operands[call.rank].device)

    def transposed(backward: Call, gradients: Tensors) -> Tensors:
        return wire.all_gather(backward, gradients[0], wire.agree(backward, gradients))

    return _linked(call, labels, [result], operands, transposed)[0]


# Between a communication and its backward ---------------------------------------------------------


def _linked(
    call: Call,
    labels: Sequence[Label],
    results: Tensors,
    operands: Tensors,
    transposed: Callable[[Call, Tensors], Tensors],
) -> tuple[Tensor, ...]:
    """Results of a collective, whose backward runs on all ranks if one needs a gradient."""
    backward = partial(transposed, call.transposed(labels[0].number))
    return linked(backward, results, operands, needs=any(label.needs for label in labels))


def _zero(device: torch.device) -> Tensor:
    """The value of a delegate."""
    return torch.zeros((), dtype=torch.float32, device=device)


#: Takes the gradients of the results and gives those of the operands, on any device.
Transposed = Callable[[Tensors], Tensors]


def tie(x: Tensor, others: Tensors) -> Tensor:
    """`x`; its backward pass also reaches the others, with gradients of 0."""

    def transposed(gradients: Tensors) -> Tensors:
        return [gradients[0], *(torch.zeros_like(other) for other in others)]

    needs = any(map(needs_gradient, (x, *others)))
    return linked(transposed, [x.detach()], [x, *others], needs=needs)[0]


class _Linked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, transposed: Transposed, results: Tensors, _anchor: Tensor, *operands: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.transposed, ctx.devices = transposed, [x.device for x in operands]
        return tuple(x.detach() for x in results)  # no views of each other

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        moved = zip(ctx.transposed(gradients), ctx.devices, strict=True)
        return None, None, None, *(gradient.to(device) for gradient, device in moved)


def linked(
    transposed: Transposed, results: Tensors, operands: Tensors, *, needs: bool
) -> tuple[Tensor, ...]:
    """The results, with `transposed` as their backward if any rank needs one."""
    if not needs:
        return tuple(results)
    # Makes the results need a gradient on ranks without an operand that needs one.
    anchor = torch.empty(0, requires_grad=True)
    outputs: tuple[Tensor, ...] = _Linked.apply(  # type: ignore[no-untyped-call]
        transposed, results, anchor, *operands
    )
    return outputs


def needs_gradient(x: Tensor) -> bool:
    """Test whether autograd would record an operation on the tensor."""
    return x.requires_grad and torch.is_grad_enabled()


# Communication without gradients -----------------------------------------------------------------


def _listed(xs: Tensors | None) -> list[Tensor]:
    """The tensors as a list; empty if `xs` is no list, which the ranks then refuse together."""
    return list(xs) if isinstance(xs, list | tuple) else []


def _moved(x: Tensor, device: Device) -> Tensor:
    return x if device is None else x.to(device)


def _scatter(call: Call, parts: Tensors, root: int) -> Tensor:
    if call.rank != root:
        return wire.get(call, root)[1]
    sends = [wire.put(call, part, rank) for rank, part in enumerate(parts) if rank != root]
    for leaving in sends:
        leaving.wait()
    return parts[root].detach().clone()


def _gather(call: Call, x: Tensor, root: int) -> list[Tensor]:
    if call.rank != root:
        wire.put(call, x, root).wait()
        return []
    copy = x.detach().clone()
    return [copy if rank == root else wire.get(call, rank)[1] for rank in range(call.size)]


def _all_to_all(call: Call, parts: Tensors, labels: Sequence[Label]) -> list[Tensor]:
    return wire.swap(call, parts, wire.swap_labels(call, parts), wire.carrier(call.group, labels))


def _reduce_scatter(call: Call, parts: Tensors, labels: Sequence[Label]) -> Tensor:
    label = call.label([parts[call.rank]])
    terms = wire.swap(call, parts, [label] * call.size, wire.carrier(call.group, labels))
    return combine(terms, "sum")


def _reduced(call: Call, x: Tensor, labels: Sequence[Label], op: str) -> Tensor:
    if op == "mean":
        return wire.all_reduce(call, x, labels, "sum") / call.size
    return wire.all_reduce(call, x, labels, op)
