"""A node as a device runs it: names of what is new are none of the model's."""

import numpy as np
import pytest
from onnx import helper

from helpers.onnx_files.onnx_models import model
from partitioner.frontends.onnx.load import load_onnx
from partitioner.ir.program import ProgramError
from partitioner.rewrites.micro_batch_graph import micro_batch_graph


def test_a_value_of_a_reserved_name_is_named() -> None:
    """The shape of the part would else be read in the place of the data."""
    data = "n.1.local"
    nodes = [helper.make_node("Reshape", [data, "shape"], ["y"], name="n")]
    shape = {"shape": np.array([4, 3], np.int64)}
    given = model(nodes, {data: ("float32", (4, 3, 1))}, {"y": ("float32", None)}, shape)
    with pytest.raises(ProgramError, match="bears a reserved name"):
        micro_batch_graph(load_onnx(given).graph, 2)
