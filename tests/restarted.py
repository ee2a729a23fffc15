"""Training under torchrun that fails twice and goes on from its last checkpoint each time.

In its first life rank 1 raises, in its second rank 0 is killed, in its third it gets through.
"""

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from trained import Mlp

import partitioner
from partitioner.constraints import Constraints, Pin
from partitioner.module_program import ModuleProgram

STEPS = 6


def compiled(module: Mlp) -> ModuleProgram:
    """What is not used is frozen: PyTorch saves no optimizer state of it, and then misses it."""
    module.spare.requires_grad_(False)
    pin = Pin("first", tensor="first.weight", dim=0)
    found = partitioner.compile(
        module,
        Mlp.batch(0),
        devices=2,
        training=True,
        cluster="ideal",
        constraints=Constraints((pin,)),
        gap=0.5,
    )
    assert isinstance(found, ModuleProgram)
    return found


def fail(life: int, step: int, rank: int) -> None:
    if (life, step, rank) == (0, 2, 1):
        raise ValueError("rank 1 has had enough")
    if (life, step, rank) == (1, 4, 0):
        os.kill(os.getpid(), signal.SIGKILL)


def train(folder: Path, life: int) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    module = compiled(Mlp(dropout=0.3).double()).module()
    update = torch.optim.AdamW(module.parameters(), lr=1e-2)
    saved = sorted(folder.glob("step-*"))
    if saved:
        model, moments = get_state_dict(module, update)
        state = {"model": model, "optimizer": moments}
        dcp.load(state, checkpoint_id=saved[-1])
        set_state_dict(
            module, update, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        module.steps = int(saved[-1].name.removeprefix("step-"))
    if dist.get_rank() == 0:
        print(f"life {life} starts at step {module.steps}", flush=True)
    for step in range(module.steps, STEPS):
        fail(life, step, dist.get_rank())
        module(*Mlp.batch(step))[0].backward()
        update.step()
        update.zero_grad()
        model, moments = get_state_dict(module, update)
        dcp.save({"model": model, "optimizer": moments}, checkpoint_id=folder / f"step-{step + 1}")
    full = module.full_state_dict()
    if dist.get_rank() == 0:
        torch.save(full, folder / "weights.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    train(Path(sys.argv[1]), int(os.environ["TORCHELASTIC_RESTART_COUNT"]))
