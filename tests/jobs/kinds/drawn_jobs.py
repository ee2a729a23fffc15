"""Jobs of test_drawn_training.py: rare and random modules trained by ranks, beside one process."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

import partitioner
from helpers.drawn.drawn_training import Case, drawn, loss_of, optimizer, refused, way_of
from helpers.modules.odd_modules import made
from jobs.processes.torch_ranks import Job, main
from partitioner.api.compiled.module import ModuleProgram
from partitioner.frontends.torch.exporting import replaced
from partitioner.ir.errors import PartitionerError

#: Steps of the optimizer.
STEPS = 3


@cache
def compiled(name: str, parallel: str, ranks: int) -> tuple[ModuleProgram, nn.Module, Any]:
    """A rare module, compiled before the ranks are forked, and another of the same weights."""
    (module, args), (plain, _) = made(name), made(name)
    program = partitioner.compile(
        module, args, ranks, training=True, parallel=parallel, optimizer="sgd"
    )
    assert isinstance(program, ModuleProgram)
    return program, plain, args


def rare(name: str, parallel: str, ranks: int, rank: int) -> None:
    """Steps of a rare module; with "local", each rank is called with its part of the batch."""
    program, plain, args = compiled(name, parallel, ranks)
    is_local = name == "mask indexed by counts"
    module = program.module(inputs="local" if is_local else "global")
    part = tuple(arg.chunk(ranks)[rank] for arg in args) if is_local else args
    ours, theirs = optimizer("sgd", module), optimizer("sgd", plain)
    for _ in range(STEPS):
        result = module(*part)
        with replaced({(nn.SyncBatchNorm, "forward"): _BatchNorm.forward}):
            expected = plain(*args)
        torch.testing.assert_close(loss_of(result), loss_of(expected))
        for one, loss in ((ours, result), (theirs, expected)):
            loss_of(loss).backward()
            one.step()
            one.zero_grad()
    _check_state(module, plain)


def encoder(parallel: str, rank: int) -> None:
    """Other sequence lengths of an encoder whose rows lie in stripes; one step is another graph."""
    del rank
    torch.manual_seed(0)
    program, plain = _encoder(parallel)
    module = program.module()
    ours, theirs = optimizer("sgd", module), optimizer("sgd", plain)
    for length in (6, 5, 1, 3, 1, 8):
        x = torch.randn(4, length, 8, generator=torch.Generator().manual_seed(length))
        for one, of in ((ours, module), (theirs, plain)):
            of(x).backward()
            one.step()
            one.zero_grad()
    _check_state(module, plain)


class Mean(nn.Module):
    """The mean square of an encoder layer's result."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """Loss."""
        return (self.inner(x) - 1).square().mean()


@cache
def _encoder(parallel: str) -> tuple[ModuleProgram, nn.Module]:
    torch.manual_seed(0)
    module, plain = Mean(), Mean()
    plain.load_state_dict(module.state_dict())
    space: dict[str, Any] = {"parallel": parallel}
    if parallel == "auto":  # in stages, sizes that make another graph are refused
        space = {"strategy": "intra"}
    program = partitioner.compile(module, torch.randn(4, 6, 8), 2, training=True, **space)
    assert isinstance(program, ModuleProgram)
    return program, plain


@cache
def prepared(seeds: tuple[int, ...]) -> list[tuple[int, Case, ModuleProgram]]:
    """The random modules of these seeds that are not refused."""
    programs = []
    for seed in seeds:
        case = drawn(seed)
        try:
            programs.append((seed, case, case.compiled()))
        except PartitionerError as error:
            if not refused(str(error)):
                raise
    return programs


def random_modules(seeds: tuple[int, ...], ranks: int, rank: int) -> None:
    """Steps of random modules, one of them of fewer rows, then evaluation."""
    del rank
    for seed, case, program in prepared(seeds):
        assert case.devices == ranks
        with replaced({(nn.SyncBatchNorm, "forward"): _BatchNorm.forward}):  # drawing runs it
            plain = drawn(seed).module
        module = program.module()
        ours, theirs = optimizer(case.optimizer, module), optimizer(case.optimizer, plain)
        *batches, last = case.batches
        fewer = tuple(one[: len(one) // 2 * 2 - 2] for one in last)
        for batch in (*batches, fewer) if len(fewer[0]) >= 2 * ranks else batches:
            try:
                result = module(*batch)
            except PartitionerError:
                if batch is not fewer:
                    raise
                break  # its graph has other nodes
            with replaced({(nn.SyncBatchNorm, "forward"): _BatchNorm.forward}):
                expected = plain(*batch)
            torch.testing.assert_close(
                *(loss_of(result), loss_of(expected)),
                msg=lambda said, seed=seed: f"seed {seed}: {said}",
            )
            for one, loss in ((ours, result), (theirs, expected)):
                loss_of(loss).backward()
                one.step()
                one.zero_grad()
        _check_state(module, plain, f"seed {seed}, ")


def _check_state(module: Any, plain: nn.Module, where: str = "") -> None:
    state = module.full_state_dict()
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(
            *(state[name], tensor),
            rtol=1e-4,
            atol=1e-5,
            msg=lambda said, name=name: f"{where}{name}: {said}",
        )


def _of_devices(devices: int, first: int, count: int) -> tuple[int, ...]:
    """Seeds of modules that are drawn with so many devices."""
    seeds = range(first, first + count)
    return tuple(seed for seed in seeds if way_of(seed)[1] == devices)


RARE = {
    "zero1_tied": ("tied", "zero1", 2),
    "zero3_keywords": ("keywords as names", "zero3", 2),
    "zero3_no_elements": ("no elements", "zero3", 2),
    "tp_one_output": ("one output", "tp", 2),
    "zero2_frozen": ("frozen parameters written", "zero2", 2),
    "dp_local_mask": ("mask indexed by counts", "dp", 2),
    "dp_sync_batch_norm": ("SyncBatchNorm", "dp", 2),
}
JOBS = {
    **{
        key: Job(
            case[2], partial(rare, *case), [partial(compiled, *case)], slow=key != "zero1_tied"
        )
        for key, case in RARE.items()
    },
    **{
        f"encoder_{kind}": Job(2, partial(encoder, kind), [partial(_encoder, kind)], slow=True)
        for kind in ("dp", "zero3", "auto")
    },
    **{
        f"random_{ranks}_{first}": Job(
            *(ranks, partial(random_modules, seeds, ranks), [partial(prepared, seeds)]),
            limit_s=300,
            slow=first == 0,
            sweep=first > 0,
        )
        for ranks in (2, 3)
        for first, count in ((0, 10), (10, 30))
        for seeds in [_of_devices(ranks, first, count)]
    },
}


if __name__ == "__main__":
    main(JOBS)
