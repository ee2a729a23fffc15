"""The module that was compiled, beside the ranks' modules, which train copies of its weights.

Its own weights stay as they were when a rank's module was made. What takes them for trained ones is
refused, at its first step: a call of it, its state, another module made from it, and an optimizer
over its parameters. So is a call of a rank's module that has copies of parameters which another
one, made from the same network, has trained since.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from partitioner.backends.errors import BackendError
from partitioner.backends.torch.dtensors.local_steps import on_steps

#: What brings the weights of a rank's module into the module that was compiled.
LOAD = "load the rank module's full_state_dict() into the module that was compiled"


class Copies:
    """The parameters that a rank's module has copies of."""

    def __init__(
        self, program: object, originals: Mapping[str, Tensor], trained: Container[str]
    ) -> None:
        self.program = program  #: What both modules of one program have alike.
        self.steps = 0  #: Optimizers' steps over the copies so far.
        own = originals.items()  # a tensor may have several names
        self._all = WeakTensorKeyDictionary({x: name for name, x in own})
        self._originals = WeakTensorKeyDictionary({x: name for name, x in own if name in trained})
        self._written = self._version()
        self._others: dict[Copies, int] = {}

    def name_of(self, tensor: Tensor) -> str:
        """The name of a parameter that is trained; "" of any other tensor."""
        name: str = self._originals.get(tensor, "")  # type: ignore[no-untyped-call]
        return name

    def trained_by(self, other: Copies) -> str:
        """The name of the first parameter that another rank's module trains; "" for none."""
        known = self._all
        return next((known[x] for x in other._originals if x in known), "")

    @property
    def are_ahead(self) -> bool:
        """Tell whether they were trained since the originals were last written to."""
        return self.steps > 0 and self._version() == self._written

    def note_step(self) -> None:
        """Note a step over the copies."""
        self.steps += 1
        self._written = self._version()

    def note_other(self, other: Copies) -> None:
        """Note another module's copies of the same parameters, as they are now."""
        self._others[other] = other.steps

    def note_loaded(self) -> None:
        """Note that the copies have the contents of the others' by now."""
        self._others = {other: other.steps for other in self._others}

    def check(self) -> None:
        """Refuse a call of the module behind a step of another over the same parameters."""
        for other, steps in self._others.items():
            if other.steps > steps:
                if not self._originals:
                    raise BackendError(
                        f"{self.trained_by(other)} was trained by another rank's module, made from "
                        "the same network: this one, for inference, has it as it was. Call the "
                        f"other one, after eval(), or {LOAD} and compile it again"
                    )
                raise BackendError(
                    f"{self.trained_by(other)} was trained by another rank's module, made from "
                    "the same network: each has copies of its own. Compile one module whose loss "
                    "is the sum of both, with an optimizer for each part of the parameters, or "
                    "load what the other trains from its full_state_dict() into this one, with "
                    "strict=False, before each call"
                )

    def _version(self) -> int:
        """Writes to the first of the originals that is left."""
        tensor = next(iter(self._originals), None)
        return 0 if tensor is None or tensor.is_inference() else tensor._version


#: Whether a module is being traced, which reads no contents of weights.
_TRACING = ContextVar("_TRACING", default=False)


@contextmanager
def tracing() -> Iterator[None]:
    """Allow calls of a module that was compiled, and its state, inside of the block."""
    token = _TRACING.set(True)
    try:
        yield
    finally:
        _TRACING.reset(token)


#: Those of each rank's module.
_COPIES: WeakKeyDictionary[nn.Module, Copies] = WeakKeyDictionary()


def watch(
    rank_module: nn.Module,
    program: object,
    original: nn.Module,
    parameters: Mapping[str, Tensor],
    trained: Container[str],
) -> None:
    """Watch a rank's module, and the module that was compiled, while the first lives.

    `parameters` are those of the original by name, `trained` has the names of those trained;
    both modules of one program have the same `program`.
    """
    copies = Copies(program, parameters, trained)
    for other in list(_COPIES.values()):
        if other.program is not program and copies.trained_by(other):
            copies.note_other(other)
        if other.program is not program and other.trained_by(copies):
            other.note_other(copies)
    ours = frozenset(map(id, rank_module.parameters()))
    _COPIES[rank_module] = copies

    def steps(optimizer: Optimizer, *_: Any) -> None:
        idle = (x for x in _parameters(optimizer) if x.grad is None)  # seldom any: look up those
        name = next(filter(None, map(copies.name_of, idle)), "")
        trained = (x for x in _parameters(optimizer) if x.grad is not None)
        if name and not any(map(copies.name_of, trained)):
            raise BackendError(
                f"{type(optimizer).__name__} was made over {name} of the module "
                "that was compiled, which gets no gradient: make it over the parameters() of the "
                "rank's module"
            )

    def stepped(optimizer: Optimizer, *_: Any) -> None:
        if any(id(x) in ours for x in _parameters(optimizer)):
            copies.note_step()

    def refuse_old_state(module: nn.Module, *_: Any) -> None:
        check_weights(module, f"state_dict() of the {type(module).__name__} that was compiled")

    on_steps(rank_module, steps, stepped)
    handles = (
        original.register_forward_pre_hook(refuse_old_weights),
        original.register_state_dict_pre_hook(refuse_old_state),  # type: ignore[no-untyped-call]
    )
    for handle in handles:
        weakref.finalize(rank_module, handle.remove).atexit = False


def check_call(rank_module: nn.Module) -> None:
    """Refuse a call of a rank's module as `Copies.check` does."""
    copies = _COPIES.get(rank_module)
    if copies is not None:
        copies.check()


def note_loaded(rank_module: nn.Module) -> None:
    """Note that a rank's module has loaded a state."""
    copies = _COPIES.get(rank_module)
    if copies is not None:
        copies.note_loaded()


def check_weights(module: nn.Module, doing: str, program: object = None) -> None:
    """Refuse to take the weights of a module that was compiled for those that ranks trained.

    Args:
        doing: What takes them, the sentence's subject.
        program: Copies of this one's own modules are no reason.
    """
    if _TRACING.get() or not any(_ahead(module, program)):
        return
    gc.collect()  # a rank's module refers to itself
    for name in _ahead(module, program):
        raise BackendError(
            f"{doing} would take {name} as it was before training, of which a rank's module "
            f"trains a copy: call the rank's module, after eval() to evaluate it, or {LOAD} first"
        )


def refuse_old_weights(module: nn.Module, *_: Any) -> None:
    """Refuse a call of a module whose weights a rank's module has trained; a hook of the module."""
    check_weights(module, f"a call of the {type(module).__name__} that was compiled")


def _ahead(module: nn.Module, program: object) -> Iterator[str]:
    """A name of each of the copies that were trained since the module was written to."""
    others = [c for c in _COPIES.values() if c.are_ahead and c.program is not program]
    for copies in others:
        name = next((n for x in module.parameters() if (n := copies.name_of(x))), "")
        if name:
            yield name


def _parameters(optimizer: Optimizer) -> Iterable[Tensor]:
    return (x for group in optimizer.param_groups for x in group["params"])
