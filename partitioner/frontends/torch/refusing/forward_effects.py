"""Refuses what a module's forward pass does in Python that a trace would do once, for all calls.

A graph has what PyTorch computes. Numbers that Python or NumPy draw would be constants of it, a
generator that is seeded in the forward pass would not be, and a number that a call counts up would
stay as it is. A number that a call sets, and the next one leaves as it is, is none of these.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from partitioner.backends.torch.guards.changes import global_hooks
from partitioner.frontends.errors import FrontendError
from partitioner.frontends.torch.exporting import is_writing, refused, replaced
from partitioner.frontends.torch.refusing.reasons import called_at


@dataclass
class Number:
    """A number that a forward pass changes, an attribute of a module."""

    module: nn.Module
    name: str  #: The attribute.
    before: object  #: The number before the pass.
    after: object  #: The number behind it.
    place: str  #: The user's line that first changes it, and ": "; or "".

    @property
    def error(self) -> FrontendError:
        """The refusal of a number that every pass changes."""
        return FrontendError(
            f"{self.place}forward changes {type(self.module).__name__}.{self.name} from "
            f"{self.before} to {self.after}: it would happen once, while it is traced; make it a "
            "buffer"
        )


@dataclass(frozen=True)
class Assigned:
    """The attributes that a forward pass assigns."""

    #: Each by the submodule's `id` and name.
    names: set[tuple[int, str]] = field(default_factory=set)
    #: The numbers among them that it changes.
    numbers: dict[tuple[int, str], Number] = field(default_factory=dict)

    @property
    def lasting(self) -> list[Number]:
        """The numbers that are others behind the pass."""
        return [number for number in self.numbers.values() if number.before != number.after]

    def add(self, module: nn.Module, name: str, value: object) -> None:
        """Note that the pass assigns a value to an attribute."""
        key, before = (id(module), name), vars(module).get(name)
        self.names.add(key)
        if key in self.numbers:
            self.numbers[key].after = value
        elif _is_number(before) and _is_number(value) and before != value:
            place = f"{place}: " if (place := called_at()) else ""
            self.numbers[key] = Number(module, name, before, value, place)


@contextmanager
def refusing_effects(module: nn.Module) -> Iterator[Assigned]:
    """Refuse effects of the module's forward pass in an export inside of the block.

    Yields:
        The attributes that the forward pass assigns.
    """
    for name in global_hooks():
        raise FrontendError(
            f"{name} is a hook of all modules, also of PyTorch's own: set it on parts of this one"
        )
    assigned, original = Assigned(), nn.Module.__setattr__

    def set_attribute(module: nn.Module, name: str, value: Any) -> None:
        if is_writing():
            assigned.add(module, name, value)
        original(module, name, value)

    seed = refused(
        torch.random.manual_seed,
        "forward calls torch.manual_seed: a program's draws follow from the seed of "
        "program.module() and the step; make fixed random tensors buffers",
    )
    replacements: Mapping[tuple[Any, str], Any] = {
        (torch, "manual_seed"): seed,
        (torch.random, "manual_seed"): seed,
        (nn.Module, "__setattr__"): set_attribute,
        (Tensor, "data"): _detached(),
        **{
            (torch.autograd, name): refused(
                getattr(torch.autograd, name),
                f"forward calls torch.autograd.{name}, which is not traced: a program has no "
                "gradients of gradients; write the derivative's formula in forward, or train such "
                "a loss (a gradient penalty) without this program",
            )
            for name in ("grad", "backward")
        },
    }
    before = _generators(module)
    with replaced(replacements):
        yield assigned
    after = _generators(module)
    for name, state in before.items():
        if after.get(name) != state:
            raise FrontendError(
                f"forward draws numbers from {name}: they would be the same in every call; draw "
                "with PyTorch, as torch.rand or dropout do"
            )


def _generators(module: nn.Module) -> dict[str, str]:
    shared: Any = np.random
    states = {
        "Python's random": repr(random.getstate()),
        "NumPy's random": _text(shared.get_state(legacy=False)),
    }
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            where = f"{path}.{name}".lstrip(".")
            if isinstance(value, random.Random):
                states[where] = repr(value.getstate())
            elif isinstance(value, np.random.RandomState):
                states[where] = _text(value.get_state(legacy=False))
            elif isinstance(value, np.random.Generator):
                states[where] = _text(value.bit_generator.state)
    return states


def _text(state: Any) -> str:
    """A state in full: NumPy shortens arrays."""
    if isinstance(state, dict):
        return repr({key: _text(value) for key, value in state.items()})
    return repr(state.tolist() if isinstance(state, np.ndarray) else state)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _detached() -> property:
    """`tensor.data` in a forward pass: the tensor without its gradient, which can be traced."""
    original: Any = Tensor.data

    def read(tensor: Tensor) -> Any:
        return tensor.detach() if _of_user() else original.__get__(tensor)

    def write(tensor: Tensor, value: Tensor) -> None:
        if _of_user():
            raise FrontendError(
                "forward assigns to tensor.data, which cannot be traced: write in place under "
                "torch.no_grad()"
            )
        original.__set__(tensor, value)

    return property(read, write)


def _of_user() -> bool:
    """Test whether a forward pass uses a tensor's attribute in code that is not PyTorch's."""
    name = str(sys._getframe(2).f_globals.get("__name__", ""))
    return is_writing() and not name.startswith("torch.")
