"""A plan as ONNX's own multi-device annotations (IR 11), in a copy of the user's model.

The file computes what the model computes: annotations change no node. A traced node is matched
with the model's node that makes the same value; nodes that tracing folded away get none, and by
the standard take over the sharding of their inputs. A model with functions is inlined first,
since one body serves several calls. See docs/reference/annotations.md.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import onnx_ir
from google.protobuf.message import EncodeError  # type: ignore[import-untyped]
from onnx import ModelProto, NodeDeviceConfigurationProto, NodeProto, ShardingSpecProto, TensorProto
from onnx_ir.passes.common import InlinePass

from partitioner.annotations.report import IR_VERSION, annotation_problems
from partitioner.cost_model.cluster.topology import Cluster
from partitioner.cost_model.schedule.task_list import Schedule
from partitioner.foundations.files import FileError, refuse_to_replace, write_files
from partitioner.frontends.onnx.load import Traced
from partitioner.frontends.onnx.reading.checks import all_tensors
from partitioner.ir.errors import PartitionerError
from partitioner.ir.graph import Graph
from partitioner.ir.layout import DimLayout, Interval, Placement
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.plan import PlacedNode
from partitioner.ir.types import TensorType

#: Name of our configuration in the model; one of that name is replaced.
CONFIGURATION = "partitioner"
#: Ops that tracing removes where they only pass their operand on.
_PASS_ON = frozenset({"Dropout", "Identity"})
_MAX_NAMED = 5
Pieces = tuple[Interval, ...]  #: Intervals of a dim.


class NotInStandardError(PartitionerError, ValueError):
    """A placement that the standard cannot express; the message says why."""


class AnnotateError(PartitionerError, ValueError):
    """A plan that cannot be written as annotations."""


@dataclass(frozen=True)
class LeftOut:
    """A part of the plan that has no annotation."""

    node: str
    tensor: str  #: Name of its tensor; "" if the whole node is left out.
    why: str


@dataclass(frozen=True)
class Annotated:
    """An annotated file.

    Attributes:
        nodes: Number of annotated nodes.
        devices: Number of devices that they are annotated for.
        left_out: The parts of the plan without annotations, in the plan's order.
    """

    path: Path
    nodes: int
    devices: int
    left_out: tuple[LeftOut, ...]

    def lines(self) -> Iterator[str]:
        """A line for each reason to leave parts out, with the names of the first few."""
        by_reason: dict[str, list[str]] = defaultdict(list)
        for item in self.left_out:
            name = f"{item.tensor!r} of {item.node!r}" if item.tensor else repr(item.node)
            by_reason[item.why].append(name)
        for why, names in by_reason.items():
            more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
            yield f"not annotated: {', '.join(names[:_MAX_NAMED])}{more}: {why}"


def annotate(
    traced: Traced,
    schedule: Schedule,
    cluster: Cluster,
    path: str | Path,
    *,
    model_path: Path | None = None,
) -> Annotated:
    """Write the user's model with a plan's annotations.

    Weights in external files are referred to where they are if that is in `path`'s folder or
    below it; otherwise their files are copied beside `path`.

    Args:
        schedule: The plan's tasks: nodes with their placements and pipeline phases.
        path: The .onnx file to write; an existing one is replaced in one step.
        model_path: The model's own file, which is never replaced; None for a model in memory.

    Raises:
        AnnotateError: The annotations of the plan would not be valid.
        FileError: The file cannot be written, or is the model itself.
    """
    target = Path(path)
    if model_path is not None:
        refuse_to_replace(model_path, target)
    model, left_out = annotated_model(traced, schedule, cluster)
    copies = _relocate(model, traced.folder, target)
    try:
        data = model.SerializeToString()
    except (ValueError, EncodeError):
        raise FileError(f"cannot write {target}: the model is over 2 GiB") from None
    write_files({**copies, target: data})
    nodes = sum(
        any(config.configuration_id == CONFIGURATION for config in node.device_configurations)
        for node in model.graph.node
    )
    return Annotated(target, nodes, len(cluster.devices), left_out)


def annotated_model(
    traced: Traced, schedule: Schedule, cluster: Cluster
) -> tuple[ModelProto, tuple[LeftOut, ...]]:
    """The model with its annotations, or an AnnotateError; references to files are as they were."""
    whole, model = traced.whole, ModelProto()
    if whole.functions:  # inlined as tracing inlines it
        read = onnx_ir.from_proto(whole)
        InlinePass()(read)
        model = onnx_ir.to_proto(read)
    else:
        model.CopyFrom(whole)
    # the annotations of an earlier run go; configurations of other names stay
    others = [item for item in model.configuration if item.name != CONFIGURATION]
    del model.configuration[:]
    model.configuration.extend(others)
    for node in model.graph.node:
        kept = [c for c in node.device_configurations if c.configuration_id != CONFIGURATION]
        del node.device_configurations[:]
        node.device_configurations.extend(kept)
    names = (f"{device.name}:{i}" for i, device in enumerate(cluster.devices))
    model.configuration.add(name=CONFIGURATION, num_devices=len(cluster.devices), device=names)
    model.ir_version = max(model.ir_version, IR_VERSION)
    left_out = tuple(_annotate_nodes(model, traced.graph, schedule))
    results = {name for node in model.graph.node for name in node.output}
    known = {*results, *(t.name for t in model.graph.initializer), *traced.graph.inputs}
    shapes = {  # of the tensors that keep their name through tracing
        name: tuple(dim.symbol or dim.size for dim in type_.dims)
        for name, type_ in traced.graph.types.items()
        if name in known
    }
    problem = next(annotation_problems(model, shapes), None)
    if problem is not None:
        raise AnnotateError(f"the annotations of this plan are not valid: {problem}")
    return model, left_out


def _annotate_nodes(model: ModelProto, graph: Graph, schedule: Schedule) -> Iterator[LeftOut]:
    makers = {name: node for node in model.graph.node for name in node.output if name}
    computes = [(task.placed, task.hops) for task in schedule.tasks if task.placed is not None]
    staged = len({phase for _, phase in computes}) > 1
    for placed, phase in computes:
        node = _matching_node(makers, placed)
        if node is None:
            yield LeftOut(placed.node.name, "", "tracing made this node; the file has none like it")
            continue
        config = node.device_configurations.add(configuration_id=CONFIGURATION)
        if staged:
            config.pipeline_stage = phase
        yield from _add_specs(config, node, placed, graph)


def _matching_node(makers: Mapping[str, NodeProto], placed: PlacedNode) -> NodeProto | None:
    """The model's node that a traced node stands for; None if the file has no such node."""
    domain, _, op = placed.node.op.rpartition("::")
    for index, name in enumerate(placed.node.outputs):
        node = makers.get(name)
        while node is not None and (node.domain, node.op_type) != (domain, op):
            passes_on = node.op_type in _PASS_ON and not node.domain and len(node.input) > 0
            name = node.input[0] if passes_on else ""
            node = makers.get(name)
        if node is not None and index < len(node.output) and node.output[index] == name:
            operands = zip_longest(placed.node.inputs, node.input, fillvalue="")
            results = zip_longest(placed.node.outputs, node.output, fillvalue="")
            # both have operands and results at the same positions
            is_like = all(bool(ours) == bool(theirs) for ours, theirs in (*operands, *results))
            return node if is_like else None
    return None


def _add_specs(
    config: NodeDeviceConfigurationProto, node: NodeProto, placed: PlacedNode, graph: Graph
) -> Iterator[LeftOut]:
    tensors = [*zip(node.input, placed.node.inputs, placed.ins, strict=False)]
    tensors += zip(node.output, placed.node.outputs, placed.outs, strict=False)
    placements: dict[str, set[Placement]] = defaultdict(set)
    for tensor, _, at in tensors:
        if tensor and at is not None:
            placements[tensor].add(at)
    values = {tensor: value for tensor, value, _ in tensors}
    for tensor, places in placements.items():
        if len(places) > 1:
            yield LeftOut(node.name, tensor, "the node reads it in two layouts")
            continue
        try:
            type_ = graph.types[values[tensor]]
            config.sharding_spec.append(sharding_spec(tensor, type_, *places))
        except NotInStandardError as error:
            yield LeftOut(node.name, tensor, str(error))


def _relocate(model: ModelProto, folder: Path | None, target: Path) -> dict[Path, Path]:
    """Make references to external files relative to `target`'s folder; the files to copy there.

    Files in that folder, or below it, stay where they are (ONNX allows no ".."). The others are to
    be copied beside `target`, under its name. `folder` is what references were relative to, if any.
    """
    outside = [t for t in all_tensors(model) if t.data_location == TensorProto.EXTERNAL]
    entries = [entry for t in outside for entry in t.external_data if entry.key == "location"]
    if folder is None:
        return {}
    copies: dict[Path, Path] = {}
    locations: dict[str, str] = {}
    for location in dict.fromkeys(entry.value for entry in entries):
        file = folder / location
        try:
            locations[location] = file.resolve().relative_to(target.parent.resolve()).as_posix()
        except ValueError:  # the file is not below the folder
            place = target.with_name(f"{target.name}.{len(copies)}.data")
            copies[place] = file
            locations[location] = place.name
    for entry in entries:
        entry.value = locations[entry.value]
    return copies


@dataclass(frozen=True)
class _Factor:
    """A fused factor of a dim: its size, and the equal blocks that it is cut into."""

    size: int
    shards: int


def sharding_spec(tensor: str, type_: TensorType, at: Placement) -> ShardingSpecProto:
    """A placement as ONNX's spec (IR 11) of a tensor of this name in its node, and of this type.

    The standard cuts a dim evenly: into `num_shards` blocks of equal size or, if the dim is several
    fused factors (major first), each factor into such blocks. Shards are numbered row-major over
    the cut dims and their factors; shard i lies on `device[i]`, a device or, below 0, a group of
    devices that all hold it. The standard cannot express a pending sum, and leaves uneven cuts to
    the backend. Source: onnx.proto and docs/proposals/ONNXMultiDeviceProposal.md of onnx/onnx.

    Raises:
        NotInStandardError: A pending reduction, or a cut that is not even.
    """
    if at.sharding.partial:
        pending = ", ".join(f"{reduce} over {axis}" for axis, reduce in at.sharding.partial)
        raise NotInStandardError(f"a pending {pending}")
    factors = [_factors(dim, at.mesh, type_.dims[i].size) for i, dim in enumerate(at.sharding.dims)]
    spec = ShardingSpecProto(tensor_name=tensor)
    holders: dict[tuple[Pieces, ...], list[int]] = defaultdict(list)
    for device, pieces in at.parts():
        holders[pieces].append(device)
    groups: dict[tuple[int, ...], int] = {}  # several devices of a shard: -1, -2, ...
    for shard in itertools.product(*(list(_blocks(parts)) for parts in factors)):
        devices = tuple(holders[shard])
        if len(devices) == 1:
            spec.device.append(devices[0])
            continue
        if devices not in groups:
            groups[devices] = -1 - len(groups)
            spec.index_to_device_group_map.add(key=groups[devices], value=devices)
        spec.device.append(groups[devices])
    for axis, (parts, dim) in enumerate(zip(factors, type_.dims, strict=True)):
        if all(part.shards == 1 for part in parts):
            continue
        sharded = spec.sharded_dim.add(axis=axis)
        for part in parts:
            simple = sharded.simple_sharding.add(num_shards=part.shards)
            if len(parts) == 1 and dim.symbol is not None:
                simple.dim_param = dim.symbol
            else:
                simple.dim_value = part.size
    return spec


def _factors(layout: DimLayout, mesh: DeviceMesh, size: int) -> tuple[_Factor, ...]:
    """Find at most two factors of a dim whose blocks are exactly the parts of the layout.

    Even cuts of the dim are tried, then those of a major and a minor factor, one of them or both. A
    factor of n under a cut of its major factor into k makes n - k + 1 segments.
    """
    if not layout.axes:
        return (_Factor(size, 1),)
    parts = {layout.pieces(mesh, point) for _, point in mesh.coords()}
    shards = mesh.size(layout.axes)
    divisors = [n for n in range(1, shards + 1) if shards % n == 0]
    majors = {1, *(len(layout.segments) + n - 1 for n in divisors)}
    for major, outer in itertools.product(sorted(majors), divisors):
        minor, inner = layout.size // major, shards // outer
        if layout.size % major == 0 and major % outer == 0 and minor % inner == 0:
            pair = (_Factor(major, outer), _Factor(minor, inner))
            factors = tuple(part for part in pair if part.size > 1)
            blocks = list(_blocks(factors))
            if len(parts) == len(blocks) and parts == set(blocks):
                return factors
    raise NotInStandardError(f"cut {layout} of a dim of {size}: not in equal blocks")


def _blocks(factors: Sequence[_Factor]) -> Iterator[Pieces]:
    """The elements of each shard of a dim, row-major over its factors."""
    major, minor = (_Factor(1, 1), *factors)[-2:]
    rows, width = major.size // major.shards, minor.size // minor.shards
    for outer, inner in itertools.product(range(major.shards), range(minor.shards)):
        lines = range(outer * rows, (outer + 1) * rows)
        if not width:
            yield ()
        elif width == minor.size:  # whole lines are one run
            yield ((outer * rows * width, rows * width),) if rows else ()
        else:
            yield tuple((line * minor.size + inner * width, width) for line in lines)
