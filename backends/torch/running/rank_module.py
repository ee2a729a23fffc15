"""A rank's part of a compiled module, as an ordinary module under torchrun.

Parameters are DTensors with the whole model's names and sizes; each rank holds its shards. Where
every rank has each of them whole, they are ordinary parameters instead: PyTorch spends some 50 us
on each operator of an optimizer's step on a DTensor. One module has one or the other, since
PyTorch's operators on lists of tensors refuse both in one list. So it is with buffers. A rank that
trains no parameter lists one of another rank, without its contents: optimizers refuse to be made
for none. All ranks have all submodules.

Calling the module runs the rank's forward graph; `loss.backward()` runs its backward graph. No
gradient goes through a collective: the backward graph has its own. Evaluation, and batches of other
sizes, are other programs over the same shards, made when they are first called for.
"""

from __future__ import annotations

import copy
import gc
import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from operator import sub
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from partitioner.backends.errors import BackendError, CommunicationError
from partitioner.backends.torch.agreeing.agreement import AgreedError, Agreement, Meeting
from partitioner.backends.torch.agreeing.faults import named, telling
from partitioner.backends.torch.agreeing.groups import check_groups
from partitioner.backends.torch.agreeing.sums import (
    Sums,
    beginning,
    checksum,
    loading,
    of_inputs,
    of_writes,
)
from partitioner.backends.torch.graphs.eager import Carrier
from partitioner.backends.torch.guards.changes import Contents, check_inputs, count_steps
from partitioner.backends.torch.guards.originals import check_call, note_loaded
from partitioner.backends.torch.running.held_state import (
    HeldState,
    StatePlaces,
    full_state,
    local_part,
    own_states,
    take_parts,
    versions,
)
from partitioner.backends.torch.running.host_memory import keep_freed_memory
from partitioner.backends.torch.running.rank_passes import RankPasses, local_regions
from partitioner.backends.torch.running.rows import joined_rows
from partitioner.backends.torch.running.step import (
    Evaluated,
    RankCall,
    TrainingStep,
    differentiable,
)
from partitioner.backends.torch.running.submodules import (
    CONSTANTS,
    Source,
    add_submodules,
    constant_words,
    fill,
    list_another,
    mark_parts_elsewhere,
    refuse_constant,
    refuse_sharing,
    torch_meshes_of,
)
from partitioner.backends.torch.state.initialise import Initialiser
from partitioner.backends.torch.state.shards import total_norm
from partitioner.backends.torch.state.whole import (
    KEY,
    OwnState,
    Submodule,
    Whole,
    before_loading,
    check_saving,
)
from partitioner.backends.waiting import STEPS
from partitioner.foundations.no_gc import no_collection
from partitioner.foundations.recent import Recent
from partitioner.ir.errors import PartitionerError

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
            each is called with its own part; "rows": each with as many rows of the batch.
        seed: Seed of dropout: a step's draws follow from ``(seed << 32) + steps``.
        compared: Calls of each kind (training, evaluation) whose inputs the ranks compare, from the
            first one on; None for all.
        kept_sizes: Programs of `variants` that are kept; the one called least recently is freed.
        variants: Makes programs for evaluation and for batches of other sizes.
        agreement: Messages between the ranks, for this module alone.

    Attributes:
        steps: Training steps begun, each micro-batch one; set it when training goes on from a
            checkpoint, so that dropout goes on too.

    Raises:
        BackendError: torch.distributed is not up or has another number of processes, `inputs`
            is neither, with "local" a rank reads an input in two different parts, `compared` is
            negative, `kept_sizes` below 1, or the ranks have other options, weights or constants.
    """

    def __init__(
        self,
        whole: Whole,
        source: Source,
        device: torch.device,
        inputs: str,
        seed: int,
        compared: int | None,
        kept_sizes: int,
        variants: Variants,
        agreement: Agreement,
    ) -> None:
        super().__init__()
        if device.type == "cpu":
            keep_freed_memory()
        self.rank = agreement.rank
        self.steps = 0
        self._local_inputs = inputs == "local"
        self._in_rows = inputs == "rows"
        self._compared = compared
        self._calls = {"training": 0, "inference": 0, "evaluation": 0}
        self._seed = seed
        self._device = device
        self._variants = variants
        self._agreement = agreement
        problem = ""
        if inputs not in ("global", "local", "rows"):
            problem = f"inputs is {inputs!r}, not 'global', 'local' or 'rows'"
        elif compared is not None and compared < 0:
            problem = f"check_inputs is {compared}, not a number of calls, or None for all"
        elif kept_sizes < 1:
            problem = f"kept_sizes is {kept_sizes}; it must be at least 1"
        weights = "the model's weights"
        if isinstance(source, Initialiser):
            weights = f"init_seed={source.seed}"
        agreement.check(f"module(inputs={inputs!r}, seed={seed}, {weights})", problem)
        #: By input and rank, its part of the batch; None if each is called with the whole batch.
        self._input_keys: Mapping[str, Mapping[int, str]] | None = None
        if self._local_inputs:
            regions = sorted(local_regions(whole).items())
            self._input_keys = {
                name: {rank: repr(region) for rank, region in by_rank.items()}
                for name, by_rank in regions
            }
        self._places = StatePlaces.of(whole, agreement.ranks)
        agreement.words = 1 + (1 if self._input_keys is None else len(self._input_keys))
        self._whole = whole
        self._traced = whole.signature.traced
        self._described = Recent[Hashable, str](_MOST_WORDS)  # calls in words, by sizes and types
        self._word = "training" if whole.training else "inference"
        with agreement.together("module()"):
            # the first one is read at each call, so that it is kept
            self._passes = Recent[str, RankPasses](max(kept_sizes, 1) + 1)
            self._passes[""] = self._passes_of(whole)
        self._compiled: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self._anchor = torch.zeros((), requires_grad=True)
        meshes = torch_meshes_of(self._places, device)
        self._tensors: dict[str, Tensor] = {}
        self._at_rest: dict[str, Tensor] = {}  # by value of the graph
        self._check_names(whole)
        add_submodules(self, whole)
        with agreement.together("module()"):
            tensors, rests, words = fill(
                self, whole, self._places, source, agreement, device, meshes
            )
            agreed = words | constant_words(whole, source, agreement)
        agreement.compare(beginning(agreed))
        self._tensors, self._at_rest = tensors, rests
        self._loaded = {name: int(name in self._tensors) for name in words}  # checksums or 1
        self._is_loaded = False  # since the ranks compared them
        self._elsewhere = list_another(self, self._places, agreement, device, meshes)
        mark_parts_elsewhere(self, whole, self._tensors)
        self._watch_optimizers()
        self.register_load_state_dict_pre_hook(_take_parts)  # type: ignore[no-untyped-call]
        self.register_state_dict_pre_hook(lambda *_: check_saving(own_states(whole)))  # type: ignore[no-untyped-call]
        self.register_state_dict_post_hook(_add_extra_state)  # type: ignore[no-untyped-call]
        if not whole.training:
            self.register_load_state_dict_pre_hook(_refuse)  # type: ignore[no-untyped-call]
            self.register_state_dict_pre_hook(_refuse)  # type: ignore[no-untyped-call]
        self._note_contents()
        if whole.programs.copies is not None:  # each is called when it has a request
            self._agreement = agreement.within(whole.programs.copies.devices)
        own = frozenset(vars(self)) | frozenset(dir(type(self)))
        root = whole.submodules.get("", Submodule())
        vars(self)[CONSTANTS] = (root.constants | root.absent) - own

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
        shards = {name: local_part(tensor) for name, tensor in self._tensors.items()}
        shards |= {value: tensor.data for value, tensor in self._at_rest.items()}
        self._held = HeldState(self.rank, self._places, self._tensors, self._elsewhere, shards)
        self._written = versions(self._held.trained.values())  # as the ranks compared them

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute that is no constant of the graphs."""
        refuse_constant(self, name, value)
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        """A parameter, buffer or submodule; else an attribute or a method of the model's own."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            whole = vars(self).get("_whole")
            root = Submodule() if whole is None else whole.submodules.get("", Submodule())
            if name in root.values:
                return root.values[name]
            found = inspect.getattr_static(root.kind, name, None)
            if found is None or name.startswith("_"):
                raise
            return found.__get__(self, root.kind) if hasattr(found, "__get__") else found

    def __deepcopy__(self, memo: dict[int, Any]) -> RankModule:
        """A module with tensors of its own and the same graphs, as means of weights need it."""
        for name in _SHARED:
            shared = vars(self)[name]
            memo[id(shared)] = shared
        other = type(self).__new__(type(self))
        memo[id(self)] = other
        noted = ("_contents", "_copied", "_held", "_written")
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
        """Refuse to be pickled, as by `torch.save`: graphs and groups are this process's."""
        raise BackendError(
            "a rank's module cannot be pickled: save its state_dict(), or full_state_dict() for "
            "the module that was compiled"
        )

    def share_memory(self) -> Any:
        """Refuse it: DTensors lie in no memory that processes could share."""
        refuse_sharing()

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
        ranks = self._places.by_name[entry.names[0]].mesh.devices
        raise AttributeError(
            f"rank {self.rank} holds no part of {name}, "
            f"{named(ranks)} {'does' if len(ranks) == 1 else 'do'}: "
            "go through named_parameters(), which lists what this rank holds"
        )

    def _watch_optimizers(self) -> None:
        holds_all = self._places.all_hold_all  # alike on all ranks, so that all of them refuse
        count_steps(self, self._tensors, self._elsewhere, holds_all=holds_all)

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
        return full_state(self._whole, self._held, self._agreement, self._device)

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
        local = {name: local_part(grad) for name, grad in grads.items() if grad is not None}
        counted = []  # those of which no lower rank holds the same region
        for name, grad in local.items():
            parts = dict(self._places.by_name[name].parts())
            same = (other for other, region in parts.items() if region == parts[self.rank])
            counted += [grad] if self.rank == min(same) else []
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
        copies = self._whole.programs.copies
        if copies is not None and all(self.rank not in ranks for ranks in copies.devices):
            raise BackendError(
                f"rank {self.rank} has no part in the {len(copies.devices)} whole copies, and no "
                "requests to serve"
            )
        # that of a torch.compile(module); None in other calls
        backend: Any = get_eval_frame_callback() or None
        while hasattr(backend, "_torchdynamo_orig_backend"):
            backend = backend._torchdynamo_orig_backend
        if backend is not None and self._compiled is None:
            self.compile(backend=backend)
        if get_eval_frame_callback() is None and not torch.is_inference_mode_enabled():
            return self._call(args, kwargs)
        return self._call_apart(args, kwargs)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _call_apart(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call it outside of what is compiled, and of inference mode, where DTensors cannot be."""
        grads = torch.is_grad_enabled()
        with torch.inference_mode(False), torch.set_grad_enabled(grads):
            return self._call(args, kwargs)

    def _call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        STEPS.begin()
        if self._in_rows:
            args, kwargs = joined_rows(self._whole.signature, self._agreement, args, kwargs)
        training = self.training and self._whole.training
        grads = torch.is_grad_enabled()
        call = self._begin(training, args, kwargs)
        if call.passes.order.table.trains and grads:
            for parameter in self._elsewhere.values():
                parameter.requires_grad_(True)  # which an optimizer's step takes away
            held = (self._tensors | self._elsewhere).items()
            trained = {name: tensor for name, tensor in held if tensor.requires_grad}
            results = TrainingStep.apply(
                call, self._agreement, tuple(trained), self._anchor, *trained.values()
            )  # type: ignore[no-untyped-call]
        else:
            own = set(map(id, call.shards.values()))
            results = call.forward()[0]
            results = tuple(x.detach() if id(x) in own else x for x in results)
            leaves = pytree.tree_leaves((args, kwargs)) if grads else []
            given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            given += self._tensors.values() if grads and self._whole.training else ()
            if any(tensor.requires_grad for tensor in given):
                shown = differentiable(results, call.passes.whole.signature, self._whole.signature)
                said = _NO_TRAINING_MODE if self._whole.training else _FOR_INFERENCE
                results = Evaluated.apply(self._agreement, said, shown, self._anchor)  # type: ignore[no-untyped-call]
        return call.passes.structured(results)

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

    def _begin(self, training: bool, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> RankCall:
        """Find a call's graphs and inputs; a rank with nothing to ask computes as it waits."""
        word = self._word if training or not self._whole.training else "evaluation"
        problem, key, base = "", "", self._passes[""]
        signature = self._whole.signature
        args, kwargs = signature.bound(args, kwargs)
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
        sums: Sequence[Sums] = ()
        if not problem:
            trained = self._held.trained
            counts = map(sub, versions(trained.values()), self._written)  # since the last call
            writes = of_writes(dict(zip(trained, counts, strict=True)), self._places.trained)
            sums = self._input_sums(word, args, kwargs), writes
        known = self._passes.get(self._variant_name(word, key))
        meeting = self._meeting(known, doing, problem, sums)
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
            drawn = (self._seed << 32) + self.steps
            seed = {signature.seed: torch.tensor(drawn)} if signature.seed else {}
            draws = 0 if word == "evaluation" else passes.draws
            values = passes.start(inputs, seed, local=self._local_inputs and passes is base)
        except Exception as error:
            self._agree(meeting, draws, error)  # where the other ranks wait for this one
            raise
        agreed = partial(self._agree, meeting, draws)
        step, shards = self.steps + draws - 1, self._held.shards_now()
        return RankCall(passes, values, self._held, shards, agreed, step)

    def _meeting(
        self, known: RankPasses | None, doing: str, problem: str, sums: Sequence[Sums]
    ) -> Meeting:
        """Meet the other ranks before a call of passes that are `known`: now, or on the way."""
        marks = known is not None and known.carriers.get(True) is Carrier.MARK
        asks = self._is_loaded
        meeting = self._agreement.begin(doing, problem, sums, asks=asks, marks=marks)
        if problem or asks or known is None:
            self._agree(meeting)
        elif known.carriers.get(False) is not Carrier.ROW:
            meeting.post()
        return meeting

    def _agree(
        self, meeting: Meeting, draws: int = 0, given: Tensor | Exception | None = None
    ) -> Tensor | None:
        """Wait until all ranks agree; a step of so many draws begins only if they do."""
        asks, total = meeting.meet(given)
        if asks:
            self._agreement.compare(loading(self._loaded))
            self._is_loaded = False
            self._written = versions(self._held.trained.values())
        self.steps += draws
        return total

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
        return of_inputs(known, self.rank, self._input_keys)

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
            with self._agreement.together(name), no_collection():
                passes = self._passes_of(self._made(name, training, args, kwargs))
            if self._compiled is not None:
                passes.compile(*self._compiled[0], **self._compiled[1])
            frees = len(self._passes) == self._passes.most
            self._passes[name] = passes
            if frees:
                FakeTensorMode.cache_clear()  # PyTorch's own, which has the sizes of all traces
                gc.collect()  # graphs refer to themselves
        return self._passes[name]

    def _made(
        self, name: str, training: bool, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Whole:
        try:
            whole = self._variants(
                training, args, kwargs, partial(self._agreement.first, doing=name)
            )
        except (CommunicationError, AgreedError):
            raise
        except PartitionerError as error:
            raise BackendError(f"{name}: {error}") from error
        if whole.programs.copies is not None:  # groups are made by all ranks together
            check_groups(whole.programs, self._whole.programs)
        return whole

    def _passes_of(self, whole: Whole) -> RankPasses:
        places, roll = self._places.by_name, self._agreement.roll
        return RankPasses(whole, self.rank, self._device, places, roll)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the rank's graphs in place with `torch.compile`, with its arguments."""
        self._compiled = (args, kwargs)
        for passes in self._passes.values():
            passes.compile(*args, **kwargs)


#: Sizes and types of calls whose words are kept.
_MOST_WORDS = 1024
#: Attributes that copies of a module share.
_SHARED = ("_agreement", "_described", "_passes", "_places", "_variants", "_whole")
#: Why results have no backward pass.
_NO_TRAINING_MODE = (
    "backward() of a call in evaluation mode: a step has gradients after module.train() "
    "(what shall stay in evaluation mode, as a batch norm, is put into it before compile)"
)
_FOR_INFERENCE = "backward() of a program for inference: compile with training=True"


def _refuse(*_: Any) -> None:
    raise BackendError(
        "a program for inference has its weights as constants in its graphs, no state_dict(): ask "
        "the module that was compiled, or compile with training=True"
    )


def _add_extra_state(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Add the extra state of the model itself; its submodules have theirs."""
    assert isinstance(module, RankModule)
    own = own_states(module._whole).get("", OwnState())
    if own.extra:
        state[prefix + KEY] = own.extra[0]


def _take_parts(
    module: nn.Module,
    state: dict[str, Any],
    prefix: str,
    local: Mapping[str, Any],
    *lists: Any,
) -> None:
    """Take this rank's shards of a state that is loaded, and note the checksums of its contents."""
    assert isinstance(module, RankModule)
    note_loaded(module)
    if local.get("assign_to_params_buffers"):
        raise BackendError("load_state_dict(assign=True): load it without assign, into the shards")
    before_loading(own_states(module._whole), state, prefix, *lists)
    for name, whole in take_parts(module._held, state, prefix).items():
        module._loaded[name] = module._agreement.checksum(whole)
        module._is_loaded = True
