"""Communication between processes that autograd runs backward as the transposed communication.

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

**Waiting.** Calls wait for their partners in the order written, `send` included. A partner that
ended makes the call raise; one that hangs does so after the group's timeout (the argument of
`init_process_group`). Calls of a collective that do not fit together raise on all its ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from partitioner.backends.process_group import Group
from partitioner.backends.tensors import combine
from partitioner.backends.torch.by_hand import wire
from partitioner.backends.torch.by_hand.labels import REDUCTIONS, Label, unlike
from partitioner.backends.torch.by_hand.linked import linked, needs_gradient, wait_at_end
from partitioner.backends.torch.by_hand.wire import Call, open_call

#: Gradients of sent tensors that came before those that were waited for, by number of the call.
_EARLY: dict[int, torch.Tensor] = {}


# Between two ranks -------------------------------------------------------------------------------


def send(x: torch.Tensor, dst: int, group: Group = None) -> torch.Tensor:
    """Send a tensor to one rank, which calls `recv`. Returns when it has taken the tensor.

    Backward receives the gradient of `x` from `dst`.

    Args:
        x: Any dense tensor, of any shape and element type.
        dst: Receiving rank.
        group: Process group.

    Returns:
        A delegate: a float32 0-D tensor of value 0. It needs a gradient if `x` does.

    Raises:
        PartitionerError: `dst` is no other rank of the group, or it is gone.
    """
    call = open_call("send", group)
    peer = call.check_peer(dst, "dst")
    wire.put(call, x, peer).wait()
    place = x.device

    def transposed(_: Sequence[torch.Tensor]) -> Sequence[torch.Tensor | None]:
        return [_gradient(call.transposed(), peer).to(place)]

    return linked(transposed, [_zero(place)], [x], needs=needs_gradient(x))[0]


def recv(
    src: int,
    group: Group = None,
    *,
    delegate: torch.Tensor | None = None,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """Receive the tensor that one rank passes to `send`.

    Backward sends the gradient of the result to `src`.

    Args:
        src: Sending rank.
        group: Process group.
        delegate: What earlier calls returned (add several up). The result depends on it, so that
            backward runs through this call first, and then through those.
        device: Where the result lies; by default where the group carries data.

    Returns:
        The tensor, dense. It needs a gradient if the sent one, or the delegate, does.

    Raises:
        PartitionerError: `src` is no other rank of the group, or it is gone; what it sent does not
            belong here; it wants a gradient while gradients are off here; integers cannot depend
            on a delegate that needs a gradient.
    """
    call = open_call("recv", group)
    peer = call.check_peer(src, "src")
    label, found = wire.get(call, peer)
    if label.needs and not torch.is_grad_enabled():
        raise call.error(
            f"rank {peer} sent a tensor that needs a gradient while gradients are off here: "
            "turn them off on both ranks, or send x.detach()"
        )
    behind = [] if delegate is None else [delegate]
    needs = label.needs or any(map(needs_gradient, behind))
    if needs and not label.smooth:
        raise call.error(f"{label} has no gradient, so pass the delegate to another recv")

    def transposed(gradients: Sequence[torch.Tensor]) -> Sequence[torch.Tensor | None]:
        if label.needs:
            wait_at_end(wire.put(call.transposed(label.number), gradients[0], peer))
        return [torch.zeros_like(x) for x in behind]

    return linked(transposed, [_moved(found, device)], behind, needs=needs)[0]


# From and to one rank ----------------------------------------------------------------------------


def bcast(
    x: torch.Tensor | None,
    src: int,
    group: Group = None,
    *,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """Copy one rank's tensor to all ranks.

    y_r = x_src; backward: dx_src = sum of dy_r over all ranks r.

    Args:
        x: The tensor, on rank `src`; not looked at elsewhere.
        src: Rank that has it.
        group: Process group.
        device: Where the result lies; by default where `x` does, or where the group carries data.

    Returns:
        A copy of the tensor, on every rank.

    Raises:
        PartitionerError: Ranks do not agree on the call, or one is gone.
    """
    call = open_call("bcast", group)
    root = call.check_rank(src, "src")
    own = [x] if call.rank == root else []
    labels = wire.agree(call, own, root=root)
    given = x if call.rank == root else None
    found = wire.broadcast(call, given, labels[root], root)
    backward = call.transposed(labels[0].number)
    inputs = [] if given is None else [given]
    homes = [x.device for x in inputs]

    def transposed(gradients: Sequence[torch.Tensor]) -> Sequence[torch.Tensor | None]:
        terms = wire.agree(backward, gradients)
        total = wire.reduce_to(backward, gradients[0], terms, root)
        return [total.to(home) for home in homes]

    moved = _moved(found, device or (homes[0] if homes else None))
    return linked(transposed, [moved], inputs, needs=_any_needs(labels))[0]


def scatter(
    xs: Sequence[torch.Tensor] | None,
    src: int,
    group: Group = None,
    *,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """Give each rank one of a rank's tensors.

    y_r = xs_src[r]; backward: dxs_src[r] = dy_r, gathered by `src`.

    Args:
        xs: A tensor a rank, on rank `src`; not looked at elsewhere. Shapes and element types may
            differ.
        src: Rank that has them.
        group: Process group.
        device: Where the result lies; by default where the group carries data, and on `src` where
            its own tensor does.

    Returns:
        This rank's tensor.

    Raises:
        PartitionerError: Ranks do not agree on the call, or one is gone.
    """
    call = open_call("scatter", group)
    root = call.check_rank(src, "src")
    given = _listed(xs) if call.rank == root else []
    labels = wire.agree(call, given, wanted=call.size, root=root)
    found = _scatter(call, given, root)
    backward = call.transposed(labels[0].number)
    homes = [x.device for x in given]

    def transposed(gradients: Sequence[torch.Tensor]) -> Sequence[torch.Tensor | None]:
        wire.agree(backward, gradients)
        parts = _gather(backward, gradients[0], root)
        return [part.to(home) for part, home in zip(parts, homes, strict=True)]

    return linked(transposed, [_moved(found, device)], given, needs=_any_needs(labels))[0]


def gather(
    x: torch.Tensor, dst: int, group: Group = None
) -> tuple[torch.Tensor, ...] | torch.Tensor:
    """Collect all ranks' tensors on one rank.

    ys_dst[r] = x_r; backward: dx_r = dys_dst[r], scattered by `dst`.

    Args:
        x: This rank's tensor; shapes and element types may differ between ranks.
        dst: Rank that collects.
        group: Process group.

    Returns:
        On `dst` the tensors by rank, on the device of its own; elsewhere a delegate, as of `send`.

    Raises:
        PartitionerError: Ranks do not agree on the call, or one is gone.
    """
    call = open_call("gather", group)
    root = call.check_rank(dst, "dst")
    labels = wire.agree(call, [x], root=root)
    parts = _gather(call, x, root)
    backward = call.transposed(labels[0].number)
    home = x.device

    def transposed(gradients: Sequence[torch.Tensor]) -> Sequence[torch.Tensor | None]:
        given = gradients if call.rank == root else []
        wire.agree(backward, gradients[:1])
        return [_scatter(backward, given, root).to(home)]

    results = [part.to(home) for part in parts] if call.rank == root else [_zero(home)]
    found = linked(transposed, results, [x], needs=_any_needs(labels))
    return found if call.rank == root else found[0]


# Among all ranks ---------------------------------------------------------------------------------


def allgather(x: torch.Tensor, group: Group = None) -> tuple[torch.Tensor, ...]:
    """Collect all ranks' tensors on every rank.

    ys_r[s] = x_s; backward: dx_s = sum of dys_r[s] over all ranks r (`reduce_scatter`).

    Args:
        x: This rank's tensor; shapes and element types may differ between ranks.
        group: Process group.

    Returns:
        The tensors by rank, on the device of this rank's.

    Raises:
        PartitionerError: Ranks do not agree on the call, or one is gone.
    """
    call = open_call("allgather", group)
    labels = wire.agree(call, [x])
    parts = wire.all_gather(call, x, labels)
    backward = call.transposed(labels[0].number)
    home = x.device

    def transposed(gradients: Sequence[torch.Tensor]) -> Sequence[torch.Tensor | None]:
        terms = wire.agree(backward, gradients, wanted=call.size)
        return [_reduce_scatter(backward, gradients, terms).to(home)]

    results = [part.to(home) for part in parts]
    return linked(transposed, results, [x], needs=_any_needs(labels))


def alltoall(xs: Sequence[torch.Tensor], group: Group = None) -> tuple[torch.Tensor, ...]:
    """Give a tensor to each rank and take one from each.

    ys_r[s] = xs_s[r]; backward: dxs_s[r] = dys_r[s], which is `alltoall` again.

    Args:
        xs: A tensor a rank; shapes and element types may differ. All on one device.
        group: Process group.

    Returns:
        The tensors from each rank, on the device of `xs`.

    Raises:
        PartitionerError: Ranks do not agree on the call, or one is gone.
    """
    call = open_call("alltoall", group)
    given = _listed(xs)
    labels = wire.agree(call, given, wanted=call.size)
    parts = wire.swap(call, given, wire.swap_labels(call, given), wire.carrier(call.group, labels))
    backward = call.transposed(labels[0].number)
    homes = [x.device for x in given]

    def transposed(gradients: Sequence[torch.Tensor]) -> Sequence[torch.Tensor | None]:
        near = wire.carrier(call.group, wire.agree(backward, gradients, wanted=call.size))
        back = wire.swap(backward, gradients, wire.swap_labels(backward, gradients), near)
        return [part.to(home) for part, home in zip(back, homes, strict=True)]

    results = [part.to(homes[0]) for part in parts]
    return linked(transposed, results, given, needs=_any_needs(labels))


def allreduce(x: torch.Tensor, op: str = "sum", group: Group = None) -> torch.Tensor:
    """Reduce the ranks' tensors elementwise, on every rank.

    "sum": y_r = sum of x_s over all ranks s; backward: dx_s = sum of dy_r over all ranks r.
    "mean" divides both by the number of ranks. "max", "min": backward gives the sum of dy_r to the
    ranks that have the extreme, in equal parts.

    A loss that every rank computes whole from `y` counts once for each rank: divide it by their
    number, or keep it on one rank.

    Args:
        x: This rank's tensor, of the same shape and element type on all ranks.
        op: "sum", "mean", "max" or "min".
        group: Process group.

    Returns:
        The reduced tensor, on the device of `x`.

    Raises:
        PartitionerError: Ranks do not agree on the call, its shapes or element types; the
            reduction does not take the element type; or a rank is gone.
    """
    call = open_call("allreduce", group)
    labels = wire.agree(call, [x], reduction=op)
    _check_reduction(call, x, labels, op)
    found = _reduced(call, x, labels, op).to(x.device)
    backward = call.transposed(labels[0].number)
    home = x.device
    winners = x == found if op in ("max", "min") else None

    def transposed(gradients: Sequence[torch.Tensor]) -> Sequence[torch.Tensor | None]:
        terms = wire.agree(backward, gradients)
        total = _reduced(backward, gradients[0], terms, "mean" if op == "mean" else "sum")
        if winners is not None:
            shares = winners.to(total.device, total.dtype)
            total = total * shares / wire.all_reduce(backward, shares, terms, "sum")
        return [total.to(home)]

    return linked(transposed, [found], [x], needs=_any_needs(labels))[0]


def reduce_scatter(xs: Sequence[torch.Tensor], group: Group = None) -> torch.Tensor:
    """Sum the ranks' lists of tensors and keep one entry a rank.

    y_r = sum of xs_s[r] over all ranks s; backward: dxs_s[r] = dy_r (`allgather`).

    Args:
        xs: A tensor a rank. Entries may differ in shape from each other, but each has the same
            shape and element type on all ranks.
        group: Process group.

    Returns:
        The sum of this rank's entries, on their device.

    Raises:
        PartitionerError: Ranks do not agree on the call, its shapes or element types, or one is
            gone.
    """
    call = open_call("reduce_scatter", group)
    given = _listed(xs)
    labels = wire.agree(call, given, wanted=call.size)
    problem = unlike(labels)
    if problem is not None:
        raise call.error(problem)
    found = _reduce_scatter(call, given, labels).to(given[call.rank].device)
    backward = call.transposed(labels[0].number)
    homes = [x.device for x in given]

    def transposed(gradients: Sequence[torch.Tensor]) -> Sequence[torch.Tensor | None]:
        parts = wire.all_gather(backward, gradients[0], wire.agree(backward, gradients))
        return [part.to(home) for part, home in zip(parts, homes, strict=True)]

    return linked(transposed, [found], given, needs=_any_needs(labels))[0]


# Between a communication and its backward ---------------------------------------------------------


def _gradient(call: Call, source: int) -> torch.Tensor:
    """The gradient of what `call` sent; those of other calls may come first."""
    while call.number not in _EARLY:
        label, found = wire.get(call, source)
        _EARLY[label.number] = found
    return _EARLY.pop(call.number)


def _any_needs(labels: Sequence[Label]) -> bool:
    """Whether backward must run, on all ranks, for the sake of one."""
    return any(label.needs for label in labels)


def _zero(device: torch.device) -> torch.Tensor:
    """The value of a delegate."""
    return torch.zeros((), dtype=torch.float32, device=device)


# Communication without gradients -----------------------------------------------------------------


def _listed(xs: Sequence[torch.Tensor] | None) -> list[torch.Tensor]:
    """A list; nothing if it is none, which the ranks then find out together."""
    return list(xs) if isinstance(xs, list | tuple) else []


def _moved(found: torch.Tensor, device: torch.device | str | None) -> torch.Tensor:
    return found if device is None else found.to(device)


def _scatter(call: Call, given: Sequence[torch.Tensor], root: int) -> torch.Tensor:
    if call.rank != root:
        return wire.get(call, root)[1]
    leaving = [wire.put(call, x, rank) for rank, x in enumerate(given) if rank != root]
    for one in leaving:
        one.wait()
    return given[root].detach().clone()


def _gather(call: Call, x: torch.Tensor, root: int) -> list[torch.Tensor]:
    if call.rank != root:
        wire.put(call, x, root).wait()
        return []
    own = x.detach().clone()
    return [own if rank == root else wire.get(call, rank)[1] for rank in range(call.size)]


def _reduce_scatter(
    call: Call, given: Sequence[torch.Tensor], labels: Sequence[Label]
) -> torch.Tensor:
    own = wire.own_label(call, given[call.rank])
    parts = wire.swap(call, given, [own] * call.size, wire.carrier(call.group, labels))
    return combine(parts, "sum")


def _check_reduction(call: Call, x: torch.Tensor, labels: Sequence[Label], op: str) -> None:
    problem = unlike(labels)
    if problem is None and op == "mean" and not labels[0].smooth:
        problem = f"{labels[0]} has no mean of its own type: use op='sum'"
    if problem is None and op in ("max", "min") and x.is_complex():
        problem = f"{labels[0]} has no order: op is one of {', '.join(REDUCTIONS[:2])}"
    if problem is not None:
        raise call.error(problem)


def _reduced(call: Call, x: torch.Tensor, labels: Sequence[Label], op: str) -> torch.Tensor:
    if op == "mean":
        return wire.all_reduce(call, x, labels, "sum") / call.size
    return wire.all_reduce(call, x, labels, op)
