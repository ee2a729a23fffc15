"""Steps of optimizers over the parameters of a rank's module that compute with its parts alone.

PyTorch dispatches every operator on such a tensor in Python: a step of AdamW takes half a
millisecond a parameter longer so. Where each element is updated by itself, the parts of a step are
steps of the parts. So the optimizer's step is given to a double, whose parameters, gradients and
state are the parts, in the same memory. The optimizer's own stay as PyTorch's checkpoints want
them.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Collection
from typing import Any, TypeAlias
from weakref import WeakSet

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import (
    GlobalOptimizerPostHook,
    GlobalOptimizerPreHook,
    Optimizer,
    _global_optimizer_pre_hooks,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from partitioner.backends.torch.dtensors.rank_tensor import RankTensor, is_cut_alike

#: Optimizers that compute each element of a parameter from that of its gradient and state alone.
_ELEMENTWISE = frozenset(
    {
        *(torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.Adam, torch.optim.Adamax),
        *(torch.optim.AdamW, torch.optim.ASGD, torch.optim.NAdam, torch.optim.RAdam),
        *(torch.optim.RMSprop, torch.optim.SGD),
    }
)

#: Arguments of a step: those by position, the optimizer first, and those by name.
Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
_State: TypeAlias = dict[str, Any]
#: The method of an optimizer that PyTorch (2.13) calls between a step and the hooks behind it.
_BEHIND = "_optimizer_step_code"
#: Attributes of an optimizer that its double has of its own.
_CONTENTS = frozenset({"param_groups", "state"})
#: What is called before steps, and changes no group of parameters.
_OWN_HOOKS: WeakSet[GlobalOptimizerPreHook] = WeakSet()


def on_steps(owner: object, before: GlobalOptimizerPreHook, after: GlobalOptimizerPostHook) -> None:
    """Call functions before and after the step of any optimizer, as PyTorch's hooks, with `owner`.

    Steps compute with parts beside these hooks: `before` changes no group of parameters.
    """
    _OWN_HOOKS.add(before)
    handles = register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)
    for handle in handles:
        weakref.finalize(owner, handle.remove).atexit = False


def over_parts(
    optimizer: Optimizer,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    ours: Collection[int],
) -> Arguments | None:
    """Arguments that make an optimizer's step compute with parts; None if it stays as it is.

    It stays where parts would do something else: with an optimizer of another kind, a closure,
    hooks of the user before the step, a gradient that lies otherwise than its parameter, a
    parameter of others, or a single number without state, which PyTorch makes then. Hooks after the
    step find the optimizer's own state: it is taken back before they are called.

    Args:
        args: Of the step, by position: the optimizer first.
        ours: Ids of the parameters of a rank's module.
    """
    if args[0] is not optimizer:
        return None  # a step of a double, for another rank's module
    vars(optimizer).pop(_BEHIND, None)  # of a step that failed
    known_hooks = set(map(id, _OWN_HOOKS))  # others' may have no hash
    if (
        len(args) > 1
        or kwargs
        or type(optimizer) not in _ELEMENTWISE
        or torch.compiler.is_compiling()
        or optimizer._optimizer_step_pre_hooks
        or any(id(hook) not in known_hooks for hook in _global_optimizer_pre_hooks.values())
    ):
        return None
    options = {name: value for name, value in vars(optimizer).items() if name not in _CONTENTS}
    parts: dict[Tensor, Tensor] = {}
    state: defaultdict[Tensor, _State] = defaultdict(dict)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            known, gradient = optimizer.state.get(parameter, {}), parameter.grad
            part = parameter
            if gradient is not None and isinstance(parameter, RankTensor):
                # of state without dims, nothing tells what is a part of it and what a number
                is_clear = known or parameter.ndim > 0
                tensors = [x for x in known.values() if isinstance(x, Tensor) and x.ndim]
                if (
                    not is_clear
                    or id(parameter) not in ours
                    or group.get("differentiable")
                    or gradient.dtype != parameter.dtype  # parts get none of another type
                    or not all(_lies_as(parameter, one) for one in (gradient, *tensors))
                ):
                    return None
                part = parameter._local_tensor.detach()
                part.grad = gradient._local_tensor
                known = {name: _local(value) for name, value in known.items()}
            parts[parameter] = part
            if known or part is not parameter:
                state[part] = known
    if all(part is parameter for parameter, part in parts.items()):
        return None
    double: Optimizer = object.__new__(type(optimizer))
    groups = [
        {**group, "params": [parts[parameter] for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]
    vars(double).update(options, param_groups=groups, state=state)

    def taken_back() -> None:
        del vars(optimizer)[_BEHIND]
        take_back(optimizer, (double,))

    vars(optimizer)[_BEHIND] = taken_back
    return (double,), kwargs


def take_back(optimizer: Optimizer, args: tuple[Any, ...]) -> None:
    """Give an optimizer, once, what the double of its step, if it had one, has made anew."""
    double = args[0]
    if double is optimizer:
        return
    own = {name: value for name, value in vars(double).items() if name not in _CONTENTS}
    vars(optimizer).update(own)
    for group, parts in zip(optimizer.param_groups, double.param_groups, strict=True):
        for parameter, part in zip(group["params"], parts["params"], strict=True):
            made = double.state.get(part, {})
            if part is parameter and made:
                optimizer.state[parameter] = made
            if part is parameter or not made:
                continue
            before = optimizer.state[parameter]
            for name, value in made.items():
                if value is not _local(before.get(name)):
                    is_part = isinstance(value, Tensor) and value.shape == part.shape
                    before[name] = parameter.like(value) if is_part else value


def _local(value: Any) -> Any:
    return value._local_tensor if isinstance(value, DTensor) else value


def _lies_as(parameter: RankTensor, value: Tensor) -> bool:
    return (
        isinstance(value, DTensor)
        and is_cut_alike(parameter, value)
        and type(value._local_tensor) is Tensor
    )
