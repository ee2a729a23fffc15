"""Compiled modules trained by ranks of a gloo group: jobs of test_rank_module.py."""

import os
import signal
import tempfile
import time
import weakref
from collections.abc import Callable, Sequence
from functools import cache, partial
from multiprocessing import Event, Semaphore
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import partitioner
from helpers.modules.trained import Batch, Gpt, Mlp
from jobs.dtensors import rank_tensors
from jobs.modules import (
    agreement_jobs,
    autocast_modules,
    cached_modules,
    checkpoints,
    few_messages_jobs,
    losses_outside,
    placed_modules,
    side_modules,
    whole_copies,
    written_buffers,
)
from jobs.processes.torch_ranks import Job, LeftError, main
from partitioner.api.compiled.module import ModuleProgram
from partitioner.backends.errors import BackendError, CommunicationError
from partitioner.backends.torch.agreeing.groups import register_named, resolved_group
from partitioner.backends.torch.operators.registry import group_name
from partitioner.backends.torch.running.held_state import local_part
from partitioner.backends.torch.running.rank_module import RankModule
from partitioner.backends.torch.state.initialise import Initialiser
from partitioner.ir.phases import Part, whole_batch_order
from partitioner.strategies.constraints import Constraints, Pin

Optimizer = Callable[[Any], torch.optim.Optimizer]
STEPS = 10
#: Weights that the plans must shard, for each module.
SHARDED = {
    Mlp: ("first.weight", "norm.weight", "norm.running_mean"),
    Gpt: ("words.weight", "blocks.0.up.weight", "blocks.0.qkv.weight"),
}


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def seeded(
    kind: type[Mlp | Gpt], dropout: float = 0.0, dtype: torch.dtype = torch.float64
) -> Mlp | Gpt:
    """In float32 Adam makes steps of noise around 0."""
    torch.manual_seed(0)
    return kind(dropout).to(dtype)


@cache
def program(
    kind: type[Mlp | Gpt],
    ranks: int,
    dropout: float = 0.0,
    parts: bool = False,
    dtype: torch.dtype = torch.float64,
) -> ModuleProgram:
    """Sharded over two axes on 4 ranks; `parts`: the batch is cut over all of them."""
    pins = [Pin(name, tensor=name, dim=0) for name in SHARDED[kind]] if ranks > 1 else []
    if parts:
        pins = [
            Pin(name, tensor=name, dim=0)
            for name in (("x", "y") if kind is Mlp else ("ids", "labels"))
        ]
    module = seeded(kind, dropout, dtype)
    compiled_program = partitioner.compile(
        module,
        kind.batch(0),
        devices=ranks,
        training=True,
        cluster="ideal",
        mesh={"dp": 2, "tp": 2} if ranks == 4 else None,
        constraints=Constraints(tuple(pins)),
        gap=0.5,
    )
    assert isinstance(compiled_program, ModuleProgram)
    return compiled_program


def loss_of(result: Any) -> torch.Tensor:
    loss = result[0] if isinstance(result, tuple) else result
    assert isinstance(loss, torch.Tensor)
    return loss


def train(
    module: nn.Module, batch: Callable[[int], Batch], optimizer: Optimizer = adamw
) -> list[float]:
    """Losses of some steps."""
    update = optimizer(module.parameters())
    losses = []
    for step in range(STEPS):
        loss = loss_of(module(*batch(step)))
        loss.backward()
        update.step()
        update.zero_grad()
        losses.append(loss.item())
    return losses


def same(module: RankModule, whole: nn.Module) -> None:
    """All names, and weights as of one process."""
    expected = whole.state_dict()
    state = module.full_state_dict()
    assert sorted(state) == sorted(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(state[name], tensor, rtol=1e-4, atol=1e-4, msg=name)


def check_training(kind: type[Mlp | Gpt], ranks: int, optimizer: Optimizer = adamw) -> None:
    module = program(kind, ranks).module()
    for name in SHARDED[kind]:
        shard = module.state_dict()[name]
        assert shard.to_local().numel() < shard.numel()
    whole = seeded(kind)
    losses = train(module, kind.batch, optimizer)
    torch.testing.assert_close(
        torch.tensor(losses), torch.tensor(train(whole, kind.batch, optimizer))
    )
    same(module, whole)


def trains_mlp(_: int) -> None:
    check_training(Mlp, dist.get_world_size())


def trains_gpt(_: int) -> None:
    check_training(Gpt, dist.get_world_size())


def other_optimizers(_: int) -> None:
    check_training(Mlp, 2, sgd)
    check_training(Gpt, 2, lambda p: torch.optim.Adam(p, lr=1e-2, foreach=False))


def finds_anomalies(_: int) -> None:
    with torch.autograd.set_detect_anomaly(True):
        check_training(Gpt, 2, sgd)
        module = program(Gpt, 2).module()
        with torch.no_grad():
            next(module.parameters()).fill_(torch.nan)
        loss = module(*Gpt.batch(0))
        with pytest.raises(RuntimeError, match="returned nan values"):
            loss.backward()


def dropout_is_that_of_one_device(_: int) -> None:
    """The draws follow from (seed << 32) + step, however the model is cut."""
    many = program(Gpt, 2, dropout=0.3)
    one = program(Gpt, 1, dropout=0.3)
    module = many.module(seed=5)
    for step in range(2):
        loss = module(*Gpt.batch(step))
        loss.backward()
        right, gradients = one.gradients(*Gpt.batch(step), seed=(5 << 32) + step)
        torch.testing.assert_close(loss, right)
        for name, parameter in module.named_parameters():
            assert isinstance(parameter.grad, DTensor)
            torch.testing.assert_close(parameter.grad.full_tensor(), gradients[name])
        module.zero_grad()
    assert module.steps == 2
    other = program(Gpt, 2, dropout=0.3).module(seed=6)
    assert (other(*Gpt.batch(1)) - right).abs() > 1e-4


def clips_accumulates_and_scales(_: int) -> None:
    module, whole = program(Gpt, 2).module(), seeded(Gpt)
    for one in (module, whole):
        update = adamw(one.parameters())
        for step in range(3):
            first, second = one(*Gpt.batch(step)), one(*Gpt.batch(step + 10))
            (loss_of(first) * 0.5).backward()
            (loss_of(second) * 0.5).backward()
            norm = nn.utils.clip_grad_norm_(one.parameters(), 0.05)
            assert norm > 0.05
            update.step()
            update.zero_grad()
    same(module, whole)
    loss = module(*Gpt.batch(0))
    kept = loss.grad_fn.kept
    assert kept
    loss.backward(retain_graph=True)
    assert not kept  # nobody holds what was freed on the way
    with pytest.raises(BackendError, match="second time on one step"):
        loss.backward()


def evaluates(_: int) -> None:
    for kind in (Mlp, Gpt):
        module, whole = program(kind, dist.get_world_size(), dropout=0.3).module(), seeded(kind)
        train(module, kind.batch)
        whole.load_state_dict(module.full_state_dict())
        whole.eval()
        module.eval()
        for size in (4, 6):
            batch = kind.batch(50, size)
            torch.testing.assert_close(module(*batch), whole(*batch), rtol=1e-5, atol=1e-5)
        same(module, whole)  # the running statistics are not written
        module.train()
        steps = module.steps
        with torch.no_grad():
            assert not loss_of(module(*kind.batch(0))).requires_grad
        assert module.steps == steps + 1
        module(*kind.batch(0))


def without_gradients_the_statistics_move(_: int) -> None:
    module, whole = program(Mlp, 2).module(), seeded(Mlp)
    with torch.no_grad():
        torch.testing.assert_close(module(*Mlp.batch(3)), whole(*Mlp.batch(3)))
    same(module, whole)


def sized(kind: type[Mlp | Gpt], step: int) -> Batch:
    """Batches of several sizes."""
    return kind.batch(step, [4, 6, 4, 6, 8][step % 5])


def other_batch_sizes(_: int) -> None:
    for kind in (Mlp, Gpt):
        module, whole = program(kind, 2).module(), seeded(kind)
        batch = partial(sized, kind)
        losses = [train(one, batch) for one in (module, whole)]
        torch.testing.assert_close(*map(torch.tensor, losses))
        same(module, whole)
    with pytest.raises(BackendError, match=r"^rank \d: arguments are 1 positional"):
        module(Gpt.batch(0)[0])


def a_batch_of_fewer_samples_than_parts(_: int) -> None:
    module, whole = program(Gpt, 2, parts=True).module(), seeded(Gpt)

    def batch(step: int) -> Batch:
        return Gpt.batch(step, [4, 1, 3, 1][step % 4])

    losses = [train(one, batch) for one in (module, whole)]
    torch.testing.assert_close(*map(torch.tensor, losses))
    same(module, whole)


def few_sizes_are_kept(_: int) -> None:
    module, whole = program(Mlp, 2).module(kept_sizes=2), seeded(Mlp)
    made: list[weakref.ref[Any]] = []
    for samples in (4, 6, 10, 12, 14, 4, 16):
        args = Mlp.batch(samples, samples)
        torch.testing.assert_close(module(*args), whole(*args))
        made.append(weakref.ref([*module._passes.values()][-1]))
    assert len({id(one()) for one in made if one() is not None}) <= 3
    with pytest.raises(BackendError, match="kept_sizes is 0; it must be at least 1"):
        program(Mlp, 2).module(kept_sizes=0)


def own_parts_are_the_whole_batch(rank: int) -> None:
    compiled_program = program(Mlp, 2, parts=True)
    module, whole = compiled_program.module(inputs="local"), seeded(Mlp)
    half = slice(4 * rank, 4 * rank + 4)
    losses = train(module, lambda s: tuple(t[half] for t in Mlp.batch(s)))
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(train(whole, Mlp.batch)))
    same(module, whole)
    module.eval()
    whole.eval()
    torch.testing.assert_close(
        module(*(t[half] for t in Mlp.batch(90))), whole(*Mlp.batch(90)), rtol=1e-5, atol=1e-5
    )
    module.train()
    size = 3 if rank else 4
    with pytest.raises(BackendError, match=r"^rank 1: its part of input 'x' is float64\[3, 16\]"):
        module(*Mlp.batch(0, size))


def rows_are_the_whole_batch(rank: int) -> None:
    """Each rank brings half of the rows, whatever the plan cuts, at any size, in evaluation too."""
    for kind in (Mlp, Gpt):
        module, whole = program(kind, 2).module(inputs="rows"), seeded(kind)

        def half(batch: Batch) -> Batch:
            first, second = (t[rank * len(t) // 2 : (rank + 1) * len(t) // 2] for t in batch)
            return first, second

        losses = train(module, lambda s, kind=kind, half=half: half(kind.batch(s)))
        torch.testing.assert_close(losses, train(whole, kind.batch))
        same(module, whole)
        for size in (8, 6):
            module.eval()
            whole.eval()
            torch.testing.assert_close(
                module(*half(kind.batch(90, size))), whole(*kind.batch(90, size))
            )
        with pytest.raises(BackendError, match=r"rank 0: its rows .*; rank 1: its rows "):
            module(*kind.batch(0, 3 + rank))
        module.train()
        if kind is Mlp:
            x, y = half(kind.batch(0))
            with pytest.raises(BackendError, match="rank 1: an input requires a gradient"):
                module(x.requires_grad_(rank == 1), y)
        whole.train()
        torch.testing.assert_close(
            loss_of(module(*half(kind.batch(1)))), loss_of(whole(*kind.batch(1)))
        )


def a_part_of_another_rank_is_not_loaded(rank: int) -> None:
    module = program(Mlp, 2).module()
    update = adamw(module.parameters())
    loss_of(module(*Mlp.batch(0))).backward()
    update.step()
    saved = [p.detach().clone() for p in module.parameters()]
    torch.save([module.state_dict(), update.state_dict()], f"part-{rank}")
    dist.barrier()
    for parameter in module.parameters():
        parameter.data.zero_()
    model, moments = torch.load(f"part-{rank}")
    module.load_state_dict(model)
    update.load_state_dict(moments)
    for parameter, before in zip(module.parameters(), saved, strict=True):
        assert torch.equal(local_part(parameter), local_part(before))
    match = f"rank {rank} loads a part of a tensor that rank {1 - rank} saved"
    with pytest.raises(BackendError, match=match):
        torch.load(f"part-{1 - rank}")
    dist.destroy_process_group()
    torch.save(module.state_dict(), f"part-{rank}")  # a script may end so


def ranks_that_differ_say_so(rank: int) -> None:
    module = program(Mlp, 2).module()
    with pytest.raises(
        BackendError,
        match=r"^the ranks do not do the same: rank 0: .*\[8,16\].*; rank 1: .*\[6,16\]",
    ):
        module(*Mlp.batch(0, 6 if rank else 8))
    module.train(rank == 0)
    with pytest.raises(BackendError, match=r"rank 0: training step .*; rank 1: evaluation step"):
        module(*Mlp.batch(0))
    module.train()
    module(*Mlp.batch(0))  # they go on


def loads_the_whole_model(_: int) -> None:
    for kind in (Mlp, Gpt):
        loads(kind)
        draws(kind)


def loads(kind: type[Mlp | Gpt]) -> None:
    module, whole = program(kind, 2).module(), kind().double()
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.add_(1)
    module.load_state_dict(whole.state_dict())
    same(module, whole)
    shards = module.state_dict()
    assert {n: t.shape for n, t in shards.items()} == {
        n: t.shape for n, t in whole.state_dict().items()
    }
    module.load_state_dict(shards)
    same(module, whole)
    with pytest.raises(RuntimeError, match="size mismatch"):
        module.load_state_dict({**whole.state_dict(), "norm.weight": torch.ones(3)})


def draws(kind: type[Mlp | Gpt]) -> None:
    """Weights that are drawn anew are those of one process, and so are numbers read of them."""
    module, whole = program(kind, 2).module(), seeded(kind)
    for one in (module, whole):
        torch.manual_seed(3)
        given = torch.Generator().manual_seed(4)
        with torch.no_grad():
            for parameter in one.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
                if parameter.dim() > 1:
                    nn.init.xavier_uniform_(parameter, generator=given)
    same(module, whole)
    ours, right = (
        [number for p in one.parameters() for number in (p.norm().item(), float(p.abs().sum()))]
        for one in (module, whole)
    )
    torch.testing.assert_close(ours, right)


def checkpoint(_: int) -> None:
    """What 4 ranks save, 2 ranks with another plan load: weights and the optimizer's state."""
    for kind in (Mlp, Gpt):  # the loss of Mlp does not depend on all parameters
        checkpoint_of(kind)


def checkpoint_of(kind: type[Mlp | Gpt]) -> None:
    folder = kind.__name__
    module = program(kind, dist.get_world_size()).module()
    whole = seeded(kind)
    update, right = adamw(module.parameters()), adamw(whole.parameters())
    for step in range(4):
        if step == 2 and dist.get_world_size() == 4:
            checkpoints.save(module, update, folder)
            return
        if step == 2:
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.zero_()
            checkpoints.restore(module, update, folder)
        for one, its in ((module, update), (whole, right)):
            if one is module and step < 2 and dist.get_world_size() == 2:
                continue
            loss_of(one(*kind.batch(step))).backward()
            its.step()
            its.zero_grad()
    same(module, whole)


@cache
def data_parallel() -> ModuleProgram:
    """Every rank holds all of it."""
    compiled_program = partitioner.compile(
        seeded(Mlp), Mlp.batch(0), devices=2, training=True, cluster="ideal", parallel="dp"
    )
    assert isinstance(compiled_program, ModuleProgram)
    return compiled_program


def whole_parameters_are_ordinary(_: int) -> None:
    """Where no rank holds a part, any optimizer takes them, those with lists of tensors too."""
    optimizers: list[Optimizer] = [
        sgd,
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
        *(
            partial(torch.optim.AdamW, lr=1e-2, **way)
            for way in ({"foreach": True}, {"fused": True})
        ),
    ]
    for optimizer in optimizers:
        module, whole = data_parallel().module(), seeded(Mlp)
        assert not any(isinstance(parameter, DTensor) for parameter in module.parameters())
        losses = [train(one, Mlp.batch, optimizer) for one in (module, whole)]
        torch.testing.assert_close(*map(torch.tensor, losses))
        same(module, whole)
        theirs = partial(nn.utils.clip_grad_norm_, list(whole.parameters()))
        torch.testing.assert_close(clipped(module, module.clip_grad_norm_), clipped(whole, theirs))
    for one in (module, whole):
        next(one.parameters()).data = torch.full((32, 16), 0.1, dtype=torch.float64)
    torch.testing.assert_close(loss_of(module(*Mlp.batch(0))), loss_of(whole(*Mlp.batch(0))))
    loss = loss_of(module(*Mlp.batch(0)))
    last = module.get_parameter("second.weight")
    last.data = torch.zeros_like(last.data)
    with pytest.raises(BackendError, match=r"^rank 0: backward\(\) after a parameter .* written"):
        loss.backward()
    next(module.parameters()).data = torch.zeros(32, 15, dtype=torch.float64)
    with pytest.raises(
        BackendError, match=r"first\.weight has the sizes \[32, 15\] now and had \["
    ):
        module(*Mlp.batch(0))


def clipped(module: nn.Module, clip: Callable[[float], torch.Tensor]) -> torch.Tensor:
    """The norm of the gradients of a step."""
    loss_of(module(*Mlp.batch(20))).backward()
    return clip(0.01).double()


def whole_and_cut_parameters_load_each_other(_: int) -> None:
    """Weights and the optimizer's state, from a plan that cuts none to one that does, and back."""
    load_from(data_parallel().module(), program(Mlp, 2).module())
    load_from(program(Mlp, 2).module(), data_parallel().module())
    whole, cut = data_parallel().module(), program(Mlp, 2).module()
    train(cut, Mlp.batch)
    parameters = dict(cut.named_parameters())
    whole.load_state_dict(parameters, strict=False)  # its buffers lie on another mesh
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(parameter, parameters[name].full_tensor(), rtol=0, atol=0)
    cut.load_state_dict(dict(whole.named_parameters()), strict=False)
    for module in (whole, cut):
        module(*Mlp.batch(0))


def load_from(saved: RankModule, loaded: RankModule) -> None:
    """A checkpoint of one module, which the other goes on from."""
    updates = [adamw(module.parameters()) for module in (saved, loaded)]

    def step(index: int, number: int) -> None:
        loss_of((saved, loaded)[index](*Mlp.batch(number))).backward()
        updates[index].step()
        updates[index].zero_grad()

    for number in range(3):
        step(0, number)
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    checkpoints.save(saved, updates[0], folder[0])
    checkpoints.restore(loaded, updates[1], folder[0])
    for index in range(2):
        step(index, 3)
    expected = saved.full_state_dict()
    for name, tensor in loaded.full_state_dict().items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-6, atol=1e-6, msg=name)


@cache
def program_of_fakes() -> ModuleProgram:
    """Its weights have no contents."""
    with torch.device("meta"):
        fake = Gpt()
    compiled_program = partitioner.compile(
        fake,
        Gpt.batch(0),
        devices=2,
        training=True,
        cluster="ideal",
        constraints=Constraints((Pin("up", tensor="blocks.0.up.weight", dim=0),)),
        gap=0.5,
    )
    assert isinstance(compiled_program, ModuleProgram)
    return compiled_program


def initialises_from_a_seed(_: int) -> None:
    compiled_program = program_of_fakes()
    with pytest.raises(BackendError, match=r"weights are fake: give init_seed="):
        compiled_program.module()
    module = compiled_program.module(init_seed=7)
    alone = Initialiser(Gpt(), 7)
    state = module.full_state_dict()
    for name, tensor in state.items():
        torch.testing.assert_close(tensor, alone("words.weight" if name == "head.weight" else name))
    whole = Gpt()
    whole.load_state_dict(state)
    torch.testing.assert_close(module(*Gpt.batch(0)), whole(*Gpt.batch(0)))
    module.eval()
    torch.testing.assert_close(module(*Gpt.batch(0, 6)), whole(*Gpt.batch(0, 6)))


def refuses_what_it_would_not_notice(_: int) -> None:  # noqa: C901 (a list of changes)
    def step(module: RankModule) -> None:
        module(*Mlp.batch(0))

    def eval_part(module: RankModule) -> None:
        module.get_submodule("norm").eval()
        step(module)

    def hook_part(module: RankModule) -> None:
        module.get_submodule("norm").register_forward_hook(lambda *_: None)
        step(module)

    def hook_all(module: RankModule) -> None:
        handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
        try:
            step(module)
        finally:
            handle.remove()

    def replaces(module: RankModule) -> None:
        module.get_submodule("first").weight = nn.Parameter(torch.zeros(32, 16))
        step(module)

    def removes(module: RankModule) -> None:
        del module.first
        step(module)

    def narrows(module: RankModule) -> None:
        step(module.float())

    def assigns(module: RankModule) -> None:
        module.load_state_dict(seeded(Mlp).state_dict(), assign=True)

    def asks_an_input(module: RankModule) -> None:
        x, y = Mlp.batch(0)
        module(x.requires_grad_(), y)

    def steps_between(module: RankModule, optimizer: Optimizer = sgd) -> None:
        losses = [loss_of(module(*Mlp.batch(seed))) for seed in range(2)]
        losses[0].backward()
        optimizer(module.parameters()).step()
        losses[1].backward()

    def steps_of_all(module: RankModule) -> None:
        steps_between(module, partial(torch.optim.AdamW, foreach=True))

    def steps_in_one(module: RankModule) -> None:
        steps_between(module, partial(torch.optim.AdamW, fused=True))

    def writes_an_input(module: RankModule, index: int = 0) -> None:
        batch = Mlp.batch(0)
        loss = loss_of(module(*batch))
        batch[index].zero_()
        loss.backward()

    for change, message in (
        (eval_part, r"^rank 0: norm is in evaluation mode"),
        (hook_part, r"norm has a hook, which would not be called"),
        (hook_all, r"is a hook of all modules, not of these: submodules do not run"),
        (replaces, r"first\.weight was replaced by another tensor"),
        (removes, r"first\.\w+ was replaced by another tensor"),
        (narrows, r"is float32 now and was float64: for another element type, compile"),
        (assigns, r"load it without assign"),
        (asks_an_input, r"an input requires a gradient"),
        (steps_between, r"after a parameter that it needs was written to"),
        (steps_of_all, r"after a parameter that it needs was written to"),
        (steps_in_one, r"after a parameter that it needs was written to"),
        (writes_an_input, r"after an input, a result or a buffer of the step that it needs was wr"),
        (partial(writes_an_input, index=1), r"^rank 0: backward\(\) after an input, a result or"),
    ):
        with pytest.raises(BackendError, match=message):
            change(program(Mlp, 2).module())
    module = program(Mlp, 2).module()
    loss, scores = module(*Mlp.batch(0))
    scores.detach().zero_()  # no gradient is computed from them
    loss.backward()


class Counted(nn.Module):
    """A buffer has the name of what a rank's module counts."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Loss."""
        self.steps += 1
        return self.layer(x).square().mean() * self.steps


@cache
def counted() -> ModuleProgram:
    torch.manual_seed(0)
    batch = torch.randn(4, 4)
    program_of_it = partitioner.compile(Counted(), batch, devices=2, training=True, cluster="ideal")
    assert isinstance(program_of_it, ModuleProgram)
    return program_of_it


def names_that_are_taken(_: int) -> None:
    with pytest.raises(BackendError, match=r"^the model's own 'steps' has the name of an attrib"):
        counted().module()


def frozen_parameters(_: int) -> None:
    module, whole = program(Gpt, 2).module(), seeded(Gpt)
    for one in (module, whole):
        update = sgd(one.parameters())
        up, down = (one.get_parameter(f"blocks.0.{name}.weight") for name in ("up", "down"))
        for step in range(3):
            up.requires_grad_(step != 1)
            loss = loss_of(one(*Gpt.batch(step)))
            down.requires_grad_(step != 2)  # its gradient comes no more
            loss.backward()
            down.requires_grad_(True)
            update.step()
            update.zero_grad()
    same(module, whole)


@cache
def zero3() -> ModuleProgram:
    compiled_program = partitioner.compile(
        seeded(Gpt), Gpt.batch(0), devices=2, training=True, cluster="ideal", parallel="zero3"
    )
    assert isinstance(compiled_program, ModuleProgram)
    return compiled_program


def trains_by_zero3(_: int) -> None:
    """Where communication is free, ranks do not do alike, and hold zeros for parts of others."""
    module, whole = zero3().module(), seeded(Gpt)
    losses = [train(one, Gpt.batch, sgd) for one in (module, whole)]
    torch.testing.assert_close(*map(torch.tensor, losses))
    same(module, whole)
    with torch.inference_mode():
        for one in (module, whole):
            one.eval()
        torch.testing.assert_close(module(*Gpt.batch(9)), whole(*Gpt.batch(9)))


SOON_S = 30  # without the group's timeout of 60 s, however slow the machine is


def end() -> None:
    """Die as a process that is killed."""
    os.kill(os.getpid(), signal.SIGKILL)


def a_rank_dies_between_steps(rank: int) -> None:
    module = program(Mlp, 2).module()
    module(*Mlp.batch(0))
    if rank == 1:
        end()
    start = time.monotonic()
    message = r"^rank 0: waiting for the other ranks before training step 1 .*: rank 1 has ended"
    with pytest.raises(CommunicationError, match=message):
        module(*Mlp.batch(0))
    assert time.monotonic() - start < SOON_S


NUMBER = whole_batch_order(1).phases.number
PHASES = {"forward": NUMBER(Part.FORWARD), "backward": NUMBER(Part.BACKWARD)}
COME = {"forward": Semaphore(0), "backward": Semaphore(0)}  # once for each rank in the pass


def dies_in(last: str, rank: int) -> None:
    module = program(Gpt, 4).module()
    passes = module._passes[""]

    def dies(*_: torch.Tensor) -> Sequence[torch.Tensor]:
        for _ in range(3):
            assert COME[last].acquire(timeout=20)
        end()
        return ()

    def comes() -> None:
        COME[last].release()

    if rank == 3:
        passes._runs[0][PHASES[last]] = dies
    else:
        run = passes._runs[0][PHASES[last]]
        first = next(node for node in run.graph.nodes if node.op == "call_function")
        with run.graph.inserting_before(first):
            run.graph.call_function(comes)
        run.recompile()
    start = time.monotonic()
    message = (
        rf"^rank {rank}: [a-z-]+ of '.+' for '/.+'( and [0-9]+ more)? "
        rf"with ranks? .* in the {last} pass: ranks? ([0-9], )*3 ha(s|ve) ended"
    )
    with pytest.raises(CommunicationError, match=message):
        loss_of(module(*Gpt.batch(0))).backward()
    assert time.monotonic() - start < SOON_S


def dies_in_forward(rank: int) -> None:
    dies_in("forward", rank)


def dies_in_backward(rank: int) -> None:
    dies_in("backward", rank)


MADE, WAITED = Event(), Event()  # known to both ranks, as they are forked


def a_rank_that_raises(rank: int) -> None:
    module = program(Mlp, 2).module()
    if rank == 1:
        assert MADE.wait(20)
        raise LeftError
    MADE.set()
    with pytest.raises(CommunicationError, match=r"^rank 0: .*: rank 1 has ended"):
        module(*Mlp.batch(0))


def a_rank_that_hangs(rank: int) -> None:
    module = program(Mlp, 2).module()
    module(*Mlp.batch(0))
    passes = module._passes[""]
    if rank == 1:
        run = passes._runs[0][PHASES["forward"]]

        def late(*arguments: torch.Tensor) -> Sequence[torch.Tensor]:
            assert WAITED.wait(40)
            return run(*arguments)

        passes._runs[0][PHASES["forward"]] = late
    match = r"^rank \d: .*(did not come in time, as it hangs, .*timeout=|(a rank|rank 0) has ended)"
    with pytest.raises(CommunicationError, match=match) as caught:
        module(*Mlp.batch(0))
    assert rank == 1 or "did not come in time" in str(caught.value)
    WAITED.set()


def compiled(_: int) -> None:
    # inductor's vectors of float64 lack some casts
    compiled_program = program(Gpt, 2, dtype=torch.float32)
    for how in ("method", "function"):
        module, whole = compiled_program.module(), seeded(Gpt, dtype=torch.float32)
        if how == "method":
            module.compile()
            losses = train(module, Gpt.batch, sgd)
        else:
            losses = train(torch.compile(module), Gpt.batch, sgd)
        right = train(whole, Gpt.batch, sgd)
        for passes in module._passes.values():
            assert all(
                not isinstance(run, torch.fx.GraphModule) for run in passes._runs[0].values()
            )
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(right), rtol=1e-4, atol=1e-4)
        same(module, whole)
        module.eval()
        whole.eval()
        torch.testing.assert_close(
            module(*Gpt.batch(9)), whole(*Gpt.batch(9)), rtol=1e-4, atol=1e-4
        )


def programs(ranks: int = 2, **options: Any) -> list[Callable[[], ModuleProgram]]:
    return [partial(program, kind, ranks, **options) for kind in (Mlp, Gpt)]


MLP, GPT = programs()
MLP_ON_4, GPT_ON_4 = programs(4)


def two_programs_share_groups(rank: int) -> None:
    """A rank outside of a group that it has seen before makes the next ones with the others."""
    register_named([(0, 1)])
    register_named([(0, 1), (1, 2)])
    register_named([(0, 1), (0, 2), (1, 2)])
    for ranks in ((0, 1), (1, 2), (0, 2)):
        if rank in ranks:
            group = resolved_group(group_name(ranks))
            total = torch.tensor([rank])
            dist.all_reduce(total, group=group)
            assert total.item() == sum(ranks)
            del group


PLACED, ZERO3 = (partial(placed_modules.program, how) for how in ("placed", "zero3"))

JOBS = {
    "mlp_on_2": Job(2, trains_mlp, [MLP], slow=True),
    "gpt_on_2": Job(2, trains_gpt, [GPT], slow=True),
    "mlp_on_4": Job(4, trains_mlp, [MLP_ON_4]),
    "gpt_on_4": Job(4, trains_gpt, [GPT_ON_4], slow=True),
    "optimizers": Job(2, other_optimizers, [MLP, GPT]),
    "anomalies": Job(2, finds_anomalies, [GPT]),
    "dropout": Job(
        2,
        dropout_is_that_of_one_device,
        [partial(program, Gpt, ranks, dropout=0.3) for ranks in (1, 2)],
    ),
    "branches": Job(2, autocast_modules.branches_under_autocast, [autocast_modules.program]),
    "clipping": Job(2, clips_accumulates_and_scales, [GPT]),
    "evaluation": Job(2, evaluates, programs(dropout=0.3)),
    "no_gradients": Job(2, without_gradients_the_statistics_move, [MLP]),
    "sizes": Job(2, other_batch_sizes, [MLP, GPT]),
    "few_samples": Job(
        2, a_batch_of_fewer_samples_than_parts, [partial(program, Gpt, 2, parts=True)]
    ),
    "kept_sizes": Job(2, few_sizes_are_kept, [MLP]),
    "rows": Job(2, rows_are_the_whole_batch, [MLP, GPT]),
    "other_part": Job(2, a_part_of_another_rank_is_not_loaded, [MLP]),
    "own_parts": Job(2, own_parts_are_the_whole_batch, [partial(program, Mlp, 2, parts=True)]),
    **agreement_jobs.JOBS,
    **few_messages_jobs.JOBS,
    "differ": Job(2, ranks_that_differ_say_so, [MLP]),
    "ordinary": Job(2, whole_parameters_are_ordinary, [data_parallel]),
    "whole_and_cut": Job(2, whole_and_cut_parameters_load_each_other, [data_parallel, MLP]),
    "load": Job(2, loads_the_whole_model, [MLP, GPT]),
    **rank_tensors.JOBS,
    "save_on_4_and_load_on_2": Job(
        4, checkpoint, [MLP_ON_4, GPT_ON_4], then=Job(2, checkpoint, [MLP, GPT])
    ),
    "dies_between": Job(2, a_rank_dies_between_steps, [MLP]),
    "dies_in_forward": Job(4, dies_in_forward, [GPT_ON_4]),
    "dies_in_backward": Job(4, dies_in_backward, [GPT_ON_4]),
    "raises": Job(2, a_rank_that_raises, [MLP]),
    "hangs": Job(2, a_rank_that_hangs, [MLP], timeout_s=4),
    "compiled": Job(
        2,
        compiled,
        [partial(program, Gpt, 2, dtype=torch.float32)],
        timeout_s=300,
        limit_s=500,
        slow=True,
    ),
    "changes": Job(2, refuses_what_it_would_not_notice, [MLP]),
    "names": Job(2, names_that_are_taken, [counted]),
    "loss_outside": Job(2, losses_outside.trains_outside, [losses_outside.outside]),
    "loss_by_name": Job(2, losses_outside.trains_by_name, [losses_outside.named]),
    **{
        f"muon_{parallel}": Job(
            2,
            partial(losses_outside.trains_whole_matrices, parallel),
            [partial(losses_outside.of_matrices, parallel)],
        )
        for parallel in ("dp", "pp")
    },
    "frozen": Job(2, frozen_parameters, [GPT]),
    "unused": Job(2, side_modules.has_unused_parameters, [side_modules.program]),
    "heads": Job(2, side_modules.evaluates_what_is_not_trained, side_modules.HEADS),
    "turned": Job(2, side_modules.trains_what_lies_oddly, side_modules.TURNED),
    "other gradients": Job(2, side_modules.refuses_other_gradients, [side_modules.program]),
    "attributes": Job(2, side_modules.refuses_attributes_of_the_graphs, [side_modules.scaled]),
    "parts_elsewhere": Job(2, side_modules.leaves_parts_to_their_ranks, [side_modules.staged]),
    "zero3": Job(2, trains_by_zero3, [zero3]),
    "initialise": Job(2, initialises_from_a_seed, [program_of_fakes]),
    "shared_groups": Job(3, two_programs_share_groups, timeout_s=10),
    "placed_state": Job(2, placed_modules.holds_the_whole_state, [PLACED]),
    "placed_clipping": Job(2, placed_modules.clips_by_the_whole_norm, [PLACED, ZERO3]),
    "placed_resuming": Job(2, placed_modules.resumes, [PLACED]),
    "placed_ending": Job(2, placed_modules.groups_end_though_the_module_lives, [PLACED]),
    "inference": Job(2, placed_modules.has_no_state_for_inference, [placed_modules.inference]),
    **{
        name: Job(2, written_buffers.trains(make, micro_batches), [make])
        for name, make, micro_batches in (
            ("buffers", written_buffers.keeping, 1),
            ("buffers_read_again", partial(written_buffers.recomputing, 1), 1),
            ("buffers_read_again_in_stages", partial(written_buffers.recomputing, 4), 4),
        )
    },
    "caches": Job(2, cached_modules.copies_no_cache, [cached_modules.keeping]),
    "caches_of_a_decoder": Job(2, cached_modules.generates, [cached_modules.generating]),
    "caches_read_before": Job(2, cached_modules.reads_before_it_writes, [cached_modules.twice]),
    "first_names": Job(
        2, placed_modules.lists_parameters_by_their_first_names, [placed_modules.twice]
    ),
    "copies": Job(2, whole_copies.serve_apart, [partial(whole_copies.program, 2)]),
    "copies_of_groups": Job(
        5, whole_copies.serve_in_groups, [partial(whole_copies.program, 5, 2)], slow=True
    ),
    "rare_types": Job(2, placed_modules.carries_rare_types, [placed_modules.rare]),
}

if __name__ == "__main__":
    main(JOBS)
