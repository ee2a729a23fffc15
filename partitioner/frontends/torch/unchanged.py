"""Refuses changes of a module that its trace does not have."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch
from torch import fx, nn

from partitioner.frontends.errors import FrontendError

#: Plain attributes of each submodule, by its name.
Settings = Mapping[str, Mapping[str, object]]


@dataclass(frozen=True)
class Snapshot:
    """The facts that a trace takes from a module beside its tensors' contents.

    Attributes:
        settings: Numbers, texts and the like that are attributes, but for those that the forward
            pass assigns.
        modes: Whether each submodule, by name, was in training mode.
        tensors: Parameters by name, and the buffers that are constants.
        types: Their element types, and those of all other buffers.
        trainable: Names of the parameters that required a gradient.
    """

    settings: Settings = field(default_factory=dict)
    modes: Mapping[str, bool] = field(default_factory=dict)
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    types: Mapping[str, torch.dtype] = field(default_factory=dict)
    trainable: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls,
        module: nn.Module,
        assigned: Collection[tuple[int, str]] = (),
        constants: Collection[str] = (),
    ) -> Snapshot:
        """A module as it is.

        Args:
            assigned: Attributes that the forward pass assigns, by the module's `id` and name.
            constants: Names of tensors that are constants of the graph.
        """
        parameters = dict(module.named_parameters(remove_duplicate=False))
        buffers = dict(module.named_buffers(remove_duplicate=False))
        fixed = {name: tensor for name, tensor in buffers.items() if name in constants}
        return cls(
            {path: _settings(part, assigned) for path, part in module.named_modules()},
            {path: part.training for path, part in module.named_modules()},
            parameters | fixed,
            {name: tensor.dtype for name, tensor in {**parameters, **buffers}.items()},
            frozenset(name for name, tensor in parameters.items() if tensor.requires_grad),
        )

    def check(self, module: nn.Module, *, training: bool, modes: bool) -> None:
        """Refuse a module that has changed.

        Args:
            module: The module that this was taken of.
            training: Whether its gradients count.
            modes: Whether its modes count.

        Raises:
            FrontendError: It has changed, in more than its tensors' contents.
        """
        for path, part in module.named_modules():
            now = vars(part)
            for name, value in self.settings.get(path, {}).items():
                if name not in now or now[name] != value:
                    changed = f"{path}.{name}".lstrip(".")
                    raise _changed(changed, f"{value!r}", f"{now.get(name)!r}")
            if modes and self.modes.get(path, part.training) != part.training:
                words = ("evaluation", "training")
                before, after = words[self.modes[path]], words[part.training]
                raise _changed(
                    path or type(module).__name__, f"in {before} mode", f"in {after} mode"
                )
        tensors: dict[str, torch.Tensor] = {
            **dict(module.named_parameters(remove_duplicate=False)),
            **dict(module.named_buffers(remove_duplicate=False)),
        }
        for name, dtype in self.types.items():
            tensor = tensors.get(name)
            if tensor is None or (name in self.tensors and tensor is not self.tensors[name]):
                raise FrontendError(
                    f"{name} was replaced by another tensor since the module was traced: write to "
                    "it in place, or compile the module again"
                )
            if tensor.dtype != dtype:
                raise _changed(name, f"{dtype}", f"{tensor.dtype}")
            grad, now_grad = name in self.trainable, tensor.requires_grad
            if training and isinstance(tensor, nn.Parameter) and grad != now_grad:
                raise _changed(name, f"requires_grad={grad}", f"requires_grad={now_grad}")


#: Attributes of every module.
_STANDARD = frozenset(vars(nn.Module()))


def _settings(part: nn.Module, assigned: Collection[tuple[int, str]]) -> dict[str, object]:
    if isinstance(part, fx.GraphModule):
        return {}
    return {
        name: value
        for name, value in vars(part).items()
        if name not in _STANDARD and (id(part), name) not in assigned and _is_plain(value)
    }


def _is_plain(value: object) -> bool:
    """Whether a value is one that no code changes in place."""
    if isinstance(value, tuple):
        return all(_is_plain(one) for one in value)
    return value is None or isinstance(value, bool | int | float | complex | str | torch.dtype)


def _changed(name: str, before: str, now: str) -> FrontendError:
    return FrontendError(
        f"{name} is {now} now and was {before} when the module was traced: compile it again"
    )
