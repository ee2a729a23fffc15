"""`partition check`: a validator of ONNX's multi-device annotations (IR 11).

ONNX's own checker ignores them. Rules marked [onnx.proto] stand in the comments of that file,
[proposal] in docs/proposals/ONNXMultiDeviceProposal.md of onnx/onnx; the others follow from what
the fields mean. See docs/reference/annotations.md.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import onnx_ir
from onnx import (
    DeviceConfigurationProto,
    ModelProto,
    NodeProto,
    ShardedDimProto,
    ShardingSpecProto,
)
from onnx_shape_inference import infer_symbolic_shapes

from partitioner.frontends.errors import FrontendError, one_line
from partitioner.frontends.onnx.inferring.corrections import correct_inference
from partitioner.frontends.onnx.reading.checks import node_lists
from partitioner.frontends.onnx.reading.read import parse_file, read_source

#: IR version that brought the annotations.
IR_VERSION = 11

Shape = tuple[int | str | None, ...]  #: Sizes; a symbol or None where a size is not known.
Shapes = Mapping[str, Shape]
_KeyT = TypeVar("_KeyT", int, str)


@dataclass(frozen=True)
class Problem:
    """A broken rule."""

    node: str  #: Name of the node; "" for the model as a whole.
    tensor: str  #: Name of the tensor; "" for the node as a whole.
    message: str  #: The broken rule, with the values.

    def __str__(self) -> str:
        where = f"node {self.node!r}" if self.node else "model"
        return f"{where}{f', tensor {self.tensor!r}' if self.tensor else ''}: {self.message}"


@dataclass(frozen=True)
class Checked:
    """The result of a check."""

    nodes: int  #: Number of annotated nodes.
    #: Numbers of devices of the model's configurations, ascending, each once.
    devices: tuple[int, ...]
    #: Everything that is wrong; empty if the model and its annotations are valid.
    problems: tuple[Problem, ...]
    #: Annotated tensors whose shape is not known, so that their dims are unchecked.
    unknown: tuple[str, ...]

    def __str__(self) -> str:
        if self.problems:
            return "\n".join(map(str, self.problems))
        lines = [
            f"ok: {self.nodes} nodes annotated for {' and '.join(map(str, self.devices))} devices"
        ]
        if self.unknown:
            named = ", ".join(map(repr, self.unknown[:3]))
            lines.append(f"{len(self.unknown)} tensors have no known shape: {named}")
        return "\n".join(lines)


def check_annotations(model: str | Path | ModelProto) -> Checked:
    """Run ONNX's checker over a model, then the rules of annotations.

    Args:
        model: Path of an .onnx file, or the message.

    Raises:
        FrontendError: The file cannot be read.
    """
    proto = model if isinstance(model, ModelProto) else parse_file(Path(model))
    nodes = annotated_nodes(proto)
    problems: list[Problem] = []
    shapes: Shapes = {}
    try:
        shapes = _inferred_shapes(read_source(model).proto)
    except FrontendError as error:
        problems.append(Problem("", "", str(error)))
    if not nodes:
        problems.append(Problem("", "", "no node has multi-device annotations"))
    cut = (
        spec.tensor_name
        for node in nodes
        for item in node.device_configurations
        for spec in item.sharding_spec
        if spec.sharded_dim
    )
    return Checked(
        nodes=len(nodes),
        devices=tuple(sorted({item.num_devices for item in proto.configuration})),
        problems=(*problems, *annotation_problems(proto, shapes)),
        unknown=tuple(dict.fromkeys(name for name in cut if name not in shapes)),
    )


def _inferred_shapes(proto: ModelProto) -> Shapes:
    """Shapes of the main graph's tensors, else a FrontendError; `proto` loses its annotations."""
    for node in annotated_nodes(proto):  # onnx_ir would resolve their names, right or wrong
        node.ClearField("device_configurations")
    correct_inference()
    read = onnx_ir.from_proto(proto)
    try:
        infer_symbolic_shapes(read, warn_on_missing=False)
    except ValueError as error:
        raise FrontendError(f"shapes do not fit: {one_line(error)}") from error
    graph = read.graph
    values = [*graph.inputs, *graph.initializers.values()]
    values += [value for node in graph for value in node.outputs]
    return {
        value.name: tuple(dim if isinstance(dim, int) else dim.value for dim in value.shape)
        for value in values
        if value.name and value.shape is not None
    }


def annotation_problems(model: ModelProto, shapes: Shapes) -> Iterator[Problem]:
    """Every problem of a model's annotations; `shapes` are of the main graph, as far as known."""
    if (annotated_nodes(model) or model.configuration) and model.ir_version < IR_VERSION:
        yield Problem(
            "", "", f"IR version {model.ir_version} has no annotations; it must be {IR_VERSION}"
        )
    configurations: dict[str, DeviceConfigurationProto] = {}
    for item in model.configuration:
        yield from (Problem("", "", message) for message in _configuration(item, configurations))
        configurations.setdefault(item.name, item)
    for index, nodes in enumerate(node_lists(model)):
        for node in nodes:
            yield from _node(node, configurations, shapes if index == 0 else {})
        yield from _stages(nodes)


def annotated_nodes(model: ModelProto) -> tuple[NodeProto, ...]:
    """Nodes with annotations, in the order of `node_lists`."""
    return tuple(n for nodes in node_lists(model) for n in nodes if n.device_configurations)


def _name(node: NodeProto) -> str:
    return node.name or f"{node.op_type} -> {next(iter(node.output), '')}"


def _repeated(counts: Counter[_KeyT]) -> list[tuple[_KeyT, int]]:
    return sorted((key, count) for key, count in counts.items() if count > 1)


def _configuration(
    item: DeviceConfigurationProto, before: Mapping[str, DeviceConfigurationProto]
) -> Iterator[str]:
    if not item.name:  # [onnx.proto] MUST be present
        yield "a configuration has no name"
    elif item.name in before:
        yield f"two configurations are called {item.name!r}"
    if item.num_devices < 1:  # [onnx.proto] MUST be present
        yield f"configuration {item.name!r} has {item.num_devices} devices; at least 1 is needed"
    elif len(item.device) not in (0, item.num_devices):  # [onnx.proto]
        yield (
            f"configuration {item.name!r} names {len(item.device)} devices, "
            f"num_devices is {item.num_devices}"
        )


def _node(
    node: NodeProto, configurations: Mapping[str, DeviceConfigurationProto], shapes: Shapes
) -> Iterator[Problem]:
    ids = Counter(item.configuration_id for item in node.device_configurations)
    for name, count in _repeated(ids):
        yield Problem(_name(node), "", f"configuration {name!r} is given {count} times")
    for item in node.device_configurations:
        known = configurations.get(item.configuration_id)
        if known is None:  # [onnx.proto] MUST match the name of a DeviceConfigurationProto
            message = f"configuration {item.configuration_id!r} is not one of the model"
            yield Problem(_name(node), "", message)
        if item.pipeline_stage < 0:
            yield Problem(_name(node), "", f"pipeline stage {item.pipeline_stage} is below 0")
        for name, count in _repeated(Counter(spec.tensor_name for spec in item.sharding_spec)):
            yield Problem(_name(node), name, f"has {count} sharding specs; one is possible")
        devices = known.num_devices if known else None
        for spec in item.sharding_spec:
            name = spec.tensor_name
            if not name or name not in (*node.input, *node.output):
                # [onnx.proto] required to match a name in the node's lists
                yield Problem(_name(node), name, "is neither an input nor an output of the node")
            for message in (*_devices(spec, devices), *_dims(spec, shapes.get(name))):
                yield Problem(_name(node), name, message)


def _devices(spec: ShardingSpecProto, devices: int | None) -> Iterator[str]:
    """Every entry of `device` is a device or a group; no device holds two shards."""
    groups = {entry.key: list(entry.value) for entry in spec.index_to_device_group_map}
    for key, count in _repeated(Counter(entry.key for entry in spec.index_to_device_group_map)):
        yield f"group {key} is given {count} times"
    if not spec.device:
        yield "names no device"
    holders = Counter[int]()
    for entry in spec.device:
        if entry < 0 and entry not in groups:
            yield f"group {entry} is not in index_to_device_group_map"
            continue
        holders.update(groups.get(entry, [entry]))
    # [onnx.proto] a group is a set of devices, so groups of groups, and cycles, cannot be
    for key, members in sorted(groups.items()):
        yield from [] if members else [f"group {key} is empty"]
        yield from (f"group {key} holds {one}; a group holds devices" for one in members if one < 0)
    for device in sorted({*holders, *(d for group in groups.values() for d in group)}):
        if device not in groups and not 0 <= device < (devices or device + 1):
            rule = f"0 .. {devices - 1}" if devices else "0, 1, ..."
            yield f"device {device} is not in {rule}"
    for device, count in _repeated(holders):
        yield f"device {device} is named {count} times; it holds one shard"
    shards = math.prod(part.num_shards for dim in spec.sharded_dim for part in dim.simple_sharding)
    if spec.device and shards not in (1, len(spec.device)):  # [proposal]
        yield f"{shards} shards for {len(spec.device)} entries of device"


def _dims(spec: ShardingSpecProto, shape: Shape | None) -> Iterator[str]:
    """The cut dims fit the tensor's shape; without a shape, sizes and ranks are unchecked."""
    rank = None if shape is None else len(shape)
    axes: Counter[int] = Counter()
    for dim in spec.sharded_dim:
        if not dim.HasField("axis"):  # [onnx.proto] MUST be present
            yield "a sharded dim has no axis"
            continue
        if rank is not None and not -rank <= dim.axis < rank:  # [onnx.proto]
            yield f"axis {dim.axis} is not in {-rank} .. {rank - 1}"
            continue
        axis = dim.axis + (rank or 0) if dim.axis < 0 else dim.axis
        axes[axis] += 1
        size = shape[axis] if shape is not None else None
        yield from (f"axis {dim.axis}: {message}" for message in _dim(dim, size))
    for axis, count in _repeated(axes):
        yield f"axis {axis} is given {count} times"


def _dim(dim: ShardedDimProto, size: int | str | None) -> Iterator[str]:
    if not dim.simple_sharding:
        yield "has no simple_sharding"
    for part in dim.simple_sharding:
        if part.num_shards < 1:  # [onnx.proto] MUST be present
            yield f"is cut into {part.num_shards} shards; at least 1 is needed"
        elif part.WhichOneof("dim") == "dim_value" and part.num_shards > part.dim_value:
            yield f"is {part.num_shards} shards of {part.dim_value} elements"
    yield from _sizes(dim, size)


def _sizes(dim: ShardedDimProto, size: int | str | None) -> Iterator[str]:
    parts = list(dim.simple_sharding)
    sizes = [part.WhichOneof("dim") for part in parts]
    if len(parts) > 1 and None in sizes:
        yield "has several parts, of which each must give its size"
    if not isinstance(size, int) or not parts:
        return
    if "dim_param" in sizes:
        name = parts[sizes.index("dim_param")].dim_param
        yield f"is called {name!r}, but its size is {size}"
    elif None not in sizes:
        elements = math.prod(part.dim_value for part in parts)
        if elements != size:
            yield f"has {elements} elements in the spec and {size} in the tensor"
    elif (shards := math.prod(part.num_shards for part in parts)) > size:
        yield f"is {shards} shards of {size} elements"


def _stages(nodes: Iterable[NodeProto]) -> Iterator[Problem]:
    """Check that no node reads a value of a later stage (the standard only calls stages a hint).

    Values pass through nodes without a stage.
    """
    staged: dict[tuple[str, str], tuple[int, str]] = {}  # (configuration, value) -> stage, producer
    configurations: set[str] = set()
    for node in nodes:
        stages = {
            item.configuration_id: item.pipeline_stage
            for item in node.device_configurations
            if item.HasField("pipeline_stage")
        }
        configurations.update(stages)
        for config in sorted(configurations):
            reads = [(*staged[config, v], v) for v in node.input if (config, v) in staged]
            latest = max(reads, default=None)
            stage = stages.get(config, latest[0] if latest else None)
            if stage is None:
                continue
            if latest is not None and latest[0] > stage:
                yield Problem(
                    _name(node),
                    latest[2],
                    f"is made in pipeline stage {latest[0]} by {latest[1]!r}, "
                    f"but read in stage {stage}",
                )
            producer = _name(node) if config in stages or latest is None else latest[1]
            staged.update({(config, value): (stage, producer) for value in node.output if value})
