"""`partition check`: a check of a model with multi-device annotations."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import onnx_ir
from onnx import ModelProto
from onnx_shape_inference import infer_symbolic_shapes

from partitioner.annotations.check import Problem, Shapes, annotated_nodes, annotation_problems
from partitioner.frontends.errors import FrontendError, one_line
from partitioner.frontends.onnx.inferring.corrections import correct_inference
from partitioner.frontends.onnx.reading.read import parse_file, read_source


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
    """Shapes of the main graph's tensors; `proto` is ours and loses its annotations.

    Raises:
        FrontendError: Shapes contradict each other.
    """
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
