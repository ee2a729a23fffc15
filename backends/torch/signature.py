"""How a module is called: its arguments as a graph's inputs, a graph's outputs as its results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from partitioner.backends.errors import BackendError
from partitioner.backends.tensors import dtype_word, torch_dtype
from partitioner.ir.types import TensorType


@dataclass(frozen=True)
class Signature:
    """Arguments and results of a module.

    Attributes:
        in_spec: Structure of (args, kwargs).
        out_spec: Structure of what it returns.
        inputs: Graph input of each flat argument; "" for those that are no tensors.
        example: The flat arguments that the module was traced with.
        types: Type of each graph input.
        results: Graph output of each flat result; "" for one that is no tensor.
        others: Each flat result that is no tensor; None in the place of tensors.
        seed: Graph input that steers random draws; "" if there are none.
        tangent: Graph input for the gradient of the first result; "" for inference.
        autocast: Element type of the `torch.autocast` around the trace; "" if there was none.
    """

    in_spec: pytree.TreeSpec
    out_spec: pytree.TreeSpec
    inputs: tuple[str, ...]
    example: tuple[Any, ...]
    types: Mapping[str, TensorType]
    results: tuple[str, ...]
    others: tuple[Any, ...]
    seed: str
    tangent: str
    autocast: str = ""

    def flatten(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Graph inputs of a call.

        Raises:
            BackendError: The arguments are not structured like those that the module was traced
                with, one that is no tensor has another value, or there is another
                `torch.autocast` around the call than around the trace.
        """
        self._check_autocast()
        flat, spec = pytree.tree_flatten((tuple(args), self._ordered(kwargs)))
        if spec != self.in_spec:
            raise BackendError(
                f"arguments are {_shape_of(spec)}; the module was traced with "
                f"{_shape_of(self.in_spec)}"
            )
        found = {}
        for name, value, example in zip(self.inputs, flat, self.example, strict=True):
            if name:
                found[name] = value
            elif not isinstance(example, torch.Tensor) and value != example:
                raise BackendError(f"an argument is {value!r}; it was traced as {example!r}")
        return found

    def _check_autocast(self) -> None:
        for kind in ("cpu", "cuda"):
            dtype = dtype_word(torch.get_autocast_dtype(kind))
            if torch.is_autocast_enabled(kind) and dtype != self.autocast:
                raise BackendError(
                    f"called under torch.autocast of {dtype}; the module was compiled "
                    f"{f'under {self.autocast}' if self.autocast else 'without it'}: "
                    "compile it as it is called"
                )

    @property
    def traced(self) -> str:
        """The call that the module was traced with, in words; see `described`."""
        known = {name: self.types.get(name, value) for name, value in self._slots() if name}
        return self.described(*self.call(known))

    def described(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        """A call in words, ``float32[8,16], labels int64[8]``: alike if one trace fits both."""
        flat, _ = pytree.tree_flatten_with_path((tuple(args), self._ordered(kwargs)))
        return ", ".join(_word(path, value) for path, value in flat) or "nothing"

    def call(self, inputs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments of the module from graph inputs by name."""
        flat = [inputs[name] if name else value for name, value in self._slots()]
        args, kwargs = pytree.tree_unflatten(flat, self.in_spec)
        return args, kwargs

    def _slots(self) -> Iterator[tuple[str, Any]]:
        return zip(self.inputs, self.example, strict=True)

    def _ordered(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Keyword arguments in the order of the trace."""
        names = self.in_spec.child(1).context
        ordered = {name: kwargs[name] for name in names if name in kwargs}
        ordered.update({name: value for name, value in kwargs.items() if name not in ordered})
        return ordered

    def check(self, inputs: Mapping[str, Any], types: Mapping[str, TensorType]) -> None:
        """Refuse inputs that are not of these types.

        Raises:
            BackendError: One is no tensor, or of other sizes or another element type.
        """
        for name, kind in types.items():
            if name not in inputs:
                continue
            tensor = inputs[name]
            if not isinstance(tensor, torch.Tensor):
                raise BackendError(f"input {name!r} is {tensor!r}, not a tensor of {kind}")
            if tuple(tensor.shape) != kind.shape or tensor.dtype != torch_dtype(kind.dtype):
                got = f"{dtype_word(tensor.dtype)}{list(tensor.shape)}"
                raise BackendError(f"input {name!r} is {got}; the program is for {kind}")

    def feed(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], seed: int
    ) -> dict[str, torch.Tensor]:
        """All graph inputs of a call: its arguments, the seed, and a gradient of one for the loss.

        Raises:
            BackendError: The arguments are not like those that the module was traced with.
        """
        inputs = self.flatten(args, kwargs)
        self.check(inputs, self.types)
        if self.seed:
            inputs[self.seed] = torch.tensor(seed)
        if self.tangent:
            kind = self.types[self.tangent]
            inputs[self.tangent] = torch.ones(kind.shape, dtype=torch_dtype(kind.dtype))
        return inputs

    def unflatten(self, values: Mapping[str, torch.Tensor]) -> Any:
        """What the module returns, from graph outputs by name."""
        results = zip(self.results, self.others, strict=True)
        flat = [values[name] if name else other for name, other in results]
        return pytree.tree_unflatten(flat, self.out_spec)


def _shape_of(spec: pytree.TreeSpec) -> str:
    """``3 positional, keywords mask, labels``."""
    args, kwargs = spec.child(0), spec.child(1)
    words = ", ".join(kwargs.context) or "no keywords"
    return f"{args.num_leaves} positional values, {words} ({kwargs.num_leaves})"


def _word(path: pytree.KeyPath, value: Any) -> str:
    """``labels int64[8]``; a positional argument has no name."""
    keyword, inside = path[0].idx == 1, path[2:]  # type: ignore[attr-defined]
    name = (path[1].key if keyword else "") + pytree.keystr(inside)  # type: ignore[attr-defined]
    if isinstance(value, torch.Tensor):
        kind, shape = value.dtype, tuple(value.shape)
    elif isinstance(value, TensorType):
        kind, shape = torch_dtype(value.dtype), value.shape
    else:
        return f"{name} {value!r}".strip()
    sizes = ",".join(map(str, shape))
    return f"{name} {dtype_word(kind)}[{sizes}]".strip()
