"""A model as a user gives it, ONNX or PyTorch, before it is read or traced.

PyTorch is loaded for modules only.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from partitioner.cost_model.executors import ONNX_RUNTIME, PYTORCH
from partitioner.frontends.errors import FrontendError
from partitioner.frontends.model_names import unusable
from partitioner.frontends.onnx.load import Traced, load_onnx
from partitioner.frontends.torch.options import AtRest, ModuleOptions
from partitioner.frontends.torch.source import Example, ModuleSource
from partitioner.ir.checks import is_a, is_whole
from partitioner.ir.errors import OptionError, typed
from partitioner.ir.graph import Graph
from partitioner.ir.nodes.feeds import Feed
from partitioner.ir.nodes.loads import Loads
from partitioner.rewrites.micro_batch_graph import even_parts

if TYPE_CHECKING:
    import onnx
    from torch import nn

    from partitioner.frontends.torch.trace import TracedModule


@dataclass(frozen=True)
class OnnxInput:
    """An ONNX model, read when its graph is first needed."""

    model: str | Path | onnx.ModelProto  #: Its path, or the model itself.
    dims: Mapping[str, int] = field(default_factory=dict)  #: Sizes of symbolic dims by symbol.
    #: Shapes of inputs by name.
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    feed: Feed = field(default_factory=dict)  #: Results that are inputs of the next call.
    plan_only: bool = False  #: Whether files of weights may be missing.
    training = False
    executor = ONNX_RUNTIME

    @property
    def path(self) -> Path | None:
        """The model's file; None for a model in memory."""
        return Path(self.model) if isinstance(self.model, str | Path) else None

    @property
    def name(self) -> str:
        """The file's name without its suffix, or the graph's."""
        return self.graph.name if self.path is None else self.path.stem

    @cached_property
    def traced(self) -> Traced:
        """The model as read; FrontendError if it cannot be."""
        return load_onnx(
            self.model, self.dims, self.shapes, feed=self.feed, plan_only=self.plan_only
        )

    @property
    def graph(self) -> Graph:
        """The graph of the model."""
        return self.traced.graph


@dataclass(frozen=True)
class ModuleInput:
    """A PyTorch module, traced when its graph is first needed."""

    module: nn.Module
    example: Example  #: Arguments to trace it with.
    source: ModuleSource  #: The file or factory that gives the module again.
    options: ModuleOptions  #: Options of the trace.
    executor = PYTORCH

    @property
    def training(self) -> bool:
        """Tell whether the backward pass is traced too."""
        return self.options.training

    @property
    def path(self) -> Path | None:
        """The exported program's file; None without one."""
        return self.source.file

    @property
    def name(self) -> str:
        """The name of the file or factory, or the module's class."""
        return self.source.name or type(self.module).__name__

    @cached_property
    def traced(self) -> TracedModule:
        """The module as traced; FrontendError if it cannot be."""
        from partitioner.frontends.torch.trace import trace_module

        return trace_module(self.module, self.example, self.options)

    @property
    def graph(self) -> Graph:
        """The graph of the module."""
        return self.traced.graph

    def in_micro_batches(self, count: int | None) -> TracedModule:
        """The module as traced with one of so many micro-batches; see `trace_micro_batch`."""
        from partitioner.frontends.torch.trace import trace_micro_batch

        whole = self.traced if count in (None, 1) else None
        return trace_micro_batch(self.module, self.example, self.options, count, whole=whole)

    def even_counts(self) -> tuple[int, ...]:
        """All numbers of equal micro-batches, ascending from 1; BackendError without a batch."""
        return even_parts(self.batch_size())

    def batch_size(self, count: int = 1) -> int:
        """Samples of the example inputs; BackendError if they have not so many parts."""
        from partitioner.backends.torch.graphs.micro_batches import micro_batch_sizes

        return sum(micro_batch_sizes((self.example.args, dict(self.example.kwargs)), count))


def open_model(
    model: Any,
    example_inputs: Any = None,
    *,
    training: bool = False,
    optimizer: str = "adamw",
    at_rest: AtRest = "",
    loads: Loads = (),
    recompute: bool | str = "auto",
    plan_only: bool = False,
    dims: Mapping[str, int] | None = None,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    feed: Feed | None = None,
    loss: Callable[..., Any] | str | int | None = None,
    target: Any = None,
) -> OnnxInput | ModuleInput:
    """Open a model with the options of its kind; all arguments are those of `partitioner.compile`.

    A factory is called, an exported program is read; an ONNX model is not read yet.

    Raises:
        PartitionerError: The model does not exist or is no model, an option is for models of the
            other kind, or options contradict each other.
    """
    if is_whole(example_inputs) and not is_a(example_inputs, bool):
        raise OptionError(
            f"example_inputs is {example_inputs!r}; did you mean devices={example_inputs!r}?"
        )
    opened = _open_module(model, example_inputs, dims, training=training)
    if opened is None:
        of_modules = {
            "training": training,
            "recompute": recompute is True,
            "loss": loss is not None,
            "target": target is not None,
            "example_inputs": example_inputs is not None,
        }
        for name in (name for name, value in of_modules.items() if value):
            raise OptionError(f"{name} is for PyTorch modules; the model is {_described(model)}")
        if loads:
            raise OptionError(
                f"loads {loads[0][0]!r}: no layer of experts of an ONNX model is one operator"
            )
        return OnnxInput(model, dims or {}, shapes or {}, feed or {}, plan_only)
    given = {"shapes": shapes, "dims": {} if opened[2].is_config else dims}
    for name in (name for name, value in given.items() if value):
        raise OptionError(f"{name} is for ONNX models: give example inputs instead")
    if feed:
        raise OptionError("feed is for ONNX models: a module keeps its caches as buffers")
    if loss is not None or target is not None:
        opened = _with_loss(*opened, loss, target, training=training)
    options = ModuleOptions(training, optimizer, at_rest, loads)
    if recompute is True and not training:
        raise OptionError("recompute is for training: inference keeps nothing")
    return ModuleInput(*opened, options)


def _open_module(
    model: Any, example_inputs: Any, dims: Mapping[str, int] | None, *, training: bool
) -> tuple[nn.Module, Example, ModuleSource] | None:
    """The module, its example inputs and its source; None for an ONNX model."""
    torch = sys.modules.get("torch")  # without PyTorch loaded, nothing is a module
    if torch is not None and isinstance(model, torch.nn.Module):
        return model, Example.of(example_inputs), ModuleSource()
    source = ModuleSource.of(model, dims)
    if source is None:
        if is_a(model, str, Path) and (hint := unusable(str(model))):
            raise FrontendError(f"{model}: {hint}")
        return None
    if example_inputs is not None:
        raise OptionError(f"example_inputs: {_described(model)} has its own")
    return *source.open(training=training), source


def _with_loss(
    module: nn.Module,
    example: Example,
    source: ModuleSource,
    loss: Callable[..., Any] | str | int | None,
    target: Any,
    *,
    training: bool,
) -> tuple[nn.Module, Example, ModuleSource]:
    """A module that was opened, with the loss of a training step; see `with_loss`."""
    from partitioner.frontends.torch.with_loss import TARGET, with_loss

    if loss is None or not training:
        given = "target" if loss is None else "loss"
        needed = "a loss, a function of (outputs, target)" if loss is None else "training=True"
        raise OptionError(f"{given} is for {needed}: give both or neither")
    if source != ModuleSource():
        raise OptionError(
            f"loss is for a module in Python; {source.name} gives one: let a function return "
            "partitioner.with_loss(module, loss) and its example inputs"
        )
    if target is not None:
        if TARGET in example.kwargs:
            raise OptionError("target is given twice, in example_inputs, too")
        example = Example(example.args, {**example.kwargs, TARGET: target})
    view = with_loss(module, loss)
    if target is not None and not callable(loss):
        raise OptionError(f"target is an argument of a function; loss is {loss!r}, which is none")
    return view, example, source


def _described(model: object) -> str:
    if isinstance(model, type):
        return f"the class {model.__name__}: give an instance"
    return repr(str(model)) if isinstance(model, str | Path) else typed(model)
