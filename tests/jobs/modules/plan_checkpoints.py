"""Checkpoints that one plan saves and each plan loads: training continues from each of them."""

from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler

import partitioner
from helpers.modules.trained import Gpt
from jobs.processes.torch_ranks import Job, main
from partitioner.api.compiled.module import ModuleProgram
from partitioner.backends.torch.running.rank_module import RankModule

#: Devices and options of each plan.
PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp": (2, {"parallel": "dp"}),
    "tp": (2, {"parallel": "tp"}),
    "pp": (2, {"parallel": "pp", "micro_batches": 2}),
    "zero3 on 4": (4, {"parallel": "zero3"}),
    "pp+tp on 4": (4, {"parallel": "pp+tp", "micro_batches": 2}),
    "auto on 3": (3, {}),
}
SAVED_AFTER, STEPS = 3, 8
#: Ranks in stages hold parameters of their own, see docs/how-to/restart.md.
OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)


def whole() -> Gpt:
    torch.manual_seed(0)
    return Gpt(blocks=2).double()


@cache
def program(name: str) -> ModuleProgram:
    devices, options = PLANS[name]
    compiled = partitioner.compile(
        whole(), Gpt.batch(0, 12), devices=devices, training=True, **options
    )
    assert isinstance(compiled, ModuleProgram)
    return compiled


def updates(module: torch.nn.Module) -> tuple[Optimizer, LRScheduler]:
    optimizer = AdamW(module.parameters(), lr=1e-2)
    return optimizer, CosineAnnealingLR(optimizer, 10)


def losses(
    module: torch.nn.Module, optimizer: Optimizer, scheduler: LRScheduler, first: int, last: int
) -> list[float]:
    """Train by the batches from `first` to before `last`."""
    found = []
    for step in range(first, last):
        loss = module(*Gpt.batch(step, 12))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        found.append(loss.item())
    return found


@cache
def of_one_process() -> list[float]:
    module = whole()
    return losses(module, *updates(module), 0, STEPS)


def state(module: RankModule, optimizer: Optimizer, scheduler: LRScheduler) -> dict[str, Any]:
    model, moments = get_state_dict(module, optimizer, options=OPTIONS)
    return {
        "model": model,
        "optimizer": moments,
        "scheduler": scheduler.state_dict(),
        "steps": module.steps,
    }


def of_this_size() -> list[str]:
    return [name for name, (devices, _) in PLANS.items() if devices == dist.get_world_size()]


def save(_: int) -> None:
    for name in of_this_size():
        module = program(name).module()
        optimizer, scheduler = updates(module)
        found = losses(module, optimizer, scheduler, 0, SAVED_AFTER)
        torch.testing.assert_close(found, of_one_process()[:SAVED_AFTER])
        dcp.save(state(module, optimizer, scheduler), checkpoint_id=name)


def load(_: int) -> None:
    for name in of_this_size():
        for saved in PLANS:
            module = program(name).module()
            optimizer, scheduler = updates(module)
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.zero_()
            loaded = state(module, optimizer, scheduler)
            dcp.load(loaded, checkpoint_id=saved)
            set_state_dict(
                module,
                optimizer,
                model_state_dict=loaded["model"],
                optim_state_dict=loaded["optimizer"],
                options=OPTIONS,
            )
            scheduler.load_state_dict(loaded["scheduler"])
            module.steps = loaded["steps"]
            assert module.steps == SAVED_AFTER * PLANS[saved][1].get("micro_batches", 1)
            found = losses(module, optimizer, scheduler, SAVED_AFTER, STEPS)
            torch.testing.assert_close(
                found,
                of_one_process()[SAVED_AFTER:],
                msg=partial("{} -> {}: {}".format, saved, name),
            )


def plan_all() -> None:
    for name in PLANS:
        program(name)
    of_one_process()


LOADED = Job(2, load, then=Job(4, load, then=Job(3, load)))
JOBS = {
    "each_plan_loads_each": Job(
        2, save, [plan_all], then=Job(4, save, then=Job(3, save, then=LOADED)), slow=True
    )
}

if __name__ == "__main__":
    main(JOBS)
