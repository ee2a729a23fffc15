"""Checkpoints by PyTorch's own functions, of a rank's module and its optimizer."""

from __future__ import annotations

from pathlib import Path

import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.optim import Optimizer


def save(module: nn.Module, update: Optimizer, folder: str | Path, *, flat: bool = False) -> None:
    """Save them; `flat` as ranks with parameters of their own need it."""
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model, moments = get_state_dict(module, update, options=options)
    dcp.save({"model": model, "optimizer": moments}, checkpoint_id=folder)


def restore(
    module: nn.Module, update: Optimizer, folder: str | Path, *, flat: bool = False
) -> None:
    """Load what `save` saved, under any plan."""
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model, moments = get_state_dict(module, update, options=options)
    state = {"model": model, "optimizer": moments}
    dcp.load(state, checkpoint_id=folder)
    loaded = set_state_dict(
        module,
        update,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        options=options,
    )
    assert not loaded.missing_keys
    assert not loaded.unexpected_keys
