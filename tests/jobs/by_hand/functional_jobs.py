"""`partitioner.functional` on ranks of a gloo group: jobs of test_functional.py."""

import gc
import re
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import Event

import pytest
import torch
import torch.distributed as dist

from jobs.processes.torch_ranks import Job, LeftError, main
from partitioner import functional as comm
from partitioner.backends.errors import BackendError, CommunicationError
from partitioner.backends.torch.by_hand.functional import tie
from partitioner.backends.torch.by_hand.labels import DTYPES

RANKS = 3
Tensors = Sequence[torch.Tensor]


def drawn(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=dtype)


# Values and gradients against one process --------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A parallel program, and the same in one process.

    Attributes:
        inputs: Of a rank.
        parallel: From a rank and its inputs to its outputs, delegates among them.
        whole: From all ranks' inputs to all ranks' outputs.
        frozen: Ranks whose inputs need no gradient.
    """

    inputs: Callable[[int], Tensors]
    parallel: Callable[[int, Tensors], Tensors]
    whole: Callable[[Sequence[Tensors]], Sequence[Tensors]]
    frozen: tuple[int, ...] = ()


def loss(rank: int, outputs: Tensors) -> torch.Tensor:
    """A number to which every element of every output counts differently on every rank."""
    total = torch.zeros((), dtype=torch.float64)
    for position, output in enumerate(outputs):
        numbers = torch.view_as_real(output) if output.is_complex() else output
        weights = drawn(100 * rank + position, *numbers.shape).to(numbers.dtype)
        total = total + (weights * numbers.sin()).sum()
    return total


def leaves(case: Case, rank: int) -> Tensors:
    needs = rank not in case.frozen
    return [x.clone().requires_grad_(needs) for x in case.inputs(rank)]


def check(case: Case, rank: int) -> None:
    operands = leaves(case, rank)
    outputs = case.parallel(rank, operands)
    everything = [leaves(case, r) for r in range(RANKS)]
    expected = case.whole(everything)
    delegates = len(outputs) - len(expected[rank])
    results = outputs[: len(expected[rank])]
    for output, right in zip(results, expected[rank], strict=True):
        torch.testing.assert_close(output, right)
    for delegate in outputs[len(outputs) - delegates :]:
        assert (delegate.shape, delegate.item()) == ((), 0)
    total = loss(rank, results)
    for delegate in outputs[len(outputs) - delegates :]:
        total = total + delegate
    if total.requires_grad:
        total.backward()
    torch.stack([loss(r, expected[r]) for r in range(RANKS)]).sum().backward()
    for x, right in zip(operands, everything[rank], strict=True):
        if rank in case.frozen:
            assert x.grad is None
        else:
            wanted = torch.zeros_like(x) if right.grad is None else right.grad
            torch.testing.assert_close(x.grad, wanted)


def flat(*values: torch.Tensor | Tensors) -> list[torch.Tensor]:
    """Results of calls as one list."""
    return [x for v in values for x in ([v] if isinstance(v, torch.Tensor) else v)]


def circle(rank: int, xs: Tensors) -> Tensors:
    """0 -> 1 -> 2 -> 0."""
    (x,) = xs
    if rank == 0:
        phi = comm.send(x.exp(), 1)
        return [comm.recv(2, delegate=phi) * x]
    received = comm.recv(rank - 1)
    return [comm.send(received * x, (rank + 1) % RANKS)]


def crossing(rank: int, xs: Tensors) -> Tensors:
    """0 sends to 1 and 2, and 1 to 2."""
    (x,) = xs
    if rank == 0:
        return [comm.send(x.cos(), 1) + comm.send(x.sin(), 2)]
    if rank == 1:
        return [comm.send(comm.recv(0) * x, 2)]
    from_one, from_zero = comm.recv(1), comm.recv(0)
    return [from_one * x + from_zero]


def several(rank: int, xs: Tensors) -> Tensors:
    """Two tensors of one shape to the same rank."""
    (x,) = xs
    if rank == 0:
        return [comm.send(x.cos(), 1) + comm.send(x.sin(), 1)]
    if rank == 2:
        return [x]
    first, second = comm.recv(0), comm.recv(0)
    return [first * x, second * x * x]


def like(*shape: int, dtype: torch.dtype = torch.float64) -> Callable[[int], Tensors]:
    return lambda rank: [drawn(rank, *shape, dtype=dtype)]


def uneven(rank: int) -> Tensors:
    return [drawn(rank, rank, 2 + rank)]  # rank 0 has no element


def lists(rank: int) -> Tensors:
    """An entry a rank, of the same shape on all ranks; one is empty and one has no dims."""
    return [drawn(10 * rank + i, *shape) for i, shape in enumerate(((2, 3), (), (0, 4)))]


def mixed(rank: int) -> Tensors:
    """Entries of different shapes and types on each rank."""
    kinds = (torch.float32, torch.float64, torch.complex64)
    return [drawn(10 * rank + i, rank + 1, 2 * i, dtype=kinds[i]) for i in range(RANKS)]


def equal(rank: int) -> Tensors:
    """Extremes that ranks share."""
    return [torch.tensor([1.0, 1.0, rank, -rank, 0.0])]


def extreme(op: str) -> Case:
    def whole(all_xs: Sequence[Tensors]) -> Sequence[Tensors]:
        stacked = torch.stack([xs[0] for xs in all_xs])
        return [[stacked.amax(0) if op == "max" else stacked.amin(0)]] * RANKS

    return Case(equal, lambda _, xs: [comm.allreduce(xs[0], op)], whole)


def summed(op: str, inputs: Callable[[int], Tensors], frozen: tuple[int, ...] = ()) -> Case:
    def whole(all_xs: Sequence[Tensors]) -> Sequence[Tensors]:
        total = torch.stack([xs[0] for xs in all_xs]).sum(0)
        return [[total / RANKS if op == "mean" else total]] * RANKS

    return Case(inputs, lambda _, xs: [comm.allreduce(xs[0], op)], whole, frozen)


def copied(src: int, frozen: tuple[int, ...] = ()) -> Case:
    return Case(
        uneven,
        lambda rank, xs: [comm.bcast(xs[0] if rank == src else None, src) * 2, xs[0]],
        lambda all_xs: [[all_xs[src][0] * 2, xs[0]] for xs in all_xs],
        frozen,
    )


def dealt(src: int, inputs: Callable[[int], Tensors]) -> Case:
    return Case(
        inputs,
        lambda rank, xs: [comm.scatter(xs if rank == src else None, src), *xs],
        lambda all_xs: [[all_xs[src][rank], *all_xs[rank]] for rank in range(RANKS)],
    )


def collected(dst: int, inputs: Callable[[int], Tensors], frozen: tuple[int, ...] = ()) -> Case:
    return Case(
        inputs,
        lambda _, xs: flat(comm.gather(xs[0], dst)),
        lambda all_xs: [flat(*all_xs) if rank == dst else [] for rank in range(RANKS)],
        frozen,
    )


def collected_by_all(inputs: Callable[[int], Tensors], frozen: tuple[int, ...] = ()) -> Case:
    return Case(
        inputs,
        lambda _, xs: comm.allgather(xs[0]),
        lambda all_xs: [flat(*all_xs)] * RANKS,
        frozen,
    )


def swapped(inputs: Callable[[int], Tensors], frozen: tuple[int, ...] = ()) -> Case:
    return Case(
        inputs,
        lambda _, xs: comm.alltoall(xs),
        lambda all_xs: [[xs[rank] for xs in all_xs] for rank in range(RANKS)],
        frozen,
    )


def sums_dealt(inputs: Callable[[int], Tensors], frozen: tuple[int, ...] = ()) -> Case:
    def whole(all_xs: Sequence[Tensors]) -> Sequence[Tensors]:
        return [[torch.stack([xs[rank] for xs in all_xs]).sum(0)] for rank in range(RANKS)]

    return Case(inputs, lambda _, xs: [comm.reduce_scatter(xs)], whole, frozen)


def in_circle(all_xs: Sequence[Tensors]) -> Sequence[Tensors]:
    a, b, c = (xs[0] for xs in all_xs)
    return [[a.exp() * b * c * a], [], []]


def in_crossing(all_xs: Sequence[Tensors]) -> Sequence[Tensors]:
    a, b, c = (xs[0] for xs in all_xs)
    return [[], [], [a.cos() * b * c + a.sin()]]


def in_several(all_xs: Sequence[Tensors]) -> Sequence[Tensors]:
    a, b, c = (xs[0] for xs in all_xs)
    return [[], [a.cos() * b, a.sin() * b * b], [c]]


CASES = {
    "circle": Case(like(3, 4), circle, in_circle),
    "circle of empty tensors": Case(like(3, 0), circle, in_circle),
    "circle of scalars, the first frozen": Case(like(), circle, in_circle, frozen=(0,)),
    "circle, the last two frozen": Case(like(2), circle, in_circle, frozen=(1, 2)),
    "circle of complex numbers": Case(like(2, dtype=torch.complex128), circle, in_circle),
    "crossing": Case(like(3, 4), crossing, in_crossing),
    "several": Case(like(3, 4), several, in_several),
    "bcast 0": copied(0),
    "bcast 2, others frozen": copied(2, frozen=(0, 1)),
    "scatter": dealt(1, lists),
    "scatter of types": dealt(2, mixed),
    "gather": collected(1, uneven),
    "gather, two frozen": collected(0, like(2, 3), frozen=(0, 2)),
    "allgather": collected_by_all(like(2, 3)),
    "allgather of scalars": collected_by_all(like()),
    "allgather of empty tensors": collected_by_all(like(0, 2)),
    "allgather of complex numbers": collected_by_all(like(2, dtype=torch.complex64)),
    "allgather, uneven, one frozen": collected_by_all(uneven, frozen=(1,)),
    "alltoall": swapped(lists),
    "alltoall of types, two frozen": swapped(mixed, frozen=(0, 1)),
    "allreduce": summed("sum", like(2, 3)),
    "allreduce of scalars, one frozen": summed("sum", like(), frozen=(2,)),
    "allreduce of complex numbers": summed("sum", like(3, dtype=torch.complex64)),
    "allreduce of nothing": summed("sum", like(0)),
    "allreduce to a mean": summed("mean", like(4)),
    "allreduce to a mean of complex numbers": summed("mean", like(4, dtype=torch.complex128)),
    "allreduce to the largest": extreme("max"),
    "allreduce to the least": extreme("min"),
    "reduce_scatter": sums_dealt(lists),
    "reduce_scatter, one frozen": sums_dealt(lists, frozen=(1,)),
}


def gradients(rank: int) -> None:
    for name, case in CASES.items():
        try:
            check(case, rank)
        except Exception as error:
            error.add_note(f"in case {name!r}")
            raise


# Values of all types -----------------------------------------------------------------------------


def samples(rank: int) -> list[torch.Tensor]:
    """Each type, and tensors that do not lie in memory one element after the other."""
    tensors = [
        torch.arange(256, dtype=torch.uint8).roll(rank)[: 16 * (rank + 1)].clone().view(dtype)
        for dtype in DTYPES
        if dtype is not torch.bool
    ]
    tensors.append(torch.tensor([True, False, rank == 1]))
    base = drawn(rank, 4, 6)
    tensors += [
        base.t(),
        base[::2, 1:5:3],
        base[0].expand(3, 6),
        torch.tensor(7),
        torch.empty(0, 2),
    ]
    tensors += [torch.tensor([1 + 2j * rank]).conj(), torch.view_as_real(torch.tensor([2j])).neg()]
    return tensors


def same(x: torch.Tensor, y: torch.Tensor) -> None:
    """Equal to the bit, NaNs included, and nothing to do with autograd."""
    assert (x.dtype, x.shape, x.requires_grad) == (y.dtype, y.shape, False)
    plain, other = (t.resolve_conj().contiguous().view(-1).view(torch.uint8) for t in (x, y))
    assert torch.equal(plain, other)


def values(rank: int) -> None:
    for mine, *theirs in zip(samples(rank), *(samples(r) for r in range(RANKS)), strict=True):
        if rank == 0:
            assert not comm.send(mine, 1).requires_grad
        elif rank == 1:
            same(comm.recv(0), theirs[0])
        same(comm.bcast(mine, 2), theirs[2])
        collect = comm.gather(mine, 1)
        for received, right in zip(collect, theirs, strict=True) if rank == 1 else ():
            same(received, right)
        for received, right in zip(comm.allgather(mine), theirs, strict=True):
            same(received, right)
        same(
            comm.scatter([mine, mine[:0] if mine.dim() else mine, mine], 0), _part(theirs[0], rank)
        )
        for received, right in zip(comm.alltoall([mine] * RANKS), theirs, strict=True):
            same(received, right)


def _part(x: torch.Tensor, rank: int) -> torch.Tensor:
    return x[:0] if rank == 1 and x.dim() else x


#: PyTorch has no addition of them on the CPU.
NOT_ADDED = (
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.uint16,
    torch.uint32,
    torch.uint64,
)


def sums(rank: int) -> None:
    """Types that gloo reduces and types that it does not."""
    for dtype in DTYPES:
        if dtype in NOT_ADDED:
            continue
        parts = [torch.tensor([r, 0, 3]).to(dtype) for r in range(RANKS)]
        whole = torch.tensor([3, 0, 9]).to(dtype)
        same(comm.allreduce(parts[rank]), whole)
        same(comm.reduce_scatter([parts[rank]] * RANKS), whole)
        if not dtype.is_complex:
            same(comm.allreduce(parts[rank], "max"), torch.tensor([2, 0, 3]).to(dtype))
            same(comm.allreduce(parts[rank], "min"), torch.tensor([0, 0, 3]).to(dtype))


def half_precision(rank: int) -> None:
    """Gradients have the type of what they belong to."""
    for dtype in (torch.float16, torch.bfloat16):
        x = torch.full((3,), float(rank), dtype=dtype, requires_grad=True)
        (comm.allreduce(x).sum() * (rank + 1)).backward()
        same(x.grad, torch.full((3,), 6.0, dtype=dtype))
        y = torch.ones(2, dtype=dtype, requires_grad=True)
        (comm.bcast(y, 0).sum() * (rank + 1)).backward()
        if rank == 0:
            same(y.grad, torch.full((2,), 6.0, dtype=dtype))


# Groups, orders ----------------------------------------------------------------------------------


def part_of_the_ranks(rank: int) -> None:
    """Ranks count within the group."""
    pair = dist.new_group([1, 2])
    if rank == 0:
        with pytest.raises(BackendError, match=r"^allreduce: process 0 is not in the group$"):
            comm.allreduce(torch.ones(1), group=pair)
        return
    x = torch.full((2,), float(rank), requires_grad=True)
    if rank == 1:
        phi = comm.send(x * 2, 1, pair)
        (comm.recv(1, pair, delegate=phi).sum() * 5).backward()
    else:
        comm.send(comm.recv(0, pair) * x, 0, pair).backward()
    same(x.grad, torch.full((2,), 20.0 if rank == 1 else 10.0))
    same(comm.bcast(x.detach(), 1, pair), torch.full((2,), 2.0))
    (comm.allreduce(x, group=pair).sum()).backward()
    same(x.grad, torch.full((2,), 22.0 if rank == 1 else 12.0))


def one_rank(_: int) -> None:
    """A group of one: communications are copies."""
    x = drawn(1, 2).requires_grad_()
    results = [comm.bcast(x, 0), comm.scatter([x], 0), comm.allreduce(x), comm.reduce_scatter([x])]
    results += [*comm.gather(x, 0), *comm.allgather(x), *comm.alltoall([x])]
    for result in results:
        assert result.data_ptr() != x.data_ptr()
        torch.testing.assert_close(result, x)
    torch.stack(results).sum().backward()
    same(x.grad, torch.full((2,), 7.0, dtype=torch.float64))


def gradients_in_any_order(rank: int) -> None:
    """The first tensor's gradient leaves first, and is waited for last."""
    x = drawn(0, 3).requires_grad_()
    if rank == 0:
        (comm.send(x.cos(), 1) + comm.send(x.sin(), 1)).backward()
        expected = drawn(0, 3).requires_grad_()
        (2 * expected.cos().sum() + 3 * expected.sin().sum()).backward()
        torch.testing.assert_close(x.grad, expected.grad)
    elif rank == 1:
        first, second = comm.recv(0), comm.recv(0)
        (2 * first.sum()).backward()
        (3 * second.sum()).backward()


GONE_ON, TAKEN = Event(), Event()  # known to all ranks, as these are forked


def backward_goes_on(rank: int) -> None:
    """A gradient leaves while backward computes; backward ends when it has been taken."""
    w = torch.ones(2, requires_grad=True)
    if rank == 0:
        phi = comm.send(w, 1)
        assert GONE_ON.wait(20)
        time.sleep(0.5)  # if backward does not wait, it ends now
        TAKEN.set()
        phi.backward()
        same(w.grad, torch.full((2,), 3.0))
        return
    local = w * 3
    local.register_hook(lambda _: GONE_ON.set())
    early = local.tanh()  # before recv: its backward comes after
    total = (comm.recv(0) * 3).sum() + early.sum()
    total.backward()
    assert TAKEN.is_set()


def results_can_be_changed(rank: int) -> None:
    """In place, without effect on what was given."""
    x = drawn(rank, 2).requires_grad_()
    before = x.detach().clone()
    for y in (comm.bcast(x, 1), *comm.allgather(x), *comm.alltoall([x] * RANKS), comm.allreduce(x)):
        y.mul_(2).sum().backward()
    torch.testing.assert_close(x.detach(), before, rtol=0, atol=0)


def graphs_do_not_keep_the_group(_: int) -> None:
    """A group that outlived its destruction would end its threads too late."""
    x = torch.ones(2, requires_grad=True)
    y = comm.allreduce(x) + comm.bcast(x, 0)
    group = weakref.ref(dist.group.WORLD)
    dist.destroy_process_group()
    gc.collect()
    assert group() is None
    with pytest.raises(BackendError, match=r"backward of .*: the process group was destroyed$"):
        y.sum().backward()


def tied(rank: int) -> None:
    x, other = drawn(rank, 2).requires_grad_(), drawn(9, 3).requires_grad_()
    y = tie(x.exp(), [other.sin()])
    (y * 2).sum().backward()
    torch.testing.assert_close(x.grad, 2 * x.detach().exp())
    torch.testing.assert_close(other.grad, torch.zeros(3, dtype=torch.float64))


# Errors ------------------------------------------------------------------------------------------


def wants(message: str, run: Callable[[], object]) -> None:
    with pytest.raises(BackendError) as caught:
        run()
    assert re.search(message, str(caught.value)), f"{caught.value} is not {message}"
    assert "\n" not in str(caught.value)


def off(run: Callable[[], object]) -> object:
    with torch.no_grad():
        return run()


def errors(rank: int) -> None:
    """Every rank gets the same error, and the group goes on."""
    one, x = torch.ones(2), torch.ones(2, requires_grad=True)
    first = rank == 0
    sparse = torch.eye(2).to_sparse()

    def both(message: str, at_first: Callable[[], object], elsewhere: Callable[[], object]) -> None:
        wants(f"^rank {rank}: {message}", at_first if first else elsewhere)

    both(
        "(bcast|gather): rank 1 is in gather, rank 0 in bcast$",
        lambda: comm.bcast(one, 0),
        lambda: comm.gather(one, 0),
    )
    both(
        "bcast: the root is 1 at rank 1 and 0 at rank 0$",
        lambda: comm.bcast(one, 0),
        lambda: comm.bcast(one, 1),
    )
    both(
        "allreduce: op is max at rank 1 and sum at rank 0$",
        lambda: comm.allreduce(one),
        lambda: comm.allreduce(one, "max"),
    )
    both(
        "allreduce: op at rank 0 is not one of sum, mean, max, min$",
        lambda: comm.allreduce(one, "median"),
        lambda: comm.allreduce(one),
    )
    both(
        r"allreduce: rank 1 gives float64 \(2,\), rank 0 float32 \(2,\)$",
        lambda: comm.allreduce(one),
        lambda: comm.allreduce(one.double()),
    )
    both(
        r"allreduce: rank 1 gives float32 \(1, 2\), rank 0 float32 \(2,\)$",
        lambda: comm.allreduce(one),
        lambda: comm.allreduce(one[None]),
    )
    both(
        "reduce_scatter: element types or shapes at rank 1 are not those at rank 0$",
        lambda: comm.reduce_scatter([one, one, one]),
        lambda: comm.reduce_scatter([one, one, one[:1]]),
    )
    both(
        "alltoall: rank 0 gives 2 tensors, not 3$",
        lambda: comm.alltoall([one, one]),
        lambda: comm.alltoall([one, one, one]),
    )
    both(
        "scatter: rank 0 gives 0 tensors, not 3$",
        lambda: comm.scatter(None, 0),
        lambda: comm.scatter(None, 0),
    )
    both(
        "scatter: rank 0 gives 0 tensors, not 3$",
        lambda: comm.scatter(torch.ones(3), 0),  # type: ignore[arg-type]
        lambda: comm.scatter(None, 0),
    )
    for wrong in (None, [one], sparse, torch.ones([1] * 65), one.to("meta")):
        both(
            "allgather: rank 0 gives what is no dense tensor of at most 64 dims$",
            lambda wrong=wrong: comm.allgather(wrong),
            lambda: comm.allgather(one),
        )
    both(
        "alltoall: rank 0 gives what is no dense tensor",
        lambda: comm.alltoall([one, sparse, one]),
        lambda: comm.alltoall([one, one, one]),
    )
    both(
        "gather: rank 1 gives integers or bools while rank 0 gives a tensor that needs a gradient",
        lambda: comm.gather(x, 0),
        lambda: comm.gather(torch.tensor([1]), 0),
    )
    both(
        "bcast: rank 0 gives a tensor that needs a gradient while gradients are off at rank 1: ",
        lambda: comm.bcast(x, 0),
        lambda: off(lambda: comm.bcast(None, 0)),
    )
    wants("allreduce: int64 .* has no mean", lambda: comm.allreduce(torch.tensor([1]), "mean"))
    wants("allreduce: complex64 .* has no order", lambda: comm.allreduce(one + 0j, "min"))
    wants(r"bcast: src is 3, not one of the ranks 0\.\.2$", lambda: comm.bcast(one, 3))
    wants(r"gather: dst is -1, not one of", lambda: comm.gather(one, -1))
    wants(r"send: dst is True, not one of", lambda: comm.send(one, True))
    wants("send: dst is this rank itself$", lambda: comm.send(one, rank))
    wants("recv: src is this rank itself$", lambda: comm.recv(rank))
    other = (rank + 1) % RANKS
    wants(f"send: list to rank {other}, where a dense tensor is", lambda: comm.send([], other))
    wants("send: torch.float32 tensor of layout torch.sparse", lambda: comm.send(sparse, other))
    same(comm.allreduce(one), torch.full((2,), 3.0))


def errors_between_two(rank: int) -> None:
    x = torch.ones(2, requires_grad=True)
    if rank == 0:
        comm.send(x, 1)
        comm.send(torch.ones(2, dtype=torch.int64), 1)
        (comm.recv(1) * 2).sum().backward()
        comm.send(x, 1)
        dist.send(torch.zeros(78, dtype=torch.int64), 1)
        comm.scatter([x.detach(), x.detach()], 0)
    else:
        off(
            lambda: wants(
                "recv: rank 0 sent a tensor .* gradients are off here", lambda: comm.recv(0)
            )
        )
        needy = torch.zeros((), requires_grad=True)
        wants(r"recv: int64 \(2,\) has no gradient", lambda: comm.recv(0, delegate=needy))
        phi = comm.send(x, 0)
        wants(
            r"recv: rank 0 sent a gradient float32 \(2,\), and this rank waits for a tensor: ",
            lambda: comm.recv(0),
        )
        assert phi.requires_grad
        comm.recv(0)
        wants("recv: what arrived was not sent by partitioner.functional$", lambda: comm.recv(0))
        comm.scatter(None, 0)


def errors_in_backward(rank: int) -> None:
    """Collectives whose backward comes in another order are not mixed up."""
    x = torch.ones(2, requires_grad=True)
    first, second = comm.allreduce(x), comm.allreduce(x * 2)
    ordered = (first, second) if rank == 0 else (second, first)
    wants(
        "backward of allreduce: rank 1 runs the backward of another allreduce than rank 0",
        lambda: ordered[0].sum().backward(),
    )
    (g,) = torch.autograd.grad(comm.allreduce(x).exp().sum(), [x], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        g.sum().backward()


# Ranks that are gone -----------------------------------------------------------------------------


SOON_S = 30  # without the group's timeout of 60 s, however slow the machine is


def gone(act: Callable[[], object], message: str) -> Callable[[int], None]:
    """Rank 1 ends while rank 0 is in a call, which must say so soon."""

    def run(rank: int) -> None:
        if rank == 1:
            time.sleep(0.5)  # until rank 0 is connected
            raise LeftError
        start = time.monotonic()
        with pytest.raises(CommunicationError, match=message) as caught:
            act()
        assert time.monotonic() - start < SOON_S
        assert "\n" not in str(caught.value)

    return run


def gone_before_its_gradient(rank: int) -> None:
    x = torch.ones(2, requires_grad=True)
    if rank == 1:
        comm.recv(0)
        raise LeftError
    phi = comm.send(x, 1)
    with pytest.raises(
        CommunicationError, match=r"^rank 0: backward of send from rank 1: .*[Cc]onnection"
    ):
        phi.backward()


def gone_before_it_takes_a_gradient(rank: int) -> None:
    if rank == 1:
        comm.send(torch.ones(2, requires_grad=True), 0)
        raise LeftError
    received = comm.recv(1)
    time.sleep(0.5)
    with pytest.raises(CommunicationError, match=r"^rank 0: backward of recv to rank 1: "):
        received.sum().backward()


def raises_in_the_middle(rank: int) -> None:
    """One of three raises in its own code: the others end too."""
    if rank == 2:
        time.sleep(0.5)  # until the others are connected
        raise LeftError
    with pytest.raises(CommunicationError, match=f"^rank {rank}: allreduce with ranks "):
        comm.allreduce(torch.ones(2))


WAITED = Event()


def sleeps(rank: int) -> None:
    """The group's timeout ends a wait for a rank that hangs."""
    if rank == 1:
        assert WAITED.wait(40)
        raise LeftError
    start = time.monotonic()
    with pytest.raises(CommunicationError, match=r"^rank 0: recv from rank 1: .*[Tt]imed out"):
        comm.recv(1)
    assert 1.9 < time.monotonic() - start < SOON_S
    WAITED.set()


ONE = torch.ones(2)
JOBS = {
    "gradients": Job(RANKS, gradients),
    "values": Job(RANKS, values),
    "sums": Job(RANKS, sums),
    "half_precision": Job(RANKS, half_precision),
    "part_of_the_ranks": Job(RANKS, part_of_the_ranks),
    "one_rank": Job(1, one_rank),
    "gradients_in_any_order": Job(RANKS, gradients_in_any_order),
    "backward_goes_on": Job(2, backward_goes_on),
    "results_can_be_changed": Job(RANKS, results_can_be_changed),
    "graphs_do_not_keep_the_group": Job(1, graphs_do_not_keep_the_group),
    "tied": Job(1, tied),
    "errors": Job(RANKS, errors),
    "errors_between_two": Job(2, errors_between_two),
    "errors_in_backward": Job(2, errors_in_backward),
    "gone_send": Job(
        2, gone(lambda: comm.send(ONE, 1), "^rank 0: send to rank 1: .*[Cc]onnection")
    ),
    "gone_recv": Job(2, gone(lambda: comm.recv(1), "^rank 0: recv from rank 1: .*[Cc]onnection")),
    "gone_bcast": Job(
        2, gone(lambda: comm.bcast(ONE, 0), "^rank 0: bcast with rank 1: .*[Cc]onnection")
    ),
    "gone_alltoall": Job(
        2, gone(lambda: comm.alltoall([ONE, ONE]), "^rank 0: alltoall with rank 1: .*[Cc]onnection")
    ),
    "gone_before_its_gradient": Job(2, gone_before_its_gradient),
    "gone_before_it_takes_a_gradient": Job(2, gone_before_it_takes_a_gradient),
    "raises_in_the_middle": Job(3, raises_in_the_middle),
    "sleeps": Job(2, sleeps, timeout_s=2),
}

if __name__ == "__main__":
    main(JOBS)
