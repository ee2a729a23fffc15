"""Tensor parallelism pins weight matrices where they are made and read, and the batch whole."""

import numpy as np
import torch
from onnx import helper
from torch import Tensor, nn

from helpers.onnx_files import onnx_models as om
from partitioner.frontends.model import open_model
from partitioner.frontends.onnx.load import load_onnx
from partitioner.ir.graph import Graph
from partitioner.strategies.kinds.kind import Asked
from partitioner.strategies.kinds.tensor import tensor_constraints


class Layers(nn.Module):
    """A table and two matrices, of which one has a dim of 1."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.up, self.down = nn.Embedding(6, 4), nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.down(self.up(self.words(ids)).relu()).square().mean()


def cut_by(graph: Graph, size: int = 2) -> dict[str, set[tuple[str, str]]]:
    """Tensors that are cut for each weight, with the side that is, and what is not cut."""
    pins: dict[str, set[tuple[str, str]]] = {}
    for pin in tensor_constraints(Asked(graph, {"tp": size})).pins:
        assert (pin.axis, pin.cut, pin.dim) == ("tp", not pin.replicate, None)
        pins.setdefault(pin.text.removeprefix("parallel tp: "), set()).add((pin.tensor, pin.side))
    return pins


def layers(*, training: bool) -> Graph:
    ids = torch.zeros(3, 2, dtype=torch.int64)
    return open_model(Layers(), (ids,), training=training).graph


def test_matrices_of_onnx_are_cut_where_products_alone_read_them() -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "first"], ["a"]),
        helper.make_node("Gemm", ["a", "second", "bias"], ["b"]),
        helper.make_node("MatMul", ["b", "also added"], ["c"]),
        helper.make_node("Add", ["c", "also added"], ["y"]),
    ]
    names = "first", "second", "bias", "also added"
    weights = {name: np.ones((8, 8), np.float32) for name in names}
    ends = {"x": ("float32", (8, 8))}, {"y": ("float32", (8, 8))}
    assert cut_by(load_onnx(om.model(nodes, *ends, weights)).graph) == {
        "batch of 'x'": {("x", "")},
        "weight 'first'": {("first", "read")},
        "weight 'second'": {("second", "read")},
    }


def test_in_inference_products_read_matrices_through_views() -> None:
    assert cut_by(layers(training=False)) == {
        "batch of 'ids'": {("ids", "")},
        "weight 'up.weight'": {("t", "read")},
        "weight 'down.weight'": {("t_1", "read")},
    }


def test_in_training_matrices_are_made_and_read_in_parts() -> None:
    """Tables, too; no bias."""
    pins = cut_by(layers(training=True))
    parameters = ["words.weight", "up.weight", "down.weight"]
    assert list(pins) == ["batch of 'ids'", *(f"parameter {name!r}" for name in parameters)]
    for name in parameters:
        of_weight = pins[f"parameter {name!r}"]
        assert (name, "made") in of_weight
        assert (f"{name}.forward", "read") in of_weight
        assert {side for tensor, side in of_weight if tensor != name} == {"read"}


def test_a_matrix_with_no_dim_of_so_many_parts_stays_whole() -> None:
    """Eight parts: only `up` has a dim that they divide, and `down` the same."""
    assert set(cut_by(layers(training=True), size=8)) == {
        "batch of 'ids'",
        "parameter 'up.weight'",
        "parameter 'down.weight'",
    }
