"""A plan as ONNX's own multi-device annotations (IR 11), in a copy of the user's model.

The file computes what the model computes: annotations change no node. A traced node is matched
with the model's node that makes the same value; nodes that tracing folded away get none, and by
the standard take over the sharding of their inputs. A model with functions is inlined first,
since one body serves several calls. See docs/reference/annotations.md.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import onnx_ir
from google.protobuf.message import EncodeError  # type: ignore[import-untyped]
from onnx import ModelProto, NodeDeviceConfigurationProto, NodeProto
from onnx_ir.passes.common import InlinePass

from partitioner.annotations.check import annotation_problems
from partitioner.annotations.external_data import relocate
from partitioner.annotations.specs import NotInStandardError, sharding_spec
from partitioner.compiled.onnx_model import Compiled
from partitioner.files import FileError, refuse_to_replace, write_files
from partitioner.ir.errors import PartitionerError
from partitioner.ir.layout import Placement
from partitioner.ir.plan import PlacedNode

#: Annotations came with this IR version.
IR_VERSION = 11
#: Name of our configuration in the model; one of that name is replaced.
CONFIGURATION = "partitioner"
#: Ops that tracing removes where they only hand their operand on.
_HANDS_ON = frozenset({"Dropout", "Identity"})
_MAX_NAMED = 5


class AnnotateError(PartitionerError, ValueError):
    """A plan that cannot be written as annotations."""


@dataclass(frozen=True)
class LeftOut:
    """Something of the plan that the file does not say.

    Attributes:
        node: Name of the node.
        tensor: Name of its tensor; "" if the whole node is left out.
        why: What there is no word for.
    """

    node: str
    tensor: str
    why: str


@dataclass(frozen=True)
class Annotated:
    """What was written.

    Attributes:
        path: The file.
        nodes: Number of nodes annotated.
        devices: Number of devices that they are annotated for.
        left_out: What could not be said, in the plan's order.
    """

    path: Path
    nodes: int
    devices: int
    left_out: tuple[LeftOut, ...]

    def lines(self) -> Iterator[str]:
        """What was left out, one line a reason, with the names of the first few."""
        by_reason: dict[str, list[str]] = defaultdict(list)
        for item in self.left_out:
            name = f"{item.tensor!r} of {item.node!r}" if item.tensor else repr(item.node)
            by_reason[item.why].append(name)
        for why, names in by_reason.items():
            more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
            yield f"not annotated: {', '.join(names[:_MAX_NAMED])}{more}: {why}"


def annotate(result: Compiled, path: str | Path) -> Annotated:
    """Write the model with the plan's annotations.

    Weights in external files are referred to where they are if that is in `path`'s folder or
    below it; otherwise their files are copied beside `path`.

    Args:
        result: A compiled model.
        path: The .onnx file to write; one that is there is replaced in one step.

    Returns:
        What was written, and what the standard has no words for.

    Raises:
        AnnotateError: The plan or the model cannot be written so.
        FileError: The file cannot be written, or is the model itself.
    """
    target = Path(path)
    if result.source.path is not None:
        refuse_to_replace(result.source.path, target)
    model, left_out = annotated_model(result)
    copies = relocate(model, result.traced.folder, target)
    try:
        data = model.SerializeToString()
    except (ValueError, EncodeError):
        raise FileError(f"cannot write {target}: the model is over 2 GiB") from None
    write_files({**copies, target: data})
    nodes = sum(bool(_own(node)) for node in model.graph.node)
    return Annotated(target, nodes, len(result.cluster.devices), left_out)


def annotated_model(result: Compiled) -> tuple[ModelProto, tuple[LeftOut, ...]]:
    """The model with its annotations, external data still where the model's folder has it.

    Raises:
        AnnotateError: See `annotate`.
    """
    model = _plain_model(result)
    _forget(model)
    names = (f"{device.name}:{i}" for i, device in enumerate(result.cluster.devices))
    model.configuration.add(
        name=CONFIGURATION, num_devices=len(result.cluster.devices), device=names
    )
    model.ir_version = max(model.ir_version, IR_VERSION)
    left_out = tuple(_annotate_nodes(model, result))
    problems = annotation_problems(model, _shapes(model, result))
    if problems:
        raise AnnotateError(f"the annotations of this plan are not valid: {problems[0]}")
    return model, left_out


def _plain_model(result: Compiled) -> ModelProto:
    """A copy of the user's model; without functions, as tracing inlines them."""
    whole = result.traced.whole
    if not whole.functions:
        model = ModelProto()
        model.CopyFrom(whole)
        return model
    read = onnx_ir.from_proto(whole)
    InlinePass()(read)
    return onnx_ir.to_proto(read)


def _forget(model: ModelProto) -> None:
    """Take out what an earlier run wrote; configurations of others stay."""
    others = [item for item in model.configuration if item.name != CONFIGURATION]
    del model.configuration[:]
    model.configuration.extend(others)
    for node in model.graph.node:
        kept = [c for c in node.device_configurations if c.configuration_id != CONFIGURATION]
        del node.device_configurations[:]
        node.device_configurations.extend(kept)


def _own(node: NodeProto) -> list[NodeDeviceConfigurationProto]:
    return [c for c in node.device_configurations if c.configuration_id == CONFIGURATION]


def _annotate_nodes(model: ModelProto, result: Compiled) -> Iterator[LeftOut]:
    found = _Nodes(model)
    stages = {task.phase for task in result.schedule.tasks if task.placed is not None}
    for task in result.schedule.tasks:
        placed = task.placed
        if placed is None:
            continue
        node = found.of(placed)
        if node is None:
            yield LeftOut(placed.node.name, "", "tracing made this node; the file has none like it")
            continue
        config = node.device_configurations.add(configuration_id=CONFIGURATION)
        if len(stages) > 1:
            config.pipeline_stage = task.phase
        yield from _add_specs(config, node, placed, result)


class _Nodes:
    """The model's nodes by what they make."""

    def __init__(self, model: ModelProto) -> None:
        self.maker = {name: node for node in model.graph.node for name in node.output if name}

    def of(self, placed: PlacedNode) -> NodeProto | None:
        """The node that a traced node stands for; None if the file has no such node."""
        domain, _, op = placed.node.op.rpartition("::")
        for index, name in enumerate(placed.node.outputs):
            node = self.maker.get(name)
            while node is not None and (node.domain, node.op_type) != (domain, op):
                handed = node.op_type in _HANDS_ON and not node.domain and len(node.input) > 0
                name = node.input[0] if handed else ""
                node = self.maker.get(name)
            if node is not None and index < len(node.output) and node.output[index] == name:
                return node if _alike(node, placed) else None
        return None


def _alike(node: NodeProto, placed: PlacedNode) -> bool:
    """Whether operands and results stand for one another, position by position."""
    ours, theirs = (placed.node.inputs, placed.node.outputs), (node.input, node.output)
    return all(
        bool(own) == bool(other)
        for pair in zip(ours, theirs, strict=True)
        for own, other in zip_longest(*pair, fillvalue="")
    )


def _add_specs(
    config: NodeDeviceConfigurationProto, node: NodeProto, placed: PlacedNode, result: Compiled
) -> Iterator[LeftOut]:
    tensors = [*zip(node.input, placed.node.inputs, placed.ins, strict=False)]
    tensors += zip(node.output, placed.node.outputs, placed.outs, strict=False)
    wanted: dict[str, set[Placement]] = defaultdict(set)
    for tensor, _, at in tensors:
        if tensor and at is not None:
            wanted[tensor].add(at)
    values = {tensor: value for tensor, value, _ in tensors}
    for tensor, places in wanted.items():
        if len(places) > 1:
            yield LeftOut(node.name, tensor, "the node reads it in two layouts")
            continue
        try:
            kind = result.graph.types[values[tensor]]
            config.sharding_spec.append(sharding_spec(tensor, kind, *places))
        except NotInStandardError as error:
            yield LeftOut(node.name, tensor, str(error))


def _shapes(model: ModelProto, result: Compiled) -> Mapping[str, tuple[int | str | None, ...]]:
    """Shapes of the tensors that keep their name through tracing."""
    types = result.graph.types
    made = Counter(name for node in model.graph.node for name in node.output)
    known = {*made, *(t.name for t in model.graph.initializer), *result.graph.inputs}
    return {
        name: tuple(dim.symbol or dim.size for dim in kind.dims)
        for name, kind in types.items()
        if name in known
    }
