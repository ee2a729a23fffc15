"""Steps of optimizers over DTensors that compute with this rank's parts alone.

PyTorch dispatches every operator on a DTensor in Python: a step of AdamW takes half a millisecond a
parameter longer so. Where each element is updated by itself, the parts of a step are steps of the
parts. So the optimizer's step is given to a double, whose parameters, gradients and state are the
parts, in the same memory. The optimizer's own stay DTensors, as PyTorch's checkpoints want them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, _global_optimizer_pre_hooks

from partitioner.backends.torch.state.shards import distributed_as

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


def over_parts(
    optimizer: Optimizer,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    ours: Collection[int],
    hooks: Collection[Any],
) -> Arguments | None:
    """Arguments that make an optimizer's step compute with parts; None if it stays as it is.

    It stays where parts would do something else: with an optimizer of another kind, a closure,
    hooks of the user before the step, a gradient that lies otherwise than its parameter, a
    parameter of others, or a single number without state, which PyTorch makes then. Hooks after the
    step find the optimizer's own state: it is taken back before they are called.

    Args:
        optimizer: Its step is about to begin.
        args: Of the step, by position: the optimizer first.
        kwargs: Of the step, by name.
        ours: Ids of the parameters of a rank's module.
        hooks: Those for all optimizers that do not change groups of parameters.
    """
    vars(optimizer).pop(_BEHIND, None)  # of a step that failed
    is_plain_call = len(args) == 1 and args[0] is optimizer and not kwargs
    if not is_plain_call or not _may_have_double(optimizer, hooks):
        return None
    options = {name: value for name, value in vars(optimizer).items() if name not in _CONTENTS}
    if any(isinstance(value, DTensor) for value in options.values()):
        return None
    parts: dict[Tensor, Tensor] = {}
    state: defaultdict[Tensor, _State] = defaultdict(dict)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            known = optimizer.state.get(parameter, {})
            if parameter.grad is None or not isinstance(parameter, DTensor):
                parts[parameter] = parameter
                if known:
                    state[parameter] = known
                continue
            is_clear = known or parameter.ndim > 0  # what state is a part, what a number
            part = _part_of(parameter, known) if is_clear and id(parameter) in ours else None
            if part is None or group.get("differentiable"):
                return None
            parts[parameter], state[part] = part, _parts_of(known)
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


def _may_have_double(optimizer: Optimizer, hooks: Collection[Any]) -> bool:
    """Test whether a step is elementwise, and no hook but `hooks` is called before it."""
    known = set(map(id, hooks))  # others' may have no hash
    of_all = _global_optimizer_pre_hooks.values()
    return (
        type(optimizer) in _ELEMENTWISE
        and not torch.compiler.is_compiling()
        and not optimizer._optimizer_step_pre_hooks
        and all(id(hook) in known for hook in of_all)
    )


#: The method of an optimizer that PyTorch (2.13) calls between a step and the hooks behind it.
_BEHIND = "_optimizer_step_code"
#: Attributes of an optimizer that its double has of its own.
_CONTENTS = frozenset({"param_groups", "state"})


def take_back(optimizer: Optimizer, args: tuple[Any, ...]) -> None:
    """Give an optimizer, whose step is over, what its double has made anew, if it had one.

    It does nothing a second time.
    """
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
                old = before.get(name)
                if value is not (old._local_tensor if isinstance(old, DTensor) else old):
                    before[name] = (
                        distributed_as(parameter, value) if _is_part(value, part) else value
                    )


def _part_of(parameter: DTensor, state: _State) -> Tensor | None:
    """Return this rank's part of a parameter, with its gradient; None if state lies otherwise."""
    gradient = parameter.grad
    if not isinstance(gradient, DTensor) or gradient.dtype != parameter.dtype:
        return None  # PyTorch gives no part a gradient of another type
    tensors = [value for value in state.values() if isinstance(value, Tensor) and value.ndim]
    for value in (gradient, *tensors):  # a loop: each step comes here for all that it reads
        if not _lies_as(parameter, value):
            return None
    part = parameter._local_tensor.detach()
    part.grad = gradient._local_tensor
    return part


def _parts_of(state: _State) -> _State:
    """Take this rank's parts of a parameter's state."""
    return {
        name: value._local_tensor if isinstance(value, DTensor) else value
        for name, value in state.items()
    }


def _lies_as(parameter: DTensor, value: Any) -> bool:
    """Test whether a tensor is distributed as a parameter is, and is no partial sum."""
    if not isinstance(value, DTensor) or type(value._local_tensor) is not Tensor:
        return False
    if value._local_tensor.shape != parameter._local_tensor.shape:
        return False
    spec, wanted = value._spec, parameter._spec
    return spec is wanted or (
        spec.mesh == wanted.mesh
        and spec.placements == wanted.placements
        and not any(place.is_partial() for place in spec.placements)
    )


def _is_part(value: Any, part: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == part.shape
