"""Refuses changes of a module that its trace does not have."""

from __future__ import annotations

import gc
import itertools
import re
import types
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor

from partitioner.backends.torch.guards.originals import refuse_old_weights
from partitioner.frontends.errors import FrontendError
from partitioner.frontends.torch.exporting import named_tensors

#: Values that attributes of each submodule hold, by its name and by their path: "config.heads[0]".
Settings = Mapping[str, Mapping[str, object]]
#: Numbers of the hooks of each submodule or parameter, by its name.
Hooks = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Snapshot:
    """The facts that a trace takes from a module beside its tensors' contents."""

    #: Numbers, texts and tensors that attributes hold, also in lists, dicts and objects, but for
    #: those that the forward pass assigns or changes.
    settings: Settings = field(default_factory=dict)
    #: Whether each submodule, by name, was in training mode.
    modes: Mapping[str, bool] = field(default_factory=dict)
    #: Parameters by name, and the buffers that are constants.
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    #: Their element types, and those of all other buffers.
    types: Mapping[str, torch.dtype] = field(default_factory=dict)
    trainable: frozenset[str] = frozenset()  #: Names of the parameters that required a gradient.
    hooks: Hooks = field(default_factory=dict)  #: Hooks, which were traced.

    @classmethod
    def of(
        cls,
        module: nn.Module,
        before: Settings,
        assigned: Collection[tuple[int, str]] = (),
        constants: Collection[str] = (),
    ) -> Snapshot:
        """A module as it is after its trace.

        `before` are the `settings_of` it before the trace, `assigned` the attributes that the
        forward pass assigns, by the module's `id` and name, `constants` names of constants of the
        graph.
        """
        tensors = named_tensors(module)
        parameters = dict(module.named_parameters(remove_duplicate=False))
        after = settings_of(module, assigned)
        return cls(
            {
                path: {
                    name: value
                    for name, value in known.items()
                    if _same(before.get(path, {}).get(name, _GONE), value)
                }
                for path, known in after.items()
            },
            {path: part.training for path, part in module.named_modules()},
            {name: x for name, x in tensors.items() if name in parameters or name in constants},
            {name: tensor.dtype for name, tensor in tensors.items()},
            frozenset(name for name, tensor in parameters.items() if tensor.requires_grad),
            _hooks(module),
        )

    def check(self, module: nn.Module, *, training: bool, modes: bool) -> None:
        """Refuse a changed module; gradients count in `training`, its modes if so told."""
        self._check_hooks(module, training=training)
        for path, part in module.named_modules():
            known = self.settings.get(path, {})
            now = _settings(part, known)
            for name, value in known.items():
                if not _same(now.get(name, _GONE), value):
                    changed = f"{path}.{name}".lstrip(".")
                    raise _changed(changed, f"{value!r}", f"{now.get(name, _GONE)!r}")
            if modes and self.modes.get(path, part.training) != part.training:
                words = ("evaluation", "training")
                before, after = words[self.modes[path]], words[part.training]
                raise _changed(
                    path or type(module).__name__, f"in {before} mode", f"in {after} mode"
                )
        tensors = named_tensors(module)
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

    def _check_hooks(self, module: nn.Module, *, training: bool) -> None:
        now = _hooks(module)
        for name, numbers in self.hooks.items():
            if now.get(name, ()) != numbers and (training or name in self.modes):
                raise FrontendError(
                    f"{name or type(module).__name__} has other hooks than when the module was "
                    "traced, which would not be called: set and remove hooks before compile"
                )


def settings_of(module: nn.Module, assigned: Collection[tuple[int, str]] = ()) -> Settings:
    """Contents of the attributes of a module's parts, less `assigned` ones, by `id` and name."""
    return {
        path: _settings(
            part, [n for n in vars(part) if n not in _STANDARD and (id(part), n) not in assigned]
        )
        for path, part in module.named_modules()
        if not isinstance(part, fx.GraphModule)
    }


def check_registered(
    settings: Settings, constants: Iterable[torch.Tensor], own: Iterable[torch.Tensor]
) -> None:
    """Refuse constants, tensors that no module registers, that would have gradients.

    The module's own parameters may be constants, too: under other names, where hooks rename them in
    its state dict.
    """
    real = (tensor for tensor in constants if not isinstance(tensor, FakeTensor))
    places = {tensor.data_ptr() for tensor in real} - {0, *(one.data_ptr() for one in own)}
    for path, known in settings.items():
        for name, value in known.items():
            tensor = value.tensor if isinstance(value, _Held) else None
            if tensor is not None and tensor.requires_grad and tensor.data_ptr() in places:
                raise FrontendError(
                    f"{path}.{name}".lstrip(".") + f" is a tensor of {list(tensor.shape)} that "
                    "requires a gradient and is no parameter of the module: make it an "
                    "nn.Parameter that is an attribute, or hold it in an nn.ParameterList"
                )
    for one in gc.get_objects() if places else ():
        if type(one) is nn.Parameter and one.requires_grad and one.data_ptr() in places:
            raise FrontendError(
                f"forward, or the loss, reads a parameter of {list(one.shape)} that requires a "
                "gradient and is of no part of the module: make what holds it a submodule, or, if "
                "it is not trained, call its requires_grad_(False)"
            )


#: Attributes of every module.
_STANDARD = frozenset(vars(nn.Module()))
#: Most values that are looked at in one attribute, and how deep.
_MOST, _DEEPEST = 10_000, 6


class _Gone:
    def __repr__(self) -> str:
        return "gone"


_GONE = _Gone()


@dataclass(frozen=True, eq=False)
class _Held:
    """A tensor that is told from others by its identity: what is written to it does not count."""

    tensor: torch.Tensor

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Held) and other.tensor is self.tensor

    def __hash__(self) -> int:
        return id(self.tensor)

    def __repr__(self) -> str:
        return f"a {self.tensor.dtype} of {list(self.tensor.shape)}"


def _settings(part: nn.Module, names: Iterable[str]) -> dict[str, object]:
    found: dict[str, object] = {}
    roots = dict.fromkeys(re.split(r"[.\[ ]", name, maxsplit=1)[0] for name in names)
    for name in roots:
        if name in vars(part):
            leaves = itertools.islice(_leaves(name, vars(part)[name], ()), _MOST)
            found.update(leaves)
    return found


def _leaves(path: str, value: object, around: tuple[int, ...]) -> Iterator[tuple[str, object]]:
    """Plain values and tensors in an attribute, by path; `around` are the `id`s of its holders."""
    if _is_plain(value):
        yield path, value
    elif isinstance(value, torch.Tensor):
        yield path, _Held(value)
    elif id(value) not in around and len(around) < _DEEPEST:
        if isinstance(value, list | dict) and value:
            yield f"{path} (length)", len(value)
        for name, one in _inner(path, value):
            yield from _leaves(name, one, (*around, id(value)))


def _inner(path: str, value: object) -> Iterable[tuple[str, object]]:
    if isinstance(value, list | tuple):
        return ((f"{path}[{index}]", one) for index, one in enumerate(value))
    if isinstance(value, dict):
        return ((f"{path}[{key!r}]", one) for key, one in value.items() if _is_plain(key))
    if isinstance(value, torch.Tensor | nn.Module) or not _is_data(value):
        return ()
    return ((f"{path}.{name}", one) for name, one in vars(value).items())


def _is_data(value: object, depth: int = 0) -> bool:
    """Test whether a value is an object of plain values alone, as configurations are."""
    if _is_plain(value):
        return True
    if depth == _DEEPEST or isinstance(value, type | types.ModuleType) or callable(value):
        return False
    if isinstance(value, list | tuple):
        return all(_is_data(one, depth + 1) for one in value)
    if not hasattr(value, "__dict__") and not isinstance(value, dict):
        return False
    inner: Mapping[Any, object] = value if isinstance(value, dict) else vars(value)
    return all(_is_data(one, depth + 1) for one in inner.values())


def _same(one: object, other: object) -> bool:
    return one == other or (one != one and other != other)  # NaN is not itself


#: Tables of a module's hooks.
_TABLES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _hooks(module: nn.Module) -> dict[str, tuple[int, ...]]:
    hooks = {
        path: tuple(
            number
            for table in _TABLES
            for number, hook in getattr(part, table).items()
            if hook is not refuse_old_weights
        )
        for path, part in module.named_modules()
    }
    for name, tensor in module.named_parameters():
        tables: tuple[Any, ...] = (tensor._backward_hooks, tensor._post_accumulate_grad_hooks)
        hooks[name] = tuple(number for table in tables for number in table or ())
    return hooks


def _is_plain(value: object) -> bool:
    """Test whether a value is one that no code changes in place."""
    return value is None or isinstance(value, bool | int | float | complex | str | torch.dtype)


def _changed(name: str, before: str, now: str) -> FrontendError:
    return FrontendError(
        f"{name} is {now} now and was {before} when the module was traced: compile it again"
    )
