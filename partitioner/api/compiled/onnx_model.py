"""Compiled ONNX models, whose rank files are ONNX files, and the graphs that are planned."""

from __future__ import annotations

import shutil
import tempfile
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from partitioner.api.compiled.base import Compiled, Model, Ranks, origin
from partitioner.api.compiled.folder import GraphFile, OnnxFiles, OnnxRequest
from partitioner.api.compiled.taken_over import SIZES, taken_over
from partitioner.api.verify.compare import Verification
from partitioner.api.verify.onnx_model import check_seeds, verify
from partitioner.api.verify.symbolic.proof import Proof
from partitioner.backends.errors import BackendError
from partitioner.backends.launch import LocalJob, LocalRun
from partitioner.backends.optimization import DEFAULT, OPTIMIZATIONS, Optimization
from partitioner.cost_model.cluster.topology import Cluster
from partitioner.frontends.inputs import input_ranges
from partitioner.frontends.model import OnnxInput
from partitioner.frontends.onnx.load import Traced
from partitioner.ir.checks import is_a
from partitioner.ir.errors import OptionError, typed
from partitioner.ir.graph import Graph
from partitioner.ir.nodes.feeds import Feed
from partitioner.ir.ops.onnx.factories import RANDOM
from partitioner.ir.pieces.blocks import Blocks
from partitioner.ir.plan import Plan
from partitioner.ir.program import Programs
from partitioner.ir.types import TensorType
from partitioner.report.findings.notes import border_notes, profile_notes
from partitioner.rewrites.block_graph import block_graph
from partitioner.rewrites.micro_batch_graph import (
    MicroBatch,
    batch_size,
    even_parts,
    micro_batch_graph,
)
from partitioner.rewrites.same_in_parts import Difference
from partitioner.search.outcome import Candidate, Outcome
from partitioner.search.request import Request, StageClock
from partitioner.search.ways.model_graphs import ModelGraphs

if TYPE_CHECKING:
    import onnx

    from partitioner.backends.onnx.running.simulator import Simulator
    from partitioner.backends.onnx.serving import Session

#: Identity, size and time of change of each file that sessions were opened from, by name.
_State = tuple[tuple[str, int, int, int], ...]


@dataclass(frozen=True)
class OnnxModel(Model):
    """An ONNX model."""

    traced: Traced
    #: Its path, absolute (a link to the file stays one: its external data is beside it), or the
    #: model in memory, which is saved with the plan.
    source: Path | onnx.ModelProto
    dims: Mapping[str, int]  #: Sizes of symbolic dims, by symbol.
    shapes: Mapping[str, tuple[int, ...]]  #: Shapes of inputs, by name.
    feed: Feed = field(default_factory=dict)  #: Results that are inputs of the next call.
    #: The part of a request that is planned, if it runs in micro-batches.
    part: MicroBatch | None = None
    cut: Graph | None = None  #: The graph that runs in blocks, if any of it does.
    delivers_all = False

    @property
    def forms(self) -> tuple[Self, ...]:
        """The model with each of the graphs that compute it, first the one as read."""
        return tuple(replace(self, traced=traced) for traced in self.traced.forms)

    def of_form(self, digest: str) -> Self:
        """The model with the graph of this digest; as it is if it has none."""
        return next((form for form in self.forms if form.graph.digest == digest), self)

    def in_micro_batches(self, count: int | None) -> Self:
        """The model whose requests run in so many micro-batches; an OptionError if it cannot.

        They run whole for None.
        """
        if count is None:
            return self
        for node in self.traced.graph.nodes:
            if node.op in RANDOM:
                raise OptionError(
                    f"micro_batches={count}: {node.name!r} ({node.op}) draws random numbers, which "
                    "would be others: leave micro_batches out"
                )
        return replace(self, part=micro_batch_graph(self.traced.graph, count))

    def in_blocks(self, blocks: Blocks) -> Self:
        """The model of which these stretches run in blocks; an OptionError if one cannot."""
        graph = self.traced.graph if self.part is None else self.part.graph
        return replace(self, cut=block_graph(graph, blocks)) if blocks else self

    def resized(self, shapes: Mapping[str, tuple[int, ...]], plan: Plan) -> tuple[Self, Plan]:
        """See `Model.resized`: the model is read with these sizes.

        Micro-batches are as many as the plan's, or the next smaller number that divides the batch.
        """
        for name in self.shapes.keys() - self.input_types.keys():
            raise OptionError(f"the sizes of {name!r} were given with the planned ones")
        traced = self.traced.of_sizes(shapes, self.feed)
        model = replace(self, traced=traced, dims={}, shapes=shapes, part=None, cut=None)
        if plan.pipeline is not None:
            most = plan.pipeline.micro_batches
            count = max(n for n in even_parts(batch_size(traced.graph)) if n <= most)
            model = model.in_micro_batches(count)
            plan = replace(plan, pipeline=replace(plan.pipeline, micro_batches=count))
        forms = [form.in_blocks(plan.blocks) for form in model.forms]
        names = self.graph.by_name.keys()
        form = next((form for form in forms if form.graph.by_name.keys() == names), forms[0])
        return form, taken_over(plan, self.graph, form.graph, SIZES)

    @cached_property
    def described(self) -> GraphFile:
        """See `Model.described`; ranks deliver their parts, and inputs are of the whole batch."""
        graph = self.cut or (self.traced.graph if self.part is None else self.part.graph)
        name = graph.name if self.path is None else self.path.stem
        return GraphFile(name, graph, input_ranges(self.traced.graph))

    @property
    def path(self) -> Path | None:
        """See `Model.path`."""
        return self.source if isinstance(self.source, Path) else None

    def write_request(self, folder: Path, final: Path) -> None:
        """Write `request.json`, and the model beside it if it has no file."""
        model = self.source
        if not isinstance(model, Path):
            (folder / "model.onnx").write_bytes(model.SerializeToString())
            model = final.resolve() / "model.onnx"
        request = OnnxRequest(model, self.graph.digest, self.dims, self.shapes, self.feed)
        request.write(folder, final)

    def ranks(self, programs: Programs, plan: Plan, read_from: Path | None = None) -> OnnxRanks:
        """See `Model.ranks`; the files are written on first use."""
        return OnnxRanks(self, programs, plan, read_from)

    @property
    def input_types(self) -> Mapping[str, TensorType]:
        """See `Model.input_types`: of the whole batch."""
        return {name: self.traced.graph.types[name] for name in self.traced.graph.inputs}


@dataclass(frozen=True)
class OnnxGraphs(ModelGraphs):
    """See `ModelGraphs`: micro-batches are cut from the graph, proven to compute the same."""

    opened: OnnxInput
    cluster: Cluster
    request: Request
    clock: StageClock  #: Times what is read and made.
    _parts: dict[int, OnnxModel] = field(default_factory=dict)
    pins_reach_forms = True
    offered = None  #: Inference computes nothing again.

    @cached_property
    def model(self) -> OnnxModel:
        """The model that runs as a whole, in the form of the plan that is kept, if one is."""
        opened = self.opened
        with self.clock("reading the model"):
            source = opened.model
            if isinstance(source, str | Path):
                source = Path(source).parent.resolve() / Path(source).name
            model = OnnxModel(opened.traced, source, opened.dims, opened.shapes, opened.feed)
        kept = self.request.constraints.plan
        return model if kept is None else model.of_form(kept.graph_digest)

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks of the front end, and on where seconds come from."""

        def backend() -> str:
            from partitioner.backends.onnx.measuring.timing import NAME

            return NAME

        measured = profile_notes(self.cluster, backend, measures_gpus=False)
        return (*self.model.traced.notes, *measured, *border_notes(self.cluster))

    @cached_property
    def forms(self) -> tuple[Graph, ...]:
        """See `ModelGraphs.forms`; of a plan in blocks that is kept, the graph of all blocks."""
        kept = self.request.constraints.plan
        if kept is not None and kept.blocks:
            return (self.model.in_blocks(kept.blocks).graph,)
        return tuple(form.graph for form in self.model.forms)

    @property
    def uncut(self) -> Graph:
        """See `ModelGraphs.uncut`."""
        return self.model.graph

    whole = uncut

    def batch_size(self, count: int = 1) -> int:  # noqa: ARG002 - any number is cut or refused later
        """See `ModelGraphs.batch_size`."""
        return batch_size(self.model.graph)

    def even_counts(self) -> tuple[int, ...]:
        """See `ModelGraphs.even_counts`."""
        return even_parts(batch_size(self.model.graph))

    def in_micro_batches(self, count: int) -> Graph:
        """See `ModelGraphs.in_micro_batches`; of a plan in blocks that is kept, that of blocks."""
        kept, part = self.request.constraints.plan, self._part(count)
        return part.graph if kept is None else part.in_blocks(kept.blocks).graph

    def uncut_in(self, count: int) -> Graph:
        """See `ModelGraphs.uncut_in`."""
        return self._part(count).graph

    def offered_in(self, count: int) -> None:
        """See `ModelGraphs.offered_in`."""

    def is_there(self, count: int) -> bool:
        """See `ModelGraphs.is_there`."""
        return count in self._parts

    def changes(self, count: int) -> Difference:
        """See `ModelGraphs.changes`: there are no micro-batches but those that change nothing."""
        self._part(count)
        return Difference(())

    def _part(self, count: int) -> OnnxModel:
        if count not in self._parts:
            with self.clock("cutting the batch"):
                self._parts[count] = self.model.in_micro_batches(count)
        return self._parts[count]

    @property
    def identity(self) -> tuple[str, ...]:
        """Words that differ where plans of the model do."""
        return ("onnx", self.model.graph.search_digest)

    def graph_of(self, plan: Plan) -> Graph:
        """The graph of a plan of the model; a PartitionerError if it has none."""
        return self._model_of(plan).graph

    def _model_of(self, plan: Plan) -> OnnxModel:
        count = plan.micro_batches
        model = self.model if count is None else self._part(count)
        return model.in_blocks(plan.blocks).of_form(plan.graph_digest)

    def planned(self, search: Callable[[], tuple[Outcome, Mapping[str, Any]]]) -> Compiled:
        """The program of the plan that a search finds."""
        outcome, summary = search()
        return self.compiled(outcome, summary)

    def compiled(
        self, planned: Candidate | Outcome, summary: Mapping[str, Any] = MappingProxyType({})
    ) -> Compiled:
        """The program of a plan."""
        plan, model = planned.plan, self._model_of(planned.plan)
        figures, seconds = planned.evaluation, self.clock.seconds
        return Compiled.of(model, self.cluster, plan, figures, summary, seconds)


@dataclass(frozen=True, eq=False)
class OnnxRanks(Ranks):
    """The ranks of an ONNX model: one ONNX file each.

    The sessions of all ranks are opened at the first run and kept; they are opened anew if a file
    of the folder has changed since. Calls of several threads run one after the other.
    """

    model: OnnxModel
    programs: Programs
    plan: Plan  #: The plan of the programs.
    read_from: Path | None = None  #: Folder of files that are there; None if they are emitted.
    optimization: Optimization = DEFAULT  #: Level of ONNX Runtime's optimizations.
    _open: dict[_State, Simulator] = field(default_factory=dict, repr=False)  # at most one
    _at: dict[str, OnnxRanks] = field(default_factory=dict, repr=False)
    _temporary: list[weakref.finalize[..., Any]] = field(default_factory=list, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies, pickled ones too, open sessions of their own."""
        fields = self.model, self.programs, self.plan, self.read_from, self.optimization
        return type(self), fields

    def at(self, optimization: Optimization | None) -> OnnxRanks:
        """See `Ranks.at`; the files are the same."""
        if optimization is None or optimization == self.optimization:
            return self
        if optimization not in OPTIMIZATIONS:
            raise OptionError(
                f"optimization {optimization!r} is not one of {', '.join(OPTIMIZATIONS)}"
            )
        if optimization not in self._at:
            self._at[optimization] = OnnxRanks(
                self.model, self.programs, self.plan, self.folder, optimization
            )
        return self._at[optimization]

    @cached_property
    def folder(self) -> Path:
        """Folder of the files; emitted ones are in a temporary folder that this object owns."""
        if self.read_from is not None:
            return self.read_from
        folder = Path(tempfile.mkdtemp(prefix="partitioner-"))
        self._temporary.append(weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True))
        self._emit(folder)
        return folder

    def _emit(self, folder: Path) -> None:
        from partitioner.backends.onnx.files.emit import emit
        from partitioner.backends.onnx.sessions.whole import check_loadable

        graph, part, whole = self.model.graph, self.model.part, self.model.traced.whole
        parts = None if part is None else part.parts
        metadata = {entry.key: entry.value for entry in whole.metadata_props}
        emit(self.programs, graph, folder, origin(self.plan, graph), parts, metadata)
        check_loadable(folder, len(self.programs.ranks), whole)

    def write(self, folder: Path) -> None:
        """See `Ranks.write`; files that were emitted before are copied."""
        if "folder" not in self.__dict__:
            self._emit(folder)
            return
        for path in sorted(self.folder.iterdir()):
            shutil.copy(path, folder)

    def run_written(self, folder: Path, job: LocalJob) -> LocalRun:
        """See `Ranks.run_written`."""
        arrays = self.model.random_inputs(job.seed) if job.inputs is None else job.inputs
        return OnnxFiles(folder).run(arrays, job.requests, job.recorded)

    def run(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """See `Ranks.run`."""
        from partitioner.backends.onnx.running.simulator import Simulator

        if not is_a(inputs, Mapping):
            names = ", ".join(map(repr, self.model.traced.graph.inputs))
            raise BackendError(f"inputs is {typed(inputs)}, not a dict of arrays by name ({names})")
        with self._lock:
            found = ((path.name, path.stat()) for path in sorted(self.folder.iterdir()))
            state = tuple((name, of.st_ino, of.st_size, of.st_mtime_ns) for name, of in found)
            if state not in self._open:
                self._open.clear()
                self._open[state] = Simulator(self.folder, optimization=self.optimization)
            return dict(self._open[state].run([dict(inputs)])[0].outputs)

    def session(self, feed: Feed | None = None) -> Session:
        """See `Ranks.session`."""
        from partitioner.backends.onnx.serving import Session

        return Session(self.folder, self.optimization, owner=self, feed=feed)

    def close(self) -> None:
        """See `Ranks.close`."""
        with self._lock:
            self._open.clear()
            for ranks in self._at.values():
                ranks.close()
            self._at.clear()
            self.__dict__.pop("folder", None)
            while self._temporary:
                self._temporary.pop()()

    def verify(self, seed: int, inputs: Mapping[str, np.ndarray] | None = None) -> Verification:
        """See `Ranks.verify`."""
        model = self.model
        return verify(
            model.traced, self.programs, self.folder, seed, model.part, self.optimization, inputs
        )

    def prove(self) -> Proof:
        """See `Ranks.prove`."""
        from partitioner.api.verify.symbolic.onnx_files import read_programs
        from partitioner.api.verify.symbolic.prove import prove

        graph = self.model.traced.graph
        check_seeds(graph)
        return prove(graph, read_programs(self.folder))
