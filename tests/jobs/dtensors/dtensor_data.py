"""`.data` of DTensors, other threads, unlike orders, reset submodules: jobs of module_jobs.py."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication

import partitioner
from jobs.processes.torch_ranks import Job
from partitioner.api.compiled.module import ModuleProgram
from partitioner.backends.errors import BackendError
from partitioner.backends.torch.dtensors.dispatch import compared_notes, correct_operators
from partitioner.backends.torch.dtensors.wholes import by_pytorch


class Net(nn.Module):
    """Submodules that PyTorch resets in unlike ways, of sizes that 2 and 3 ranks do not share."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 6, padding_idx=2)
        self.up, self.norm = nn.Linear(6, 13), nn.BatchNorm1d(13)
        self.middle, self.down = nn.Linear(13, 13, bias=False), nn.Linear(13, 13, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Loss."""
        y: Tensor = self.down(self.middle(self.norm(self.up(self.words(x))).tanh()))
        return y.square().mean()


BATCH = torch.arange(12) % 7


@cache
def program(parallel: str, ranks: int) -> ModuleProgram:
    torch.manual_seed(0)
    options: dict[str, Any] = {"devices": ranks, "training": True, "cluster": "ideal"}
    compiled = partitioner.compile(Net().double(), BATCH, parallel=parallel, **options)
    assert isinstance(compiled, ModuleProgram)
    return compiled


def pair(parallel: str, ranks: int) -> tuple[nn.Module, nn.Module]:
    """A rank's module, and the whole one."""
    compiled = program(parallel, ranks)
    return compiled.module(), copy.deepcopy(compiled.whole)


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def are_alike(module: nn.Module, whole: nn.Module) -> None:
    ours = module.state_dict()
    for name, tensor in whole.state_dict().items():
        torch.testing.assert_close(full(ours[name]), tensor, msg=lambda m, n=name: f"{n}: {m}")


def step(module: nn.Module) -> None:
    module.zero_grad()
    module(BATCH).backward()
    torch.optim.SGD(module.parameters(), lr=0.1).step()


def sets_contents(parallel: str, ranks: int, _: int) -> None:
    """Methods that reset submodules, and functions that fill parameters, give those of one process.

    What they read of the submodule is what it had when it was compiled.
    """
    both = pair(parallel, ranks)
    for module in both:
        step(module)
        torch.manual_seed(3)
        for part in module.modules():
            if hasattr(part, "reset_parameters"):
                part.reset_parameters()
    are_alike(*both)
    for module in both:
        step(module)
        torch.manual_seed(4)
        for part in module.modules():
            if isinstance(part, nn.Linear):
                nn.init.sparse_(part.weight, 0.3, std=part.in_features**-0.5)
            if isinstance(part, nn.BatchNorm1d):
                assert part.momentum == 0.1
                part.momentum = 0.1
                part.reset_running_stats()
    are_alike(*both)
    assert not full(both[0].get_buffer("norm.running_mean")).any()
    for module in both:
        step(module)
    are_alike(*both)
    with pytest.raises(BackendError, match=r"^momentum was traced as it was when the module was"):
        both[0].get_submodule("norm").momentum = None  # type: ignore[assignment]
    with pytest.raises(BackendError, match=r"^a rank's module cannot be pickled: save its state_d"):
        pickle.dumps(both[0])
    shown, module = copy.copy(both[0]), both[0]
    step(shown)
    step(both[1])
    torch.testing.assert_close(*(one(BATCH).detach() for one in (shown, both[1])))
    assert all(p is q for p, q in zip(shown.parameters(), module.parameters(), strict=True))


def swaps_data(parallel: str, ranks: int, _: int) -> None:
    """Means that are swapped in by `.data`, and taken out again, and swapped with parameters."""
    both = pair(parallel, ranks)
    said: list[list[Tensor]] = []
    for module in both:
        means = {name: p.data.clone() for name, p in module.named_parameters()}
        losses = []
        for _turn in range(3):
            step(module)
            before = {name: p.data for name, p in module.named_parameters()}
            for name, p in module.named_parameters():
                means[name] = 0.8 * means[name] + 0.2 * p.data
                p.data = means[name]
            losses.append(module(BATCH).detach())
            for name, p in module.named_parameters():
                p.data.mul_(0.5)
                p.data = before[name]
            losses += [full(mean.sum()) for mean in means.values()]
            for name, p in module.named_parameters():
                p.data, means[name].data = means[name].data, p.data
            losses.append(module(BATCH).detach())
        said.append(losses)
    are_alike(*both)
    torch.testing.assert_close(*said)


def data_is_not_stale(_: int) -> None:
    """What is written through `.data` and `to_local()` is seen in rows, and by backward passes."""
    module, _whole = pair("zero3", 2)
    weight = module.get_parameter("up.weight")
    assert isinstance(weight, DTensor)
    (cut,) = weight.placements
    assert isinstance(cut, Shard)
    row = weight.select(cut.dim, 3)  # which PyTorch copies
    expected = full(row).clone()
    weight.data.mul_(2)
    torch.testing.assert_close(full(row), expected * 2)
    weight.to_local().detach().mul_(2)
    torch.testing.assert_close(full(row), expected * 4)
    with torch.inference_mode():
        weight.data.mul_(0.25)
    torch.testing.assert_close(full(row), expected)
    for write in (
        lambda: weight.data.mul_(1.0),
        lambda: setattr(weight, "data", weight.data.clone()),
        lambda: weight.to_local().detach().mul_(1.0),
    ):
        loss = module(BATCH)
        write()
        with pytest.raises(BackendError, match=r"^rank 0: backward\(\) after a parameter that it"):
            loss.backward()
    for use in (lambda: row + 1, row.zero_, lambda: weight.detach().select(cut.dim, 2).copy_(row)):
        said = r"^a part of a tensor .* before the tensor's \.da"
        with torch.no_grad(), pytest.raises(BackendError, match=said):
            use()
    for _ in range(2):
        given = weight.clone()
        earlier = given.select(cut.dim, 3)
        weight.data = given.data
        rows = earlier, given.select(cut.dim, 3)
        expected = full(earlier).clone()
        weight.data.mul_(2)
        for row in rows:
            torch.testing.assert_close(full(row), expected * 2)
    for other in (torch.zeros(13, 6, dtype=torch.float64), weight.T, weight.sum(0)):
        with pytest.raises(BackendError, match=r"^the \.data of a tensor that .* not cut so"):
            weight.data = other.detach()
    with pytest.raises(BackendError, match=r"^squeeze_\(\) of a part of a tensor that is cut ove"):
        weight.detach().narrow(cut.dim, 3, 1).squeeze_(cut.dim)
    with pytest.raises(BackendError, match=r"^an operator writes to a part .* by another view: cl"):
        weight.detach().select(cut.dim, 3).mul_(weight.detach().T.select(1 - cut.dim, 0))


def one_rank_writes_data(rank: int) -> None:
    """A rank that alone writes to its part is named."""
    module, _whole = pair("zero3", 2)
    module(BATCH)
    if rank == 1:
        module.get_parameter("up.bias").data.mul_(2)
    with pytest.raises(BackendError, match=r"^rank 1 has other writes to 'up\.bias' than rank 0"):
        module(BATCH)


def parts_without_elements(rank: int) -> None:
    """Parts that lie behind each other, as gradients do, of which a rank has no elements."""
    mesh = DeviceMesh("cpu", [0, 1, 2])
    correct_operators([mesh])
    numbers = torch.tensor([[1.0, 2.0], [3.0, 5.0]])
    line = numbers[:, rank : rank + 1].clone().reshape(-1)
    parts = [
        DTensor.from_local(
            part, mesh, [Shard(0)], run_check=False, shape=torch.Size([2]), stride=(1,)
        )
        for part in (line[: len(line) // 2], line[len(line) // 2 :])
    ]
    cut = distribute_tensor(numbers, mesh, [Shard(0)])
    results = []
    for (a, b), factors in ((parts, cut), (numbers.clone(), numbers)):
        product = torch.zeros(2).addcmul_(a, b)
        torch._foreach_mul_([a, b], [factors.prod(0), factors.sum(0)])
        a[0].add_(b[1])
        a[0].mul_(a.data[1])
        results.append([product, full(a), full(b)])
    torch.testing.assert_close(*results)


def gradients_of_writes(_: int) -> None:
    """Gradients go through what was written to a part of a tensor that was computed."""
    mesh = DeviceMesh("cpu", [0, 1, 2])
    correct_operators([mesh])
    whole = torch.rand(5, 4, generator=torch.Generator().manual_seed(0))
    for cut in (Shard(0), Shard(1)):
        weights = nn.Parameter(distribute_tensor(whole, mesh, [cut])), nn.Parameter(whole.clone())
        for weight in weights:
            made = weight * 2
            made[1] = 0.0
            made[3:] *= 3
            made[:, 1].mul_(weight[:, 0])
            made.square().sum().backward()
        ours, theirs = (weight.grad for weight in weights)
        assert isinstance(ours, DTensor)
        torch.testing.assert_close(ours.full_tensor(), theirs)


def in_thread(run: Callable[[], object]) -> list[BaseException]:
    """What a function raises in another thread."""
    raised: list[BaseException] = []

    def caught() -> None:
        try:
            run()
        except BaseException as error:  # noqa: BLE001 - the caller looks at it
            raised.append(error)

    thread = threading.Thread(target=caught)
    thread.start()
    thread.join()
    return raised


def other_threads(_: int) -> None:
    """Plain tensors are whole beside DTensors in all threads, but not those of others."""
    ready, go = threading.Event(), threading.Event()
    results: list[Tensor] = []
    mesh, plain = DeviceMesh("cpu", [0, 1, 2]), torch.rand(5, 3)
    weight = distribute_tensor(torch.rand(5, 3), mesh, [Shard(0)])

    def waiting() -> None:
        ready.set()
        go.wait()
        results.append(weight * plain)

    before = threading.Thread(target=waiting)
    before.start()
    ready.wait()
    correct_operators([mesh])
    go.set()
    before.join()
    assert in_thread(lambda: results.append(weight.mul_(plain).add_(plain[0]))) == []
    torch.testing.assert_close(results[0].full_tensor() + plain[0], results[1].full_tensor())  # type: ignore[attr-defined]
    others = distribute_tensor(torch.rand(5, 3), DeviceMesh("cpu", [0, 1]), [Replicate()])
    for run in (lambda: others + plain, lambda: others.lerp_(plain, 0.5)):
        assert "got mixed torch.Tensor and DTensor" in str(in_thread(run))

    def allowed() -> None:
        with implicit_replication():
            others.sub_(plain)

    assert in_thread(allowed) == []
    inside, leave = threading.Event(), threading.Event()

    def operator() -> None:
        inside.set()
        leave.wait()

    handlers = DTensor._op_dispatcher._custom_op_handlers
    handlers[operator] = by_pytorch
    thread = threading.Thread(target=by_pytorch, args=(operator, (), {}))
    thread.start()
    inside.wait()
    assert operator in DTensor._op_dispatcher._custom_op_handlers  # in this thread
    leave.set()
    thread.join()
    del handlers[operator]
    by_pytorch(operator, (), {})  # which another thread has watched no longer


def notes_of_threads(_: int) -> None:
    """A thread notes plain tensors as long as it needs them, whatever another one compares."""
    mesh, ranks = DeviceMesh("cpu", [0, 1, 2]), [(0, 1, 2)]
    correct_operators([mesh])
    weight, taken = distribute_tensor(torch.rand(5, 3), mesh, [Shard(0)]), list[dict[str, int]]()

    def first_and_second(*, meanwhile: Callable[[], object]) -> None:
        correct_operators([mesh])
        weight.fmod(torch.full((5, 3), 2.0))
        meanwhile()
        weight.fmod(torch.full((5, 3), 3.0))
        taken.append(compared_notes(ranks))

    for compares in (lambda: None, lambda: in_thread(lambda: compared_notes(ranks))):
        assert in_thread(partial(first_and_second, meanwhile=compares)) == []
    alone, beside_another = taken
    assert alone == beside_another
    assert list(alone) == ["fmod"]


def masks_in_any_order(rank: int) -> None:
    """Ranks come to their parameters in unlike orders, each of which has a mask of its own."""
    module, _whole = pair("zero3", 2)
    names = [name for name, p in module.named_parameters()]
    random = torch.Generator().manual_seed(0)
    masks = {
        name: torch.rand(p.shape, dtype=p.dtype, generator=random)
        for name, p in module.named_parameters()
    }
    for turn in range(6):
        with torch.no_grad():
            for name in names[:: -1 if rank and turn % 2 else 1]:
                module.get_parameter(name).mul_(masks[name])
            for some in (names[:2], names[2:])[:: -1 if rank else 1]:
                parameters = [module.get_parameter(name) for name in some]
                torch._foreach_mul_(parameters, [masks[name] for name in some])
        step(module)
    module.get_parameter("up.bias").data.fmod(torch.full((13,), 1.0 + rank))
    match = r"^rank 1 has another plain tensor beside .* in 'fmod' than rank 0: it stands"
    with pytest.raises(BackendError, match=match):
        module(BATCH)
    if rank:  # nobody knows when the others do
        ended = in_thread(lambda: module.get_parameter("up.bias").data.fmod(torch.ones(13)))
        assert ended == []
    module(BATCH)


JOBS = {
    **{
        f"contents set, {parallel} on {ranks}": Job(
            *(ranks, partial(sets_contents, parallel, ranks)),
            [partial(program, parallel, ranks)],
            slow=(parallel, ranks) == ("zero3", 2),
        )
        for parallel, ranks in (("zero3", 2), ("zero3", 3), ("tp", 3), ("dp", 2), ("zero2", 2))
    },
    **{
        f"data swapped, {parallel} on {ranks}": Job(
            ranks, partial(swaps_data, parallel, ranks), [partial(program, parallel, ranks)]
        )
        for parallel, ranks in (("zero3", 2), ("tp", 3), ("dp", 2))
    },
    "stale data": Job(2, data_is_not_stale, [partial(program, "zero3", 2)]),
    "data of one rank": Job(2, one_rank_writes_data, [partial(program, "zero3", 2)]),
    "parts without elements": Job(3, parts_without_elements, timeout_s=20),
    "gradients of writes": Job(3, gradients_of_writes),
    "threads": Job(3, other_threads),
    "notes of threads": Job(3, notes_of_threads),
    "masks in any order": Job(2, masks_in_any_order, [partial(program, "zero3", 2)]),
}
