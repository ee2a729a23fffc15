"""Refuses changes of a rank's module that its graphs would not notice."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from partitioner.backends.errors import BackendError
from partitioner.backends.tensors import dtype_word
from partitioner.backends.torch.dtensors.local_steps import (
    Arguments,
    on_steps,
    over_parts,
    take_back,
)
from partitioner.backends.torch.state.whole import Stored

#: Optimizers with operators that are not computed of parts of a tensor.
_WHOLE_ONLY = (
    *(torch.optim.Rprop, torch.optim.Adafactor, torch.optim.SparseAdam, torch.optim.LBFGS),
    torch.optim.Muon,
)


@dataclass(frozen=True)
class Contents:
    """The objects that a rank's module consists of, by which changes of it are noticed.

    A check at each call compares objects by identity. Only where one is another does it look at
    names, to say what was changed.
    """

    stored: Sequence[Stored]  #: The parameters and buffers of the whole model.
    tensors: Mapping[str, Tensor]  #: Those of the rank, by first name.
    #: The storage of each tensor that lies in the memory of what the plan keeps between steps. An
    #: assignment to its `data` would move it out of there: it is refused.
    at_rest: Mapping[str, torch.UntypedStorage]
    parts: Sequence[nn.Module]  #: The submodules.
    #: The submodules, parameters and buffers of the module and of each part, in order.
    objects: Sequence[object]
    names: Sequence[object]  #: Their names, behind the number of each part's.
    facts: Sequence[tuple[torch.Size, torch.dtype]]  #: Sizes and element type of each tensor.
    frozen: Sequence[Tensor]  #: Tensors that must not require a gradient.

    @classmethod
    def of(
        cls,
        module: nn.Module,
        stored: Sequence[Stored],
        tensors: Mapping[str, Tensor],
        rests: Iterable[Tensor],
    ) -> Contents:
        """The contents of a module as it is; the plan keeps `rests` between steps besides."""
        parts = tuple(module.modules())[1:]
        held = [entry for entry in stored if entry.names[0] in tensors]
        kept = {rest.untyped_storage()._cdata for rest in rests}
        storages = {name: _storage_of(tensor) for name, tensor in tensors.items()}
        at_rest = {name: one for name, one in storages.items() if one._cdata in kept}
        types = {entry.names[0]: entry.dtype for entry in held}
        return cls(
            stored,
            tensors,
            at_rest,
            parts,
            *_contents((module, *parts)),
            [(tensor.shape, types[name]) for name, tensor in tensors.items()],
            [tensors[e.names[0]] for e in held if e.value and e.frozen],
        )

    def check(self, module: nn.Module) -> None:
        """Refuse the module if it was changed.

        Raises:
            BackendError: All modules have a hook; a submodule is in another mode than the module,
                or has hooks; a parameter or buffer was replaced by another tensor, its `data` was
                where the plan keeps that in memory of its own, or it has another element type or
                other sizes; a parameter requires a gradient and was frozen in the trace. (One that
                required a gradient in the trace, and that the loss does not use, gets none.)
        """
        for name in global_hooks():
            raise BackendError(f"{name} is a hook of all modules, not of these: {_HOOKS_ADVICE}")
        if self._is_as_it_was(module):
            return
        parts = dict(module.named_modules())
        _check_parts(module, parts)
        for entry in self.stored:
            tensor = self.tensors.get(entry.names[0])
            if tensor is not None:
                self._check_tensor(module, entry, tensor, parts)

    def _is_as_it_was(self, module: nn.Module) -> bool:
        mode, parts = module.training, self.parts  # every call of a module comes here
        if any(itertools.chain.from_iterable(map(_HOOKS, parts))):
            return False
        modes = [part.training for part in parts]
        if modes.count(mode) < len(modes) and not all(_is_in(mode, part) for part in parts):
            return False
        objects, names = _contents((module, *parts))
        if names != self.names or not all(map(is_, objects, self.objects)):
            return False
        if self.facts != [(x.shape, x.dtype) for x in self.tensors.values()]:
            return False
        stays = (_storage_of(self.tensors[n])._cdata == x._cdata for n, x in self.at_rest.items())
        return all(stays) and not any(x.requires_grad for x in self.frozen)

    def _check_tensor(
        self,
        module: nn.Module,
        entry: Stored,
        tensor: Tensor,
        parts: Mapping[str, nn.Module],
    ) -> None:
        if tensor.dtype != entry.dtype:
            raise BackendError(
                f"{entry.names[0]} is {dtype_word(tensor.dtype)} now and was "
                f"{dtype_word(entry.dtype)}: for another element type, compile the module in it"
            )
        if tuple(tensor.shape) != tuple(entry.shape):
            raise BackendError(
                f"{entry.names[0]} has the sizes {list(tensor.shape)} now and had "
                f"{list(entry.shape)}: for other sizes, compile the module with them"
            )
        rest = self.at_rest.get(entry.names[0])
        if rest is not None and _storage_of(tensor)._cdata != rest._cdata:
            raise BackendError(
                f"{entry.names[0]}.data was set, and the plan keeps it in memory of its own "
                "between steps: write in place under torch.no_grad(), as by copy_()"
            )
        for name in entry.names:
            if _tensor_of(module, parts, name) is not tensor:
                raise BackendError(
                    f"{name} was replaced by another tensor: write to it instead, with "
                    "load_state_dict() or in place under torch.no_grad(); for another element "
                    "type, compile the module in it"
                )
        if tensor.requires_grad and entry.value and entry.frozen:
            raise BackendError(
                f"{entry.names[0]} requires a gradient now, but was frozen when the module was "
                "compiled: compile it again"
            )


def _storage_of(tensor: Tensor) -> torch.UntypedStorage:
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage()


#: What a submodule consists of, and its hooks that would not be called.
_CONTENTS = attrgetter("_modules", "_parameters", "_buffers")
_HOOKS = attrgetter(
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
)


def _contents(parts: Iterable[nn.Module]) -> tuple[list[object], list[object]]:
    """The submodules, the parameters and the buffers of each part; their number and names."""
    tables: list[Mapping[str, object]] = [*itertools.chain.from_iterable(map(_CONTENTS, parts))]
    objects = itertools.chain.from_iterable([table.values() for table in tables])
    return [*objects], [*map(len, tables), *itertools.chain.from_iterable(tables)]


#: Where a submodule keeps whether the trace has it in training mode.
TRACED_MODE = "_mode_in_the_trace"


def _is_in(mode: bool, part: nn.Module) -> bool:
    """Test whether a submodule is as it is in the graphs of a mode of the module."""
    return part.training is mode or (mode and not vars(part).get(TRACED_MODE, True))


#: What ranks' modules do with hooks.
_HOOKS_ADVICE = (
    "submodules do not run by themselves; hooks of the whole module and of parameters are called"
)


def _check_parts(module: nn.Module, parts: Mapping[str, nn.Module]) -> None:
    for name, submodule in parts.items():
        if not _is_in(module.training, submodule):
            mode = "training" if submodule.training else "evaluation"
            raise BackendError(
                f"{name} is in {mode} mode, the module is not, and its mode was traced: call "
                f"{name}.{'train' if submodule.training else 'eval'}() before compile, and only "
                "train() and eval() of the whole module after it"
            )
        if name and any(_HOOKS(submodule)):
            raise BackendError(
                f"{name} has a hook, which would not be called: set it, as torch.nn.utils.prune "
                f"does, before compile, which traces what it computes; {_HOOKS_ADVICE}"
            )


def _tensor_of(module: nn.Module, parts: Mapping[str, nn.Module], name: str) -> Tensor | None:
    """The tensor of a name now, if any; `parts` has shared submodules by their first path."""
    path, _, leaf = name.rpartition(".")
    owner = parts.get(path)
    try:
        owner = module.get_submodule(path) if owner is None else owner
    except AttributeError:
        return None
    return owner._parameters.get(leaf, owner._buffers.get(leaf))


def count_steps(
    owner: object,
    tensors: Mapping[str, Tensor],
    elsewhere: Mapping[str, Tensor],
    *,
    holds_all: bool,
) -> None:
    """Count each optimizer's step as a write to the parameters that have gradients, with `owner`.

    PyTorch counts no writes of steps with `foreach=True` or `fused=True` to DTensors, nor those of
    steps over parts (see `local_steps`). Optimizers that fail on parts of tensors, and those that
    lack options, are refused by name when they step.

    Args:
        tensors: The rank's parameters and buffers.
        elsewhere: Parameters that it lists and does not hold; no step trains them.
        holds_all: Whether it has a shard of every parameter of the model.
    """
    ours = frozenset(map(id, tensors.values()))
    has_parts = any(isinstance(tensor, DTensor) for tensor in tensors.values())
    others = frozenset(map(id, elsewhere.values()))

    def stepped(optimizer: Optimizer, args: tuple[Any, ...], _: Mapping[str, Any]) -> None:
        take_back(optimizer, args)
        parameters = (x for group in optimizer.param_groups for x in group["params"])
        increment_version([x for x in parameters if id(x) in ours and x.grad is not None])

    def steps(
        optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Arguments | None:
        for group in optimizer.param_groups:
            for tensor in group["params"] if others else ():
                if id(tensor) in others and tensor.grad is not None:
                    tensor.requires_grad_(False)  # else PyTorch's checkpoints look for its state
                    tensor.grad = None
            if any(id(x) in ours for x in group["params"]):
                _check_options(optimizer, group)
                if isinstance(optimizer, torch.optim.LBFGS) and not holds_all:
                    raise BackendError(
                        "LBFGS measures along all parameters at once, and this rank holds those of "
                        "its own layers only: take an optimizer that works element by element"
                    )
        if not has_parts:
            return None
        if not isinstance(optimizer, _WHOLE_ONLY):
            return over_parts(optimizer, args, kwargs, ours)
        _check_are_whole(optimizer, ours)
        return None

    on_steps(owner, steps, stepped)


def _check_are_whole(optimizer: Optimizer, ours: Collection[int]) -> None:
    """Refuse an optimizer that fails on parts of tensors if any of ours is cut."""
    parameters = (x for group in optimizer.param_groups for x in group["params"])
    cut = (x for x in parameters if id(x) in ours and isinstance(x, DTensor))
    if any(not all(place.is_replicate() for place in x.placements) for x in cut):
        raise BackendError(
            f"{type(optimizer).__name__} does not work on parts of tensors: take "
            "another optimizer, or a plan that keeps parameters whole, as parallel='dp'"
        )


def _check_options(optimizer: Optimizer, group: Mapping[str, Any]) -> None:
    """Refuse a group of parameters without the optimizer's options.

    PyTorch's checkpoints hold one rank's groups for all ranks, by the names of their parameters. A
    rank with other parameters finds none of its own there, and no options either.
    """
    if not optimizer.defaults.keys() <= group.keys():
        lacking = sorted(optimizer.defaults.keys() - group.keys())
        raise BackendError(
            f"{type(optimizer).__name__} has no {', '.join(map(repr, lacking))} for parameters of "
            "this rank: torch.distributed.checkpoint saved the options of another rank's "
            "parameters; get and set the optimizer's state with "
            "options=StateDictOptions(flatten_optimizer_state_dict=True)"
        )


def check_inputs(values: Iterable[Any]) -> None:
    """Refuse inputs that require a gradient in a training step."""
    for value in values:
        if isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled():
            raise BackendError(
                "an input requires a gradient: only parameters get one; detach() it, or make what "
                "computes it a part of the module"
            )


#: Where PyTorch keeps them.
_TABLES = (
    *("_global_forward_hooks", "_global_forward_pre_hooks"),
    *("_global_backward_hooks", "_global_backward_pre_hooks"),
)


def global_hooks() -> Iterator[str]:
    """The names of the hooks of all modules that are not PyTorch's own."""
    for table in _TABLES:
        for hook in vars(nn.modules.module)[table].values():
            if not str(getattr(hook, "__module__", "")).startswith("torch."):
                yield getattr(hook, "__qualname__", repr(hook))
