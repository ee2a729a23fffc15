"""Habits of training loops: each on two ranks against one process, the same weights or a refusal.

    PYTHONPATH=tests python tests/jobs/modules/habits.py table

prints a line a habit. A habit is written once, for any module, and runs on a compiled one and on
the plain one; `state_dict()` and what it returns must be equal.
"""

from __future__ import annotations

import copy
import io
import math
import pickle
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F  # noqa: N812 - the usual name
from torch.nn.utils import parametrizations, prune
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import partitioner
from jobs.modules import checkpoints
from jobs.processes.torch_ranks import Job, fork_ranks, main
from partitioner.backends.torch.running.rank_module import RankModule
from partitioner.ir.errors import PartitionerError

Batch = tuple[Tensor, Tensor]
MICRO_BATCHES = 2
STAGES = {"parallel": "pp", "schedule": "1f1b", "micro_batches": MICRO_BATCHES}
#: Runs a habit on a module; what it returns must be equal too.
Loop = Callable[["Side"], object]


class Net(nn.Module):
    """A perceptron with batch statistics; returns its loss and its scores."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.scores(x)
        return F.cross_entropy(scores, y), scores

    def scores(self, x: Tensor) -> Tensor:
        return self.down(self.norm(self.up(x)).relu())


class Unbiased(Net):
    """Without the bias whose gradient is zero but for rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 16, bias=False)


class Frozen(Net):
    """Its first layer is frozen, and its statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.up.requires_grad_(False)
        self.norm.eval()


class Tied(Net):
    """Two layers share a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.back = nn.Linear(16, 16)
        self.forth = nn.Linear(16, 16)
        self.forth.weight = self.back.weight

    def scores(self, x: Tensor) -> Tensor:
        return self.down(self.forth(self.back(self.norm(self.up(x)))).relu())


class TiedByData(Tied):
    """Two layers have a matrix each, in the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.double()  # which would part them
        self.forth.weight = nn.Parameter(self.back.weight.data)


class Shares(Net):
    """Its scores are shares, from which gradients are computed."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        shares = self.scores(x).sigmoid()
        return F.binary_cross_entropy(shares, F.one_hot(y, 4).double()), shares


class Checkpointed(Net):
    """Its middle is computed again."""

    def scores(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(
            lambda y: self.down(y).tanh(), self.norm(self.up(x)), use_reentrant=False
        )
        return y


class ManyLosses(Net):
    """Three losses, of which one is weighted by a learned number."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        scores = self.scores(x)
        losses = {
            "classes": F.cross_entropy(scores, y, label_smoothing=0.1),
            "sizes": scores.square().mean() * (-self.weight).exp() + self.weight,
            "weights": self.up.weight.abs().sum(),
        }
        return losses["classes"] + 0.3 * losses["sizes"] + 0.01 * losses["weights"], losses


class Penalised(Net):
    """A gradient penalty."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        x = x.clone().requires_grad_()
        scores = self.scores(x)
        loss = F.cross_entropy(scores, y)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + slope.norm(), scores


class Hooked(Net):
    """Hooks are set before it is compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.up.weight.register_hook(lambda gradient: gradient * 3)
        self.norm.register_forward_hook(lambda _, __, result: result * 2)
        self.down.register_full_backward_hook(lambda _, inputs, __: (inputs[0] * 0.5,))


class Pruned(Net):
    """Some weights are masked before it is compiled."""

    def __init__(self) -> None:
        super().__init__()
        prune.l1_unstructured(self.up, "weight", 0.3)


class Parametrised(Net):
    """Its weights are computed of others."""

    def __init__(self) -> None:
        super().__init__()
        parametrizations.weight_norm(self.up)


@dataclass
class Side:
    """The module that a habit trains.

    Attributes:
        module: A rank's part, or the module itself.
        rank: This process's.
    """

    module: nn.Module
    rank: int
    parallel: str = "zero3"

    @property
    def is_whole(self) -> bool:
        return not isinstance(self.module, RankModule)

    def parameters(self) -> list[nn.Parameter]:
        return [p for p in self.module.parameters() if p.requires_grad]

    def loss(self, step: int, size: int = 8) -> Tensor:
        result: Tensor = self.module(*batch(step, size))[0]
        return result

    def sgd(self, lr: float = 0.1) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=lr, momentum=0.9)

    def steps(self, optimizer: torch.optim.Optimizer, *steps: int) -> list[float]:
        losses = []
        for step in steps or range(3):
            optimizer.zero_grad()
            loss = self.loss(step)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses


def batch(step: int, size: int = 8) -> Batch:
    random = torch.Generator().manual_seed(step)
    x = torch.randn(size, 6, dtype=torch.float64, generator=random)
    return x, torch.randint(0, 4, (size,), generator=random)


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


# The habits --------------------------------------------------------------------------------------


def accumulates(side: Side) -> None:
    update = side.sgd()
    without_sums = getattr(side.module, "no_sync", nullcontext)  # as of DistributedDataParallel
    for step in range(6):
        with nullcontext() if step % 2 else without_sums():
            (side.loss(step) / 2).backward()
        if step % 2:
            update.step()
            update.zero_grad()


def adds_losses(side: Side) -> None:
    update = side.sgd()
    for step in range(3):
        (side.loss(step) + 0.5 * side.loss(step + 9)).backward()
        update.step()
        update.zero_grad()


def clips_norm(side: Side) -> list[Any]:
    update, norms = side.sgd(), []
    for step in range(3):
        side.loss(step).backward()
        norms.append(nn.utils.clip_grad_norm_(side.parameters(), 0.1))
        update.step()
        update.zero_grad()
    return norms


def clips_own_norm(side: Side) -> list[Any]:
    update, norms = side.sgd(), []
    for step in range(3):
        side.loss(step).backward()
        clip = (
            side.module.clip_grad_norm_
            if isinstance(side.module, RankModule)
            else partial(nn.utils.clip_grad_norm_, side.parameters())
        )
        norms.append(clip(0.1))
        update.step()
        update.zero_grad()
    return norms


def clips_value(side: Side) -> None:
    update = side.sgd()
    for step in range(3):
        side.loss(step).backward()
        nn.utils.clip_grad_value_(side.parameters(), 0.01)
        update.step()
        update.zero_grad()


def clips_given_norm(side: Side) -> None:
    update = side.sgd()
    for step in range(3):
        side.loss(step).backward()
        norm = nn.utils.get_total_norm([p.grad for p in side.parameters() if p.grad is not None])
        nn.utils.clip_grads_with_norm_(side.parameters(), 0.1, norm)
        update.step()
        update.zero_grad()


def schedules(make: Callable[[Any], Any]) -> Loop:
    def run(side: Side) -> list[float]:
        update = side.sgd()
        scheduler = make(update)
        losses = []
        for step in range(5):
            losses += side.steps(update, step)
            if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
                scheduler.step(losses[-1])
            else:
                scheduler.step()
        return [update.param_groups[0]["lr"]]

    return run


@torch.no_grad()
def follow(mean: dict[str, Tensor], module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        mean[name].lerp_(parameter, 0.3)


def averages_by_hand(side: Side) -> None:
    mean = {name: p.detach().clone() for name, p in side.module.named_parameters()}
    update = side.sgd()
    for step in range(4):
        side.steps(update, step)
        follow(mean, side.module)
    with torch.no_grad():
        for name, parameter in side.module.named_parameters():
            parameter.copy_(mean[name])


def averages_a_state(side: Side) -> None:
    update, states = side.sgd(), []
    for step in range(3):
        side.steps(update, step)
        states.append(copy.deepcopy(side.module.state_dict()))
    mean = {name: sum(s[name] for s in states) / 3 for name in states[0]}
    side.module.load_state_dict(mean)


def averages(side: Side, **options: Any) -> object:
    mean = AveragedModel(side.module, **options)
    update = side.sgd()
    for step in range(4):
        side.steps(update, step)
        mean.update_parameters(side.module)
    mean.eval()
    return mean(*batch(9))[0]


def scales(side: Side, *, clips: bool = True) -> object:
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    update = side.sgd()
    for step in range(4):
        scaler.scale(side.loss(step)).backward()
        if step == 1:  # a gradient overflows, on one rank alone
            gradients = [p.grad for n, p in side.module.named_parameters() if n == "up.weight"]
            for gradient in gradients:
                assert gradient is not None
                if not clips or side.is_whole or side.rank == 1:
                    local(gradient)[-1] = math.inf
        if clips:
            scaler.unscale_(update)
            nn.utils.clip_grad_norm_(side.parameters(), 1.0)
        scaler.step(update)
        scaler.update()
        update.zero_grad()
    return scaler.get_scale()


def scales_a_part(side: Side, to: str) -> object:
    """With a rank that trains no parameter."""
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    update = torch.optim.AdamW(side.parameters(), lr=1e-2, fused=True)
    for step in range(4):
        scaler.scale(side.loss(step)).backward()
        for name, parameter in side.module.named_parameters():
            if step == 1 and name == to and parameter.grad is not None:
                local(parameter.grad)[-1:] = math.inf
        scaler.step(update)
        scaler.update()
        update.zero_grad()
    return scaler.get_scale()


def hooks_parameters(side: Side) -> None:
    for parameter in side.parameters():
        parameter.register_hook(lambda gradient: gradient * 0.5)
    side.steps(side.sgd())


def steps_in_backward(side: Side) -> None:
    updates = {p: torch.optim.SGD([p], lr=0.1) for p in side.parameters()}

    def update(parameter: Any) -> None:
        updates[parameter].step()
        updates[parameter].zero_grad()

    for parameter in side.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    for step in range(3):
        side.loss(step).backward()


def hooks_the_module(side: Side) -> object:
    seen: list[Any] = []
    side.module.register_forward_hook(lambda _, __, result: seen.append(result[0].detach()))
    side.steps(side.sgd())
    return seen


def freezes_later(side: Side) -> None:
    update = side.sgd()
    side.steps(update, 0, 1)
    for name, parameter in side.module.named_parameters():
        if name == "up.weight":
            parameter.requires_grad_(False)
    side.steps(update, 2, 3)


def freezes_and_thaws(side: Side) -> None:
    update = torch.optim.SGD(side.module.parameters(), lr=0.1)
    for step in range(4):
        for parameter in side.module.get_submodule("down").parameters():
            parameter.requires_grad_(step % 2 == 0)
        side.steps(update, step)


def thaws(side: Side) -> None:
    side.steps(side.sgd(), 0)
    for parameter in side.module.parameters():
        parameter.requires_grad_(True)
    side.steps(side.sgd(), 1)


def groups(side: Side) -> None:
    named = [(n, p) for n, p in side.module.named_parameters() if p.requires_grad]
    update = torch.optim.AdamW(
        [
            {"params": [p for n, p in named if n.startswith("up.")], "lr": 1e-3},
            {
                "params": [p for n, p in named if not n.startswith("up.") and p.ndim > 1],
                "weight_decay": 0.3,
            },
            {
                "params": [p for n, p in named if not n.startswith("up.") and p.ndim <= 1],
                "weight_decay": 0.0,
            },
        ],
        lr=1e-2,
    )
    side.steps(update)


def groups_by_kind(side: Side) -> None:
    parts = side.module.modules()
    norms = [p for m in parts if isinstance(m, nn.BatchNorm1d) for p in m.parameters()]
    others = [p for p in side.parameters() if all(p is not norm for norm in norms)]
    groups = [{"params": others, "weight_decay": 0.3}, {"params": norms, "weight_decay": 0.0}]
    side.steps(torch.optim.AdamW([g for g in groups if g["params"]], lr=1e-2))


def initialises_by_kind(side: Side) -> None:
    @torch.no_grad()
    def initialise(part: nn.Module) -> None:
        if isinstance(part, nn.Linear) and part.bias is not None:
            part.bias.fill_(0.3)

    side.module.apply(initialise)
    side.steps(side.sgd())


def freezes_statistics_by_kind(side: Side) -> None:
    for part in side.module.modules():
        if isinstance(part, nn.BatchNorm1d):
            part.eval()
    side.steps(side.sgd())


def trains_in_evaluation_mode(side: Side) -> None:
    side.module.eval()
    penalty = sum(p.square().sum() for p in side.parameters())
    (side.loss(0) + 0.01 * penalty).backward()


def adds_a_group(side: Side) -> None:
    update = torch.optim.SGD([p for p in side.parameters() if p.ndim > 1], lr=0.1)
    side.steps(update, 0, 1)
    update.add_param_group({"params": [p for p in side.parameters() if p.ndim == 1]})
    side.steps(update, 2, 3)


def zeros(side: Side) -> None:
    update = side.sgd()
    for step in range(3):
        update.zero_grad(set_to_none=False)
        side.loss(step).backward()
        update.step()
    side.module.zero_grad(set_to_none=False)
    assert all(
        float(local(p.grad).abs().sum()) == 0 for p in side.parameters() if p.grad is not None
    )


def evaluates(side: Side) -> object:
    update, scores = side.sgd(), []
    for step in range(3):
        side.steps(update, step)
        side.module.eval()
        with torch.no_grad():
            scores += [side.module(*batch(step + 20, size))[1] for size in (8, 4)]
        side.module.train()
    with torch.inference_mode():
        scores.append(side.module(*batch(30))[1].clone())
    side.steps(update, 7)
    return scores


def infers_in_training(side: Side) -> object:
    update = side.sgd()
    side.steps(update)
    with torch.no_grad():
        return side.module(*batch(4))


def creates_a_graph(side: Side) -> None:
    loss = side.loss(0)
    gradients = torch.autograd.grad(loss, side.parameters(), create_graph=True)
    sum((g.square().sum() for g in gradients), loss).backward()
    side.sgd().step()


def takes_gradients(side: Side) -> None:
    """Gradients by `torch.autograd.grad`, and steps by hand."""
    for step in range(3):
        parameters = side.parameters()
        gradients = torch.autograd.grad(side.loss(step), parameters)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter -= 0.1 * gradient


def goes_back_twice(side: Side) -> None:
    loss = side.loss(0)
    loss.backward(retain_graph=True)
    loss.backward()
    side.sgd().step()


def goes_back_from_scores(side: Side) -> None:
    _, scores = side.module(*batch(0))
    F.cross_entropy(scores, batch(0)[1]).backward()
    side.sgd().step()


def weighs(side: Side) -> None:
    update = side.sgd()
    for step in range(3):
        side.loss(step).backward(gradient=torch.tensor(0.5, dtype=torch.float64))
        update.step()
        update.zero_grad()


def regularises(side: Side) -> None:
    """A penalty of weights outside of the module."""
    update = side.sgd()
    for step in range(3):
        penalty = sum(p.square().sum() for p in side.parameters())
        (side.loss(step) + 0.01 * penalty).backward()
        update.step()
        update.zero_grad()


def adds_to_gradients(side: Side) -> None:
    update = side.sgd()
    for step in range(3):
        update.zero_grad()
        side.loss(step).backward()
        with torch.no_grad():
            for parameter in side.parameters():
                assert parameter.grad is not None
                parameter.grad.add_(parameter.sign(), alpha=0.01)
                parameter.grad.div_(parameter.grad.norm() + 1)
        update.step()


def steps_by_hand(side: Side) -> None:
    for step in range(3):
        side.module.zero_grad()
        side.loss(step).backward()
        with torch.no_grad():
            for parameter in side.parameters():
                assert parameter.grad is not None
                parameter -= 0.1 * parameter.grad


def steps_by_data(side: Side) -> None:
    for step in range(3):
        side.module.zero_grad()
        side.loss(step).backward()
        for parameter in side.parameters():
            assert parameter.grad is not None
            parameter.data.add_(parameter.grad.data, alpha=-0.1)


def clamps(side: Side) -> None:
    update = side.sgd()
    for step in range(3):
        side.steps(update, step)
        with torch.no_grad():
            for parameter in side.parameters():
                parameter.clamp_(-0.1, 0.1)


def sets_weights(side: Side) -> None:
    with torch.no_grad():
        for parameter in side.parameters():
            nn.init.constant_(parameter, 0.05)
    side.steps(side.sgd())


def swaps_optimizers(side: Side) -> None:
    side.steps(torch.optim.AdamW(side.parameters(), lr=1e-2), 0, 1)
    side.steps(side.sgd(), 2, 3)


def resumes_an_optimizer(side: Side) -> None:
    first = torch.optim.AdamW(side.parameters(), lr=1e-2)
    side.steps(first, 0, 1)
    second = torch.optim.AdamW(side.parameters(), lr=0.5)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    side.steps(second, 2, 3)


def finds_a_rate(side: Side) -> None:
    """Tries rates, then goes back to the first weights."""
    start = copy.deepcopy(side.module.state_dict())
    update = side.sgd(1e-4)
    for step in range(4):
        side.steps(update, step)
        update.param_groups[0]["lr"] *= 3
    side.module.load_state_dict(start)
    side.steps(side.sgd(0.05))


def saves_a_file(side: Side) -> None:
    side.steps(side.sgd())
    module = side.module
    state = module.full_state_dict() if isinstance(module, RankModule) else module.state_dict()
    name = f"model-{side.is_whole}-{side.rank}.pt"
    torch.save(state, name)
    with torch.no_grad():
        for parameter in side.parameters():
            parameter.zero_()
    module.load_state_dict(torch.load(name))
    side.steps(side.sgd(), 5)


def copies_the_module(side: Side) -> None:
    teacher = copy.deepcopy(side.module)
    side.steps(side.sgd())
    teacher(*batch(0))


def changes_sizes(side: Side) -> None:
    update = side.sgd()
    for step, size in enumerate((8, 8, 6, 8, 2)):
        update.zero_grad()
        side.loss(step, size).backward()
        update.step()


def writes_before_backward(side: Side, of: int) -> None:
    """Over an input or a result, which PyTorch refuses on one process."""
    x, y = batch(0)
    loss, result = side.module(x, y)
    if not side.is_whole:
        (x, y, result.detach())[of].zero_()
    loss.backward()
    side.sgd().step()


def has_an_odd_rest(side: Side) -> None:
    update = side.sgd()
    side.loss(0).backward()
    side.loss(0, 5).backward()
    update.step()


def compiles(side: Side) -> None:
    module, update = torch.compile(side.module, backend="eager"), side.sgd()
    for step in range(3):
        update.zero_grad()
        module(*batch(step))[0].backward()
        update.step()


def halves(side: Side) -> None:
    side.module.half()
    side.loss(0).backward()


def closes(side: Side, make: Callable[[Any], Any]) -> None:
    update = make(side.parameters())
    for step in range(3):

        def closure(step: int = step) -> float:
            update.zero_grad()
            loss = side.loss(step)
            loss.backward()
            return loss.item()

        update.step(closure)


def optimizes(make: Callable[..., Any], **options: Any) -> Loop:
    def run(side: Side) -> None:
        side.steps(make(side.parameters(), **options), 0, 1, 2, 3)

    return run


def optimizes_matrices(make: Callable[..., Any], **options: Any) -> Loop:
    def run(side: Side) -> None:
        side.steps(make([p for p in side.parameters() if p.ndim == 2], **options), 0, 1, 2)

    return run


def samples(side: Side) -> None:
    """Each rank's loader gives it its part, as under DistributedDataParallel."""
    data = TensorDataset(*batch(0, 16))
    update = side.sgd()
    if side.is_whole:
        order = [0, 2, 4, 6, 1, 3, 5, 7]  # of a batch, as the ranks have it
        loader = [tuple(t[torch.tensor(order) + 8 * n] for t in data.tensors) for n in range(2)]
    else:
        sampler = DistributedSampler(data, num_replicas=2, rank=side.rank, shuffle=False)
        loader = list(DataLoader(data, batch_size=4, sampler=sampler))
    for x, y in loader:
        update.zero_grad()
        side.module(x, y)[0].backward()
        update.step()


def logs(side: Side) -> dict[str, Any]:
    """Norms of weights and gradients, the number of elements of each, and the accuracy."""
    update: torch.optim.Optimizer = side.sgd()
    said: dict[str, Any] = {}
    for step in range(3):
        update.zero_grad()
        loss, scores = side.module(*batch(step))
        loss.backward()
        for name, p in side.module.named_parameters():
            assert p.grad is not None
            said |= {f"{name}.grad {step}": p.grad.norm(), f"{name} {step}": p.detach().std()}
            said[f"{name} size"] = float(p.numel())
        said[f"accuracy {step}"] = (scores.argmax(1) == batch(step)[1]).double().mean()
        update.step()
    return said


def refreshes_statistics(side: Side) -> None:
    side.steps(side.sgd())
    for part in side.module.modules():
        if hasattr(part, "running_mean"):
            part.running_mean.zero_()
            part.running_var.fill_(1)
    with torch.no_grad():
        for step in range(3):
            side.module(*batch(step))


def assigns_data(side: Side) -> None:
    update = side.sgd()
    for step in range(2):
        side.steps(update, step)
        for parameter in side.parameters():
            parameter.data = parameter.data.clamp(-0.1, 0.1)


def scales_rows(side: Side) -> None:
    update = side.sgd()
    for step in range(3):
        side.steps(update, step)
        for parameter in side.parameters():
            parameter.data[0] *= 0.5


def empties_elements(side: Side) -> None:
    update = side.sgd()
    for step in range(3):
        side.steps(update, step)
        with torch.no_grad():
            for parameter in side.parameters():
                parameter[parameter > 0.1] = 0.0
                parameter[[0, 2]] = 0.01


@torch.no_grad()
def writes_parts(side: Side) -> None:
    """Rows, slices, diagonals and single elements of weights and gradients."""
    update = side.sgd()
    for step in range(3):
        with torch.enable_grad():
            side.loss(step).backward()
        for p in side.parameters():
            assert p.grad is not None
            p.grad[0] = 0.0
            p.grad[1:3] *= 2
            p[-1].clamp_(-0.05, 0.05)
            if p.ndim == 2:
                p.diagonal().mul_(0.9)
                p[:, ::2].mul_(0.5)
                p.T[1].add_(0.01)
                p[1, 2] = 0.02
        update.step()
        update.zero_grad()


def swaps_means(side: Side) -> list[Tensor]:
    """Means of weights are swapped in for a call by `.data`, and out again."""
    update, losses = side.sgd(), []
    means = {name: p.data.clone() for name, p in side.module.named_parameters()}
    for step in range(3):
        side.steps(update, step)
        before = {}
        for name, p in side.module.named_parameters():
            means[name] = 0.8 * means[name] + 0.2 * p.data
            before[name], p.data = p.data, means[name]
        with torch.no_grad():
            losses.append(side.module(*batch(9))[0])
        for name, p in side.module.named_parameters():
            p.data = before[name]
    return losses


def copies_means(side: Side) -> list[Tensor]:
    """Means of weights are copied in for a call, and the weights back."""
    update, losses = side.sgd(), []
    means = {name: p.data.clone() for name, p in side.module.named_parameters()}
    for step in range(3):
        side.steps(update, step)
        before = {name: p.data.clone() for name, p in side.module.named_parameters()}
        for name, p in side.module.named_parameters():
            p.data.copy_(means[name].mul_(0.8).add_(p.data, alpha=0.2))
        side.module.eval()
        with torch.no_grad():
            losses.append(side.module(*batch(9))[0])
        side.module.train()
        for name, p in side.module.named_parameters():
            p.data.copy_(before[name])
    return losses


def ascends_first(side: Side) -> None:
    """Sharpness-aware: a step up, and one down from where it began."""
    update = side.sgd()
    for step in range(3):
        side.loss(step).backward()
        norm = nn.utils.get_total_norm([p.grad for p in side.parameters() if p.grad is not None])
        before = [p.data.clone() for p in side.parameters()]
        with torch.no_grad():
            for p in side.parameters():
                p.add_(p.grad / norm, alpha=0.05)  # type: ignore[operator]
        side.module.zero_grad()
        side.loss(step).backward()
        for p, old in zip(side.parameters(), before, strict=True):
            p.data.copy_(old)
        update.step()
        update.zero_grad()


def with_gradients(side: Side) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """In three steps, each parameter, a tensor that is zero at first, and the gradient."""
    means = [torch.zeros_like(p) for p in side.parameters()]
    for step in range(3):
        side.module.zero_grad()
        with torch.enable_grad():
            side.loss(step).backward()
        for p, mean in zip(side.parameters(), means, strict=True):
            assert p.grad is not None
            yield p, mean, p.grad


@torch.no_grad()
def steps_by_lamb(side: Side) -> None:
    """A ratio of norms for each parameter."""
    for p, mean, gradient in with_gradients(side):
        mean.mul_(0.9).add_(gradient.data, alpha=0.1)
        update = mean + 0.01 * p.data
        size, length = p.data.pow(2).sum().sqrt().clamp(0, 10), update.pow(2).sum().sqrt()
        ratio = 1.0 if size == 0 or length == 0 else size / length
        p.data.add_(update * ratio, alpha=-0.01)


@torch.no_grad()
def steps_by_signs(side: Side) -> None:
    """Lion: the sign of a mean."""
    for p, mean, gradient in with_gradients(side):
        p.data.mul_(0.999)
        p.add_((mean * 0.9 + gradient * 0.1).sign_(), alpha=-0.01)
        mean.mul_(0.99).add_(gradient, alpha=0.01)


def looks_ahead(side: Side) -> None:
    update, slow = side.sgd(), [p.detach().clone() for p in side.parameters()]
    for step in range(4):
        side.steps(update, step)
        for p, q in zip(side.parameters(), slow, strict=True) if step % 2 else ():
            q.data.add_(p.data - q.data, alpha=0.5)
            p.data.copy_(q.data)


def masks_in_sets(side: Side) -> None:
    """Sets have an order of their own in each process."""
    random = torch.Generator().manual_seed(0)
    masks = {
        name: torch.rand(p.shape, dtype=p.dtype, generator=random)
        for name, p in copied(Net).named_parameters()
    }
    update = side.sgd()
    for step in range(4):
        side.steps(update, step)
        turned = sorted(masks, reverse=not side.is_whole and side.rank == 1)
        held = dict(side.module.named_parameters())
        with torch.no_grad():
            for name in turned:
                if name in held:
                    held[name].mul_(masks[name])


def works_in_threads(side: Side) -> None:
    """A thread writes plain tensors into weights while nobody trains."""
    update = side.sgd()
    for step in range(3):
        side.steps(update, step)
        with ThreadPoolExecutor(2) as threads:
            for p in side.parameters():
                scale = torch.full(p.shape, 0.9, dtype=p.dtype)
                threads.submit(lambda p=p, s=scale: p.data.mul_(s)).result()


def resets_parts(side: Side) -> None:
    side.steps(side.sgd())
    for part in side.module.modules():
        torch.manual_seed(5)
        if hasattr(part, "reset_parameters"):
            part.reset_parameters()
    for part in side.module.modules():
        torch.manual_seed(6)
        if isinstance(part, nn.Linear):
            nn.init.normal_(part.weight, std=part.in_features**-0.5)
        if isinstance(part, nn.BatchNorm1d):
            part.reset_running_stats()
    side.steps(side.sgd(), 4)


def updates_statistics(side: Side) -> None:
    """By means over batches, which are not traced."""

    class Inputs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = side.module

        def forward(self, x: Tensor) -> Any:
            return self.module(x, batch(0)[1])

    update_bn([batch(step)[0] for step in range(3)], Inputs())


def pickles(side: Side) -> None:
    pickle.dumps(side.module)


def gives_plain_gradients(side: Side) -> None:
    """Gradients are replaced by whole ones, to which a later batch is added."""
    update = torch.optim.AdamW(side.parameters(), lr=0.01)
    for step in range(3):
        side.loss(step).backward()
        for p in side.parameters():
            assert p.grad is not None
            p.grad = (p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad) * 0.5
        side.loss(step + 7).backward()
        update.step()
        update.zero_grad()


def prunes(side: Side) -> None:
    for part in side.module.modules():
        if isinstance(part, nn.Linear):
            prune.l1_unstructured(part, "weight", 0.3)
    side.loss(0)


def parametrises(side: Side) -> None:
    for part in side.module.modules():
        if isinstance(part, nn.Linear):
            parametrizations.weight_norm(part)
    side.loss(0)


def copies_behind_a_step(side: Side) -> dict[str, Any]:
    """A module with gradients and its optimizer, and what is saved of them."""
    update = torch.optim.AdamW(side.parameters(), lr=1e-2)
    side.steps(update, 0)
    module, other = copy.deepcopy((side.module, update))
    saved = io.BytesIO()
    torch.save([side.module.state_dict(), [p.grad for p in side.parameters()]], saved)
    side.steps(update, 1)
    Side(module, side.rank).steps(other, 2)
    saved.seek(0)
    state, _ = torch.load(saved, weights_only=False)
    side.module.load_state_dict(state)
    return dict(module.named_parameters())


def reads_rows_later(side: Side) -> dict[str, Tensor]:
    """What was taken of parameters and statistics before the steps."""
    taken = {}
    for name, tensor in [*side.module.named_parameters(), *side.module.named_buffers()]:
        if tensor.ndim:
            taken |= {f"{name} row": tensor[3], f"{name} slice": tensor.detach()[1:]}
    side.steps(side.sgd())
    return {name: one * 1 for name, one in taken.items()}


def clips_adaptively(side: Side) -> None:
    """Each row by its norm; and a penalty of the norms of groups."""
    update = side.sgd()
    for step in range(3):
        update.zero_grad()
        groups = sum(p.norm(dim=0).sum() + p.norm(dim=-1).sum() for p in side.parameters())
        (side.loss(step) + 0.01 * groups).backward()
        for p in side.parameters():
            assert p.grad is not None
            most = p.detach().norm(dim=-1, keepdim=True).clamp_(min=1e-3).mul_(0.1)
            norm = p.grad.norm(dim=-1, keepdim=True).clamp_(min=1e-6)
            p.grad.copy_(torch.where(norm > most, p.grad * (most / norm), p.grad))
        update.step()


def flattens(side: Side) -> object:
    side.steps(side.sgd())
    vector = nn.utils.parameters_to_vector(side.parameters())
    nn.utils.vector_to_parameters(vector * 0.5, side.parameters())
    return side.loss(0)


@dataclass(frozen=True)
class Habit:
    """A habit of training loops.

    Attributes:
        run: What is done with the module.
        kind: The module.
        refused: How the refusal begins, a pattern; "" if the weights are to be equal.
        parallel: Of `compile`.
        local: Whether ranks are called with their own parts.
        atol: Allowed difference of weights.
    """

    run: Loop
    kind: type[Net] = Net
    refused: str = ""
    parallel: str = "zero3"
    local: bool = False
    atol: float = 1e-9


def autocasts(side: Side) -> None:
    update = side.sgd()
    for step in range(3):
        update.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = side.loss(step)
        loss.backward()
        update.step()


o = torch.optim
#: What is refused of tensors that are cut.
IN_PARTS = r"\w+\(\) is not computed of a tensor that is cut over ranks: compute it of p\.full_tens"
HABITS: dict[str, Habit] = {
    "accumulation": Habit(accumulates),
    "sum of two calls' losses": Habit(adds_losses),
    "clip_grad_norm_": Habit(clips_norm),
    "module.clip_grad_norm_": Habit(clips_own_norm),
    "clip_grad_value_": Habit(clips_value),
    "clip_grads_with_norm_": Habit(clips_given_norm),
    "StepLR": Habit(schedules(partial(lr_scheduler.StepLR, step_size=2))),
    "OneCycleLR": Habit(schedules(partial(lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=9))),
    "ReduceLROnPlateau": Habit(schedules(partial(lr_scheduler.ReduceLROnPlateau, patience=0))),
    "warmup and cosine": Habit(
        schedules(
            lambda u: lr_scheduler.SequentialLR(
                u, [lr_scheduler.LinearLR(u), lr_scheduler.CosineAnnealingLR(u, 5)], [2]
            )
        )
    ),
    "EMA by hand": Habit(averages_by_hand),
    "mean of state_dicts": Habit(averages_a_state),
    "SWA": Habit(averages),
    "EMA by AveragedModel": Habit(partial(averages, multi_avg_fn=get_ema_multi_avg_fn(0.9))),
    "EMA of buffers too": Habit(partial(averages, use_buffers=True)),
    "EMA of buffers by a factor": Habit(
        partial(averages, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    ),
    "autocast": Habit(autocasts, refused=r"rank 0: called under torch\.autocast of bfloat16; the"),
    "GradScaler": Habit(scales),
    "GradScaler without clipping": Habit(partial(scales, clips=False)),
    "GradScaler of frozen parts": Habit(partial(scales_a_part, to="down.weight"), Frozen),
    "hooks before compile": Habit(lambda side: side.steps(side.sgd()), Hooked),
    "hooks of parameters": Habit(hooks_parameters),
    "optimizer steps in backward": Habit(steps_in_backward),
    "hook of the module": Habit(hooks_the_module),
    "frozen parts": Habit(lambda side: side.steps(side.sgd()), Frozen),
    "frozen later": Habit(freezes_later),
    "frozen and thawed": Habit(freezes_and_thaws),
    "thawed later": Habit(thaws, Frozen, r"rank 0: up\.weight requires a gradient now, but was f"),
    "parameter groups": Habit(groups),
    "a group added later": Habit(adds_a_group),
    "groups by kind": Habit(groups_by_kind),
    "initialised by kind": Habit(initialises_by_kind),
    "statistics frozen by kind": Habit(
        freezes_statistics_by_kind, refused="rank 0: norm is in evaluation mode, the module is not"
    ),
    "statistics frozen by kind, as before": Habit(freezes_statistics_by_kind, Frozen),
    "training in evaluation mode": Habit(
        trains_in_evaluation_mode,
        refused=r"rank 0: backward\(\) of a call in evaluation mode: a st",
    ),
    "tied weights": Habit(lambda side: side.steps(side.sgd()), Tied),
    "weights tied by .data": Habit(
        lambda side: side.steps(side.sgd()),
        TiedByData,
        ".*forth.weight lies in the memory of back.weight and is another tensor",
    ),
    "several losses": Habit(lambda side: side.steps(side.sgd()), ManyLosses),
    "loss of another result": Habit(
        goes_back_from_scores, refused=r"rank 0: a gradient reaches another result of the module"
    ),
    "zero_grad(set_to_none=False)": Habit(zeros),
    "evaluation between steps": Habit(evaluates),
    "no_grad in training mode": Habit(infers_in_training),
    "no_grad with frozen parts": Habit(infers_in_training, Frozen),
    "gradient penalty": Habit(
        accumulates, Penalised, r".*forward calls torch\.autograd\.grad, which is not traced"
    ),
    "create_graph": Habit(creates_a_graph, refused="rank 0: backward with create_graph=True: a p"),
    "retain_graph": Habit(
        goes_back_twice, refused=r"rank 0: backward\(\) was called a second time"
    ),
    "torch.autograd.grad": Habit(takes_gradients),
    "backward(gradient)": Habit(weighs),
    "penalty outside the module": Habit(regularises),
    "changed gradients": Habit(adds_to_gradients),
    "steps by hand": Habit(steps_by_hand),
    "steps by .data": Habit(steps_by_data),
    "clamped weights": Habit(clamps),
    "weights set by hand": Habit(sets_weights),
    "another optimizer": Habit(swaps_optimizers),
    "optimizer's state_dict": Habit(resumes_an_optimizer),
    "learning rate finder": Habit(finds_a_rate),
    "torch.save and load": Habit(saves_a_file),
    "copy.deepcopy": Habit(copies_the_module),
    "share_memory": Habit(
        lambda side: side.module.share_memory(), refused=r"share_memory\(\) of a rank's module: its"
    ),
    "share_memory of a part": Habit(
        lambda side: side.module.get_submodule("up").share_memory(),
        refused=r"share_memory\(\) of a rank's module: its",
    ),
    "BatchNorm reset": Habit(refreshes_statistics),
    "rows scaled": Habit(scales_rows, refused=IN_PARTS),
    "rows scaled, tp": Habit(scales_rows, refused=IN_PARTS, parallel="tp"),
    "parts written": Habit(writes_parts, refused=IN_PARTS),
    "parts written, tp": Habit(writes_parts, refused=IN_PARTS, parallel="tp"),
    "means swapped by .data": Habit(swaps_means),
    "means swapped by .data, zero2": Habit(
        swaps_means, refused=r"rank 0: up\.weight\.data was set, and the plan", parallel="zero2"
    ),
    "means copied in": Habit(copies_means),
    "means copied in, zero2": Habit(copies_means, parallel="zero2"),
    "SAM": Habit(ascends_first),
    "LAMB": Habit(steps_by_lamb, Unbiased),
    "Lion": Habit(steps_by_signs, Unbiased),
    "Lookahead": Habit(looks_ahead),
    "masks in sets": Habit(masks_in_sets, refused=IN_PARTS),
    "threads": Habit(works_in_threads, refused=IN_PARTS),
    "parts reset": Habit(resets_parts),
    "update_bn": Habit(updates_statistics, refused="momentum was traced as it was when the mod"),
    "pickle": Habit(pickles, refused="a rank's module cannot be pickled: save its state_dict"),
    "plain gradients": Habit(gives_plain_gradients, Unbiased, IN_PARTS),
    "elements emptied": Habit(empties_elements, refused=IN_PARTS),
    "pruning": Habit(prunes, refused=IN_PARTS),
    "pruning before compile": Habit(lambda side: side.steps(side.sgd()), Pruned),
    "weight_norm": Habit(parametrises, refused=IN_PARTS),
    "weight_norm before compile": Habit(lambda side: side.steps(side.sgd()), Parametrised),
    "copies behind a step": Habit(copies_behind_a_step),
    "copies of parts of larger memory": Habit(copies_behind_a_step, parallel="zero2"),
    "rows read later": Habit(reads_rows_later, refused=IN_PARTS),
    "rows read later, tp": Habit(reads_rows_later, refused=IN_PARTS, parallel="tp"),
    "clipped adaptively": Habit(clips_adaptively),
    "clipped adaptively, tp": Habit(clips_adaptively, parallel="tp"),
    "other sizes": Habit(changes_sizes),
    "odd last batch": Habit(has_an_odd_rest),
    **{
        f"{name} written before backward": Habit(
            partial(writes_before_backward, of=of),
            refused="rank 0: backward.. after an input, a result or a buffer of the step that it n",
        )
        for of, name in enumerate(("input", "label"))
    },
    # what they return is gathered, and gradients are computed from the parts
    "result written before backward": Habit(partial(writes_before_backward, of=2), Shares),
    "torch.compile": Habit(compiles),
    "half() after compile": Habit(
        halves, refused=r"rank 0: up\.weight is float16 now and was floa"
    ),
    "checkpointing": Habit(lambda side: side.steps(side.sgd()), Checkpointed),
    "closure": Habit(partial(closes, make=partial(o.SGD, lr=0.1))),
    "LBFGS": Habit(
        partial(closes, make=partial(o.LBFGS, lr=0.1, max_iter=3)),
        refused="LBFGS does not work on parts of tensors: take another optimizer, or a plan that",
    ),
    "LBFGS, dp": Habit(partial(closes, make=partial(o.LBFGS, lr=0.1, max_iter=3)), parallel="dp"),
    "DistributedSampler, local": Habit(samples, local=True, parallel="dp"),
    "DistributedSampler, global": Habit(
        samples, refused="rank 1 has other data in input 'x' and 1 more than rank 0"
    ),
    "logs": Habit(logs),
    "assigned .data": Habit(assigns_data),
    "vector_to_parameters": Habit(flattens, refused=IN_PARTS),
    **{
        f"{make.__name__}{options or ''}": Habit(optimizes(make, **options))
        for make, options in (
            (o.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
            (o.SGD, {"lr": 0.1, "foreach": True}),
            (o.Adam, {"lr": 1e-2, "amsgrad": True}),
            (o.AdamW, {"lr": 1e-2, "foreach": True}),
            (o.AdamW, {"lr": 1e-2, "fused": True}),
            (o.RMSprop, {"lr": 1e-3, "centered": True}),
            (o.Adagrad, {"eps": 1e-4}),  # the gradient of up.bias is zero but for rounding
            (o.Adadelta, {}),
            (o.Adamax, {}),
            (o.NAdam, {}),
            (o.RAdam, {}),
            (o.ASGD, {}),
        )
    },
    "Rprop": Habit(
        optimizes(o.Rprop), Unbiased, refused="Rprop does not work on parts of tensors: take"
    ),
    "Adafactor": Habit(
        optimizes(o.Adafactor), Unbiased, refused="Adafactor does not work on parts of ten"
    ),
    "Muon": Habit(optimizes_matrices(o.Muon), refused="Muon does not work on parts of tensors: t"),
    "Muon, dp": Habit(
        optimizes_matrices(o.Muon), parallel="dp", atol=2e-4
    ),  # it rounds to bfloat16
}


#: How habits in stages are refused that others are not; "" if the weights are equal there.
OTHERS_IN_STAGES = {
    "clip_grad_norm_": "this rank's gradients are those of its own layers only, so their norm is n",
    "clip_grads_with_norm_": "this rank's gradients are those of its own layers only, so their nor",
    "GradScaler": "this rank's gradients are those of its own layers only, so their norm is not th",
    "LBFGS": "LBFGS measures along all parameters at once, and this rank holds those of its own la",
    "LBFGS, dp": "LBFGS measures along all parameters at once, and this rank holds those of its ow",
    **dict.fromkeys(("Rprop", "Muon", "masks in sets", "threads", "plain gradients"), ""),
    **dict.fromkeys(("rows scaled", "rows scaled, tp", "parts written", "parts written, tp"), ""),
    **dict.fromkeys(("rows read later", "rows read later, tp", "elements emptied"), ""),
    "pruning": r"rank 0: (?:up|down) has a hook, which would not be called: set it, as torch",
    "weight_norm": r"a Linear of a rank's module cannot become a ParametrizedLinear: parametrize t",
    "Adafactor": "",
    "vector_to_parameters": "this rank's tensors are those of its own layers only, and joined",
    # rank 1 has no norm: it saves its state, for which rank 0 does not come
    "update_bn": r"momentum was traced as|rank 1: waiting for the other ranks before full_state_d",
    "means swapped by .data, zero2": "",
    "SAM": "this rank's gradients are those of its own layers only, so their norm is not that of t",
    **dict.fromkeys((f"{name} written before backward" for name in ("input", "label")), ""),
    "DistributedSampler, local": "rank 0: one of 2 micro-batches of its part of input 'x'",
    "other sizes": r"training on float64\[2,6\], .*Expected more than 1 value per channel when tra",
}


def checkpointed(_: int) -> None:
    """What two ranks save, three ranks and one go on from: weights and the optimizer's state."""
    ranks = dist.get_world_size()
    program = partitioner.compile(
        copied(Net),
        batch(0),
        training=True,
        cluster="ideal",
        parallel="zero3" if ranks > 1 else None,
    )
    assert isinstance(program, partitioner.ModuleProgram)
    module, plain = program.module(), copied(Net)
    sides = Side(module, 0), Side(plain, 0)
    updates = [torch.optim.AdamW(side.parameters(), lr=1e-2) for side in sides]
    sides[1].steps(updates[1], 0, 1)
    if ranks == 2:
        sides[0].steps(updates[0], 0, 1)
        checkpoints.save(module, updates[0], "checkpoint")
        return
    checkpoints.restore(module, updates[0], "checkpoint")
    losses = [side.steps(update, 2, 3) for side, update in zip(sides, updates, strict=True)]
    torch.testing.assert_close(*map(torch.tensor, losses), rtol=0, atol=1e-9)
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(module.full_state_dict()[name], tensor, rtol=0, atol=1e-9)


def in_parts(kind: type[Net]) -> type[Net]:
    """The module as one process runs it in micro-batches: losses are means of theirs."""

    class InParts(kind):  # type: ignore[valid-type, misc]
        def forward(self, x: Tensor, y: Tensor) -> Any:
            if not self.training:
                return super().forward(x, y)
            parts = zip(x.chunk(MICRO_BATCHES), y.chunk(MICRO_BATCHES), strict=True)
            results = [(super(InParts, self).forward(*part), len(part[0])) for part in parts]

            def whole(*of: Tensor) -> Tensor:
                if of[0].dim():
                    return torch.cat(of)
                shares = [size / len(x) for _, size in results]
                return torch.stack([o * share for o, share in zip(of, shares, strict=True)]).sum()

            return torch.utils._pytree.tree_map(whole, *[result for result, _ in results])

    return InParts


@cache
def program_of(kind: type[Net], parallel: str, *, staged: bool) -> partitioner.ModuleProgram:
    """The program of all habits of a module; habits write to the modules that it makes only."""
    options: dict[str, Any] = STAGES if staged else {"parallel": parallel}
    program = partitioner.compile(
        copied(kind), batch(0), devices=2, training=True, cluster="ideal", **options
    )
    assert isinstance(program, partitioner.ModuleProgram)
    return program


def plan_all(*, staged: bool = False) -> None:
    """Make the programs that all ranks take, but those that are refused."""
    for habit in HABITS.values():
        with suppress(PartitionerError):
            assert program_of(habit.kind, habit.parallel, staged=staged).programs


def outcome(habit: Habit, rank: int, *, staged: bool = False) -> str:
    """ "equal", "refused: ..." or what is wrong."""
    try:
        torch.manual_seed(0)
        plain = copied(habit.kind)
        if staged:
            plain.__class__ = in_parts(habit.kind)
        program = program_of(habit.kind, habit.parallel, staged=staged)
        part = program.module(inputs="local" if habit.local else "global")
        returned = habit.run(Side(part, rank))
        state = part.full_state_dict()
    except PartitionerError as error:
        return f"refused: {error}"
    except Exception as error:  # noqa: BLE001 - it is shown
        return f"raised: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
    expected = habit.run(Side(plain, rank))
    try:
        for name, tensor in plain.state_dict().items():
            torch.testing.assert_close(
                state[name], tensor, rtol=0, atol=habit.atol, msg=lambda m, n=name: f"{n}: {m}"
            )
        if isinstance(expected, dict):  # a rank in stages logs its own parameters
            assert isinstance(returned, dict)
            assert returned.keys() == expected.keys() or (staged and returned)
            expected = {name: expected[name] for name in returned}
        for one, other in zip(leaves(returned), leaves(expected), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=habit.atol)
    except Exception as error:  # noqa: BLE001 - it is shown
        return f"differs: {' '.join(str(error).split())[:200]}"
    return "equal"


def copied(kind: type[Net]) -> Net:
    torch.manual_seed(0)
    return kind().double()


def leaves(value: object) -> list[Tensor]:
    flat, _ = torch.utils._pytree.tree_flatten(value)
    found = [x if isinstance(x, Tensor) else torch.tensor(x) for x in flat if x is not None]
    return [(x.full_tensor() if isinstance(x, DTensor) else x).double() for x in found]


def outcomes(rank: int, names: Sequence[str], *, staged: bool = False) -> Iterator[tuple[str, str]]:
    torch.manual_seed(rank)
    return ((name, outcome(HABITS[name], rank, staged=staged)) for name in names)


def check(rank: int, names: Sequence[str], *, staged: bool = False) -> None:
    wrong = {}
    for name, said in outcomes(rank, names, staged=staged):
        refused = (
            OTHERS_IN_STAGES.get(name, HABITS[name].refused) if staged else HABITS[name].refused
        )
        right = re.match(f"refused: (?:{refused})", said) if refused else said == "equal"
        if not right:
            wrong[name] = said
    assert not wrong, "\n".join(f"{name}: {said}" for name, said in wrong.items())


def table(rank: int, names: Sequence[str], *, staged: bool) -> None:
    for name, said in outcomes(rank, names, staged=staged):
        texts: list[Any] = [None, None]
        dist.all_gather_object(texts, said)
        if rank == 0:
            both = texts[0] if texts[0] == texts[1] else " | ".join(texts)
            print(f"{name:36} {both}", flush=True)


JOBS = {
    "habits": Job(2, partial(check, names=list(HABITS)), [plan_all], limit_s=600, slow=True),
    "habits_in_stages": Job(
        2,
        partial(check, names=list(HABITS), staged=True),
        [partial(plan_all, staged=True)],
        limit_s=600,
        slow=True,
    ),
    "checkpoints": Job(
        2, checkpointed, then=Job(3, checkpointed, then=Job(1, checkpointed)), slow=True
    ),
}

if __name__ == "__main__":
    if sys.argv[1:2] == ["table"]:
        words = [word for word in sys.argv[2:] if word != "--stages"]
        names = [name for name in HABITS if not words or any(word in name for word in words)]
        run = partial(table, names=names, staged="--stages" in sys.argv)
        sys.exit(fork_ranks(Job(2, run, limit_s=1800)))
    main(JOBS)
