"""How a module is called: its arguments as a graph's inputs, a graph's outputs as its results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from partitioner.backends.errors import BackendError
from partitioner.backends.tensors import torch_dtype
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
        results: Graph output of each flat result; "" for None.
        seed: Graph input that steers random draws; "" if there are none.
        tangent: Graph input for the gradient of the first result; "" for inference.
    """

    in_spec: pytree.TreeSpec
    out_spec: pytree.TreeSpec
    inputs: tuple[str, ...]
    example: tuple[Any, ...]
    types: Mapping[str, TensorType]
    results: tuple[str, ...]
    seed: str
    tangent: str

    def flatten(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Graph inputs of a call.

        Raises:
            BackendError: The arguments are not structured like those that the module was traced
                with, or one that is no tensor has another value.
        """
        names = self.in_spec.child(1).context
        ordered = {name: kwargs[name] for name in names if name in kwargs}
        ordered.update({name: value for name, value in kwargs.items() if name not in ordered})
        flat, spec = pytree.tree_flatten((tuple(args), ordered))
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
                got = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
                raise BackendError(f"input {name!r} is {got}; the program is for {kind}")

    def unflatten(self, values: Mapping[str, torch.Tensor]) -> Any:
        """What the module returns, from graph outputs by name."""
        flat = [values[name] if name else None for name in self.results]
        return pytree.tree_unflatten(flat, self.out_spec)


def _shape_of(spec: pytree.TreeSpec) -> str:
    """``3 positional, keywords mask, labels``."""
    args, kwargs = spec.child(0), spec.child(1)
    words = ", ".join(kwargs.context) or "no keywords"
    return f"{args.num_leaves} positional values, {words} ({kwargs.num_leaves})"
