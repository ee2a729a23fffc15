"""Saved module programs: the module is had again and traced, the plan is read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from partitioner.compiled.folder import ResultError, SavedModule, load_module_request, load_plan
from partitioner.compiled.module import ModuleProgram
from partitioner.compiled.reload import stored_plan
from partitioner.frontends.torch.source import Example, ModuleSource
from partitioner.frontends.torch.trace import ModuleOptions, trace_module
from partitioner.ir.errors import OptionError

if TYPE_CHECKING:
    from torch import nn


def load_program(
    folder: Path, module: nn.Module | None = None, example_inputs: Any = None
) -> ModuleProgram:
    """A saved module program (see `partitioner.load`).

    Raises:
        PartitionerError: As `partitioner.load`.
    """
    request = load_module_request(folder)
    held, example = _module(folder, request, module, example_inputs)
    traced = trace_module(held, example, ModuleOptions(request.training, request.optimizer))
    if traced.graph.digest != request.graph_digest:
        traced = traced.of(load_plan(folder).nodes)
    if traced.graph.digest != request.graph_digest:
        what = request.file or request.factory or "the module that was given"
        raise ResultError(
            f"{folder}: its model {what} is traced to another graph than before: it has changed, "
            "or the version of PyTorch; partition it again"
        )
    stored = stored_plan(folder, traced.graph)
    return ModuleProgram(
        traced=traced,
        whole=held,
        training=request.training,
        optimizer=request.optimizer,
        source=ModuleSource.saved(request) if module is None else ModuleSource(),
        **stored.parts,
    )


def _module(
    folder: Path, request: SavedModule, module: nn.Module | None, example_inputs: Any
) -> tuple[nn.Module, Example]:
    if module is not None:
        return module, Example.of(example_inputs)
    if example_inputs is not None:
        raise OptionError("example_inputs are of a module: give both or neither")
    if request.file is not None and not request.file.is_file():
        raise ResultError(
            f"{folder}: its model {request.file} is gone; move it back or partition again"
        )
    if request.file is None and not request.factory:
        raise ResultError(
            f"{folder}: its module was given in Python, give it again: "
            f"partitioner.load({str(folder)!r}, module=..., example_inputs=...); plan.json and "
            "report.html can be read without it"
        )
    return ModuleSource.saved(request).open()
