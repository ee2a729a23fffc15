"""`partition check`: is a model with multi-device annotations valid?"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import onnx_ir
from onnx import ModelProto
from onnx_shape_inference import infer_symbolic_shapes

from partitioner.annotations.check import (
    Problem,
    Shapes,
    annotated_nodes,
    annotation_problems,
)
from partitioner.annotations.dims import Shape
from partitioner.frontends.errors import FrontendError, one_line
from partitioner.frontends.onnx.read import parse_file, read_source


@dataclass(frozen=True)
class Checked:
    """What a check found.

    Attributes:
        nodes: Number of annotated nodes.
        devices: Devices of each configuration, by its name.
        problems: Everything that is wrong.
        unknown: Annotated tensors whose shape is not known, so that their dims are unchecked.
    """

    nodes: int
    devices: dict[str, int]
    problems: tuple[Problem, ...]
    unknown: tuple[str, ...]

    def __str__(self) -> str:
        if self.problems:
            return "\n".join(map(str, self.problems))
        sizes = sorted(set(self.devices.values()))
        lines = [f"ok: {self.nodes} nodes annotated for {' and '.join(map(str, sizes))} devices"]
        if self.unknown:
            named = ", ".join(map(repr, self.unknown[:3]))
            lines.append(f"{len(self.unknown)} tensors have no known shape: {named}")
        return "\n".join(lines)


def check(model: str | Path | ModelProto) -> list[Problem]:
    """Everything that is wrong with a model and its annotations; empty if it is valid.

    Args:
        model: Path of an .onnx file, or the message.

    Raises:
        FrontendError: The file cannot be read.
    """
    return list(check_model(model).problems)


def check_model(model: str | Path | ModelProto) -> Checked:
    """Run ONNX's checker, then our own over the annotations (see `check`).

    Raises:
        FrontendError: The file cannot be read.
    """
    proto = model if isinstance(model, ModelProto) else parse_file(Path(model))
    invalid: list[Problem] = []
    shapes: Shapes = {}
    try:
        shapes = _shapes(read_source(model).proto)
    except FrontendError as error:
        invalid.append(Problem("", "", str(error)))
    nodes = annotated_nodes(proto)
    if not nodes:
        invalid.append(Problem("", "", "no node has multi-device annotations"))
    return Checked(
        nodes=len(nodes),
        devices={item.name: item.num_devices for item in proto.configuration},
        problems=(*invalid, *annotation_problems(proto, shapes)),
        unknown=_unknown(proto, shapes),
    )


def _shapes(proto: ModelProto) -> Shapes:
    """Shapes of the main graph's tensors, inferred; `proto` has passed the front end's checks.

    Args:
        proto: Loses its annotations.

    Raises:
        FrontendError: Shapes contradict each other.
    """
    for node in annotated_nodes(proto):
        node.ClearField(
            "device_configurations"
        )  # onnx_ir would resolve their names, right or wrong
    read = onnx_ir.from_proto(proto)
    try:
        infer_symbolic_shapes(read, warn_on_missing=False)
    except ValueError as error:
        raise FrontendError(f"shapes do not fit: {one_line(error)}") from error
    graph = read.graph
    values = [*graph.inputs, *graph.initializers.values()]
    values += [value for node in graph for value in node.outputs]
    return {
        value.name: _shape(value.shape)
        for value in values
        if value.name and value.shape is not None
    }


def _shape(shape: onnx_ir.Shape) -> Shape:
    return tuple(dim if isinstance(dim, int) else dim.value for dim in shape)


def _unknown(proto: ModelProto, shapes: Shapes) -> tuple[str, ...]:
    specs = (
        spec
        for node in annotated_nodes(proto)
        for item in node.device_configurations
        for spec in item.sharding_spec
        if spec.sharded_dim
    )
    return tuple(dict.fromkeys(s.tensor_name for s in specs if s.tensor_name not in shapes))
