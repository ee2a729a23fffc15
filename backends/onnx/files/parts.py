"""Rank files without their communications: plain models, which other tools read and change.

What a rank receives is an input of its part, and what it sends an output. Nothing else connects the
parts, so a tool may change all that is inside of one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from onnx import GraphProto, ModelProto, TensorProto, ValueInfoProto, numpy_helper

from partitioner.backends.errors import BackendError, one_line, why_unreadable
from partitioner.backends.header import Header
from partitioner.backends.onnx.files.emit import IDLE
from partitioner.backends.onnx.files.load import MOST_BYTES, check_ranks, load_rank
from partitioner.backends.onnx.files.messages import DOMAIN, value_info
from partitioner.backends.onnx.files.steps import Cut, RankModel, Segment
from partitioner.backends.onnx.files.weights import EXTERNAL_BYTES, WeightFile
from partitioner.foundations.files import read_file
from partitioner.ir.errors import OptionError
from partitioner.ir.types import TensorType, from_onnx_dtype, onnx_dtype


@dataclass(frozen=True)
class Part:
    """A rank's computation, without communications."""

    model: RankModel  #: The rank file.
    proto: ModelProto  #: A plain model: of the file's nodes, or of others that compute the same.
    folder: Path | None  #: Where its external weights lie.

    @cached_property
    def constants(self) -> Mapping[str, TensorProto]:
        """The constants of the part, by name."""
        return {tensor.name: tensor for tensor in self.proto.graph.initializer}

    def write(self, path: Path) -> None:
        """Write the model and, beside it, a file of its large constants."""
        proto = ModelProto()
        proto.CopyFrom(self.proto)
        del proto.graph.initializer[:]
        with closing(WeightFile(path.with_suffix(".weights"))) as file:
            for name, tensor in self.constants.items():
                proto.graph.initializer.append(stored(name, tensor, self.folder, file))
        path.write_bytes(proto.SerializeToString())

    @property
    def cuts(self) -> Iterator[Cut]:
        """The rank's sides of communications."""
        return (step for step in self.model.steps if isinstance(step, Cut))


def read_ranks(folder: Path) -> tuple[RankModel, ...]:
    """The files of the ranks that serve a first request: of whole copies, those of one.

    Raises:
        BackendError: A file is wrong, or the files do not agree.
        OptionError: They compute micro-batches, not a request.
    """
    first = load_rank(folder / "rank0.onnx")
    others = (load_rank(folder / f"rank{rank}.onnx") for rank in range(1, first.header.ranks))
    models = (first, *others)
    check_ranks([(model.header, model.steps) for model in models], str(folder))
    if first.header.batch is not None:
        raise OptionError(
            f"{folder}: its plan runs in {first.header.batch.parts.count} micro-batches, and its "
            "rank files compute one of them: partition again without --micro-batches"
        )
    served = first.header.of_request(0, [model.header for model in models])
    return tuple(models[header.rank] for header in served)


def part_of(model: RankModel, phase: int | None = None) -> Part:
    """The part of a rank, or its nodes of a phase, for which those of others are outside too."""
    segments = [step for step in model.steps if isinstance(step, Segment)]
    here = [one for one in segments if phase is None or one.phase == phase]
    nodes = [node for one in here for node in one.nodes if IDLE not in node.output]
    made = {name for node in nodes for name in node.output}
    outside = [step for step in model.steps if step not in here]
    reads = dict.fromkeys(name for one in here for name in one.reads if name not in made)
    wanted = [name for step in outside for name in step.reads]
    wanted += [output.value for output in model.header.outputs]
    constants = {name for one in here for name in one.constants}
    graph = GraphProto(name=model.proto.graph.name, node=nodes)
    graph.input.extend(value_info(name, model.types[name]) for name in reads)
    graph.output.extend(model.output_info(n) for n in dict.fromkeys(wanted) if n in made)
    graph.initializer.extend(t for name, t in model.constants.items() if name in constants)
    return Part(model, model.around(graph), model.folder)


def whole_infos(header: Header, types: Mapping[str, TensorType]) -> list[ValueInfoProto]:
    """The model's inputs or outputs; a size that depends on data is left open."""
    infos = [value_info(name, type_) for name, type_ in types.items()]
    for info in infos:
        for dim in info.type.tensor_type.shape.dim if info.name in header.bounded else ():
            dim.ClearField("dim_value")
    return infos


def write_parts(models: Sequence[RankModel], folder: Path) -> None:
    """Write the parts of all ranks that compute something: `rank0.onnx`, ..., and their weights."""
    for model in models:
        part = part_of(model)
        if part.proto.graph.node:
            part.write(folder / f"rank{model.rank}.onnx")


def stored(name: str, tensor: TensorProto, folder: Path | None, file: WeightFile) -> TensorProto:
    """A constant of this name; a large one goes to the file."""
    if tensor.data_location == TensorProto.EXTERNAL or len(tensor.raw_data) >= EXTERNAL_BYTES:
        type_ = TensorType.of(from_onnx_dtype(tensor.data_type), tensor.dims)
        return file.tensor(name, type_, contents(tensor, folder))
    own = TensorProto()
    own.CopyFrom(tensor)
    own.name = name
    return own


def contents(tensor: TensorProto, folder: Path | None) -> np.ndarray:
    """The elements of a constant, whose external data lies in a folder; else a BackendError."""
    try:
        return numpy_helper.to_array(tensor, base_dir=str(folder or ""))
    except (OSError, ValueError, onnx.checker.ValidationError) as error:
        raise BackendError(f"{folder}: constant {tensor.name!r}: {one_line(error)}") from None


def read_part(model: RankModel, path: Path) -> Part:
    """The part of a rank as another tool wrote it; a BackendError if it is of no such rank."""
    try:
        proto = ModelProto.FromString(read_file(path, MOST_BYTES))
    except (OSError, ValueError, DecodeError) as error:
        raise BackendError(f"{path}: {why_unreadable(error)}") from None
    own = part_of(model).proto.graph
    if any(node.domain == DOMAIN for node in proto.graph.node):
        raise BackendError(
            f"{path} has communications, so it is a rank file: change the files that "
            "partition export DIR --to parts writes"
        )
    made = Counter(name for node in proto.graph.node for name in node.output if name)
    made.update(tensor.name for tensor in proto.graph.initializer)
    inputs = {one.name: one for one in proto.graph.input}
    outputs = {one.name: one for one in proto.graph.output}
    fed = {one.name for one in own.input}
    wrong = [f"input {name!r} is new" for name in sorted(inputs.keys() - fed - made.keys())]
    wrong += [f"input {name!r} is made inside" for name in sorted(fed & made.keys())]
    wrong += [f"value {name!r} is made twice" for name, count in made.items() if count > 1]
    missing = {one.name for one in own.output} - outputs.keys()
    wrong += [f"output {name!r} is missing" for name in sorted(missing)]
    if wrong:
        raise BackendError(f"{path}: {wrong[0]}: rank {model.rank} keeps its inputs and outputs")
    for name, value in (*inputs.items(), *outputs.items()):
        if name in model.types and not _fits(value, model.types[name]):
            raise BackendError(f"{path}: {name!r} has another type than {model.types[name]}")
    return Part(model, proto, path.parent)


def _fits(value: ValueInfoProto, expected: TensorType) -> bool:
    """Test whether a declared type can be the expected one: sizes may be left open."""
    type_ = value.type.tensor_type
    sizes = [dim.dim_value if dim.HasField("dim_value") else None for dim in type_.shape.dim]
    if type_.elem_type != onnx_dtype(expected.dtype):
        return False
    is_like = len(sizes) == len(expected.shape) and all(
        size in (None, own) for size, own in zip(sizes, expected.shape, strict=True)
    )
    return is_like or not type_.HasField("shape")
