"""A rank's part of a compiled module, as an ordinary module under torchrun.

Parameters are DTensors with the whole model's names and sizes; each rank holds its shards. Where
the plan cuts none of them, so that a rank has each whole or not at all, they are ordinary
parameters instead: PyTorch spends some 50 us on each operator of an optimizer's step on a DTensor.
One module has one or the other, since PyTorch's operators on lists of tensors refuse both in one
list. So it is with buffers. A rank that trains no parameter lists one of another rank, without its
contents: optimizers refuse to be made for none. All ranks have all submodules.

Calling the module runs the rank's forward graph; `loss.backward()` runs its backward graph. No
gradient goes through a collective: the backward graph has its own. Evaluation, and batches of other
sizes, are other programs over the same shards, made when they are first called for.
"""

from __future__ import annotations

import copy
from array import array
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from operator import sub
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding
from torch.utils import _pytree as pytree

from partitioner.backends.errors import BackendError, CommunicationError
from partitioner.backends.regions import box_view
from partitioner.backends.tensors import from_numpy
from partitioner.backends.torch.agreeing.agreement import AgreedError, Agreement
from partitioner.backends.torch.agreeing.faults import named, telling
from partitioner.backends.torch.agreeing.groups import torch_meshes
from partitioner.backends.torch.agreeing.sums import Sums, checksum, code
from partitioner.backends.torch.dtensors.dispatch import compared_notes, correct_operators
from partitioner.backends.torch.guards.changes import (
    TRACED_MODE,
    Contents,
    check_inputs,
    count_steps,
    watch_partial_gradients,
)
from partitioner.backends.torch.guards.originals import check_call, note_loaded
from partitioner.backends.torch.running.host_memory import keep_freed_memory
from partitioner.backends.torch.running.rank_passes import (
    RankPasses,
    Values,
    local_regions,
)
from partitioner.backends.torch.state.buffers import apart
from partitioner.backends.torch.state.initialise import Initialiser
from partitioner.backends.torch.state.own_state import KEY, OwnState, before_loading, check_saving
from partitioner.backends.torch.state.parts_reset import RESETTING, VALUES, reset_part
from partitioner.backends.torch.state.shards import (
    distributed_as,
    gathered_value,
    is_first_holder,
    part_of,
    region_on,
    region_within,
    total_norm,
)
from partitioner.backends.torch.state.whole import Stored, Submodule, Whole
from partitioner.backends.waiting import STEPS
from partitioner.ir.errors import PartitionerError
from partitioner.ir.exchange import Region
from partitioner.ir.layout import Placement, Sharding

#: Returns the whole contents of a parameter or buffer by name.
Source = Callable[[str], Tensor]
#: Runs a function on rank 0 and returns its text on every rank; all ranks call it.
Share = Callable[[Callable[[], str]], str]
#: Makes the program of another call over the same stored values, from whether it is a training
#: step, and the call's arguments.
Variants = Callable[[bool, tuple[Any, ...], Mapping[str, Any], Share], Whole]


class RankModule(nn.Module):
    """A rank's module.

    Attributes that the module has and its graphs have as constants cannot be set.

    Args:
        inputs: "global": every rank is called with the whole batch and takes its part; "local":
            each is called with its own part.
        seed: Seed of dropout: a step's draws follow from ``(seed << 32) + steps``.
        compared: Calls of each kind (training, evaluation) whose inputs the ranks compare, from the
            first one on; None for all.
        variants: Makes programs for evaluation and for batches of other sizes.
        agreement: Messages between the ranks, for this module alone.

    Attributes:
        steps: Training steps begun, each micro-batch one; set it when training goes on from a
            checkpoint, so that dropout goes on too.

    Raises:
        BackendError: torch.distributed is not up or has another number of processes, `inputs`
            is neither, with "local" a rank reads an input in two different parts, `compared` is
            negative, or the ranks have other options, weights or constants.
    """

    def __init__(
        self,
        whole: Whole,
        source: Source,
        device: torch.device,
        inputs: str,
        seed: int,
        compared: int | None,
        variants: Variants,
        agreement: Agreement,
    ) -> None:
        super().__init__()
        if device.type == "cpu":
            keep_freed_memory()
        self.rank = agreement.rank
        self.steps = 0
        self._local_inputs = inputs == "local"
        self._compared = compared
        self._calls = {"training": 0, "inference": 0, "evaluation": 0}
        self._seed = seed
        self._device = device
        self._variants = variants
        self._agreement = agreement
        problem = _problem(inputs, compared)
        agreement.check(f"module(inputs={inputs!r}, seed={seed}, {_origin(source)})", problem)
        regions = sorted(local_regions(whole).items()) if self._local_inputs else []
        self._input_keys = {  # by input and rank
            name: {r: repr(region) for r, region in by_rank.items()} for name, by_rank in regions
        }
        agreement.words = 2 + (len(self._input_keys) if self._local_inputs else 1)
        places = whole.places
        self._places = {
            entry.names[0]: places.get(entry.names[0])
            or Placement(whole.spare, Sharding.replicate(entry.shape))
            for entry in whole.stored
        }
        self._are_cut = {  # of buffers, and of parameters
            is_parameter: any(
                not self._places[entry.names[0]].sharding.is_replicated
                for entry in whole.stored
                if entry.parameter is is_parameter
            )
            for is_parameter in (False, True)
        }
        self._trained = {  # by rank, what it holds
            rank: [e.names[0] for e in whole.stored if e.trained and self._holds(rank, e)]
            for rank in range(agreement.ranks)
        }
        self._holders = {"": {rank: repr(names) for rank, names in self._trained.items()}}
        self._meshes = {  # by rank, those of parameters and buffers that it takes part in
            rank: sorted({p.mesh.devices for p in self._places.values() if rank in p.mesh.devices})
            for rank in range(agreement.ranks)
        }
        self._mesh_keys = {"": {rank: repr(meshes) for rank, meshes in self._meshes.items()}}
        self._whole = whole
        self._traced = whole.signature.traced
        self._described: dict[Hashable, str] = {}  # calls in words, by sizes and types
        self._word = "training" if whole.training else "inference"
        with agreement.together("module()"):
            self._passes = {"": self._passes_of(whole)}
        self._compiled: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self._anchor = torch.zeros((), requires_grad=True)
        _allow_anomaly_detection()
        cut = [entry.names[0] for entry in whole.stored if self._are_cut[entry.parameter]]
        listed = self._listed_elsewhere()
        names = cut if listed is None else [*cut, listed.names[0]]
        meshes = torch_meshes([self._places[name].mesh for name in names], device)
        correct_operators(meshes.values())
        self._tensors: dict[str, Tensor] = {}
        self._at_rest: dict[str, Tensor] = {}  # by value of the graph
        self._check_names(whole)
        for path, submodule in whole.submodules.items():  # in the model's order: PyTorch lists so
            if submodule.first:
                *owner, leaf = path.split(".")
                shared = _submodule(self, submodule.first.split("."))
                _submodule(self, owner).add_module(leaf, shared)
            elif path:
                *owner, leaf = path.split(".")
                part = _Part.of(submodule)
                submodule.state.set_into(part, path)
                _submodule(self, owner).add_module(leaf, part)
        with agreement.together("module()"):
            words = {entry.names[0]: self._hold(entry, source, meshes) for entry in whole.stored}
            constant_words = self._constant_words(source)
        agreement.compare(_beginning(words | constant_words))
        self._loaded = {name: int(name in self._tensors) for name in words}  # checksums, or 1
        self._is_loaded = False  # since the ranks compared them
        self._elsewhere = self._list_another(meshes)
        self._mark_parts_elsewhere(places)
        self._watch_optimizers()
        self.register_load_state_dict_pre_hook(_take_parts)  # type: ignore[no-untyped-call]
        self.register_state_dict_pre_hook(_check_saving)  # type: ignore[no-untyped-call]
        self.register_state_dict_post_hook(_add_extra_state)  # type: ignore[no-untyped-call]
        if not whole.training:
            self.register_load_state_dict_pre_hook(_refuse)  # type: ignore[no-untyped-call]
            self.register_state_dict_pre_hook(_refuse)  # type: ignore[no-untyped-call]
        self._note_contents()
        own = frozenset(vars(self)) | frozenset(dir(type(self)))
        root = whole.submodules.get("", Submodule())
        vars(self)[_CONSTANTS] = (root.constants | root.absent) - own

    def _check_names(self, whole: Whole) -> None:
        """Refuse a model with a tensor or submodule that has the name of an attribute of this."""
        tensors = (name for entry in whole.stored for name in entry.names)
        taken = {*vars(self), *dir(type(self))}
        for name in (*tensors, *whole.submodules):
            if name in taken:
                raise BackendError(
                    f"the model's own {name!r} has the name of an attribute of a rank's module: "
                    "give it another name, or compile a module that holds the model"
                )

    def _note_contents(self) -> None:
        """Note the tensors that calls begin with, and what else the module consists of."""
        self._contents = Contents.of(
            self, self._whole.stored, self._tensors, self._at_rest.values()
        )
        self._counted = {name: self._tensors[name] for name in self._trained[self.rank]}
        self._written = _versions(self._counted.values())  # as the ranks compared them
        shards = {name: _local(tensor) for name, tensor in self._tensors.items()}
        # writing to these is no change of a parameter: the parts that are its own stay the same
        self._shards = shards | {value: tensor.data for value, tensor in self._at_rest.items()}

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute that is no constant of the graphs."""
        _refuse_constant(self, name, value)
        super().__setattr__(name, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> RankModule:
        """A module with tensors of its own and the same graphs, as means of weights need it."""
        for name in _SHARED:
            shared = vars(self)[name]
            memo[id(shared)] = shared
        other = type(self).__new__(type(self))
        memo[id(self)] = other
        noted = ("_contents", "_copied", "_counted", "_written", "_shards")
        own = {name: value for name, value in vars(self).items() if name not in noted}
        vars(other).update(copy.deepcopy(own, memo))
        other._note_contents()
        other._watch_optimizers()
        return other

    def __copy__(self) -> RankModule:
        """A module with the same tensors, as of any module."""
        other = type(self).__new__(type(self))
        vars(other).update(vars(self))
        vars(other)["_copied"] = self  # optimizers' steps are counted while that lives
        return other

    def __reduce_ex__(self, _: object) -> NoReturn:
        """Refuse to be pickled, as by `torch.save(module)`: graphs and groups are this process's.

        Raises:
            BackendError: Always.
        """
        raise BackendError(
            "a rank's module cannot be pickled: save its state_dict(), or full_state_dict() for "
            "the module that was compiled"
        )

    def share_memory(self) -> Any:
        """Refuse it: DTensors lie in no memory that processes could share.

        Raises:
            BackendError: Always.
        """
        _refuse_sharing()

    # Parameters ------------------------------------------------------------------------------

    def get_parameter(self, target: str) -> nn.Parameter:
        """The parameter of a name.

        Raises:
            AttributeError: The module has none, or this rank holds no part of it.
        """
        self._check_held(target)
        return super().get_parameter(target)

    def get_buffer(self, target: str) -> Tensor:
        """The buffer of a name; as `get_parameter`."""
        self._check_held(target)
        return super().get_buffer(target)

    def _check_held(self, name: str) -> None:
        entry = next((entry for entry in self._whole.stored if name in entry.names), None)
        if entry is None or entry.names[0] in {**self._tensors, **self._elsewhere}:
            return
        ranks = self._places[entry.names[0]].mesh.devices
        does = "does" if len(ranks) == 1 else "do"
        raise AttributeError(
            f"rank {self.rank} holds no part of {name}, {named(ranks)} {does}: "
            "go through named_parameters(), which lists what this rank holds"
        )

    def _hold(self, entry: Stored, source: Source, meshes: Mapping[Any, Any]) -> int:
        """Register a parameter or buffer under its names, if this rank has a shard of it.

        Returns:
            Checksum of the whole value; 0 if it would have to be initialised for that alone.
        """
        place = self._places[entry.names[0]]
        if not self._holds(self.rank, entry):
            return 0 if isinstance(source, Initialiser) else self._sum_of(source(entry.names[0]))
        whole = source(entry.names[0])
        word = self._sum_of(whole)
        part = self._copy_of(whole, place)
        home = self._whole.programs.homes.get(entry.rest)
        if home is not None and home.placement != place:
            held = self._copy_of(whole, home.placement)
            self._at_rest[entry.rest] = held.detach()
            view = _view_within(held, region_within(place, home.placement, self.rank))
            part = part if view is None else view
        tensor = part
        if self._are_cut[entry.parameter]:
            tensor = DTensor.from_local(
                part,
                meshes[place.mesh],
                _placements(place),
                run_check=False,
                shape=whole.shape,
                stride=torch.empty(whole.shape, device="meta").stride(),
            )
        if entry.parameter:
            tensor = nn.Parameter(tensor, requires_grad=entry.trained)
        self._tensors[entry.names[0]] = tensor
        for name in entry.names:
            *path, leaf = name.split(".")
            owner = _submodule(self, path)
            if isinstance(tensor, nn.Parameter):
                owner.register_parameter(leaf, tensor)
            else:
                owner.register_buffer(leaf, tensor, persistent=name not in entry.hidden)
        return word

    def _copy_of(self, whole: Tensor, place: Placement) -> Tensor:
        """Copy this rank's part of a whole value into memory of its own."""
        part = part_of(whole.detach(), region_on(place, self.rank)).to(self._device)
        is_shared = part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
        return part.clone() if is_shared else part

    def _list_another(self, meshes: Mapping[Any, Any]) -> dict[str, nn.Parameter]:
        """List a parameter of other ranks if this one trains none; returns it by its first name.

        It has the whole size and no elements here, and gets no gradient, so that optimizers keep no
        state of it: what PyTorch keeps whole, such as Adam's number of steps, would be saved in
        place of its holder's.
        """
        entry = self._listed_elsewhere()
        if entry is None or self._trained[self.rank]:
            return {}
        place = self._places[entry.names[0]]
        tensor = nn.Parameter(
            DTensor.from_local(
                torch.empty(0, dtype=entry.dtype, device=self._device),
                meshes[place.mesh],
                _placements(place),
                run_check=False,
                shape=torch.Size(entry.shape),
                stride=torch.empty(entry.shape, device="meta").stride(),
            ),
            requires_grad=entry.trained,
        )
        *path, leaf = entry.names[0].split(".")
        _submodule(self, path).register_parameter(leaf, tensor)
        return {entry.names[0]: tensor}

    def _mark_parts_elsewhere(self, used: Container[str]) -> None:
        """Mark the submodules of whose own tensors that are computed with this rank holds none.

        They are of no kind here: code that goes by kinds leaves them to the ranks that hold them.
        """
        is_held: dict[str, bool] = {}  # by path
        for entry in self._whole.stored:
            if entry.names[0] in used:
                for path in {name.rpartition(".")[0] for name in entry.names} - {""}:
                    here = entry.names[0] in self._tensors
                    is_held[path] = is_held.get(path, False) or here
        for path, is_here in is_held.items():
            vars(_submodule(self, path.split(".")))[_ELSEWHERE] = not is_here

    def _listed_elsewhere(self) -> Stored | None:
        """The parameter that ranks list which train none; None if each has its own."""
        trained = (entry for entry in self._whole.stored if entry.trained)
        return None if all(self._trained.values()) else next(trained, None)

    def _watch_optimizers(self) -> None:
        entries = (entry for entry in self._whole.stored if entry.trained)
        ranks = range(self._agreement.ranks)
        # alike on all ranks, so that all of them refuse
        holds_all = all(self._holds(rank, entry) for entry in entries for rank in ranks)
        self._holds_all = holds_all
        count_steps(self, self._tensors, self._elsewhere, holds_all=holds_all)
        if not holds_all:
            watch_partial_gradients(self, self._agreement)

    def _holds(self, rank: int, entry: Stored) -> bool:
        return rank in self._places[entry.names[0]].mesh.devices

    def _sum_of(self, tensor: Tensor) -> int:
        """Checksum of a tensor; 0 where there is no other rank."""
        return checksum(tensor) if self._agreement.ranks > 1 else 0

    def _constant_words(self, source: Source) -> dict[str, int]:
        """Checksums of the graph's constants; 0 for those that would be initialised for others."""
        constants = self._whole.graph.constants
        read = {part.whole for part in self._whole.programs.ranks[self.rank].constants.values()}
        known = read if isinstance(source, Initialiser) else constants.keys()
        return {
            name: self._sum_of(from_numpy(constant.load(), constant.type.dtype))
            if name in known and self._agreement.ranks > 1
            else 0
            for name, constant in sorted(constants.items())
        }

    def full_state_dict(self) -> dict[str, Any]:
        """The whole model's state on every rank, under its names; all ranks must call it.

        Extra state (`get_extra_state`) is that of this process's module as it was compiled.

        Raises:
            BackendError: The program is for inference: its weights are constants.
            CommunicationError: A rank is gone, or does not call it in time.
        """
        if not self._whole.training:
            _refuse(self)
        self._agreement.check("full_state_dict()")
        state: dict[str, Any] = {}
        for entry in self._whole.stored:
            first = entry.names[0]
            shard, holders = self._tensors.get(first), self._places[first].mesh.devices
            with telling(f"gathering {first}", self.rank, self._agreement.roll):
                whole = gathered_value(shard, holders, entry.shape, entry.dtype, self._device)
            state |= {name: whole for name in entry.names if name not in entry.hidden}
        for path, own in _own_states(self._whole).items():
            if own.extra:
                state[f"{path}.{KEY}".lstrip(".")] = own.extra[0]
        return state

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Scale all gradients so that their norm is at most `max_norm`; all ranks must call it.

        Every parameter of the whole model counts once, also those that lie on other ranks only,
        which `torch.nn.utils.clip_grad_norm_` leaves out.

        Args:
            norm_type: Order of the norm, from 1 to infinity.
            error_if_nonfinite: Raise if the norm is infinite or no number.

        Returns:
            The norm before scaling: the same float64 scalar on all ranks, no DTensor.

        Raises:
            BackendError: `norm_type` is below 1, or the norm is not finite.
            CommunicationError: A rank is gone, or does not call it in time.
        """
        is_norm = norm_type >= 1
        problem = "" if is_norm else f"norm_type is {norm_type}, not from 1 to infinity"
        self._agreement.check("clip_grad_norm_()", problem)
        grads = {name: tensor.grad for name, tensor in self._tensors.items()}
        local = {name: _local(grad) for name, grad in grads.items() if grad is not None}
        counted = [g for name, g in local.items() if is_first_holder(self._places[name], self.rank)]
        with telling("adding up a norm", self.rank, self._agreement.roll):
            norm = total_norm(counted, norm_type, self._device)
        if error_if_nonfinite and not bool(norm.isfinite()):
            raise BackendError(f"the norm of all gradients is {norm.item()}")
        factor = (max_norm / (norm + 1e-6)).clamp(max=1)
        for grad in local.values():
            grad.mul_(factor)
        return norm

    # Calls -----------------------------------------------------------------------------------

    @torch.compiler.disable(recursive=False)  # type: ignore[no-untyped-call,untyped-decorator]
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the rank's forward graph; the arguments are the module's own."""
        backend = _compiling()
        if backend is not None and self._compiled is None:
            self.compile(backend=backend)
        return self._call(args, kwargs)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        STEPS.begin()
        training = self.training and self._whole.training
        grads = torch.is_grad_enabled()
        # DTensors cannot be made in inference mode
        with torch.inference_mode(False), torch.set_grad_enabled(grads):
            passes, values, agreed = self._begin(training, args, kwargs)
            shards = self._shards_now()
            if passes.differentiates and grads:
                trained = {n: t for n, t in self._tensors.items() if t.requires_grad}
                names, tensors = tuple(trained), trained.values()
                start = self, passes, values, shards, agreed, names
                results = _Step.apply(*start, self._anchor, *tensors)  # type: ignore[no-untyped-call]
            else:
                own = set(map(id, shards.values()))
                results = self._forward(passes, values, shards, agreed)[0]
                results = tuple(x.detach() if id(x) in own else x for x in results)
                if grads and self._would_differentiate(args, kwargs):
                    flags = self._differentiable(passes, results)
                    results = _Evaluation.apply(self, results, flags, self._anchor)  # type: ignore[no-untyped-call]
            return passes.structured(results)

    def _forward(
        self,
        passes: RankPasses,
        values: Any,
        shards: Mapping[str, Tensor],
        agreed: Callable[[], None],
        *,
        backward: bool = False,
    ) -> tuple[tuple[Tensor, ...], Values]:
        """Run the forward graph, and count its writes to DTensors as PyTorch does to tensors."""
        results = passes.forward(values, shards, agreed, backward=backward)
        written = map(self._tensors.get, passes.whole.written)
        increment_version([tensor for tensor in written if isinstance(tensor, DTensor)])
        return results

    def _would_differentiate(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Test whether a call of the whole model would give results that require a gradient."""
        own = self._tensors.values() if self._whole.training else ()
        given = (x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor))
        return any(tensor.requires_grad for tensor in (*own, *given))

    def _differentiable(self, passes: RankPasses, results: Sequence[Tensor]) -> list[bool]:
        """Tell of each result of a call without a backward pass if it would require a gradient.

        It is not traced: a result is taken to be as in training, if there are as many.
        """
        names, flags = passes.whole.signature.results, self._whole.signature.differentiable
        known = flags if len(flags) == len(names) else [True] * len(names)
        named = [flag for name, flag in zip(names, known, strict=True) if name]
        floats = (x.is_floating_point() or x.is_complex() for x in results)
        return [flag and is_float for flag, is_float in zip(named, floats, strict=True)]

    def _shards_now(self) -> Mapping[str, Tensor]:
        """Return this rank's shards by first name, and values at rest by value, detached.

        The same tensors at each call, as long as parameters and buffers lie where they lay.
        """
        for name, tensor in self._tensors.items():
            local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
            if not local.is_set_to(self._shards[name]):
                self._shards[name] = local.detach()
        return self._shards

    def train_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Run a forward and a backward pass; the arguments are the module's own.

        Gradients are added to those that the parameters have.

        Returns:
            The loss.

        Raises:
            BackendError: The program is not for training.
        """
        if not self._whole.training:
            raise BackendError("train_step() is for training: compile with training=True")
        loss: Tensor = pytree.tree_leaves(self(*args, **kwargs))[0]
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def _begin(
        self, training: bool, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[RankPasses, Any, Callable[[], None]]:
        """The graphs of a call, their inputs by local name, and what waits for all to agree.

        A rank computes while it waits, if it has nothing else to ask the other ranks.
        """
        word = self._word if training or not self._whole.training else "evaluation"
        problem, key, base = "", "", self._passes[""]
        signature = self._whole.signature
        inputs: dict[str, Any] | None = None
        try:
            self._contents.check(self)
            check_call(self)
            if training:
                check_inputs(signature.plain(args, kwargs) or pytree.tree_leaves((args, kwargs)))
            if self._local_inputs:
                inputs = signature.flatten(args, kwargs)
                base.local(inputs)
            else:
                key = self._in_words(args, kwargs)
                if word == self._word:
                    inputs = signature.flatten(args, kwargs)  # others may be another loss
        except BackendError as error:
            problem = str(error) if self._local_inputs else f"rank {self.rank}: {error}"
        doing = f"{word} step {self.steps} with seed {self._seed} on {key or 'its part'}"
        plain_sums = self._plain_sums()  # ranks that have no problem take their notes, too
        sums: Sequence[Sums] = ()
        if not problem:
            sums = self._input_sums(word, args, kwargs), plain_sums, self._written_sums()
        agree = self._agreement.begin(doing, problem, sums, asks=self._is_loaded)
        if problem or self._is_loaded or self._variant_name(word, key) not in self._passes:
            self._agree(agree)
            agree = _agreed
        draws = 0
        try:
            if self._local_inputs and word == "evaluation":
                whole = base.joined(signature.flatten(args, kwargs), self._agreement)
                args, kwargs = signature.call(whole)
                key = signature.described(args, kwargs)
            passes = self._variant(training, word, key, args, kwargs)
            signature = passes.whole.signature
            if passes is not base or inputs is None:
                inputs = signature.flatten(args, kwargs)
            seed = {signature.seed: torch.tensor((self._seed << 32) + self.steps)}
            draws = 0 if word == "evaluation" else passes.draws
            values = passes.start(inputs, seed, local=self._local_inputs and passes is base)
        except Exception:
            self._agree(agree, draws)  # where the other ranks wait for this one
            raise
        return passes, values, partial(self._agree, agree, draws)

    def _agree(self, agree: Callable[[], bool], draws: int = 0) -> None:
        """Wait until all ranks agree; a step of so many draws begins only if they do."""
        if agree():
            self._agreement.compare(_loading(self._loaded))
            self._is_loaded = False
            self._written = _versions(self._counted.values())
        self.steps += draws

    def _in_words(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        """A call in words; equal if one trace fits both."""
        signature = self._whole.signature
        tensors = signature.plain(args, kwargs)
        if tensors is None:
            return signature.described(args, kwargs)
        sizes = tuple((tensor.shape, tensor.dtype) for tensor in tensors)
        if sizes not in self._described:
            self._described[sizes] = signature.described(args, kwargs)
        return self._described[sizes]

    def _input_sums(self, word: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Sums:
        """Checksums of a call's inputs; 0 if they are not to be compared."""
        is_compared = self._compared is None or self._calls[word] < self._compared
        self._calls[word] += 1
        known: dict[str, int] = {}
        if is_compared and self._agreement.ranks > 1:
            tensors = self._whole.signature.tensors(args, kwargs)
            known = {name: checksum(tensor) for name, tensor in tensors.items()}
        if not self._local_inputs:
            words = {"": code(repr(known).encode()) if known else 0}
            return Sums(words, "other data in input", _GLOBAL_ADVICE, inner=known)
        keys = self._input_keys
        words = {name: known.get(name, 0) if self.rank in keys[name] else 0 for name in keys}
        return Sums(words, "another part of input", _LOCAL_ADVICE, keys)

    def _written_sums(self) -> Sums:
        """Checksum of how often the trained parameters that this rank holds were written to."""
        counts = [*map(sub, _versions(self._counted.values()), self._written)]
        word = code(array("q", counts).tobytes()) if counts else 0
        by_name = dict(zip(self._counted, counts, strict=True))
        return Sums({"": word}, "other writes to", _WRITTEN_ADVICE, self._holders, by_name)

    def _plain_sums(self) -> Sums:
        """Checksum of plain tensors that were computed with parameters since the last call."""
        noted = compared_notes(self._meshes[self.rank])
        word = code(repr(noted).encode()) if noted else 0
        differ = "another plain tensor beside parts of tensors in"
        return Sums({"": word}, differ, _PLAIN_ADVICE, self._mesh_keys, noted)

    def _variant_name(self, word: str, key: str) -> str:
        """Where the graphs of a call are found; "" for those of the trace."""
        is_traced = word == self._word and (self._local_inputs or key == self._traced)
        return "" if is_traced else f"{word} on {key}"

    def _variant(
        self, training: bool, word: str, key: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> RankPasses:
        """The graphs of a call, made with the first call of its kind."""
        name = self._variant_name(word, key)
        if name not in self._passes:
            share = partial(self._agreement.first, doing=name)
            with self._agreement.together(name):
                try:
                    whole = self._variants(training, args, kwargs, share)
                except (CommunicationError, AgreedError):
                    raise
                except PartitionerError as error:
                    raise BackendError(f"{name}: {error}") from error
                passes = self._passes_of(whole)
            if self._compiled is not None:
                passes.compile(*self._compiled[0], **self._compiled[1])
            self._passes[name] = passes
        return self._passes[name]

    def _passes_of(self, whole: Whole) -> RankPasses:
        return RankPasses(whole, self.rank, self._device, self._places, self._agreement.roll)

    def _writes_to(self, shards: Mapping[str, Tensor]) -> dict[str, tuple[int, int] | None]:
        """PyTorch's counts of writes to tensors and their shards; None of those that lie elsewhere.

        Args:
            shards: As they lay, by first name.
        """
        return {
            name: (self._tensors[name]._version, shard._version)
            if _local(self._tensors[name]).is_set_to(shard)
            else None
            for name, shard in shards.items()
        }

    def _gradients(
        self, passes: RankPasses, kept: Values, tangent: Tensor, names: Sequence[str]
    ) -> Iterator[Tensor | None]:
        """Gradients of parameters, in order; None for one that has none.

        None has memory of another, as PyTorch adds to them, and clips them, in place.
        """
        gradients = passes.backward(kept, tangent)
        parts: dict[str, Tensor] = {}
        for name in names:
            gradient, shard = gradients.get(name), self._shards[name]
            if gradient is None:
                continue
            if gradient.shape != shard.shape:
                gradient = self._own_part(passes, name, gradient)
            # fused optimizers read both in one order
            is_alike = gradient.stride() == shard.stride()
            parts[name] = gradient if is_alike else torch.empty_like(shard).copy_(gradient)
        parts = apart(parts, [tangent])
        for name in names:
            tensor, part = self._tensors[name], parts.get(name)
            if part is not None and isinstance(tensor, DTensor):
                part = distributed_as(tensor, part)
            yield part

    def _own_part(self, passes: RankPasses, name: str, gradient: Tensor) -> Tensor:
        """The part of a gradient that is of this rank's part of a parameter: a view, if it can be.

        Raises:
            BackendError: The plan gives this rank no such part.
        """
        (value,) = (e.gradient for e in passes.whole.stored if e.names[0] == name)
        place = passes.whole.programs.homes[value].placement
        region = region_within(self._places[name], place, self.rank)
        if region is None:
            raise BackendError(
                f"rank {self.rank}: the optimizer's state of {name} is of no part of the gradient "
                "that it holds: compile with parallel='zero2'"
            )
        view = _view_within(gradient, region)
        return part_of(gradient, region) if view is None else view

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the rank's graphs in place with `torch.compile`, with its arguments."""
        self._compiled = (args, kwargs)
        for passes in self._passes.values():
            passes.compile(*args, **kwargs)


#: Attributes that copies of a module share.
_SHARED = (
    *("_agreement", "_described", "_holders", "_input_keys", "_mesh_keys", "_meshes", "_passes"),
    *("_places", "_trained", "_variants", "_whole"),
)

#: What ranks should do that are called with other data.
_GLOBAL_ADVICE = (
    "with inputs='global' every rank is called with the same whole batch: seed the loaders alike, "
    "without a DistributedSampler, or use module(inputs='local') for own parts "
    "(module(check_inputs=0) compares no inputs)"
)
_LOCAL_ADVICE = (
    "the plan gives them the same part: with inputs='local' seed the loaders of such ranks alike "
    "(module(check_inputs=0) compares no inputs)"
)


#: What ranks should do that computed with other plain tensors.
_PLAIN_ADVICE = (
    "it stands for a whole one, so every rank must have the same: draw it after torch.manual_seed "
    "with one seed, or as part of a parameter's (torch.rand_like(p)), or send rank 0's with "
    "torch.distributed.broadcast"
)


#: What ranks should do that wrote otherwise to their parameters.
_WRITTEN_ADVICE = (
    "call optimizer.step(), and whatever else writes to parameters, equally often on every rank, "
    "as their parts no longer are of one model"
)


def _problem(inputs: str, compared: int | None) -> str:
    """The reason why these options of a module have no meaning; "" if they have one."""
    if inputs not in ("global", "local"):
        return f"inputs is {inputs!r}, not 'global' or 'local'"
    if compared is not None and compared < 0:
        return f"check_inputs is {compared}, not a number of calls, or None for all"
    return ""


def _beginning(words: Mapping[str, int]) -> Sums:
    """Checksums of the weights and constants that a rank begins with."""
    return Sums(
        words,
        "other contents of",
        "begin with the same weights and constants: call torch.manual_seed with the same seed on "
        "every rank before the model is made, load the same file, or send rank 0's with "
        "torch.distributed.broadcast before compile",
    )


def _loading(words: Mapping[str, int]) -> Sums:
    """Checksums of the whole weights that a rank loaded."""
    return Sums(
        words,
        "loaded other contents of",
        "call load_state_dict() on every rank, with the same tensors",
    )


def _origin(source: Source) -> str:
    """Where weights come from, in words."""
    return f"init_seed={source.seed}" if isinstance(source, Initialiser) else "the model's weights"


class _Step(torch.autograd.Function):
    """The forward graph, and in backward the backward graph."""

    @staticmethod
    def forward(
        ctx: Any,
        module: RankModule,
        passes: RankPasses,
        values: Any,
        shards: Mapping[str, Tensor],
        agreed: Callable[[], None],
        names: Sequence[str],
        *_: Tensor,
    ) -> tuple[Tensor, ...]:
        """Run the forward graph; results require gradients as the module's do."""
        computed, kept = module._forward(passes, values, shards, agreed, backward=True)
        results = tuple(result.detach() for result in computed)  # kept values hold no graph
        ctx.module, ctx.passes, ctx.kept, ctx.names = module, passes, kept, names
        ctx.step = module.steps - 1
        again = {id(value) for value in kept.values()}
        read = {name for name in shards if name in module._tensors and id(shards[name]) in again}
        ctx.shards = {name: shards[name] for name in read}
        ctx.versions = module._writes_to(ctx.shards)
        ctx.writes = _versions(kept.values())
        signature = passes.whole.signature
        named = zip(signature.results, signature.differentiable, strict=True)
        flags = [differentiable for name, differentiable in named if name]
        cut = (result for result, flag in zip(results[1:], flags[1:], strict=True) if not flag)
        ctx.mark_non_differentiable(*cut)
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Run the backward graph, once: it frees the kept values; the ranks agree on it first.

        Where it sends nothing, a rank goes on to its optimizer's step and waits for the answer in
        its next call. Only the loss, the first result, has a backward pass.
        """
        module, kept, problem = ctx.module, ctx.kept, ""
        if any(grad is not None for grad in grads[1:]):
            problem = (
                "a gradient reaches another result of the module than its loss, which comes first: "
                "compute all of the loss in the module, or detach() the other results"
            )
        elif torch.is_grad_enabled():
            problem = "backward with create_graph=True: a program has no gradients of gradients"
        elif kept is None:
            problem = "backward() was called a second time on one step: it is freed"
        elif module._writes_to(ctx.shards) != ctx.versions:
            problem = (
                "backward() after a parameter that it needs was written to, as by "
                "optimizer.step(): call backward() before that, or the module again"
            )
        elif _versions(kept.values()) != ctx.writes:
            problem = (
                "backward() after an input, a result or a buffer of the step that it needs was "
                "written to in place: write to a clone(), or call backward() before that"
            )
        problem = problem and f"rank {module.rank}: {problem}"
        # that of a loss to which a DTensor was added, as a penalty of weights, is a DTensor
        tangent = grads[0].full_tensor() if isinstance(grads[0], DTensor) else grads[0]
        is_scaled = not (module._holds_all or problem) and float(tangent) != 1.0
        doing = f"backward() of training step {ctx.step}"
        doing = f"{doing} by {float(tangent):g}" if is_scaled else doing
        agree = module._agreement.begin(doing, problem)
        if problem or is_scaled or ctx.passes.communicates_going_back:
            agree()
        ctx.kept = ctx.shards = None
        return *[None] * 7, *module._gradients(ctx.passes, kept, tangent, ctx.names)


class _Evaluation(torch.autograd.Function):
    """Results of a call without a backward pass: going back from them is refused.

    Else a sum of such a result and of something that has a gradient would train that alone.
    """

    @staticmethod
    def forward(
        ctx: Any, module: RankModule, results: Sequence[Tensor], flags: Sequence[bool], _: Tensor
    ) -> tuple[Tensor, ...]:
        """Return the results; those with a flag require gradients."""
        ctx.module = module
        shown = tuple(result.detach() for result in results)
        ctx.mark_non_differentiable(*(x for x, flag in zip(shown, flags, strict=True) if not flag))
        return shown

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[None, ...]:
        """Refuse it on all ranks."""
        module = ctx.module
        said = (
            "backward() of a call in evaluation mode: a step has gradients after module.train() "
            "(what shall stay in evaluation mode, as a batch norm, is put into it before compile)"
            if module._whole.training
            else "backward() of a program for inference: compile with training=True"
        )
        module._agreement.check("backward() of an evaluation", f"rank {module.rank}: {said}")
        raise AssertionError(said)


def _agreed() -> bool:
    """The end of an agreement that the rank has waited for; no rank asks."""
    return False


@cache
def _allow_anomaly_detection() -> None:
    """Give DTensor a rule for the check that `torch.autograd.set_detect_anomaly` makes.

    It asks of every gradient whether any element is NaN; with this rule each rank asks it of the
    whole gradient, so that all of them raise.
    """
    whole = [([Replicate()], [Replicate()])]
    register_sharding(torch.ops.aten._is_any_true.default)(lambda _: whole)


def _compiling() -> Any:
    """The backend, if this is a call of a ``torch.compile(module)``; None in other calls."""
    from torch._C._dynamo.eval_frame import get_eval_frame_callback

    backend: Any = get_eval_frame_callback() or None
    while hasattr(backend, "_torchdynamo_orig_backend"):
        backend = backend._torchdynamo_orig_backend
    return backend


def _placements(place: Placement) -> list[Shard | Replicate]:
    """DTensor's placement on each axis."""
    placements: list[Shard | Replicate] = []
    for axis in place.mesh.names or ("one",):
        dims = [dim for dim, layout in enumerate(place.sharding.dims) if axis in layout.axes]
        placements.append(Shard(dims[0]) if dims else Replicate())
    return placements


def _local(tensor: Tensor) -> Tensor:
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).detach()


def _view_within(tensor: Tensor, region: Region | None) -> Tensor | None:
    """A dense view of a region of a tensor; None if there is none."""
    view = None if region is None else box_view(tensor, region)
    return view if view is not None and view.is_contiguous() else None


def _versions(tensors: Iterable[Tensor]) -> list[int]:
    """PyTorch's counts of writes to tensors; it counts none to those of `inference_mode`."""
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


class _Part(nn.Module):
    """A submodule, which holds parameters and buffers and does not run.

    It is an instance of its class in the model, for code that goes by kinds of modules, unless all
    that it consists of is on other ranks. What such code calls or sets that the graphs would not
    notice is refused.
    """

    @property  # type: ignore[override]
    def __class__(self) -> type[nn.Module]:
        """The class that it has in the model; that of any module if it is on other ranks."""
        kind: type[nn.Module] = vars(self).get(_KIND, _Part)
        return nn.Module if vars(self).get(_ELSEWHERE, False) else kind

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
    def of(submodule: Submodule) -> _Part:
        """A part with the class, the constants and the absent tensors of a submodule."""
        part = _Parts() if issubclass(submodule.kind, _CONTAINERS) else _Part()
        own = frozenset(vars(part)) | frozenset(dir(_Part))
        for name in sorted(submodule.absent):
            part.register_parameter(name, None)
        vars(part)[_KIND] = submodule.kind
        vars(part)[TRACED_MODE] = submodule.training
        vars(part)[_CONSTANTS] = (submodule.constants | submodule.absent) - own
        vars(part)[VALUES] = submodule.values
        return part

    def share_memory(self) -> Any:
        """Refuse it, as the whole module does."""
        _refuse_sharing()

    def forward(self, *_: Any, **__: Any) -> Any:
        """Refuse it."""
        kind = vars(self).get(_KIND, _Part).__name__
        raise BackendError(f"a {kind} of a rank's module does not run by itself: call the module")

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute that is no constant of the graphs."""
        _refuse_constant(self, name, value)
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        """A parameter, buffer or submodule, a plain value, or a method that sets the contents.

        Raises:
            AttributeError: It is something else.
        """
        for contents in ("_parameters", "_buffers", "_modules"):
            if name in vars(self).get(contents, ()):
                return vars(self)[contents][name]
        values = vars(self).get(VALUES, {})
        if name in values:
            return values[name]
        if name in RESETTING and hasattr(self.__class__, name):
            return partial(reset_part, self, name)
        kind = vars(self).get(_KIND, _Part).__name__
        raise AttributeError(
            f"a {kind} of a rank's module has no {name!r}, only the parameters "
            "and buffers that this rank holds: ask the module that was compiled"
        )


#: Kinds of modules whose submodules are read by position or key.
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


class _Parts(_Part):
    """A sequence, list or dictionary of submodules, which is read as PyTorch's are."""

    @property
    def _container(self) -> Any:
        """The class of PyTorch that it is one of."""
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
        """A submodule, or a method that reads the contents.

        Raises:
            AttributeError: It is something else.
        """
        if name in _READING and hasattr(self._container, name):
            return partial(getattr(self._container, name), self)
        return super().__getattr__(name)


#: Methods of containers that read them, for users and for `__getitem__` of PyTorch's classes.
_READING = frozenset({"keys", "values", "items", "_get_abs_string_index", "_get_item_by_idx"})


#: Where a part of a rank's module keeps its class.
_KIND = "_kind_in_the_model"
#: Where a part keeps whether other ranks hold it.
_ELSEWHERE = "_is_elsewhere"
#: Where a part of a rank's module keeps the names of its constants.
_CONSTANTS = "_constants_of_graphs"


def _refuse_constant(part: nn.Module, name: str, value: object) -> None:
    values = vars(part).get(VALUES, {})
    is_same = name in values and type(values[name]) is type(value) and values[name] == value
    if name in vars(part).get(_CONSTANTS, ()) and not is_same:
        raise BackendError(
            f"{name} was traced as it was when the module was compiled: set it before compile"
        )


def _submodule(root: nn.Module, path: Sequence[str]) -> Any:
    """The part of a path, which is made if there is none; the module itself for an empty path."""
    for name in path:
        if name not in root._modules:
            root.add_module(name, _Part())
        child = root._modules[name]
        assert child is not None
        root = child
    return root


def _refuse_sharing() -> NoReturn:
    raise BackendError(
        "share_memory() of a rank's module: its parts belong to this process; to share weights, "
        "load its state_dict() into the module that was compiled, and share that"
    )


def _refuse(*_: Any) -> None:
    """Refuse the state of a program for inference, which would lack the weights."""
    raise BackendError(
        "a program for inference has its weights as constants in its graphs, no state_dict(): ask "
        "the module that was compiled, or compile with training=True"
    )


def _own_states(whole: Whole) -> Mapping[str, OwnState]:
    """List what submodules save beside parameters and buffers, by each of their paths."""
    of = whole.submodules
    return {path: of[part.first].state if part.first else part.state for path, part in of.items()}


def _check_saving(module: nn.Module, *_: Any) -> None:
    """Refuse a state without what the model's submodules add to theirs."""
    assert isinstance(module, RankModule)
    check_saving(_own_states(module._whole))


def _add_extra_state(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Add the extra state of the model itself; its submodules have theirs."""
    assert isinstance(module, RankModule)
    own = _own_states(module._whole).get("", OwnState())
    if own.extra:
        state[prefix + KEY] = own.extra[0]


def _take_parts(
    module: nn.Module,
    state: dict[str, Any],
    prefix: str,
    local: Mapping[str, Any],
    *lists: Any,
) -> None:
    """Whole tensors in a state that is loaded become this rank's shards.

    DTensors in the state become whole where the module has no shards: all ranks must load it.
    """
    assert isinstance(module, RankModule)
    note_loaded(module)
    if local.get("assign_to_params_buffers"):
        raise BackendError("load_state_dict(assign=True): load it without assign, into the shards")
    before_loading(_own_states(module._whole), state, prefix, *lists)
    for entry in module._whole.stored:
        for whole in (state.get(prefix + name) for name in entry.names):
            if isinstance(whole, Tensor) and not isinstance(whole, DTensor):
                module._loaded[entry.names[0]] = module._sum_of(whole)
                module._is_loaded = True
        tensor = module._tensors.get(entry.names[0])
        if not module._are_cut[entry.parameter]:
            sharded = {prefix + name: state.get(prefix + name) for name in entry.names}
            state |= {n: x.full_tensor() for n, x in sharded.items() if isinstance(x, DTensor)}
        for name in entry.names if tensor is None else ():
            state.pop(prefix + name, None)  # other ranks hold it
        if not isinstance(tensor, DTensor):
            continue
        region = region_on(module._places[entry.names[0]], module.rank)
        for name in (prefix + name for name in entry.names):
            whole = state.get(name)
            if whole is None or isinstance(whole, DTensor) or whole.shape != tensor.shape:
                continue  # PyTorch's own message names both sizes
            part = part_of(whole.detach(), region)
            state[name] = distributed_as(tensor, part.to(tensor.device))
    state |= {prefix + name: tensor for name, tensor in module._elsewhere.items()}
