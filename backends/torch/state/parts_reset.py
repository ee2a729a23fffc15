"""Methods of submodules that set their contents, on ranks, which have parts of them.

`reset_parameters()` and its like are called on a whole submodule of the same class, with the plain
attributes that it had when it was compiled. Each rank keeps its part of what is set: the numbers of
one process, if all ranks' generators are seeded alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from partitioner.backends.errors import BackendError, one_line

#: Methods of PyTorch's submodules that set parameters and buffers, and are called by users.
RESETTING = frozenset(
    {"reset_parameters", "_reset_parameters", "reset_running_stats", "reset_num_batches_tracked"}
)
#: Types of plain values.
PLAIN = int, float, complex, str, tuple, torch.dtype, type(None)
#: Where a part of a rank's module keeps the plain values of attributes that it had when compiled.
VALUES = "_values_in_the_model"


def reset_part(part: nn.Module, method: str) -> None:
    """Call a method that sets contents of a part of a rank's module; all ranks must call it.

    Raises:
        BackendError: The method fails on a whole submodule with these contents, or gives it other
            tensors, sizes or plain attributes.
    """
    kind = part.__class__
    held = dict(_tensors(part))
    with torch.no_grad():
        whole = _whole_of(part, {})
        values = _values(whole)
        try:
            getattr(whole, method)()
            problem = _problem(held, dict(_tensors(whole))) or _problem_of(values, _values(whole))
        except Exception as error:
            raise BackendError(
                f"{method}() of a {kind.__name__} of a rank's module: {one_line(error)}: {_ADVICE}"
            ) from error
        if problem:
            raise BackendError(
                f"{method}() of a {kind.__name__} of a rank's module {problem}: {_ADVICE}"
            )
        for name, tensor in _tensors(whole):
            held[name].copy_(tensor)


#: What users can do in place of a method that fails.
_ADVICE = (
    "reset the module before compile, or write to its parameters in place under torch.no_grad()"
)


def _problem(held: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> str:
    """Say what a method did that cannot be taken over; "" if it only set contents."""
    if held.keys() != after.keys():
        return "changes which tensors it has"
    resized = [name for name, tensor in held.items() if tensor.shape != after[name].shape]
    return f"changes the size of {resized[0]}" if resized else ""


def _problem_of(
    values: Mapping[tuple[str, str], object], after: Mapping[tuple[str, str], object]
) -> str:
    """Name the plain value that a method set; "" if none of those that were there."""
    for key, value in values.items():
        if key not in after or repr(after[key]) != repr(value):
            return f"sets {key[1]}, which was traced as it was when the module was compiled"
    return ""


def _values(module: nn.Module) -> dict[tuple[str, str], object]:
    """Plain values of attributes of a module and those in it, by path and name."""
    return {
        (path, name): value
        for path, part in module.named_modules(remove_duplicate=False)
        for name, value in vars(part).items()
        if isinstance(value, PLAIN)
    }


def _whole_of(part: nn.Module, wholes: dict[int, Tensor]) -> nn.Module:
    """A module of the class that a part shows, with whole contents.

    Args:
        part: A submodule.
        wholes: The contents by `id` of the part's tensor, to which its own are added.
    """
    whole: nn.Module = object.__new__(part.__class__)
    nn.Module.__init__(whole)
    vars(whole).update(vars(part).get(VALUES, {}))
    whole.training = part.training

    def contents(tensor: Tensor) -> Tensor:
        if id(tensor) not in wholes:
            value = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()
            value = value.clone()  # a DTensor that is whole on each rank gives its own memory
            is_parameter = isinstance(tensor, nn.Parameter)
            wholes[id(tensor)] = nn.Parameter(value, False) if is_parameter else value
        return wholes[id(tensor)]

    for name, parameter in part._parameters.items():
        whole._parameters[name] = None if parameter is None else contents(parameter)  # type: ignore[assignment]
    for name, buffer in part._buffers.items():
        whole._buffers[name] = None if buffer is None else contents(buffer)
    for name, child in part._modules.items():
        whole._modules[name] = None if child is None else _whole_of(child, wholes)
    return whole


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)
