"""A model as it is given, of ONNX or of PyTorch: what is wanted of it, and its graph.

PyTorch is loaded for modules only.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from typing_extensions import TypeIs

from partitioner.frontends.onnx.load import Traced, load_onnx
from partitioner.frontends.torch.source import Example, ModuleSource
from partitioner.ir.errors import OptionError
from partitioner.ir.graph import Graph
from partitioner.search.explicit import Request

if TYPE_CHECKING:
    import onnx
    from torch import nn

    from partitioner.frontends.torch.graph import ModuleGraph
    from partitioner.frontends.torch.trace import ModuleOptions


@dataclass(frozen=True)
class GivenOnnx:
    """An ONNX model.

    Attributes:
        model: Its path, or the model itself.
        dims: Sizes of symbolic dims by symbol.
        shapes: Shapes of inputs by name.
    """

    model: str | Path | onnx.ModelProto
    dims: Mapping[str, int]
    shapes: Mapping[str, tuple[int, ...]]

    @property
    def path(self) -> Path | None:
        """The model's file, if it came from one."""
        return Path(self.model) if isinstance(self.model, str | Path) else None

    @property
    def name(self) -> str:
        """For people."""
        return self.graph.name if self.path is None else self.path.stem

    @cached_property
    def traced(self) -> Traced:
        """The model, read.

        Raises:
            FrontendError: It cannot be read.
        """
        return load_onnx(self.model, self.dims, self.shapes)

    @property
    def graph(self) -> Graph:
        """Its graph."""
        return self.traced.graph

    def applied(self, request: Request, _devices: int) -> Request:
        """The request as it is."""
        return request

    def bound(self, request: Request) -> Request:
        """The request as it is."""
        return request


@dataclass(frozen=True)
class GivenModule:
    """A PyTorch module.

    Attributes:
        module: The module.
        example: Arguments to trace it with.
        source: Where it came from.
        options: What is wanted of it.
    """

    module: nn.Module
    example: Example
    source: ModuleSource
    options: ModuleOptions

    @property
    def path(self) -> Path | None:
        """The exported program's file, if the module came from one."""
        return self.source.file

    @property
    def name(self) -> str:
        """For people."""
        return self.source.name or type(self.module).__name__

    @cached_property
    def traced(self) -> ModuleGraph:
        """The module, traced.

        Raises:
            FrontendError: It cannot be traced.
        """
        from partitioner.frontends.torch.trace import trace_module

        return trace_module(self.module, self.example, self.options)

    @property
    def graph(self) -> Graph:
        """Its graph."""
        return self.traced.graph

    def applied(self, request: Request, devices: int) -> Request:
        """The request with the search space that the module's options have; traces nothing.

        Raises:
            SearchError: The kind of parallelism and the mesh do not fit each other.
        """
        return self.options.applied(request, devices)

    def bound(self, request: Request) -> Request:
        """The request, applied before, with the constraints of the kind of parallelism."""
        return self.options.bound(request, self.traced)


Given = GivenOnnx | GivenModule


def given_model(
    model: object,
    example_inputs: Any = None,
    *,
    training: bool = False,
    optimizer: str = "adamw",
    parallel: str | None = None,
    recompute: bool | Literal["auto"] = "auto",
    dims: Mapping[str, int] | None = None,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> Given:
    """A model with what is wanted of it, all arguments as of `partitioner.compile`.

    A factory is called, an exported program is read; an ONNX model is not read yet.

    Raises:
        PartitionerError: It cannot be had, or an argument is for models of the other kind.
    """
    held = _module_of(model, example_inputs)
    if held is not None:
        from partitioner.frontends.torch.trace import ModuleOptions

        if dims or shapes:
            raise OptionError("dims and shapes are for ONNX models: give example inputs instead")
        return GivenModule(*held, ModuleOptions(training, optimizer, parallel, recompute))
    assert not is_module(model)
    asked = {
        "training": training,
        "parallel": parallel,
        "recompute": recompute is True,
        "example_inputs": example_inputs is not None,
    }
    for word in (word for word, there in asked.items() if there):
        raise OptionError(f"{word} is for PyTorch modules; the model is {_what(model)}")
    read: Any = model
    return GivenOnnx(read, dims or {}, shapes or {})


def _module_of(
    model: object, example_inputs: Any
) -> tuple[nn.Module, Example, ModuleSource] | None:
    """The module, its example inputs and its source; None for an ONNX model."""
    if is_module(model):
        return model, Example.of(example_inputs), ModuleSource()
    source = ModuleSource.of(model)
    if source is None:
        return None
    if example_inputs is not None:
        raise OptionError(f"example_inputs: {_what(model)} has its own")
    return *source.open(), source


def is_module(model: object) -> TypeIs[nn.Module]:
    """Whether a model is a PyTorch module; loads no PyTorch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(model, torch.nn.Module)


def _what(model: object) -> str:
    return repr(str(model)) if isinstance(model, str | Path) else f"a {type(model).__name__}"
