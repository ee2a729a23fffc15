"""A validator of ONNX's multi-device annotations (IR 11), of which ONNX's own checker sees nothing.

Rules marked [onnx.proto] stand in the comments of that file, [proposal] in
docs/proposals/ONNXMultiDeviceProposal.md of onnx/onnx; the others follow from what the fields
mean. See docs/reference/annotations.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from onnx import (
    DeviceConfigurationProto,
    ModelProto,
    NodeDeviceConfigurationProto,
    NodeProto,
    ShardingSpecProto,
)

from partitioner.annotations.dims import Shape, dim_problems, shard_count
from partitioner.frontends.onnx.checks import nested_graphs

#: IR version that brought the annotations.
IR_VERSION = 11

Shapes = Mapping[str, Shape]


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong.

    Attributes:
        node: Name of the node; "" for the model as a whole.
        tensor: Name of the tensor; "" for the node as a whole.
        what: What is wrong, with the values.
    """

    node: str
    tensor: str
    what: str

    def __str__(self) -> str:
        where = f"node {self.node!r}" if self.node else "model"
        return f"{where}{f', tensor {self.tensor!r}' if self.tensor else ''}: {self.what}"


def annotation_problems(model: ModelProto, shapes: Shapes) -> tuple[Problem, ...]:
    """Everything that is wrong with a model's annotations.

    Args:
        model: Any model.
        shapes: Shapes of the main graph's tensors, as far as known: sizes, symbols, None.
    """
    return tuple(_problems(model, shapes))


def annotated_nodes(model: ModelProto) -> tuple[NodeProto, ...]:
    """Nodes with annotations: of the graph, then inside subgraphs, then of functions."""
    return tuple(
        node for nodes, _ in _bodies(model) for node in nodes if node.device_configurations
    )


def name_of(node: NodeProto) -> str:
    """The node's name, or its op and first result."""
    return node.name or f"{node.op_type} -> {next(iter(node.output), '')}"


def _problems(model: ModelProto, shapes: Shapes) -> Iterator[Problem]:
    annotated = annotated_nodes(model)
    if (annotated or model.configuration) and model.ir_version < IR_VERSION:
        yield Problem(
            "", "", f"IR version {model.ir_version} has no annotations; it must be {IR_VERSION}"
        )
    configurations: dict[str, DeviceConfigurationProto] = {}
    for item in model.configuration:
        yield from (Problem("", "", what) for what in _configuration(item, configurations))
        configurations.setdefault(item.name, item)
    for nodes, is_main in _bodies(model):
        for node in nodes:
            yield from _node(node, configurations, shapes if is_main else {})
        yield from _stages(nodes)


def _bodies(model: ModelProto) -> Iterator[tuple[Iterable[NodeProto], bool]]:
    """Lists of nodes, and whether it is the main graph's."""
    yield model.graph.node, True
    for graph in nested_graphs(model.graph.node):
        yield graph.node, False
    for function in model.functions:
        yield function.node, False
        for graph in nested_graphs(function.node):
            yield graph.node, False


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
    problem = partial(Problem, name_of(node))
    ids = Counter(item.configuration_id for item in node.device_configurations)
    for name in sorted(name for name, count in ids.items() if count > 1):
        yield problem("", f"configuration {name!r} is given {ids[name]} times")
    for item in node.device_configurations:
        known = configurations.get(item.configuration_id)
        if known is None:  # [onnx.proto] MUST match the name of a DeviceConfigurationProto
            yield problem("", f"configuration {item.configuration_id!r} is not one of the model")
        if item.pipeline_stage < 0:
            yield problem("", f"pipeline stage {item.pipeline_stage} is below 0")
        yield from _specs(node, item, shapes, known.num_devices if known else None)


def _specs(
    node: NodeProto, item: NodeDeviceConfigurationProto, shapes: Shapes, devices: int | None
) -> Iterator[Problem]:
    own = {name for name in (*node.input, *node.output) if name}
    counts = Counter(spec.tensor_name for spec in item.sharding_spec)
    for name in sorted(name for name, count in counts.items() if count > 1):
        yield Problem(name_of(node), name, f"has {counts[name]} sharding specs; one is possible")
    for spec in item.sharding_spec:
        name = spec.tensor_name
        if name not in own:  # [onnx.proto] required to match a name in the node's lists
            yield Problem(name_of(node), name, "is neither an input nor an output of the node")
        found = [*_devices(spec, devices), *dim_problems(spec, shapes.get(name))]
        yield from (Problem(name_of(node), name, what) for what in found)


def _devices(spec: ShardingSpecProto, devices: int | None) -> Iterator[str]:
    """Every entry of `device` is a device or a group; no device holds two shards."""
    keys = Counter(entry.key for entry in spec.index_to_device_group_map)
    groups = {entry.key: list(entry.value) for entry in spec.index_to_device_group_map}
    for key in sorted(key for key, count in keys.items() if count > 1):
        yield f"group {key} is given {keys[key]} times"
    if not spec.device:
        yield "names no device"
    holders = Counter[int]()
    for entry in spec.device:
        if entry < 0 and entry not in groups:
            yield f"group {entry} is not in index_to_device_group_map"
            continue
        holders.update(groups.get(entry, [entry]))
    for key in sorted(groups):
        yield from _group(key, groups[key])
    known = sorted({*holders, *(d for group in groups.values() for d in group)})
    for device in known:
        if device not in groups and not 0 <= device < (devices or device + 1):
            rule = f"0 .. {devices - 1}" if devices else "0, 1, ..."
            yield f"device {device} is not in {rule}"
    for device in sorted(device for device, count in holders.items() if count > 1):
        yield f"device {device} is named {holders[device]} times; it holds one shard"
    shards = shard_count(spec)
    if spec.device and shards not in (1, len(spec.device)):  # [proposal]
        yield f"{shards} shards for {len(spec.device)} entries of device"


def _group(key: int, members: list[int]) -> Iterator[str]:
    """[onnx.proto] A group is a set of devices, so groups of groups, and cycles, cannot be."""
    if not members:
        yield f"group {key} is empty"
    for member in members:
        if member < 0:
            yield f"group {key} holds {member}; a group holds devices"


def _stages(nodes: Iterable[NodeProto]) -> Iterator[Problem]:
    """No node reads what a later stage makes (the standard calls stages a hint and says no more).

    Values pass through nodes without a stage.
    """
    made: dict[tuple[str, str], tuple[int, str]] = {}
    names: set[str] = set()
    for node in nodes:
        stages = {
            item.configuration_id: item.pipeline_stage
            for item in node.device_configurations
            if item.HasField("pipeline_stage")
        }
        names.update(stages)
        for config in sorted(names):
            reads = [(*made[config, v], v) for v in node.input if (config, v) in made]
            latest = max(reads, default=None)
            stage = stages.get(config, latest[0] if latest else None)
            if stage is None:
                continue
            if latest is not None and latest[0] > stage:
                yield Problem(
                    name_of(node),
                    latest[2],
                    f"is made in pipeline stage {latest[0]} by {latest[1]!r}, "
                    f"but read in stage {stage}",
                )
            maker = name_of(node) if config in stages or latest is None else latest[1]
            made.update({(config, value): (stage, maker) for value in node.output if value})
