"""The steps of a loaded rank: segments of local nodes, and communications between. Data only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, numpy_helper

from partitioner.backends.header import Header
from partitioner.backends.onnx.files.messages import DOMAIN, value_info
from partitioner.backends.regions import is_whole
from partitioner.ir.program import REDUCING, Comm
from partitioner.ir.types import TensorType


@dataclass(frozen=True)
class Segment:
    """A maximal run of local nodes of one phase and block: one ONNX Runtime session."""

    phase: int  #: Pipeline phase of its nodes.
    nodes: tuple[NodeProto, ...]  #: In order.
    reads: tuple[str, ...] = ()  #: Values that come from elsewhere.
    #: Values that are used elsewhere; none if nothing is (it is not run then).
    writes: tuple[str, ...] = ()
    constants: tuple[str, ...] = ()  #: Initializers that it reads.
    #: Block of its nodes: its session is open while it runs, and no longer. None for a session that
    #: stays open.
    block: int | None = None
    plain: bool = False  #: Whether its convolutions are kept out of blocked layouts.

    @property
    def span(self) -> tuple[int, int]:
        """Phases in which it reads and writes."""
        return self.phase, self.phase


@dataclass(frozen=True)
class Cut:
    """A rank's side of a communication."""

    rank: int
    #: The communication, with this rank's transfers only; `source` and `target` are "" where this
    #: rank does not read or write.
    comm: Comm
    active: tuple[int, ...]  #: Ranks that send or receive something, ascending.
    #: Of a broadcast: one part goes to all. Of an all-gather: parts are of equal size and every
    #: rank gets all of them.
    uniform: bool
    #: Type of the local tensor that is read, None if this rank only receives.
    source: TensorType | None
    #: Type of the local tensor that is written, None if this rank only sends.
    target: TensorType | None

    @property
    def reduces(self) -> bool:
        """Tell whether received parts are combined, not written side by side."""
        return self.comm.kind in REDUCING

    @property
    def reads(self) -> tuple[str, ...]:
        """The local value that this rank reads, if it does."""
        return (self.comm.source,) if self.comm.source else ()

    @property
    def writes(self) -> tuple[str, ...]:
        """The local value that this rank writes, if it does."""
        return (self.comm.target,) if self.comm.target else ()

    @property
    def span(self) -> tuple[int, int]:
        """Phases in which it reads and writes."""
        return self.comm.phase, self.comm.target_phase

    @property
    def pipelined(self) -> bool:
        """Tell whether the receiving side runs in a later turn than the sending side."""
        return self.comm.target_phase > self.comm.phase

    @cached_property
    def keeps_all(self) -> bool:
        """Test whether the target here is the source here, unchanged: nothing is to be received."""
        if self.source is None or self.target is None or self.reduces:
            return False
        arriving = [t for t in self.comm.transfers if t.target == self.rank and t.numel]
        return (
            len(arriving) == 1
            and arriving[0].source == self.rank
            and is_whole(arriving[0].read, self.source.shape)
            and is_whole(arriving[0].write, self.target.shape)
        )

    def __str__(self) -> str:
        why = f" for {self.comm.why}" if self.comm.why else ""
        return f"{self.comm.kind} {self.comm.seq}{why}"


@dataclass(frozen=True)
class RankModel:
    """A rank file, cut into steps."""

    header: Header  #: Its description.
    proto: ModelProto  #: The file's message.
    folder: Path | None  #: Where its external weights lie; None if it has none.
    steps: tuple[Segment | Cut, ...]  #: In order.
    types: Mapping[str, TensorType]  #: Types of the values that cross steps.
    keep: tuple[str, ...] = ()  #: Values to have after a run beside the outputs.

    @property
    def rank(self) -> int:
        """The rank it is of."""
        return self.header.rank

    @cached_property
    def constants(self) -> Mapping[str, TensorProto]:
        """Initializers by name."""
        return {tensor.name: tensor for tensor in self.proto.graph.initializer}

    def segment(self, index: int) -> Segment:
        """The segment that is a step."""
        step = self.steps[index]
        assert isinstance(step, Segment)
        return step

    def around(self, graph: GraphProto) -> ModelProto:
        """A model of a graph of this file's operators; communications are none of them."""
        opsets = [entry for entry in self.proto.opset_import if entry.domain != DOMAIN]
        return ModelProto(ir_version=self.proto.ir_version, graph=graph, opset_import=opsets)

    @cached_property
    def bounded(self) -> frozenset[str]:
        """Local values whose sizes depend on data."""
        header = self.header
        return frozenset(o.value for o in header.outputs if o.whole in header.bounded)

    def output_info(self, name: str) -> ValueInfoProto:
        """An output of a session: with a bound for a size, ONNX Runtime would fold the size."""
        info = value_info(name, self.types[name])
        for dim in info.type.tensor_type.shape.dim if name in self.bounded else ():
            dim.ClearField("dim_value")
        return info

    def constant(self, name: str) -> np.ndarray:
        """Contents of an initializer."""
        base = "" if self.folder is None else str(self.folder)
        return numpy_helper.to_array(self.constants[name], base_dir=base)
