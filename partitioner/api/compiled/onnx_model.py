"""Compiled ONNX models, whose rank files are ONNX files."""

from __future__ import annotations

import shutil
import tempfile
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from partitioner.api.compiled.base import Model, Ranks, origin
from partitioner.api.compiled.folder import OnnxRequest
from partitioner.api.compiled.graph_file import GraphFile
from partitioner.api.compiled.rank_files import OnnxFiles
from partitioner.api.verify.compare import Verification
from partitioner.api.verify.onnx_model import verify
from partitioner.backends.errors import BackendError
from partitioner.backends.optimization import DEFAULT, OPTIMIZATIONS, Optimization
from partitioner.frontends.inputs import input_ranges
from partitioner.frontends.onnx.load import Traced
from partitioner.frontends.onnx.rewriting.fold import draws
from partitioner.ir.checks import is_a
from partitioner.ir.errors import OptionError, typed
from partitioner.ir.graph import Graph
from partitioner.ir.pieces.blocks import Blocks
from partitioner.ir.plan import Plan
from partitioner.ir.program import Programs
from partitioner.ir.types import TensorType
from partitioner.rewrites.block_graph import block_graph
from partitioner.rewrites.micro_batch_graph import MicroBatch, micro_batch_graph

if TYPE_CHECKING:
    import onnx

    from partitioner.backends.onnx.running.simulator import Simulator

#: Identity, size and time of change of each file that sessions were opened from, by name.
_State = tuple[tuple[str, int, int, int], ...]


@dataclass(frozen=True)
class OnnxModel(Model):
    """An ONNX model."""

    traced: Traced
    #: Its path, absolute; None for a model in memory, which is saved with the plan.
    file: Path | None
    proto: onnx.ModelProto | None  #: The model in memory; None if it has a file.
    dims: Mapping[str, int]  #: Sizes of symbolic dims, by symbol.
    shapes: Mapping[str, tuple[int, ...]]  #: Shapes of inputs, by name.
    #: The part of a request that is planned, if it runs in micro-batches.
    part: MicroBatch | None = None
    cut: Graph | None = None  #: The graph that runs in blocks, if any of it does.
    files = OnnxFiles
    delivers_all = False

    @classmethod
    def of(
        cls,
        model: str | Path | onnx.ModelProto,
        traced: Traced,
        dims: Mapping[str, int],
        shapes: Mapping[str, tuple[int, ...]],
    ) -> OnnxModel:
        """A model from a path or from memory, with its trace."""
        if isinstance(model, str | Path):
            path = Path(model)  # a link to the file stays one: its external data is beside it
            return cls(traced, path.parent.resolve() / path.name, None, dims, shapes)
        return cls(traced, None, model, dims, shapes)

    @property
    def forms(self) -> tuple[Self, ...]:
        """The model with each of the graphs that compute it, first the one as read."""
        return tuple(replace(self, traced=traced) for traced in self.traced.forms)

    def of_form(self, digest: str) -> Self:
        """The model with the graph of this digest; as it is if it has none."""
        return next((form for form in self.forms if form.graph.digest == digest), self)

    def in_micro_batches(self, count: int) -> Self:
        """The model whose requests run in so many micro-batches.

        Raises:
            OptionError: As `micro_batch_graph`, or the model draws random numbers.
        """
        for node in self.traced.graph.nodes:
            if draws(node.op):
                raise OptionError(
                    f"micro_batches={count}: {node.name!r} ({node.op}) draws random numbers, which "
                    "would be others: leave micro_batches out"
                )
        return replace(self, part=micro_batch_graph(self.traced.graph, count))

    def in_blocks(self, blocks: Blocks) -> Self:
        """The model of which these stretches run in blocks.

        Raises:
            OptionError: A stretch cannot run so.
        """
        return replace(self, cut=block_graph(self.traced.graph, blocks)) if blocks else self

    @cached_property
    def described(self) -> GraphFile:
        """See `Model.described`; ranks deliver their parts, and inputs are of the whole batch."""
        graph = self.cut or (self.traced.graph if self.part is None else self.part.graph)
        name = graph.name if self.file is None else self.file.stem
        return GraphFile(name, graph, frozenset(), input_ranges(self.traced.graph))

    @property
    def path(self) -> Path | None:
        """The model's file; None for a model in memory."""
        return self.file

    def write_request(self, folder: Path, final: Path) -> None:
        """Write `request.json`, and the model beside it if it has no file."""
        file = self.file
        if file is None:
            assert self.proto is not None
            (folder / "model.onnx").write_bytes(self.proto.SerializeToString())
        OnnxRequest(
            final.resolve() / "model.onnx" if file is None else file,
            self.graph.digest,
            self.dims,
            self.shapes,
        ).write(folder, final)

    def emit(self, programs: Programs, plan: Plan) -> OnnxRanks:
        """See `Model.emit`; the files are written on first use."""
        return OnnxRanks(self, programs, plan)

    def read(self, programs: Programs, folder: Path) -> OnnxRanks:
        """See `Model.read`."""
        return OnnxRanks(self, programs, read_from=folder)

    @property
    def input_types(self) -> Mapping[str, TensorType]:
        """See `Model.input_types`: of the whole batch."""
        return {name: self.traced.graph.types[name] for name in self.traced.graph.inputs}


@dataclass(frozen=True, eq=False)
class OnnxRanks(Ranks):
    """The ranks of an ONNX model: one ONNX file each.

    The sessions of all ranks are opened at the first run and kept; they are opened anew if a file
    of the folder has changed since. Calls of several threads run one after the other.
    """

    model: OnnxModel
    programs: Programs
    plan: Plan | None = None  #: The plan of the programs; None if the ranks were read from files.
    #: Folder of the files that were read; None if the ranks were emitted.
    read_from: Path | None = None
    optimization: Optimization = DEFAULT  #: Level of ONNX Runtime's optimizations.
    _open: dict[_State, Simulator] = field(default_factory=dict, repr=False)  # at most one
    _at: dict[str, OnnxRanks] = field(default_factory=dict, repr=False)
    _temporary: list[weakref.finalize[..., Any]] = field(default_factory=list, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies, pickled ones too, open sessions of their own."""
        fields = self.model, self.programs, self.plan, self.read_from, self.optimization
        return type(self), fields

    def at(self, optimization: Optimization) -> OnnxRanks:
        """See `Ranks.at`; the files are the same."""
        if optimization not in OPTIMIZATIONS:
            raise OptionError(
                f"optimization {optimization!r} is not one of {', '.join(OPTIMIZATIONS)}"
            )
        if optimization == self.optimization:
            return self
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

        assert self.plan is not None
        graph, part = self.model.graph, self.model.part
        parts = None if part is None else part.parts
        emit(self.programs, graph, folder, origin(self.plan, graph), parts)
        check_loadable(folder, len(self.programs.ranks), self.model.traced.whole)

    def write(self, folder: Path) -> None:
        """See `Ranks.write`; files that were emitted before are copied."""
        if "folder" not in self.__dict__:
            self._emit(folder)
            return
        for path in sorted(self.folder.iterdir()):
            shutil.copy(path, folder)

    def run_seconds(self, folder: Path, count: int) -> float:
        """See `Ranks.run_seconds`."""
        from partitioner.backends.onnx.local import run_local

        return run_local(folder, self.model.random_inputs(seed=0), count).seconds

    def run(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """See `Ranks.run`."""
        if not is_a(inputs, Mapping):
            names = ", ".join(map(repr, self.model.traced.graph.inputs))
            raise BackendError(f"inputs is {typed(inputs)}, not a dict of arrays by name ({names})")
        with self._lock:
            return dict(self._simulator().run([dict(inputs)])[0].outputs)

    def _simulator(self) -> Simulator:
        """All ranks with their sessions open, as the files are now."""
        from partitioner.backends.onnx.running.simulator import Simulator

        found = ((path.name, path.stat()) for path in sorted(self.folder.iterdir()))
        state = tuple((name, of.st_ino, of.st_size, of.st_mtime_ns) for name, of in found)
        if state not in self._open:
            self._open.clear()
            self._open[state] = Simulator(self.folder, optimization=self.optimization)
        return self._open[state]

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
