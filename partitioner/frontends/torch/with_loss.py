"""A module whose loss is computed by a criterion outside of it, or is one of its results."""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor, nn

from partitioner.backends.torch.guards.originals import refuse_old_weights
from partitioner.frontends.errors import FrontendError
from partitioner.ir.checks import is_a, is_whole
from partitioner.ir.errors import OptionError, hints_keywords, typed

#: Keyword of a call that has a criterion's target.
TARGET = "target"
#: Whether the trace around a call is of a training step, which needs its loss.
_TRAINING = ContextVar("_TRAINING", default=False)
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


@contextmanager
def losses_needed(*, training: bool) -> Iterator[None]:
    """Refuse calls without a loss inside of the block, if it traces a training step."""
    token = _TRAINING.set(training)
    try:
        yield
    finally:
        _TRAINING.reset(token)


@hints_keywords
def with_loss(module: nn.Module, loss: Callable[..., Any] | str | int) -> nn.Module:
    """View a module as one that returns its loss first, as training needs it.

    The view has the class of the module, its parameters, submodules, attributes and mode: they are
    the same objects, so that names, checkpoints and plans are those of the module.

    Args:
        module: The module, which has no hooks of its own (its submodules may have some).
        loss: A criterion, a function of (outputs, target): then calls take the keyword `target`,
            with which they return the loss alone, and without which, in evaluation, the outputs. It
            is taken as it is now. Or the key of the loss in the outputs, a dict or a `ModelOutput`,
            which comes first then; or its place in a tuple.

    Raises:
        OptionError: `loss` is none of these, or trains parameters of its own.
        FrontendError: The module has hooks of its own.
    """
    _check_hooks(module)
    kind: Any = type(module)
    signature = inspect.signature(kind.forward)
    if "forward" in vars(module):
        raise OptionError(f"loss: {kind.__name__}.forward is set on this instance: write a class")
    if isinstance(loss, type) or not (callable(loss) or is_a(loss, str) or is_whole(loss)):
        given = f"the class {loss.__name__}" if isinstance(loss, type) else repr(loss)
        raise OptionError(
            f"loss is {given}; give a function of (outputs, target), as nn.CrossEntropyLoss(), or "
            "the key of the loss in the module's outputs"
        )
    if callable(loss):
        signature = _with_target(kind, signature)
    if isinstance(loss, nn.Module):
        _check_criterion(loss)
        loss = copy.deepcopy(loss)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        _check_hooks(self)
        if not callable(loss):
            return _first(kind.forward(self, *args, **kwargs), loss, kind.__name__)
        target = kwargs.pop(TARGET, None)
        if target is None and _TRAINING.get():
            raise FrontendError(f"loss is a function of (outputs, {TARGET}): give {TARGET}=")
        outputs = kind.forward(self, *args, **kwargs)
        return outputs if target is None else loss(outputs, target)

    def deepcopy(_: Any, memo: dict[int, Any]) -> nn.Module:
        return with_loss(copy.deepcopy(module, memo), loss)

    forward.__signature__ = signature  # type: ignore[attr-defined]
    forward.__doc__ = kind.forward.__doc__
    own: dict[str, Any] = {"forward": forward, "__deepcopy__": deepcopy}
    own |= {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    view: nn.Module = object.__new__(type(kind)(kind.__name__, (kind,), own))
    object.__setattr__(view, "__dict__", vars(module))
    return view


def _with_target(kind: type[nn.Module], signature: inspect.Signature) -> inspect.Signature:
    """The signature of a module's `forward`, with the keyword of a target."""
    listed = list(signature.parameters.values())
    if TARGET in signature.parameters:
        raise OptionError(
            f"loss: {kind.__name__}.forward has an argument {TARGET!r} of its own, which a "
            "criterion's target is named, too: rename it"
        )
    behind = [p for p in listed if p.kind is p.VAR_KEYWORD]
    target = inspect.Parameter(TARGET, inspect.Parameter.KEYWORD_ONLY, default=None)
    return signature.replace(parameters=[*listed[: len(listed) - len(behind)], target, *behind])


def _check_criterion(loss: nn.Module) -> None:
    """Refuse a criterion that is trained: no rank would hold its parameters."""
    for name, tensor in loss.named_parameters():
        if tensor.requires_grad:
            raise OptionError(
                f"loss: {type(loss).__name__} trains {name}, which no checkpoint of the module "
                "has: hold both in a module that returns its loss first"
            )


def _check_hooks(module: nn.Module) -> None:
    hooks = (hook for table in _HOOKS for hook in getattr(module, table).values())
    if any(hook is not refuse_old_weights for hook in hooks):
        raise FrontendError(
            f"{type(module).__name__} has hooks of its own, which would be given the loss with its "
            "outputs: set them on its parts, or write a module that returns its loss first"
        )


def _first(outputs: Any, key: str | int, name: str) -> Any:
    """Outputs with one of them before all others; unchanged in evaluation if there is none."""
    if isinstance(key, str) and isinstance(outputs, Mapping) and key in outputs:
        if not isinstance(outputs, OrderedDict):
            return {key: outputs[key], **outputs}
        moved = copy.copy(outputs)  # ModelOutputs keep their class
        moved.move_to_end(key, last=False)
        return moved
    is_row = not isinstance(key, str) and isinstance(outputs, tuple | list)
    if is_row and -len(outputs) <= int(key) < len(outputs):
        others = list(outputs)
        return (others.pop(int(key)), *others)
    if not _TRAINING.get():
        return outputs
    has = typed(outputs)
    if isinstance(outputs, Mapping):
        has = f"a {type(outputs).__name__} of {', '.join(map(repr, outputs)) or 'nothing'}"
    elif isinstance(outputs, tuple | list):
        has = f"{len(outputs)} in a {type(outputs).__name__}"
    elif isinstance(outputs, Tensor):
        has = f"a tensor of {list(outputs.shape)}"
    raise FrontendError(
        f"loss is {key!r}, and the outputs of {name} are {has}: give a key of theirs (is an "
        "argument missing, as labels?), or a function of (outputs, target)"
    )
