"""Calls of a module: its arguments as a graph's inputs, a graph's outputs as its results."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from partitioner.backends.errors import BackendError
from partitioner.backends.tensors import dtype_word, torch_dtype
from partitioner.ir.types import TensorType


@dataclass(frozen=True)
class Signature:
    """Arguments and results of a module."""

    in_spec: pytree.TreeSpec  #: Structure of (args, kwargs).
    out_spec: pytree.TreeSpec  #: Structure of the returned value.
    inputs: tuple[str, ...]  #: Graph input of each flat argument; "" for those that are no tensors.
    example: tuple[Any, ...]  #: The flat arguments that the module was traced with.
    #: Type of each graph input.
    types: Mapping[str, TensorType] = field(default_factory=dict)
    results: tuple[str, ...] = ()  #: Graph output of each flat result; "" if it is no tensor.
    others: tuple[Any, ...] = ()  #: Each flat result that is no tensor; None for tensors.
    seed: str = ""  #: Graph input that seeds random draws; "" if there are none.
    tangent: str = ""  #: Graph input for the gradient of the first result; "" for inference.
    #: Element type of the `torch.autocast` around the trace; "" if there was none.
    autocast: str = ""
    #: Whether each flat result depends on a trained parameter in the module; a program
    #: differentiates the first alone. Empty for inference.
    differentiable: tuple[bool, ...] = ()
    #: Names of the arguments that the module takes by position, in its order, as far as known.
    parameters: tuple[str, ...] = ()
    #: Values of the arguments, by name, that the module takes where a call leaves them out.
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def bound(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """A call in the form of the trace; one that the module would not take stays as it is.

        What it leaves out has its default where the trace has no tensor, and what the trace left
        out may be given as its default.
        """
        count, traced = self._positions, dict.fromkeys(self.in_spec.child(1).context)
        if len(args) == count and kwargs.keys() == traced.keys():
            return args, kwargs
        first, given = self.parameters[:count], dict(zip(self.parameters, args, strict=False))
        taken = len(given) == len(args) and len(first) == count and not given.keys() & kwargs.keys()
        given.update(kwargs)
        traced.update(dict.fromkeys(first))
        for name, default in self.defaults.items():
            if name in self._fixed:
                given.setdefault(name, default)
            elif name not in traced and name in given and _is_same(given[name], default):
                del given[name]
        if not taken or not given.keys() >= set(first):
            return args, kwargs
        return tuple(given.pop(name) for name in first), given

    def flatten(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Graph inputs of a call.

        Raises:
            BackendError: The arguments have another structure than in the trace, one that is no
                tensor has another value, or there is another `torch.autocast` around the call.
        """
        for device in ("cpu", "cuda"):
            if not torch.is_autocast_enabled(device):
                continue
            if (dtype := dtype_word(torch.get_autocast_dtype(device))) != self.autocast:
                raise BackendError(
                    f"called under torch.autocast of {dtype}; the module was compiled "
                    f"{f'under {self.autocast}' if self.autocast else 'without it'}: "
                    "compile it as it is called"
                )
        tensors = self.plain(args, kwargs)
        if tensors is not None:
            return {name: x for name, x in zip(self.inputs, tensors, strict=True) if name}
        args, kwargs = self.bound(args, kwargs)
        flat, spec = pytree.tree_flatten((tuple(args), self._ordered(kwargs)))
        if spec != self.in_spec:
            raise BackendError(
                f"arguments are {_structure(spec)}; the module was traced with "
                f"{_structure(self.in_spec)}"
            )
        inputs = {}
        for name, value, example in zip(self.inputs, flat, self.example, strict=True):
            if name:
                inputs[name] = value
            elif not isinstance(example, Tensor) and value != example:
                raise BackendError(f"an argument is {value!r}; it was traced as {example!r}")
        return inputs

    def plain(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Tensor, ...] | None:
        """The arguments in the trace's order if all are tensors; None if it takes more to tell."""
        if self._keywords is None or len(args) != len(self.inputs) - len(self._keywords):
            return None
        if kwargs.keys() != self._keywords.keys():
            return None
        tensors = (*args, *map(kwargs.__getitem__, self._keywords))
        for value in tensors:  # every call of a module comes here
            if not isinstance(value, Tensor):
                return None
        return tensors

    @cached_property
    def _positions(self) -> int:
        """Number of arguments of the trace by position."""
        return len(self.in_spec.child(0).children())

    @cached_property
    def _fixed(self) -> frozenset[str]:
        """Names of the arguments of the trace that hold no tensors, as far as known."""
        args, kwargs = self.in_spec.child(0), self.in_spec.child(1)
        names = (*self.parameters[: self._positions], *kwargs.context)
        if len(names) < self._positions + len(kwargs.context):
            return frozenset()
        ends = itertools.accumulate(
            one.num_leaves for one in (*args.children(), *kwargs.children())
        )
        slots = zip(names, itertools.pairwise((0, *ends)), strict=True)
        return frozenset(name for name, (start, end) in slots if not any(self.inputs[start:end]))

    @cached_property
    def _keywords(self) -> dict[str, None] | None:
        """Keywords of the trace, in order; None if not all of its arguments were tensors."""
        args, kwargs = self.in_spec.child(0), self.in_spec.child(1)
        leaves = (*args.children(), *kwargs.children())
        is_flat = all(one.is_leaf() for one in leaves)
        is_flat = is_flat and all(isinstance(x, Tensor) for x in self.example)
        return dict.fromkeys(kwargs.context) if is_flat else None

    @cached_property
    def traced(self) -> str:
        """The call of the trace in words; see `described`."""
        slots = zip(self.inputs, self.example, strict=True)
        known = {name: self.types.get(name, value) for name, value in slots if name}
        return self.described(*self.call(known))

    def described(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        """A call in words, ``float32[8,16], labels int64[8]``; equal if one trace fits both."""
        flat, _ = pytree.tree_flatten_with_path((tuple(args), self._ordered(kwargs)))
        return ", ".join(_word(path, value) for path, value in flat) or "nothing"

    def tensors(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
        """The tensors of a call by name: graph inputs, or places if it is another call."""
        flat, spec = pytree.tree_flatten_with_path((tuple(args), self._ordered(kwargs)))
        values = [value for _, value in flat]
        names = [pytree.keystr(path) for path, _ in flat]
        if spec == self.in_spec:
            names = [known or name for known, name in zip(self.inputs, names, strict=True)]
        return {n: x for n, x in zip(names, values, strict=True) if isinstance(x, Tensor)}

    def call(self, inputs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """(args, kwargs) from graph inputs by name."""
        slots = zip(self.inputs, self.example, strict=True)
        flat = [inputs[name] if name else value for name, value in slots]
        args, kwargs = pytree.tree_unflatten(flat, self.in_spec)
        return args, kwargs

    def _ordered(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        names = self.in_spec.child(1).context
        ordered = {name: kwargs[name] for name in names if name in kwargs}
        ordered.update({name: value for name, value in kwargs.items() if name not in ordered})
        return ordered

    def check(self, inputs: Mapping[str, Any], types: Mapping[str, TensorType]) -> None:
        """Refuse inputs of other types; those without a type, or without an input, are left out."""
        for name, wanted in types.items():
            if name not in inputs:
                continue
            tensor = inputs[name]
            if not isinstance(tensor, Tensor):
                raise BackendError(f"input {name!r} is {tensor!r}, not a tensor of {wanted}")
            if tuple(tensor.shape) != wanted.shape or tensor.dtype != torch_dtype(wanted.dtype):
                actual = TensorType.of(dtype_word(tensor.dtype), tensor.shape)
                raise BackendError(f"input {name!r} is {actual}; the program is for {wanted}")

    def check_floats(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Refuse floating inputs of other types than in the trace, and so than the weights."""
        for name, tensor in self.tensors(args, kwargs).items():
            known = self.types.get(name)
            wanted = tensor.dtype if known is None else torch_dtype(known.dtype)
            if tensor.dtype != wanted and (tensor.is_floating_point() or wanted.is_floating_point):
                raise BackendError(
                    f"input {name!r} is {dtype_word(tensor.dtype)}; the module was compiled with "
                    f"{dtype_word(wanted)}: cast it, or compile the module for it"
                )

    def feed(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], seed: int
    ) -> dict[str, Tensor]:
        """All graph inputs of a call: its arguments, the seed, and a gradient of one for the loss.

        Raises:
            BackendError: The arguments differ from those of the trace, see `flatten` and `check`.
        """
        inputs = self.flatten(args, kwargs)
        self.check(inputs, self.types)
        if self.seed:
            inputs[self.seed] = torch.tensor(seed)
        if self.tangent:
            loss = self.types[self.tangent]
            inputs[self.tangent] = torch.ones(loss.shape, dtype=torch_dtype(loss.dtype))
        return inputs

    def unflatten(self, values: Mapping[str, Tensor]) -> Any:
        """The module's returned value from graph outputs by name."""
        results = zip(self.results, self.others, strict=True)
        flat = [values[name] if name else other for name, other in results]
        return pytree.tree_unflatten(flat, self.out_spec)


def _is_same(value: Any, default: Any) -> bool:
    """Test whether a value is a default, without comparing tensors."""
    if value is default:
        return True
    return type(value) is type(default) and not isinstance(value, Tensor) and value == default


def _structure(spec: pytree.TreeSpec) -> str:
    """``3 positional, keywords mask, labels``."""
    args, kwargs = spec.child(0), spec.child(1)
    words = ", ".join(kwargs.context) or "no keywords"
    return f"{args.num_leaves} positional values, {words} ({kwargs.num_leaves})"


def _word(path: pytree.KeyPath, value: Any) -> str:
    """``labels int64[8]``; a positional argument has no name."""
    keyword, inside = path[0].idx == 1, path[2:]  # type: ignore[attr-defined]
    name = (path[1].key if keyword else "") + pytree.keystr(inside)  # type: ignore[attr-defined]
    if isinstance(value, Tensor):
        dtype, shape = value.dtype, tuple(value.shape)
    elif isinstance(value, TensorType):
        dtype, shape = torch_dtype(value.dtype), value.shape
    else:
        text = re.sub(r"\n\s*", " ", repr(value))  # that of an array has several lines
        return f"{name} {text}".strip()
    sizes = ",".join(map(str, shape))
    return f"{name} {dtype_word(dtype)}[{sizes}]".strip()
