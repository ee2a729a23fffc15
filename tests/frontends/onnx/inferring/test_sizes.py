"""Sizes and contents that are inferred are those of ONNX Runtime, over grids of its operators."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from helpers.drawn.drawn_contents import drawn
from helpers.onnx_files import onnx_models as om
from helpers.onnx_files.constant_models import bits, run
from partitioner.frontends.errors import FrontendError
from partitioner.frontends.onnx.load import load_onnx

FAR = (2**31 - 1, -(2**31), 2**63 - 1, -(2**63))


@dataclass
class Grid:
    """Many nodes in one model: of constants alone, or of inputs of the model and constants."""

    opset: int
    constant: bool
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    weights: dict[str, om.Array] = field(default_factory=dict)
    inputs: dict[str, om.Array] = field(default_factory=dict)
    types: dict[str, tuple[str, None]] = field(default_factory=dict)
    folded: int = 0

    def add(
        self, op: str, data: om.Array, operands: Sequence[om.Array | None], **attributes: Any
    ) -> None:
        name = f"n{len(self.nodes)}"
        held = self.weights if self.constant else self.inputs
        key = f"{data.dtype}{data.tobytes().hex()}{data.shape}"
        held.setdefault(key, data)
        names = [key]
        for index, operand in enumerate(operands):
            names.append("" if operand is None else f"{name}_{index}")
            if operand is not None:
                self.weights[names[-1]] = operand
        self.nodes.append(helper.make_node(op, names, [name], name, **attributes))
        self.types[name] = (data.dtype.name, None)

    def differences(self) -> list[str]:
        """The nodes whose results the front end reads otherwise than ONNX Runtime computes them.

        For the front end, an Identity stands behind each: results of a model are not folded.
        """
        inputs = {name: (x.dtype.name, x.shape) for name, x in self.inputs.items()}
        right = run(
            om.model(self.nodes, inputs, self.types, self.weights, opset=self.opset), self.inputs
        )
        behind = [helper.make_node("Identity", [name], [f"{name}_out"]) for name in self.types]
        outputs = {f"{name}_out": type_ for name, type_ in self.types.items()}
        nodes = [*self.nodes, *behind]
        graph = load_onnx(om.model(nodes, inputs, outputs, self.weights, opset=self.opset)).graph
        wrong = []
        for node, output, whole in zip(self.nodes, graph.outputs, right, strict=True):
            type_, last = graph.types[output], graph.producers[output]
            constant = graph.constants[last.inputs[0]] if last.op == "Identity" else None
            self.folded += constant is not None
            if type_.shape != whole.shape:
                wrong.append(f"{node}: {type_.shape}, not {whole.shape}")
            elif constant is not None and bits(constant.load()) != bits(whole):
                wrong.append(f"{node}: {constant.load()}, not {whole}")
        return wrong


def slices(sizes: Sequence[int], bounds: Sequence[int]) -> Iterator[tuple[int, int, int, int]]:
    """Size, start, end and step of each."""
    steps = (-3, -2, -1, 1, 2, 3)
    yield from itertools.product(sizes, bounds, bounds, steps)


def grid_of_slices(dtype: type, sizes: Sequence[int], *, constant: bool, far: bool) -> Grid:
    grid = Grid(17, constant)
    bounds = (*range(-7, 8), *FAR) if far else (-6, -2, 0, 3, 2**63 - 1, -(2**63))
    for size, start, end, step in slices(sizes, bounds):
        operands = [np.array([x]) for x in (start, end, 0, step)]
        grid.add("Slice", np.arange(1, size + 1, dtype=dtype), operands)
    return grid


@pytest.mark.parametrize("constant", [True, False])
def test_slices(constant: bool) -> None:
    grid = grid_of_slices(np.int64, [5], constant=constant, far=False)
    assert not grid.differences()
    assert len(grid.types) == 216
    assert grid.folded == 216 or not constant


@pytest.mark.slow
@pytest.mark.parametrize("constant", [True, False])
@pytest.mark.parametrize("dtype", [np.int64, np.float32])
def test_all_slices(dtype: type, constant: bool) -> None:
    grid = grid_of_slices(dtype, [5], constant=constant, far=True)
    assert len(grid.types) == 2166
    assert not grid.differences()


def resizes() -> Iterator[tuple[Mapping[str, Any], Sequence[om.Array | None]]]:
    """Attributes and operands of each: 160."""
    factors = (0.3, 0.5, 0.7, 1.2, 1.7, 2.0, 2.1, 3.3)
    modes = itertools.product(
        ("nearest", "linear", "cubic"),
        ("half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel"),
    )
    for mode, coordinates in modes:
        attributes = {"mode": mode, "coordinate_transformation_mode": coordinates}
        for factor in factors:
            yield attributes, [None, np.array([1, 1, factor, factor], np.float32)]
        for whole in ([1, 1, 3, 7], [1, 1, 10, 4], [1, 1, 1, 1]):
            yield attributes, [None, None, np.array(whole)]
    for policy, sizes in itertools.product(
        ("not_larger", "not_smaller"), itertools.product((2, 3, 7, 11), (1, 3, 5, 9))
    ):
        named = {"axes": [2, 3], "keep_aspect_ratio_policy": policy, "mode": "nearest"}
        yield named, [None, None, np.array(sizes)]


@pytest.mark.parametrize("constant", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_resizes(constant: bool) -> None:
    grid = Grid(18, constant)
    x = np.random.default_rng(0).standard_normal((1, 1, 6, 5)).astype(np.float32)
    for attributes, operands in resizes():
        grid.add("Resize", x, operands, **attributes)
    assert len(grid.types) == 164
    assert not grid.differences()


@pytest.mark.parametrize("op", ["Resize", "Upsample"])
def test_scales_of_older_opsets(op: str) -> None:
    """In float32, 10 * 0.7 is 7; with more digits, less."""
    grid = Grid(10 if op == "Resize" else 9, constant=False)
    scales = np.random.default_rng(0).uniform(0.2, 3, 40).round(1) if op == "Resize" else [1.1, 1.7]
    for scale, size in itertools.product((*scales, 2.3), (3, 7, 10)):
        operand = np.array([1, 1, scale, scale], np.float32)
        grid.add(op, np.ones((1, 1, size, 4), np.float32), [operand], mode="nearest")
    assert not grid.differences()


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int32, np.int64, np.int16])
def test_ranges(dtype: type) -> None:
    grid = Grid(17, constant=True)
    is_float = np.issubdtype(dtype, np.floating)
    numbers = (0.1, -0.3, 0.7, 1, 2.1) if is_float else (-3, -1, 1, 2, 7)
    for start, limit, delta in itertools.product(numbers, numbers, numbers):
        grid.add("Range", np.array(start, dtype), [np.array(x, dtype) for x in (limit, delta)])
    if not is_float:
        info = np.iinfo(dtype)
        for start, limit in ((info.min, info.max), (info.max, info.min)):
            step = int(info.max) // 3
            grid.add("Range", np.array(start, dtype), [np.array(x, dtype) for x in (limit, step)])
    assert not grid.differences()
    assert grid.folded == len(grid.types)


@pytest.mark.parametrize("count", [12, pytest.param(60, marks=pytest.mark.slow)])
def test_drawn_models_that_compute_with_sizes(count: int) -> None:
    folded = 0
    for model in drawn(count):
        graph = load_onnx(model.proto).graph
        results = run(om.to_proto(graph), model.inputs)
        for name, mine, whole in zip(graph.outputs, results, model.values, strict=True):
            assert (bits(mine), graph.types[name].shape) == (bits(whole), whole.shape)
            folded += graph.producers[name].inputs[0] in graph.constants
    assert folded > 6 * count


def shapes_of(nodes: Sequence[onnx.NodeProto], weights: Mapping[str, om.Array]) -> om.Array:
    """What a model of an input of 2 x 5 computes as `y`, by the front end."""
    behind = helper.make_node("ConstantOfShape", ["y"], ["z"])
    proto = om.model(
        [*nodes, behind], {"x": ("float32", [2, 5])}, {"z": ("float32", None)}, weights
    )
    traced = load_onnx(proto)
    om.assert_same(traced, {"x": np.zeros((2, 5), np.float32)})
    return np.array(traced.graph.types["z"].shape)


def test_a_reversed_shape_keeps_its_first_element() -> None:
    """x.reshape(x.shape[::-1])."""
    bounds = {"s": np.array([-1]), "e": np.array([-(2**63)]), "a": np.array([0])}
    nodes = [
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("Slice", ["shape", "s", "e", "a", "s"], ["y"]),
    ]
    assert list(shapes_of(nodes, bounds)) == [5, 2]
    nodes.append(helper.make_node("Reshape", ["x", "y"], ["z"]))
    proto = om.model(nodes, {"x": ("float32", [2, 5])}, {"z": ("float32", None)}, bounds)
    assert load_onnx(proto).graph.types["z"].shape == (5, 2)


def test_sizes_that_are_divided_as_floats_keep_the_fraction() -> None:
    """ceil(5 / 2) is 3."""
    nodes = [
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("Cast", ["shape"], ["floats"], to=1),
        helper.make_node("Gather", ["floats", "i"], ["width"]),
        helper.make_node("Gather", ["floats", "j"], ["height"]),
        helper.make_node("Div", ["width", "height"], ["ratio"]),
        helper.make_node("Ceil", ["ratio"], ["up"]),
        helper.make_node("Cast", ["up"], ["y"], to=7),
    ]
    assert list(shapes_of(nodes, {"i": np.array([1]), "j": np.array([0])})) == [3]


def test_a_row_of_sizes_is_no_size() -> None:
    nodes = [
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("Unsqueeze", ["shape", "i"], ["row"]),
        helper.make_node("Gather", ["row", "i"], ["taken"], axis=0),
        helper.make_node("Reshape", ["taken", "all"], ["y"]),
    ]
    assert list(shapes_of(nodes, {"i": np.array([0]), "all": np.array([-1])})) == [2, 5]


def test_a_part_of_a_dim_of_unknown_size_has_no_size() -> None:
    """The first three places that are not zero may be fewer."""
    nodes = [
        helper.make_node("NonZero", ["x"], ["places"]),
        helper.make_node("Slice", ["places", "zero", "three", "one"], ["y"]),
    ]
    bounds = {"zero": np.array([0]), "one": np.array([1]), "three": np.array([3])}
    proto = om.model(nodes, {"x": ("float32", [4])}, {"y": ("int64", None)}, bounds)
    with pytest.raises(FrontendError, match=r"'places'.*has shape .*not static"):
        load_onnx(proto)


def test_axes_of_a_slice_that_are_computed_at_run_time_are_not_guessed() -> None:
    nodes = [helper.make_node("Slice", ["x", "zero", "one", "axes"], ["y"])]
    inputs = {"x": ("float32", [4, 5]), "axes": ("int64", [1])}
    bounds = {"zero": np.array([0]), "one": np.array([1])}
    proto = om.model(nodes, inputs, {"y": ("float32", [4, 1])}, bounds)
    assert load_onnx(proto).graph.types["y"].shape == (4, 1)


@pytest.mark.parametrize(
    ("operands", "words"),
    [
        (([0], [1], [2], [1]), "axis 2 is not a dim of its operand of 2 dims"),
        (([0, 0], [1], [0, 1], [1, 1]), "its starts, ends, axes and steps are not as many"),
        (([0], [1], [0], [0]), "a step is 0"),
    ],
)
def test_bounds_of_a_slice_that_do_not_fit(operands: Sequence[list[int]], words: str) -> None:
    names = ["starts", "ends", "axes", "steps"]
    weights = {name: np.array(values) for name, values in zip(names, operands, strict=True)}
    proto = om.model(
        [helper.make_node("Slice", ["x", *names], ["y"])],
        {"x": ("float32", [4, 5])},
        {"y": ("float32", None)},
        weights,
    )
    with pytest.raises(FrontendError, match=words):
        load_onnx(proto)


def test_a_range_without_end() -> None:
    operands = {"a": np.float32(0), "b": np.float32(np.inf), "c": np.float32(1)}
    proto = om.model(
        [helper.make_node("Range", ["a", "b", "c"], ["y"])],
        {"x": ("float32", [1])},
        {"y": ("float32", None)},
        {name: np.array(value) for name, value in operands.items()},
    )
    with pytest.raises(FrontendError, match="its start, limit and delta make inf elements"):
        load_onnx(proto)
