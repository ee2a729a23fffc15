"""Reading of saved compilations: the model is opened and traced again, the plan is read."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, overload

import numpy as np

from partitioner.api.compiled.base import Compiled, Model
from partitioner.api.compiled.folder import (
    GRAPH_FILE,
    GraphFile,
    ModuleRequest,
    OnnxRequest,
    is_certified,
    load_plan,
    load_request,
    load_summary,
    rank_files,
)
from partitioner.api.compiled.onnx_model import OnnxModel
from partitioner.api.verify.symbolic.proof import IN_BLOCKS, Proof
from partitioner.backends.runtimes import naming_runtimes
from partitioner.cost_model.cluster.topology import Cluster
from partitioner.cost_model.evaluate import evaluate
from partitioner.foundations.files import ResultError, read_text
from partitioner.frontends.onnx.load import load_onnx
from partitioner.frontends.torch.options import ModuleOptions
from partitioner.frontends.torch.source import Example, ModuleSource
from partitioner.ir.errors import OptionError, hints_keywords, naming
from partitioner.ir.plan import Plan
from partitioner.report.measured import FILE, Measured
from partitioner.rewrites.block_graph import block_graph
from partitioner.rewrites.stretch_layout import BlockError

if TYPE_CHECKING:
    from torch import nn

    from partitioner.api.compiled.module import ModuleModel, ModuleProgram

Kind = TypeVar("Kind", bound=Compiled)
#: How a module is named: ``package.module:function``.
_FACTORY = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


@dataclass(frozen=True)
class _StoredModel(Model):
    """A model of which the graph alone is there: its plan can be shown, and not emitted."""

    folder: Path  #: Folder of the saved compilation.
    request: OnnxRequest | ModuleRequest
    stored: GraphFile
    delivers_all: bool

    @property
    def described(self) -> GraphFile:
        return self.stored

    @property
    def path(self) -> Path | None:
        request = self.request
        return request.file if isinstance(request, ModuleRequest) else request.model

    def write_request(self, folder: Path, final: Path) -> None:
        self.request.write(folder, final)

    def ranks(self, *_: object, **__: object) -> NoReturn:
        raise ResultError(
            f"{self.folder}: its plan was read without its model: partitioner.load reads both"
        )

    resized = ranks


@overload
def load(
    directory: str | Path,
    module: nn.Module | str,
    example_inputs: Any = None,
    *,
    model: str | Path | None = None,
) -> ModuleProgram: ...


@overload
def load(
    directory: str | Path,
    module: None = None,
    example_inputs: None = None,
    *,
    model: str | Path | None = None,
) -> Compiled: ...


@naming_runtimes()
@hints_keywords
def load(
    directory: str | Path,
    module: nn.Module | str | None = None,
    example_inputs: Any = None,
    *,
    model: str | Path | None = None,
) -> Compiled | ModuleProgram:
    """Load a saved compilation; its plan may have been edited.

    The rank files are not read: the result emits its ranks anew, with the weights that the model
    has now. ``partition run`` and ``partition verify`` use the files, and refuse those that are not
    of the plan (and, for verify, of the model's weights).

    A PyTorch module is traced again. It comes from its ``.pt2`` file, or from `module`: the folder
    says which factory it came from, but nothing that a folder names is imported.

    Args:
        directory: The folder that `save` or ``partition MODEL`` wrote.
        module: The PyTorch module that was compiled, or ``package.module:factory``, the model's own
            code, which is run.
        example_inputs: As of `partitioner.compile`; given together with a module.
        model: The model's file (.onnx, .pt2), if it does not lie where it was.

    Returns:
        The compilation. Its plan has no certificate if the stored one is of another plan, and
        `warnings` says so.

    Raises:
        ResultError: The folder is no saved compilation, its module is not given, its model is gone,
            or the model's structure, types or small constants have changed.
        FrontendError: The model cannot be read.
        PlanError: The plan was edited and no longer fits the model.
        CostError: Its cluster is malformed, or lacks a device that the plan uses.
    """
    folder = Path(directory)
    request = load_request(folder)
    if isinstance(request, ModuleRequest):
        from partitioner.api.compiled.module import ModuleProgram

        traced = _load_module(folder, request, module, example_inputs, model)
        return _planned(ModuleProgram, traced, folder)
    if module is not None:
        raise ResultError(f"{folder} is of an ONNX model, which it finds itself: give no module")
    return _planned(Compiled, _load_onnx(folder, request, model), folder)


def load_named(
    folder: Path, module: str | None = None, model: Path | None = None
) -> Compiled | ModuleProgram:
    """`load` with the module or file that a command names, if it names one."""
    return load(folder, model=model) if module is None else load(folder, module, model=model)


def prove_written(folder: Path, module: str | None = None, model: Path | None = None) -> Proof:
    """Prove that the rank files of a saved compilation compute its model; see `Compiled`.

    A PyTorch module that is not named is neither traced nor needed where there are rank files: its
    graph is in the folder.
    """
    request, plan = load_request(folder), load_plan(folder)
    files = rank_files(folder)
    if not files.are_none:
        files.check(plan)  # before the model, which takes longer
    is_named = module is not None or model is not None
    if is_named or files.are_none or not isinstance(request, ModuleRequest):
        return load_named(folder, module, model).prove_written(folder)
    from partitioner.api.verify.symbolic.module_files import prove_files

    proof = prove_files(folder, GraphFile.read(folder, request.graph_digest).graph)
    note = f"as {GRAPH_FILE} has it: name the module (--module, --model) to trace it again"
    in_blocks = (IN_BLOCKS,) if plan.blocks else ()
    return replace(proof, notes=(*proof.notes, *in_blocks, note))


def look(directory: str | Path) -> Compiled:
    """Read a saved compilation to look at its plan; neither model nor module is opened."""
    folder = Path(directory)
    model = _read_model(folder)
    with naming(f"{folder}: {GRAPH_FILE} is of no model", ResultError):
        return _planned(Compiled, model, folder)


def draw_inputs(folder: Path, seed: int) -> Mapping[str, np.ndarray]:
    """Random valid inputs of a saved compilation by name; a PartitionerError without its model."""
    model = _read_model(folder)
    with naming(f"{folder}: {GRAPH_FILE} is of no model", ResultError):
        return model.random_inputs(seed)


def _read_model(folder: Path) -> Model:
    """The model by its graph; of a compilation that was saved without it, the model, as data."""
    request = load_request(folder)
    if os.path.lexists(folder / GRAPH_FILE):
        is_module = isinstance(request, ModuleRequest)
        stored = GraphFile.read(folder, request.graph_digest)
        return _StoredModel(folder, request, stored, is_module)
    if isinstance(request, ModuleRequest) and request.file is None:
        raise ResultError(
            f"{folder} was saved by an earlier version, without {GRAPH_FILE}: partition it again, "
            "or load it with its module (partitioner.load(..., module=...)) and save it"
        )
    return load(folder).model


def _load_onnx(folder: Path, request: OnnxRequest, named: str | Path | None = None) -> OnnxModel:
    model = request.model
    if named is not None:
        model = Path(named)
        model = model.parent.resolve() / model.name
        if not model.is_file():
            raise ResultError(f"{named}: no such file")
    elif not model.is_file():
        raise ResultError(_gone(folder, model))
    sizes = request.dims, request.shapes
    traced = load_onnx(model, *sizes, feed=request.feed, plan_only=True)
    onnx_model = OnnxModel(traced, model, *sizes, request.feed)
    onnx_model = onnx_model.of_form(request.graph_digest)
    plan = load_plan(folder)
    have = "or the blocks of its plan have" if plan.blocks else "has"
    changed = f"{folder}: its model {model} {have} changed since; partition it again"
    try:
        onnx_model = onnx_model.in_micro_batches(plan.micro_batches).in_blocks(plan.blocks)
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
    module: nn.Module | str | None = None,
    example_inputs: Any = None,
    named: str | Path | None = None,
) -> ModuleModel:
    from partitioner.api.compiled.module import ModuleModel
    from partitioner.frontends.torch.trace import trace_micro_batch

    if example_inputs is not None and (module is None or isinstance(module, str)):
        raise OptionError("example_inputs are of a module: give both or neither")
    source = _source(folder, request, module, named)
    if module is None or isinstance(module, str):
        opened, example = source.open(training=request.training)
    else:
        opened, example = module, Example.of(example_inputs)
    plan = load_plan(folder)
    options = ModuleOptions(request.training, request.optimizer, request.at_rest, request.loads)
    traced = trace_micro_batch(opened, example, options, plan.micro_batches)
    why = ""
    if plan.blocks:
        try:
            traced = traced.on(block_graph(traced.traced.uncut, plan.blocks))
        except OptionError as error:  # the module has other nodes, or the plan other blocks
            why = f" ({error})"
    elif traced.graph.digest != request.graph_digest:
        traced = traced.of(plan.nodes)
    if traced.graph.digest != request.graph_digest:
        model = source.file or source.factory or "the module that is given"
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
    return ModuleModel(traced, source)


def _source(
    folder: Path,
    request: ModuleRequest,
    module: nn.Module | str | None,
    named: str | Path | None,
) -> ModuleSource:
    """The source of a saved compilation's module; nothing for one that is given itself."""
    if named is not None and module is not None:
        raise OptionError("model and module are given: give one of them")
    if named is None and module is None:
        if request.file is None:
            raise ResultError(_not_named(folder, request.factory))
        source = ModuleSource(request.file, dims=request.dims)
    elif module is not None and not isinstance(module, str):
        return ModuleSource()
    else:
        given = ModuleSource.of(named if module is None else module, request.dims)
        if given is None or (given.file is None) != (module is not None):
            what = "model" if module is None else "module"
            kind = "a .pt2 or config.json file" if module is None else "package.module:factory"
            raise OptionError(f"{what} is {str(named or module)!r}; give {kind}")
        source = given
    if source.file is not None and not source.file.is_file():
        raise ResultError(f"{named}: no such file" if named else _gone(folder, source.file))
    return source


def _not_named(folder: Path, factory: str) -> str:
    where = shlex.quote(str(folder))
    if _FACTORY.fullmatch(factory) is None:
        return (
            f"{folder}: its module was given in Python, give it again: "
            f"partitioner.load({str(folder)!r}, module=..., example_inputs=...), or partition "
            f"verify {where} --module package.module:factory; show, explain and report need none"
        )
    return (
        f"{folder}: its module came from {factory}, which is imported only if you name it: "
        f"partition verify {where} --module {factory} (Python: "
        f"partitioner.load({str(folder)!r}, module={factory!r})); show, explain and report need it "
        "not"
    )


def _gone(folder: Path, model: Path) -> str:
    return (
        f"{folder}: its model is not at {model}; put it there, name it (partition verify "
        f"{shlex.quote(str(folder))} --model FILE) or partition again"
    )


def _measured(folder: Path, plan: Plan) -> tuple[Measured | None, str]:
    """The measured run of a saved compilation, or None and why it is left out, if there was one."""
    file = folder / FILE
    try:
        measured = Measured.from_json(read_text(file))
    except FileNotFoundError:
        return None, ""
    except (OSError, ValueError) as error:  # ours are ValueErrors
        return None, f"{file} is left out: {getattr(error, 'strerror', None) or error}"
    if measured.plan != plan.digest:
        return None, f"{file} is left out: it is of another plan"
    return measured, ""


def _planned(kind: type[Kind], model: Model, folder: Path) -> Kind:
    plan = load_plan(folder)
    cluster = Cluster.from_data(plan.cluster)
    evaluation = evaluate(model.graph, plan, cluster)
    summary = load_summary(folder)
    stale, cert = "", plan.certificate
    if cert and not is_certified(cert, cluster, evaluation):
        cost = evaluation.cost(cert.objective)
        files = {str(one.file) for spec in cluster.devices if (one := spec.profile) is not None}
        other = f", or {' and '.join(sorted(files))} has other measurements now" if files else ""
        stale = (
            f"{folder}: the certificate in plan.json is left out: it says {cert.objective} cost "
            f"{cert.cost:.6g}, but the plan costs {cost:.6g}; it was edited, or made by another "
            f"version{other}"
        )
    measured, why_left_out = _measured(folder, plan)
    plan = replace(plan, certificate=None) if stale else plan
    # The plan or its files may have been edited since; `verify --symbolic` proves what is there.
    summary = {key: value for key, value in summary.items() if key != "proof"}
    warnings, seconds = tuple(filter(None, [stale, why_left_out])), summary["seconds"]
    return kind.of(model, cluster, plan, evaluation, summary, seconds, warnings, measured)
