"""Refuses changes of a rank's module that its graphs would not notice."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils import _pytree as pytree

from partitioner.backends.errors import BackendError
from partitioner.backends.tensors import dtype_word
from partitioner.backends.torch.rank_passes import Stored


def check_changes(
    module: nn.Module, stored: Sequence[Stored], tensors: Mapping[str, Tensor]
) -> None:
    """Refuse a module that was changed since it was made.

    Args:
        tensors: Those that the rank's module was made with, by first name.

    Raises:
        BackendError: A submodule is in another mode than the module, or has hooks; a parameter or
            buffer was replaced by another tensor or has another element type; a parameter requires
            a gradient and was frozen in the trace. (One that required a gradient in the trace, and
            that the loss does not use, gets none.)
    """
    for name, submodule in module.named_modules():
        if submodule.training != module.training:
            mode = "training" if submodule.training else "evaluation"
            raise BackendError(
                f"{name} is in {mode} mode, the module is not, and its mode was traced: call "
                f"{name}.{'train' if submodule.training else 'eval'}() before compile, and only "
                "train() and eval() of the whole module after it"
            )
        hooks = (submodule._forward_hooks, submodule._forward_pre_hooks, submodule._backward_hooks)
        if name and any((*hooks, submodule._backward_pre_hooks)):
            raise BackendError(
                f"{name} has a hook, which would not be called: submodules do not run by "
                "themselves; hooks of the whole module and of parameters are called"
            )
    for entry in stored:
        tensor = tensors.get(entry.names[0])
        if tensor is None:
            continue
        if tensor.dtype != entry.dtype:
            raise BackendError(
                f"{entry.names[0]} is {dtype_word(tensor.dtype)} now and was "
                f"{dtype_word(entry.dtype)}: for another element type, compile the module in it"
            )
        for name in entry.names:
            if _tensor_of(module, name) is not tensor:
                raise BackendError(
                    f"{name} was replaced by another tensor: write to it instead, with "
                    "load_state_dict() or in place under torch.no_grad(); for another element "
                    "type, compile the module in it"
                )
        if tensor.requires_grad and entry.value and entry.frozen:
            raise BackendError(
                f"{entry.names[0]} requires a gradient now, but was frozen when the module was "
                "compiled: compile it again"
            )


def _tensor_of(module: nn.Module, name: str) -> Tensor | None:
    """The parameter or buffer that has this name now; None if there is none."""
    path, _, leaf = name.rpartition(".")
    try:
        owner = module.get_submodule(path)
    except AttributeError:
        return None
    return owner._parameters.get(leaf, owner._buffers.get(leaf))


def count_steps(owner: object, tensors: Mapping[str, Tensor]) -> None:
    """Count each optimizer's step as a write to the parameters that have gradients.

    PyTorch counts no writes of steps with `foreach=True` or `fused=True` to DTensors.

    Args:
        owner: Steps are counted while it lives.
        tensors: The rank's parameters and buffers.
    """
    ours = frozenset(map(id, tensors.values()))

    def stepped(optimizer: Optimizer, *_: Any) -> None:
        parameters = (x for group in optimizer.param_groups for x in group["params"])
        increment_version([x for x in parameters if id(x) in ours and x.grad is not None])

    handle = register_optimizer_step_post_hook(stepped)
    weakref.finalize(owner, handle.remove).atexit = False


def check_inputs(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Refuse inputs that require a gradient in a training step."""
    for value in pytree.tree_leaves((args, dict(kwargs))):
        if isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled():
            raise BackendError(
                "an input requires a gradient: only parameters get one; detach() it, or make what "
                "computes it a part of the module"
            )
