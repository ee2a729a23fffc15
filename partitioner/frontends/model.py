"""A model as a user gives it, ONNX or PyTorch, before it is read or traced.

PyTorch is loaded for modules only.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import TypeIs

from partitioner.frontends.onnx.load import Traced, load_onnx
from partitioner.frontends.torch.options import ModuleOptions
from partitioner.frontends.torch.source import Example, ModuleSource
from partitioner.ir.errors import OptionError
from partitioner.ir.graph import Graph

if TYPE_CHECKING:
    import onnx
    from torch import nn

    from partitioner.frontends.torch.trace import TracedModule


@dataclass(frozen=True)
class OnnxInput:
    """An ONNX model.

    Attributes:
        model: Its path, or the model itself.
        dims: Sizes of symbolic dims by symbol.
        shapes: Shapes of inputs by name.
    """

    model: str | Path | onnx.ModelProto
    dims: Mapping[str, int] = field(default_factory=dict)
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    training = False

    @property
    def path(self) -> Path | None:
        """The model's file, if it came from one."""
        return Path(self.model) if isinstance(self.model, str | Path) else None

    @property
    def name(self) -> str:
        """The file's name without its suffix, or the graph's."""
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


@dataclass(frozen=True)
class ModuleInput:
    """A PyTorch module.

    Attributes:
        module: The module.
        example: Arguments to trace it with.
        source: Where it came from.
        options: How it is traced.
    """

    module: nn.Module
    example: Example
    source: ModuleSource
    options: ModuleOptions

    @property
    def training(self) -> bool:
        """Whether the backward pass is traced too."""
        return self.options.training

    @property
    def path(self) -> Path | None:
        """The exported program's file, if the module came from one."""
        return self.source.file

    @property
    def name(self) -> str:
        """The name of the file or factory, or the module's class."""
        return self.source.name or type(self.module).__name__

    @cached_property
    def traced(self) -> TracedModule:
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


def open_model(
    model: object,
    example_inputs: Any = None,
    *,
    training: bool = False,
    optimizer: str = "adamw",
    dims: Mapping[str, int] | None = None,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    of_modules: Sequence[str] = (),
) -> OnnxInput | ModuleInput:
    """A model with the options of its kind, all arguments as of `partitioner.compile`.

    A factory is called, an exported program is read; an ONNX model is not read yet.

    Args:
        model: The model.
        example_inputs: For a module itself.
        training: For a module.
        optimizer: For training.
        dims: For an ONNX model.
        shapes: For an ONNX model.
        of_modules: Names of options that were given and that only modules have.

    Raises:
        PartitionerError: It cannot be had, or an argument is for models of the other kind.
    """
    opened = _open_module(model, example_inputs)
    if opened is not None:
        if dims or shapes:
            raise OptionError("dims and shapes are for ONNX models: give example inputs instead")
        return ModuleInput(*opened, ModuleOptions(training, optimizer))
    assert not is_module(model)
    words = [*(("training",) if training else ()), *of_modules]
    words += ["example_inputs"] if example_inputs is not None else []
    for word in words:
        raise OptionError(f"{word} is for PyTorch modules; the model is {_described(model)}")
    onnx_model: Any = model
    return OnnxInput(onnx_model, dims or {}, shapes or {})


def _open_module(
    model: object, example_inputs: Any
) -> tuple[nn.Module, Example, ModuleSource] | None:
    """The module, its example inputs and its source; None for an ONNX model."""
    if is_module(model):
        return model, Example.of(example_inputs), ModuleSource()
    source = ModuleSource.of(model)
    if source is None:
        return None
    if example_inputs is not None:
        raise OptionError(f"example_inputs: {_described(model)} has its own")
    return *source.open(), source


def is_module(model: object) -> TypeIs[nn.Module]:
    """Whether a model is a PyTorch module; loads no PyTorch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(model, torch.nn.Module)


def _described(model: object) -> str:
    return repr(str(model)) if isinstance(model, str | Path) else f"a {type(model).__name__}"
