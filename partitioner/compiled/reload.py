"""Saved compilations: the model is had again and traced, the plan is read beside it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from partitioner.compiled.base import Compiled
from partitioner.compiled.folder import (
    ModuleRequest,
    OnnxRequest,
    load_plan,
    load_request,
    load_summary,
)
from partitioner.compiled.onnx_model import OnnxModel
from partitioner.cost_model.cluster import Cluster
from partitioner.cost_model.evaluate import Evaluation, evaluate
from partitioner.files import ResultError
from partitioner.frontends.inputs import random_inputs
from partitioner.frontends.onnx.load import Traced, load_onnx
from partitioner.frontends.torch.options import ModuleOptions
from partitioner.frontends.torch.source import Example, ModuleSource
from partitioner.ir.errors import OptionError
from partitioner.ir.graph import Graph
from partitioner.ir.plan import Certificate
from partitioner.report.planned import check_explicit

if TYPE_CHECKING:
    from torch import nn

    from partitioner.compiled.module import ModuleModel, ModuleProgram

#: Relative difference of two sums of one plan's costs that is rounding.
COST_TOLERANCE = 1e-9


def load(
    directory: str | Path, module: nn.Module | None = None, example_inputs: Any = None
) -> Compiled | ModuleProgram:
    """A saved compilation; its plan may have been edited.

    The rank files are not looked at: what the result runs and verifies it makes anew, with the
    weights that the model has now. ``partition run`` and ``partition verify`` use the files, and
    refuse those that are not of the plan (and, for verify, of the model's weights).

    A PyTorch module is traced again: read from its ``.pt2`` file, made by its
    ``package.module:factory`` (which is the model's own code, and runs), or given here.

    Args:
        directory: What `save` or ``partition MODEL`` wrote.
        module: The PyTorch module that was compiled, if it was given in Python.
        example_inputs: As in `partitioner.compile`, if `module` is given.

    Returns:
        The compilation. Its plan has no certificate if the stored one is not of this plan, and
        `warnings` says so.

    Raises:
        ResultError: Not such a folder, the model is gone, or its structure, types or small
            constants have changed.
        FrontendError: The model cannot be read.
        PlanError: The plan was edited into something that does not fit the model.
        CostError: Its cluster is none, or lacks a device that the plan uses.
    """
    folder = Path(directory)
    request = load_request(folder)
    if isinstance(request, ModuleRequest):
        from partitioner.compiled.module import ModuleProgram

        traced = _load_module(folder, request, module, example_inputs)
        return ModuleProgram.of(traced, **_stored_plan(folder, traced.graph))
    if module is not None:
        raise ResultError(f"{folder} is of an ONNX model, which it finds itself: give no module")
    graph = _load_graph(folder, request)
    model = OnnxModel(graph, request.model, None, request.dims, request.shapes)
    return Compiled.of(model, **_stored_plan(folder, graph.graph))


def draw_inputs(folder: Path, seed: int) -> Mapping[str, np.ndarray]:
    """Valid random inputs of a saved compilation's model, by name.

    Raises:
        ResultError: The model, which says what is valid, is gone or has changed.
        FrontendError: It cannot be read.
    """
    request = load_request(folder)
    if isinstance(request, ModuleRequest):
        from partitioner.verify.module import random_inputs as like_examples

        return like_examples(_load_module(folder, request).module, seed)
    return random_inputs(_load_graph(folder, request).graph, seed)


def _load_graph(folder: Path, request: OnnxRequest) -> Traced:
    model = request.model
    if not model.is_file():
        raise ResultError(f"{folder}: its model {model} is gone; move it back or partition again")
    traced = load_onnx(model, request.dims, request.shapes)
    if traced.graph.digest != request.graph_digest:
        raise ResultError(f"{folder}: its model {model} has changed since; partition it again")
    return traced


def _load_module(
    folder: Path,
    request: ModuleRequest,
    module: nn.Module | None = None,
    example_inputs: Any = None,
) -> ModuleModel:
    from partitioner.compiled.module import ModuleModel
    from partitioner.frontends.torch.trace import trace_module

    source = ModuleSource(request.file, request.factory, request.folder)
    opened, example = _open(folder, source, module, example_inputs)
    traced = trace_module(opened, example, ModuleOptions(request.training, request.optimizer))
    if traced.graph.digest != request.graph_digest:
        traced = traced.of(load_plan(folder).nodes)
    if traced.graph.digest != request.graph_digest:
        what = request.file or request.factory or "the module that was given"
        raise ResultError(
            f"{folder}: its model {what} is traced to another graph than before: it has changed, "
            "or the version of PyTorch; partition it again"
        )
    return ModuleModel(traced, source if module is None else ModuleSource())


def _open(
    folder: Path, source: ModuleSource, module: nn.Module | None, example_inputs: Any
) -> tuple[nn.Module, Example]:
    if module is not None:
        return module, Example.of(example_inputs)
    if example_inputs is not None:
        raise OptionError("example_inputs are of a module: give both or neither")
    if source.file is not None and not source.file.is_file():
        raise ResultError(
            f"{folder}: its model {source.file} is gone; move it back or partition again"
        )
    if source.file is None and not source.factory:
        raise ResultError(
            f"{folder}: its module was given in Python, give it again: "
            f"partitioner.load({str(folder)!r}, module=..., example_inputs=...); plan.json and "
            "report.html can be read without it"
        )
    return source.open()


def _stored_plan(folder: Path, graph: Graph) -> dict[str, Any]:
    """A folder's plan with its figures on the graph, as arguments of `Compiled.of`.

    Raises:
        ResultError: A file is missing or wrong.
        PlanError: The plan does not fit the graph.
        CostError: Its cluster is none, or lacks a device that the plan uses.
    """
    plan = load_plan(folder)
    cluster = Cluster.from_data(plan.cluster)
    check_explicit(cluster)
    evaluation = evaluate(graph, plan, cluster)
    summary = load_summary(folder)
    warnings = tuple(_stale(folder, plan.certificate, evaluation))
    return {
        "cluster": cluster,
        "plan": replace(plan, certificate=None) if warnings else plan,
        "evaluation": evaluation,
        "summary": summary,
        "seconds": summary["seconds"],
        "warnings": warnings,
    }


def _stale(folder: Path, cert: Certificate | None, evaluation: Evaluation) -> Iterator[str]:
    """A warning if the certificate is not of the plan that it stands in."""
    if cert is None:
        return
    cost = evaluation.cost(cert.objective)
    if not math.isclose(cost, cert.cost, rel_tol=COST_TOLERANCE):
        yield (
            f"{folder}: the certificate in plan.json is left out: it says {cert.objective} cost "
            f"{cert.cost:.6g}, but the plan costs {cost:.6g}; it was edited, or made by another "
            "version"
        )
