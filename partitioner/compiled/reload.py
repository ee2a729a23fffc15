"""Reading of saved compilations: the model is opened and traced again, the plan is read."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from partitioner.backends.torch.tried import naming_untried
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
from partitioner.frontends.onnx.load import load_onnx
from partitioner.frontends.torch.options import ModuleOptions
from partitioner.frontends.torch.source import Example, ModuleSource
from partitioner.ir.errors import OptionError, hints_keywords
from partitioner.ir.graph import Graph
from partitioner.ir.plan import Certificate, Plan
from partitioner.report.measured import FILE, Measured
from partitioner.search.limits import MOST_EXPLICIT
from partitioner.strategies.block_graph import block_graph
from partitioner.strategies.stretch_layout import BlockError

if TYPE_CHECKING:
    from torch import nn

    from partitioner.compiled.module import ModuleModel, ModuleProgram

#: Largest relative difference of a plan's recomputed cost from the stored one: rounding.
COST_TOLERANCE = 1e-9


@overload
def load(directory: str | Path, module: nn.Module, example_inputs: Any) -> ModuleProgram: ...


@overload
def load(directory: str | Path, module: None = None, example_inputs: None = None) -> Compiled: ...


@naming_untried()
@hints_keywords
def load(
    directory: str | Path, module: nn.Module | None = None, example_inputs: Any = None
) -> Compiled | ModuleProgram:
    """Load a saved compilation; its plan may have been edited.

    The rank files are not read: the result emits its ranks anew, with the weights that the model
    has now. ``partition run`` and ``partition verify`` use the files, and refuse those that are not
    of the plan (and, for verify, of the model's weights).

    A PyTorch module is traced again. It comes from its ``.pt2`` file, from its
    ``package.module:factory`` (the model's own code, which is run), or from `module`.

    Args:
        directory: The folder that `save` or ``partition MODEL`` wrote.
        module: The PyTorch module that was compiled, if it was passed to `compile` itself.
        example_inputs: As of `partitioner.compile`; given together with `module`.

    Returns:
        The compilation. Its plan has no certificate if the stored one is of another plan, and
        `warnings` says so.

    Raises:
        ResultError: The folder is no saved compilation, its model is gone, or the model's
            structure, types or small constants have changed.
        FrontendError: The model cannot be read.
        PlanError: The plan was edited and no longer fits the model.
        CostError: Its cluster is malformed, or lacks a device that the plan uses.
    """
    folder = Path(directory)
    request = load_request(folder)
    if isinstance(request, ModuleRequest):
        from partitioner.compiled.module import ModuleProgram

        model = _load_module(folder, request, module, example_inputs)
        return ModuleProgram.of(model, **_stored_plan(folder, model.graph))
    if module is not None:
        raise ResultError(f"{folder} is of an ONNX model, which it finds itself: give no module")
    onnx_model = _load_onnx(folder, request)
    return Compiled.of(onnx_model, **_stored_plan(folder, onnx_model.graph))


def draw_inputs(folder: Path, seed: int) -> Mapping[str, np.ndarray]:
    """Valid random inputs of a saved compilation's model, by name.

    Raises:
        ResultError: The model, which tells the valid inputs, is gone or has changed.
        FrontendError: It cannot be read.
    """
    request = load_request(folder)
    if isinstance(request, ModuleRequest):
        from partitioner.verify.module import random_inputs as module_inputs

        return module_inputs(_load_module(folder, request).module, seed)
    return _load_onnx(folder, request).random_inputs(seed)


def _load_onnx(folder: Path, request: OnnxRequest) -> OnnxModel:
    model = request.model
    if not model.is_file():
        raise ResultError(f"{folder}: its model {model} is gone; move it back or partition again")
    traced = load_onnx(model, request.dims, request.shapes, plan_only=True)
    onnx_model = OnnxModel(traced, model, None, request.dims, request.shapes)
    onnx_model = onnx_model.of_form(request.graph_digest)
    plan = load_plan(folder)
    have = "or the blocks of its plan have" if plan.blocks else "has"
    changed = f"{folder}: its model {model} {have} changed since; partition it again"
    try:
        if plan.pipeline is not None:
            onnx_model = onnx_model.in_micro_batches(plan.pipeline.micro_batches)
        onnx_model = onnx_model.in_blocks(plan.blocks)
    except BlockError as error:
        raise ResultError(f"{changed} ({error})") from None
    except OptionError:  # another batch, or other nodes
        raise ResultError(changed) from None
    if onnx_model.graph.digest != request.graph_digest:
        raise ResultError(changed)
    return onnx_model


def _load_module(
    folder: Path,
    request: ModuleRequest,
    module: nn.Module | None = None,
    example_inputs: Any = None,
) -> ModuleModel:
    from partitioner.compiled.module import ModuleModel
    from partitioner.frontends.torch.micro_batches import trace_micro_batch
    from partitioner.frontends.torch.trace import trace_module

    source = ModuleSource(request.file, request.factory, request.folder)
    opened, example = _open(folder, source, module, example_inputs)
    plan = load_plan(folder)
    options = ModuleOptions(request.training, request.optimizer, request.at_rest, request.loads)
    traced = (
        trace_module(opened, example, options)
        if plan.pipeline is None
        else trace_micro_batch(opened, example, options, plan.pipeline.micro_batches)
    )
    why = ""
    if plan.blocks:
        try:
            traced = traced.on(block_graph(traced.traced.uncut, plan.blocks))
        except OptionError as error:  # the module has other nodes, or the plan other blocks
            why = f" ({error})"
    elif traced.graph.digest != request.graph_digest:
        traced = traced.of(plan.nodes)
    if traced.graph.digest != request.graph_digest:
        model = request.file or request.factory or "the module that is given"
        if module is not None and traced.signature.traced != request.call:
            raise ResultError(
                f"{folder}: the example inputs of {model} are {traced.signature.traced}; the plan "
                f"is for {request.call}"
            )
        raise ResultError(
            f"{folder}: {model} is traced to another graph than before: it has changed, "
            + ("or the blocks of its plan, " if plan.blocks else "")
            + f"or the version of PyTorch; partition it again{why}"
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


def _measured(folder: Path, plan: Plan) -> tuple[Measured | None, str]:
    """The measured run of a saved compilation, or None and why it is left out, if there was one."""
    file = folder / FILE
    try:
        measured = Measured.from_json(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None, ""
    except (OSError, ValueError) as error:  # ours are ValueErrors
        return None, f"{file} is left out: {getattr(error, 'strerror', None) or error}"
    if measured.plan != plan.digest:
        return None, f"{file} is left out: it is of another plan"
    return measured, ""


def _stored_plan(folder: Path, graph: Graph) -> dict[str, Any]:
    """A folder's plan with its figures on the graph, as arguments of `Compiled.of`.

    Raises:
        ResultError: A file is missing or wrong.
        PlanError: The plan does not fit the graph.
        CostError: Its cluster is malformed, or lacks a device that the plan uses.
    """
    plan = load_plan(folder)
    cluster = Cluster.from_data(plan.cluster)
    evaluation = evaluate(graph, plan, cluster)
    summary = load_summary(folder)
    stale = tuple(_stale(folder, plan.certificate, evaluation, cluster))
    measured, why_left_out = _measured(folder, plan)
    return {
        "cluster": cluster,
        "plan": replace(plan, certificate=None) if stale else plan,
        "evaluation": evaluation,
        "summary": summary,
        "seconds": summary["seconds"],
        "warnings": (*stale, *filter(None, [why_left_out])),
        "measured": measured,
    }


def _stale(
    folder: Path, cert: Certificate | None, evaluation: Evaluation, cluster: Cluster
) -> Iterator[str]:
    """A warning if the plan's cost is not the one that its certificate states.

    Of more than `MOST_EXPLICIT` devices the certificate's cost is an upper estimate.
    """
    if cert is None:
        return
    cost = evaluation.cost(cert.objective)
    estimated = len(cluster) > MOST_EXPLICIT and cert.bound <= cost <= cert.cost
    if not estimated and not math.isclose(cost, cert.cost, rel_tol=COST_TOLERANCE):
        files = {str(one.file) for spec in cluster.devices if (one := spec.profile) is not None}
        measured = f", or {' and '.join(sorted(files))} has other measurements now" if files else ""
        yield (
            f"{folder}: the certificate in plan.json is left out: it says {cert.objective} cost "
            f"{cert.cost:.6g}, but the plan costs {cost:.6g}; it was edited, or made by another "
            f"version{measured}"
        )
