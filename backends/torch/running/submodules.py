"""Submodules of a rank's module, which do not run, and the parts of values that fill them."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from functools import partial
from operator import getitem
from typing import Any, NoReturn
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh as TorchMesh

from partitioner.backends.errors import BackendError
from partitioner.backends.tensors import from_numpy
from partitioner.backends.torch.agreeing.agreement import Agreement
from partitioner.backends.torch.guards.changes import TRACED_MODE
from partitioner.backends.torch.running.held_state import StatePlaces, distributed
from partitioner.backends.torch.state.initialise import Initialiser
from partitioner.backends.torch.state.shards import part_and_rest
from partitioner.backends.torch.state.whole import Submodule, Whole
from partitioner.ir.mesh import DeviceMesh

#: Kinds of modules whose submodules are read by position or key.
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
#: Methods of containers that read them, for users and for `__getitem__` of PyTorch's classes.
_READING = frozenset({"keys", "values", "items", "_get_abs_string_index", "_get_item_by_idx"})
#: Where a part of a rank's module keeps its class.
_KIND = "_kind_in_the_model"
#: Methods of PyTorch's submodules that set parameters and buffers, and are called by users.
_RESETTING = frozenset(
    {"reset_parameters", "_reset_parameters", "reset_running_stats", "reset_num_batches_tracked"}
)
#: Where a part keeps the plain values of attributes that it had when it was compiled.
VALUES = "_values_in_the_model"
#: Where a part keeps whether other ranks hold it.
ELSEWHERE = "_is_elsewhere"
#: Where a part of a rank's module keeps the names of its constants.
CONSTANTS = "_constants_of_graphs"


class RankSubmodule(nn.Module):
    """A submodule, which holds parameters and buffers and does not run.

    It is an instance of its class in the model, for code that goes by kinds of modules, unless all
    that it consists of is on other ranks. What such code calls or sets that the graphs would not
    notice is refused.
    """

    @property  # type: ignore[override]
    def __class__(self) -> type[nn.Module]:
        """The class that it has in the model; that of any module if it is on other ranks."""
        kind: type[nn.Module] = vars(self).get(_KIND, RankSubmodule)
        return nn.Module if vars(self).get(ELSEWHERE, False) else kind

    @__class__.setter
    def __class__(self, kind: type[nn.Module]) -> None:
        """Refuse another class, as `torch.nn.utils.parametrize` sets one."""
        raise BackendError(
            f"a {self.__class__.__name__} of a rank's module cannot become a {kind.__name__}: "
            "parametrize the module before compile, which traces how its parameters are computed"
        )

    def __reduce_ex__(self, _: object) -> tuple[Any, ...]:
        """Pickle the contents: `pickle` takes no other class than the one shown."""
        return type(self), (), vars(self)

    @staticmethod
    def of(submodule: Submodule) -> RankSubmodule:
        """A part with the class, the constants and the absent tensors of a submodule."""
        part = RankContainer() if issubclass(submodule.kind, _CONTAINERS) else RankSubmodule()
        own = frozenset(vars(part)) | frozenset(dir(RankSubmodule))
        for name in sorted(submodule.absent):
            part.register_parameter(name, None)
        vars(part)[_KIND] = submodule.kind
        vars(part)[TRACED_MODE] = submodule.training
        vars(part)[CONSTANTS] = (submodule.constants | submodule.absent) - own
        vars(part)[VALUES] = submodule.values
        return part

    def share_memory(self) -> Any:
        """Refuse it, as the whole module does."""
        refuse_sharing()

    def forward(self, *_: Any, **__: Any) -> Any:
        """Refuse it."""
        kind = vars(self).get(_KIND, RankSubmodule).__name__
        raise BackendError(f"a {kind} of a rank's module does not run by itself: call the module")

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute that is no constant of the graphs."""
        refuse_constant(self, name, value)
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        """A parameter, buffer or submodule, a plain value, or a method that sets the contents."""
        for contents in ("_parameters", "_buffers", "_modules"):
            if name in vars(self).get(contents, ()):
                return vars(self)[contents][name]
        values = vars(self).get(VALUES, {})
        if name in values:
            return values[name]
        if name in _RESETTING and hasattr(self.__class__, name):
            return partial(getattr(self.__class__, name), self)
        kind = vars(self).get(_KIND, RankSubmodule).__name__
        raise AttributeError(
            f"a {kind} of a rank's module has no {name!r}, only the parameters "
            "and buffers that this rank holds: ask the module that was compiled"
        )


class RankContainer(RankSubmodule):
    """A sequence, list or dictionary of submodules, which is read as PyTorch's are."""

    @property
    def _container(self) -> Any:
        kind: type[nn.Module] = vars(self)[_KIND]
        return next(one for one in _CONTAINERS if issubclass(kind, one))

    def __getitem__(self, key: Any) -> Any:
        return self._container.__getitem__(self, key)

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._container.__iter__(self))

    def __contains__(self, key: object) -> bool:
        return key in self._modules if self._container is nn.ModuleDict else key in [*self]

    def __getattr__(self, name: str) -> Any:
        """A submodule, or a method that reads the contents."""
        if name in _READING and hasattr(self._container, name):
            return partial(getattr(self._container, name), self)
        return super().__getattr__(name)


def refuse_constant(part: nn.Module, name: str, value: object) -> None:
    """Refuse to set an attribute that is a constant of the graphs to another value."""
    values = vars(part).get(VALUES, {})
    is_same = name in values and type(values[name]) is type(value) and values[name] == value
    if name in vars(part).get(CONSTANTS, ()) and not is_same:
        raise BackendError(
            f"{name} was traced as it was when the module was compiled: set it before compile"
        )


def submodule_at(root: nn.Module, path: Sequence[str]) -> Any:
    """The part of a path, which is made if there is none; the module itself for an empty path."""
    for name in path:
        if name not in root._modules:
            root.add_module(name, RankSubmodule())
        child = root._modules[name]
        assert child is not None
        root = child
    return root


def refuse_sharing() -> NoReturn:
    """Refuse `share_memory()`: DTensors lie in no memory that processes could share."""
    raise BackendError(
        "share_memory() of a rank's module: its parts belong to this process; to share weights, "
        "load its state_dict() into the module that was compiled, and share that"
    )


#: Returns the whole contents of a parameter or buffer by name.
Source = Callable[[str], Tensor]


def torch_meshes_of(places: StatePlaces, device: torch.device) -> Mapping[DeviceMesh, TorchMesh]:
    """Make PyTorch's meshes of the parameters and buffers that are DTensors."""
    listed = places.listed_elsewhere
    cut = [entry.names[0] for entry in places.stored if places.are_parts[entry.parameter]]
    names = cut if listed is None else [*cut, listed.names[0]]
    torch_mesh = {}
    # in one order on every rank
    for mesh in sorted({places.by_name[n].mesh for n in names}, key=lambda m: (m.devices, m.axes)):
        shape = tuple(size for _, size in mesh.axes) or (1,)
        ranks = torch.tensor(mesh.devices).reshape(shape)
        made = TorchMesh(device.type, ranks, mesh_dim_names=mesh.names or ("one",))
        # The groups are not to be held; PyTorch finds them by their names, too.
        made._pg_registry = WeakValueDictionary(made._pg_registry)  # type: ignore[assignment]
        torch_mesh[mesh] = made
    return torch_mesh


def add_submodules(module: nn.Module, whole: Whole) -> None:
    """Add all submodules, in the model's order: PyTorch lists them so."""
    for path, submodule in whole.submodules.items():
        if not path:
            continue
        *owner, leaf = path.split(".")
        if submodule.first:
            part = submodule_at(module, submodule.first.split("."))
        else:
            part = RankSubmodule.of(submodule)
            own = submodule.state
            if own.extra:
                vars(part)["get_extra_state"] = partial(getitem, own.extra, 0)
                vars(part)["set_extra_state"] = partial(own.check_extra, path)
        submodule_at(module, owner).add_module(leaf, part)


def fill(
    module: nn.Module,
    whole: Whole,
    places: StatePlaces,
    source: Source,
    agreement: Agreement,
    device: torch.device,
    meshes: Mapping[DeviceMesh, Any],
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, int]]:
    """Register this rank's parts of parameters and buffers, under their names.

    Returns:
        The rank's parameters and buffers by first name; what it keeps between steps besides them,
        by value of the graph; and checksums of whole parameters and buffers by first name, 0 for
        those that would have to be initialised for that alone.
    """
    tensors: dict[str, Tensor] = {}
    rests: dict[str, Tensor] = {}
    words: dict[str, int] = {}
    for entry in whole.stored:
        first = entry.names[0]
        if not places.holds(agreement.rank, entry):
            is_made = isinstance(source, Initialiser)
            words[first] = 0 if is_made else agreement.checksum(source(first))
            continue
        value, place = source(first), places.by_name[first]
        words[first] = agreement.checksum(value)
        home = whole.programs.homes.get(entry.rest)
        rest_place = place if home is None else home.placement
        part, at_rest = part_and_rest(value, place, rest_place, agreement.rank, device)
        if at_rest is not None:
            rests[entry.rest] = at_rest
        if places.are_parts[entry.parameter]:
            asked = None if places.all_hold_all else agreement
            part = distributed(part, place, meshes, entry.shape, asked)
        tensor = nn.Parameter(part, requires_grad=entry.trained) if entry.parameter else part
        tensors[first] = tensor
        for name in entry.names:
            *path, leaf = name.split(".")
            owner = submodule_at(module, path)
            if isinstance(tensor, nn.Parameter):
                owner.register_parameter(leaf, tensor)
            else:
                owner.register_buffer(leaf, tensor, persistent=name not in entry.hidden)
    return tensors, rests, words


def list_another(
    module: nn.Module,
    places: StatePlaces,
    agreement: Agreement,
    device: torch.device,
    meshes: Mapping[DeviceMesh, Any],
) -> dict[str, nn.Parameter]:
    """List a parameter of other ranks if this one trains none; returns it by its first name.

    It has the whole size and no elements here, and gets no gradient, so that optimizers keep no
    state of it: what PyTorch keeps whole, such as Adam's number of steps, would be saved in place
    of its holder's.
    """
    entry = places.listed_elsewhere
    if entry is None or places.trained[agreement.rank]:
        return {}
    nothing = torch.empty(0, dtype=entry.dtype, device=device)
    place = places.by_name[entry.names[0]]
    whole = distributed(nothing, place, meshes, entry.shape, agreement)
    tensor = nn.Parameter(whole, requires_grad=entry.trained)
    *path, leaf = entry.names[0].split(".")
    submodule_at(module, path).register_parameter(leaf, tensor)
    return {entry.names[0]: tensor}


def mark_parts_elsewhere(module: nn.Module, whole: Whole, tensors: Container[str]) -> None:
    """Mark the submodules of whose own tensors that are computed with this rank holds none.

    They are of no kind here: code that goes by kinds leaves them to the ranks that hold them.
    `tensors` are the first names of what the rank holds.
    """
    is_held: dict[str, bool] = {}  # by path
    used = whole.places
    for entry in whole.stored:
        if entry.names[0] in used:
            for path in {name.rpartition(".")[0] for name in entry.names} - {""}:
                is_held[path] = is_held.get(path, False) or entry.names[0] in tensors
    for path, is_here in is_held.items():
        vars(submodule_at(module, path.split(".")))[ELSEWHERE] = not is_here


def constant_words(whole: Whole, source: Source, agreement: Agreement) -> dict[str, int]:
    """Checksums of the graph's constants; 0 for those that would be initialised for others."""
    constants = whole.graph.constants
    read = {part.whole for part in whole.programs.ranks[agreement.rank].constants.values()}
    known = read if isinstance(source, Initialiser) else constants.keys()
    return {
        name: agreement.checksum(from_numpy(constant.load(), constant.type.dtype))
        if name in known and agreement.ranks > 1
        else 0
        for name, constant in sorted(constants.items())
    }
