"""A program with the programs of all ranks, and what its model stores, as every rank needs them.

Submodules save and load extra state and call hooks beside parameters and buffers (`OwnState`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from partitioner.backends.errors import BackendError
from partitioner.backends.torch.graphs.emit import rest_argument
from partitioner.backends.torch.graphs.micro_batches import WHOLE_BATCH, MicroBatches
from partitioner.backends.torch.graphs.phases import Rest
from partitioner.backends.torch.graphs.signature import Signature
from partitioner.ir.graph import Graph
from partitioner.ir.layout import Placement
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.program import Programs

#: PyTorch's name of extra state in a `state_dict`.
KEY = "_extra_state"
#: Modules whose hooks and methods do nothing that a rank's module would leave out.
_KNOWN = ("torch.", "partitioner.")


@dataclass(frozen=True)
class OwnState:
    """State that a submodule of the whole model saves and loads beside parameters and buffers."""

    #: Its extra state (`get_extra_state`) as it was compiled; empty without any.
    extra: tuple[object, ...] = ()
    #: Its hooks that change a state before it is loaded.
    load_hooks: tuple[Callable[..., None], ...] = ()
    saving: str = ""  #: What else of its own is called when it saves, in words; "" if nothing is.
    loading: str = ""  #: The same when it loads.

    @classmethod
    def of(cls, part: nn.Module) -> OwnState:
        """Read the state of a submodule as it is."""
        kind = type(part)
        has_extra = kind.get_extra_state is not nn.Module.get_extra_state
        saves = (*part._state_dict_hooks.values(), *part._state_dict_pre_hooks.values())
        return cls(
            (part.get_extra_state(),) if has_extra else (),
            tuple(part._load_state_dict_pre_hooks.values()),
            _own(saves, (kind.state_dict, kind._save_to_state_dict)),
            _own(
                part._load_state_dict_post_hooks.values(),
                (kind.load_state_dict, kind._load_from_state_dict),
            ),
        )

    def check_extra(self, path: str, state: object) -> None:
        """Refuse extra state that is not as it was compiled."""
        if not _is_same(state, self.extra[0]):
            raise BackendError(
                f"the extra state of {path or 'the module'} is another than when the module was "
                "compiled, which its graphs do not take: load it into the module before compile"
            )


def check_saving(states: Mapping[str, OwnState]) -> None:
    """Refuse `state_dict()` of a rank's module that would not call all that the model's does."""
    for path, state in states.items():
        if state.saving:
            raise BackendError(
                f"state_dict() of a rank's module leaves out {state.saving} of "
                f"{path or 'the module'}: load its full_state_dict() into the module that was "
                "compiled, and save that"
            )


def before_loading(
    states: Mapping[str, OwnState], state: dict[str, Any], prefix: str, *lists: Any
) -> None:
    """Call the hooks of submodules, by path, on a state that is loaded.

    Args:
        prefix: That of the module's names in the state.
        lists: What PyTorch gives such hooks behind the metadata.
    """
    metadata = getattr(state, "_metadata", None) or {}
    for path, own in states.items():
        if own.loading:
            raise BackendError(
                f"load_state_dict() of a rank's module leaves out {own.loading} of "
                f"{path or 'the module'}: load the state into the module that was compiled, and "
                "make the rank's module after that"
            )
        where = prefix + path + "." if path else prefix
        for hook in own.load_hooks:
            hook(state, where, metadata.get(where[:-1], {}), *lists)
    root = states.get("", OwnState())
    if root.extra and prefix + KEY in state:
        root.check_extra("", state.pop(prefix + KEY))


def _own(hooks: Iterable[Any], methods: Iterable[Any]) -> str:
    """The first of these that is not PyTorch's, in words."""
    for hook in hooks:
        if not _is_known(hook):
            return f"the state-dict hook {_named(hook)}"
    method = next((each for each in methods if not _is_known(each)), None)
    return "" if method is None else f"{_named(method)}()"


def _is_known(function: Any) -> bool:
    inner = getattr(function, "hook", function)  # PyTorch wraps some
    module = getattr(inner, "__module__", None) or type(inner).__module__
    return module.startswith(_KNOWN)


def _named(function: Any) -> str:
    inner = getattr(function, "hook", function)
    return getattr(inner, "__qualname__", type(inner).__qualname__)


def _is_same(one: object, other: object) -> bool:
    some, spec = pytree.tree_flatten(one)
    others, known = pytree.tree_flatten(other)

    def are_equal(one: object, other: object) -> bool:
        if isinstance(one, Tensor) and isinstance(other, Tensor):
            return one.dtype == other.dtype and torch.equal(one.cpu(), other.cpu())
        return type(one) is type(other) and bool(one == other)

    return spec == known and all(map(are_equal, some, others))


@dataclass(frozen=True)
class Stored:
    """A parameter or buffer of the whole model."""

    value: str  #: Name in the graph; "" if nothing computes with it.
    names: tuple[str, ...]  #: Its names in the module, the first one first.
    trained: bool  #: Whether it has a gradient.
    frozen: bool  #: Whether `requires_grad` was off when the module was compiled.
    parameter: bool  #: Whether it is a parameter; a buffer otherwise.
    shape: tuple[int, ...]  #: Sizes of the whole value.
    dtype: torch.dtype
    gradient: str = ""  #: Graph output of its gradient; "" if it has none.
    written: str = ""  #: Graph output of its next contents; "" if it is not written.
    #: Those of its names that are not in the module's `state_dict`.
    hidden: frozenset[str] = frozenset()
    #: Name in the graph of the value as it lies between steps; "" if that is `value`.
    rest: str = ""


@dataclass(frozen=True)
class Submodule:
    """Describe what a rank's module shows of a submodule of the whole model."""

    kind: type[nn.Module] = nn.Module  #: Its class.
    #: Names of its attributes that are constants of the graph.
    constants: frozenset[str] = frozenset()
    absent: frozenset[str] = frozenset()  #: Names of its parameters and buffers that are None.
    training: bool = True  #: Whether it was in training mode.
    first: str = ""  #: The first path of a submodule that has several; "" at the first.
    #: Plain values of attributes, by name.
    values: Mapping[str, object] = field(default_factory=dict)
    #: What it saves and loads beside parameters and buffers.
    state: OwnState = field(default_factory=OwnState)


@dataclass(frozen=True)
class Whole:
    """A program with the programs of all ranks."""

    programs: Programs
    graph: Graph
    signature: Signature
    stored: tuple[Stored, ...]
    training: bool  #: Whether it has a backward pass.
    #: Mesh of all ranks, each of which holds the stored values that nothing computes with.
    spare: DeviceMesh
    #: Those of the model by path, in its order; the model itself has the path "".
    submodules: Mapping[str, Submodule] = field(default_factory=dict)
    micro: MicroBatches = WHOLE_BATCH  #: The micro-batches of a call.
    rest: Rest | None = None  #: The last of them, if it is smaller.

    @property
    def places(self) -> Mapping[str, Placement]:
        """Placement of each stored value that the program computes with, by its first name."""
        homes = self.programs.homes
        return {e.names[0]: homes[e.value].placement for e in self.stored if e.value in homes}

    @cached_property
    def written(self) -> tuple[str, ...]:
        """First names of the stored values that the program writes to."""
        return tuple(entry.names[0] for entry in self.stored if entry.written)

    def local_shards(self, shards: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A rank's shards, which have first names, and values at rest, by local name."""
        return {local: shards[name] for local, name in self._local_names if name in shards}

    @cached_property
    def _local_names(self) -> list[tuple[str, str]]:
        """Local name of each stored value with its first name, and of each value at rest."""
        homes = self.programs.homes
        used = [(homes[e.value].name, e.names[0]) for e in self.stored if e.value in homes]
        rests = (entry.rest for entry in self.stored if entry.rest in homes)
        return used + [(rest_argument(homes[rest].name), rest) for rest in rests]
