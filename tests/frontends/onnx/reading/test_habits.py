"""Habits of exporters that ONNX Runtime takes: such files are read, planned and verified."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

import partitioner
from helpers.onnx_files import onnx_models as om
from partitioner.backends.errors import BackendError
from partitioner.frontends.errors import FrontendError
from partitioner.frontends.inputs import random_inputs
from partitioner.frontends.onnx.load import Traced, load_onnx
from partitioner.ir.errors import OptionError

F32 = "float32"
MICROSOFT, CLASSICAL = "com.microsoft", "ai.onnx.ml"


def floats(*shape: int) -> om.Array:
    return np.random.default_rng(sum(shape)).standard_normal(shape, np.float32)


def node(op: str, reads: str, makes: str, domain: str = "", **attrs: object) -> onnx.NodeProto:
    names = ["" if name == "_" else name for name in reads.split()]
    return helper.make_node(op, names, makes.split(), domain=domain, **attrs)


def assert_right(
    proto: onnx.ModelProto, shapes: dict[str, tuple[int, ...]] | None = None
) -> Traced:
    """The model is read as ONNX Runtime runs it, and its ranks compute the same."""
    traced = load_onnx(proto, shapes=shapes or {})
    feeds = random_inputs(traced.graph, 0)
    results = om.assert_same(traced, feeds, tolerance=1e-6)
    for mine, theirs in zip(results, om.run(proto, feeds), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    for strategy in ("inter", "auto"):
        compiled = partitioner.compile(
            proto, devices=2, strategy=strategy, cluster="ideal", shapes=shapes
        )
        assert compiled.verify().equal
    return traced


def test_a_size_of_minus_one_is_not_known() -> None:
    """So old exports of Paddle write it, in inputs, outputs and results."""
    nodes = [node("MatMul", "x w", "h"), node("Relu", "h", "y")]
    inputs, outputs = {"x": (F32, [-1, 4])}, {"y": (F32, [-1, 6])}
    proto = om.model(nodes, inputs, outputs, {"w": floats(4, 6)})
    proto.graph.value_info.extend(om.infos({"h": (F32, [-1, 6])}))
    with pytest.raises(FrontendError, match=r"dims without a size: x\[\?, 4\]; pass --shape x=N,4"):
        load_onnx(proto)
    assert assert_right(proto, {"x": (8, 4)}).graph.types["h"].shape == (8, 6)


def test_initializers_of_ir_version_3_need_not_be_inputs() -> None:
    """ONNX Runtime saves an old model so: what it fuses is in no input."""
    inputs, outputs = {"x": (F32, [4, 4])}, {"y": (F32, [4, 6])}
    proto = om.model([node("MatMul", "x w", "y")], inputs, outputs, {"w": floats(4, 6)})
    proto.ir_version = 3
    assert_right(proto)


def test_nodes_stand_in_any_order() -> None:
    """The order is the least changed one; what bodies read counts."""
    then = om.body([node("Abs", "h", "t"), node("Neg", "t", "u")], {}, {"u": (F32, [4, 6])})
    other = om.body([node("Abs", "g", "v")], {}, {"v": (F32, [4, 6])})
    branch = helper.make_node("If", ["c"], ["b"], then_branch=then, else_branch=other)
    nodes = [
        node("Relu", "b", "y"),
        branch,
        node("Exp", "h", "g"),
        node("MatMul", "x w", "h"),
        node("Cos", "x", "z"),
    ]
    inputs = {"x": (F32, [4, 4]), "c": ("bool", [])}
    outputs = {"y": (F32, [4, 6]), "z": (F32, [4, 4])}
    proto = om.model(nodes, inputs, outputs, {"w": floats(4, 6)})
    traced = assert_right(proto)
    assert [n.op for n in traced.graph.nodes] == ["MatMul", "Exp", "If", "Relu", "Cos"]


def test_nodes_in_a_circle_are_refused() -> None:
    nodes = [node("Add", "x b", "a"), node("Relu", "a", "b")]
    with pytest.raises(FrontendError, match="must be topologically sorted"):
        load_onnx(om.model(nodes, {"x": (F32, [2])}, {"b": (F32, [2])}))


@pytest.mark.parametrize(
    ("op", "opset", "weights"),
    [
        ("SimplifiedLayerNormalization", 13, "s"),
        ("SimplifiedLayerNormalization", 20, "s"),
        ("LayerNormalization", 12, "s b"),
        ("LayerNormalization", 16, "s b"),
    ],
)
def test_norms_that_only_onnx_runtime_has_in_this_opset(op: str, opset: int, weights: str) -> None:
    """They are in ONNX's own domain, where the version that ONNX has is newer, or none."""
    nodes = [
        node("MatMul", "x w", "h"),
        node(op, f"h {weights}", "n", axis=-1, epsilon=1e-5),
        node("MatMul", "n v", "y"),
    ]
    arrays = {"w": floats(8, 16), "v": floats(16, 4), "s": floats(16), "b": floats(16)}
    kept = {name: array for name, array in arrays.items() if name in f"w v {weights}".split()}
    proto = om.model(nodes, {"x": (F32, [4, 8])}, {"y": (F32, [4, 4])}, kept, opset=opset)
    traced = assert_right(proto)
    assert traced.graph.types["n"].shape == (4, 16)
    assert [n.op for n in traced.graph.nodes] == ["MatMul", op, "MatMul"]


def test_an_operator_that_nobody_has_is_refused() -> None:
    proto = om.model([node("Unheard", "x", "y")], {"x": (F32, [2])}, {"y": (F32, [2])})
    with pytest.raises(FrontendError, match="No Op registered for Unheard"):
        load_onnx(proto)


@pytest.mark.parametrize("dims", [[2, 4], [2, 3, 1], [7, "n"]])
def test_a_stale_declaration_is_a_note(dims: om.Dims) -> None:
    """The inferred shape is taken, as ONNX Runtime takes it."""
    nodes = [node("Relu", "x", "h"), node("Neg", "h", "y")]
    proto = om.model(nodes, {"x": (F32, [2, 3])}, {"y": (F32, [2, 3])})
    proto.graph.value_info.extend(om.infos({"h": (F32, dims)}))
    traced = assert_right(proto)
    assert traced.graph.types["h"].shape == (2, 3)
    assert [note for note in traced.notes if "'h'" in note and "which is taken" in note]


def test_a_stale_output_is_a_note() -> None:
    proto = om.model([node("Relu", "x", "y")], {"x": (F32, [2, 3])}, {"y": (F32, [2, 4])})
    note = (
        "tensor 'y' of node 'Relu_0' (Relu) is declared [2, 4] but works out as [2, 3], "
        "which is taken"
    )
    assert load_onnx(proto).notes == (note,)
    assert partitioner.compile(proto, devices=2).verify().equal


def test_outputs_that_are_inputs_or_weights_keep_their_names() -> None:
    """In one process, between processes, and in micro-batches."""
    proto = om.model(
        [node("MatMul", "x w", "y"), node("Identity", "x", "z")],
        {"x": (F32, [4, 4])},
        {"x": (F32, [4, 4]), "y": (F32, [4, 6]), "w": (F32, [4, 6]), "z": (F32, [4, 4])},
        {"w": floats(4, 6)},
    )
    feeds = {"x": floats(4, 4)}
    expected = dict(zip(("x", "y", "w", "z"), om.run(proto, feeds), strict=True))
    assert load_onnx(proto).notes == ()
    for options in ({}, {"micro_batches": 2}, {"strategy": "inter"}):
        compiled = partitioner.compile(proto, devices=2, cluster="ideal", **options)
        results = compiled.run(feeds)
        assert list(results) == list(expected)
        for name, array in expected.items():
            np.testing.assert_allclose(results[name], array, rtol=1e-6)
        verification = compiled.verify()
        assert verification.equal
        assert [output.name for output in verification.outputs] == list(expected)


def branches(dims: om.Dims = None) -> onnx.ModelProto:
    """An If whose branches give 6 columns and 8."""
    then = om.body([node("MatMul", "x v", "t")], {}, {"t": (F32, None)})
    other = om.body([node("MatMul", "x w", "e")], {}, {"e": (F32, None)})
    nodes = [
        node("Cast", "c", "d", to=9),
        helper.make_node("If", ["d"], ["h"], then_branch=then, else_branch=other),
        node("Relu", "h", "y"),
    ]
    inputs = {"x": (F32, [4, 4]), "c": ("int64", [])}
    weights = {"v": floats(4, 6), "w": floats(4, 8)}
    return om.model(nodes, inputs, {"y": (F32, dims)}, weights)


def test_branches_of_unlike_sizes_need_one() -> None:
    message = r"'h' of node 'If_0' \(If\) has shape \[4, \?\], .*; pass --shape h=\.\.\., declare"
    with pytest.raises(FrontendError, match=message):
        load_onnx(branches())


@pytest.mark.parametrize(
    ("dims", "shapes"), [(None, {"h": (4, 6)}), (None, {"y": (4, 6)}), ([4, 6], {})]
)
def test_the_size_of_the_branch_that_runs(
    dims: om.Dims, shapes: dict[str, tuple[int, ...]]
) -> None:
    """It is given for the result itself, or for one that is made of it element by element."""
    assert assert_right(branches(dims), shapes).graph.types["h"].shape == (4, 6)


def test_a_given_shape_that_cannot_be_is_refused() -> None:
    with pytest.raises(
        FrontendError, match=r"--shape h=3,6: node 'If_0' \(If\) makes it \[4, \?\]"
    ):
        load_onnx(branches(), shapes={"h": (3, 6)})
    with pytest.raises(FrontendError, match=r"nor has a result of a node; did you mean 'h'"):
        load_onnx(branches(), shapes={"hh": (3, 6)})


def cached(
    past: int, total: int | None, present: int | None = None
) -> tuple[onnx.ModelProto, dict[str, om.Array]]:
    """A GroupQueryAttention of one query over so many past keys; None: total comes at run time."""
    nodes = [
        node(
            "GroupQueryAttention",
            "q k v pk pv s n",
            "a prk prv",
            MICROSOFT,
            num_heads=4,
            kv_num_heads=2,
        ),
        node("MatMul", "a w", "y"),
    ]
    inputs = {"q": (F32, [2, 1, 32]), "k": (F32, [2, 1, 16]), "v": (F32, [2, 1, 16])}
    inputs |= {name: (F32, [2, 2, past, 8]) for name in ("pk", "pv")} | {"s": ("int32", [2])}
    weights = {"w": floats(32, 32)}
    if total is None:
        inputs["n"] = ("int32", [])
    else:
        weights["n"] = np.array(total, np.int32)
    dims = None if present is None else [2, 2, present, 8]
    outputs = {"y": (F32, [2, 1, 32]), "prk": (F32, dims), "prv": (F32, dims)}
    return om.model(nodes, inputs, outputs, weights, domains=[MICROSOFT]), weights


@pytest.mark.parametrize(
    ("past", "total", "present", "length"),
    [
        (8, 5, None, 8),  # a buffer with room
        (8, 8, None, 8),
        (8, 9, None, 9),  # a new one for one more
        (8, None, 8, 8),
        (8, None, 9, 9),
        (8, None, None, 8),
    ],
)
def test_present_keys_are_the_longer_of_past_and_total(
    past: int, total: int | None, present: int | None, length: int
) -> None:
    proto, _ = cached(past, total, present)
    traced = assert_right(proto)
    assert traced.graph.types["prk"].shape == (2, 2, length, 8)
    assumed = any("is taken to keep its keys in the 8 places" in note for note in traced.notes)
    assert assumed == (total is None and present is None)


def test_the_length_of_a_growing_cache_is_given() -> None:
    proto, _ = cached(8, None)
    shapes = {"prk": (2, 2, 9, 8), "prv": (2, 2, 9, 8)}
    assert assert_right(proto, shapes).graph.types["prv"].shape == (2, 2, 9, 8)


def test_flat_scales_are_cut_along_the_blocks() -> None:
    """A row of them is a piece of its own: 96 rows are more pieces than a layout may have."""
    blocks, columns = 4, 96
    weights = {
        "b": np.random.default_rng(0).integers(0, 255, (columns, blocks, 16)).astype(np.uint8),
        "s": np.abs(floats(columns * blocks)) + 0.1,
        "z": np.random.default_rng(1).integers(0, 255, columns * 2).astype(np.uint8),
    }
    attrs = {"K": 32 * blocks, "N": columns, "bits": 4, "block_size": 32}
    inputs, outputs = {"x": (F32, [4, 32 * blocks])}, {"y": (F32, [4, columns])}
    for reads in ("x b s", "x b s z"):
        kept = {name: array for name, array in weights.items() if name in reads.split()}
        nodes = [node("MatMulNBits", reads, "y", MICROSOFT, **attrs)]
        proto = om.model(nodes, inputs, outputs, kept, domains=[MICROSOFT])
        assert_right(proto)
        assert load_onnx(proto).graph.types["s_in_rows"].shape == (columns, blocks)
    layout = {"dims": {"k": "x.1"}, "layout": {"k": "a"}}
    proto = om.model(
        [node("MatMulNBits", "x b s", "y", MICROSOFT, **attrs)],
        *(inputs, outputs, {name: weights[name] for name in "bs"}),
        domains=[MICROSOFT],
    )
    compiled = partitioner.compile(
        proto, devices=2, cluster="ideal", mesh={"a": 2}, constraints=layout
    )
    assert compiled.verify().equal


def classical(
    nodes: list[onnx.NodeProto], inputs: om.Values, weights: dict[str, om.Array]
) -> onnx.ModelProto:
    """A model of which nothing but the inputs' types is declared."""
    proto = om.model(nodes, inputs, {}, weights)
    proto.graph.output.add(name="y")
    proto.graph.output[0].type.tensor_type.elem_type = 1
    proto.opset_import.append(helper.make_opsetid(CLASSICAL, 3))
    return proto


TREE = {
    "n_targets": 1,
    "nodes_treeids": [0, 0, 0],
    "nodes_nodeids": [0, 1, 2],
    "nodes_featureids": [1, 0, 0],
    "nodes_values": [0.2, 0.0, 0.0],
    "nodes_modes": ["BRANCH_LEQ", "LEAF", "LEAF"],
    "nodes_truenodeids": [1, 0, 0],
    "nodes_falsenodeids": [2, 0, 0],
    "target_treeids": [0, 0],
    "target_nodeids": [1, 2],
    "target_ids": [0, 0],
    "target_weights": [1.0, 2.0],
}
MADE = {
    "Scaler": ("x", {"offset": [0.5] * 5, "scale": [2.0] * 5}, (8, 5)),
    "Normalizer": ("x", {"norm": "L2"}, (8, 5)),
    "Imputer": ("x", {"imputed_value_floats": [1.0]}, (8, 5)),
    "FeatureVectorizer": ("x z", {"inputdimensions": [5, 2]}, (8, 7)),
    "OneHotEncoder": ("i", {"cats_int64s": [0, 1, 2]}, (8, 1, 3)),
    "LinearRegressor": ("x", {"coefficients": [0.1] * 10, "targets": 2}, (8, 2)),
    "TreeEnsembleRegressor": ("x", TREE, (8, 1)),
    "LabelEncoder": ("i", {"keys_int64s": [1, 2], "values_floats": [0.5, 2.0]}, (8, 1)),
}


@pytest.mark.parametrize("op", MADE)
def test_classical_operators_need_no_declared_types(op: str) -> None:
    """ONNX Runtime does not infer their results; it computes one node on zeros."""
    reads, attrs, shape = MADE[op]
    nodes = [node(op, reads, "h", CLASSICAL, **attrs), node("MatMul", "h w", "y")]
    every: om.Values = {"x": (F32, [8, 5]), "z": (F32, [8, 2]), "i": ("int64", [8, 1])}
    inputs = {name: every[name] for name in reads.split()}
    proto = classical(nodes, inputs, {"w": floats(shape[-1], 4)})
    assert assert_right(proto).graph.types["h"].shape == shape


def selected() -> onnx.ModelProto:
    """Boxes behind a product, chosen by NonMaxSuppression, and how many there are."""
    nodes = [
        node("MatMul", "x w", "h"),
        node("Reshape", "h boxed", "b"),
        node("MatMul", "x v", "g"),
        node("Reshape", "g scored", "s"),
        node("NonMaxSuppression", "b s most iou least", "chosen"),
        node("Slice", "chosen two three one", "last"),
        node("Squeeze", "last one", "places"),
        node("Squeeze", "b zero", "all"),
        node("Gather", "all places", "y", axis=0),
        node("Shape", "y", "sizes"),
        node("Gather", "sizes zero", "count", axis=0),
        node("Relu", "g", "scores"),
    ]
    numbers = {"boxed": [1, 10, 4], "scored": [1, 3, 10], "most": [5], "two": [2], "three": [3]}
    weights: dict[str, om.Array] = {name: np.array(value) for name, value in numbers.items()}
    weights |= {"one": np.array([1]), "zero": np.array([0]), "w": floats(4, 4), "v": floats(4, 3)}
    weights |= {"iou": np.array([0.5], np.float32), "least": np.array([0.0], np.float32)}
    outputs = {"y": (F32, None), "count": ("int64", None), "scores": (F32, None)}
    return om.model(nodes, {"x": (F32, [10, 4])}, outputs, weights)


def test_what_depends_on_data_stays_together_behind_a_bound() -> None:
    """The rest is cut, and nothing is simplified by the bound: the count is the real one."""
    proto = selected()
    with pytest.raises(FrontendError, match=r"'chosen' .* is not static: .*--shape chosen="):
        load_onnx(proto)
    bound = {"chosen": (15, 3)}
    traced = assert_right(proto, bound)
    graph = traced.graph
    cut = "MatMul Reshape MatMul Reshape Squeeze Relu"  # Squeeze is of all boxes
    assert [n.op for n in graph.nodes] == [*cut.split(), "If"]
    assert graph.bounded == {"y", "count"}
    assert graph.types["y"].shape == (15, 4)
    assert "sizes behind 'chosen' depend on data" in " ".join(traced.notes)
    compiled = partitioner.compile(
        proto, devices=2, strategy="inter", cluster="ideal", shapes=bound
    )
    for seed in range(3):
        feeds = random_inputs(graph, seed)
        y, count, scores = om.run(proto, feeds)
        results = compiled.run(feeds)
        assert 0 < len(y) < 15
        np.testing.assert_allclose(results["y"], y, rtol=1e-6)
        np.testing.assert_array_equal(results["count"], count)
        np.testing.assert_allclose(results["scores"], scores, rtol=1e-6)


@pytest.mark.parametrize(
    ("op", "reads", "bound"),
    [("NonZero", "x", (2, 32)), ("Unique", "x", (32,)), ("Compress", "x c", (32,))],
)
def test_bounds_of_other_operators(op: str, reads: str, bound: tuple[int, ...]) -> None:
    nodes = [node(op, reads, "h"), node("Neg", "h", "y"), node("Abs", "x", "z")]
    inputs: om.Values = {"x": ("int64", [8, 4]), "c": ("bool", [8])}
    kept = {name: inputs[name] for name in reads.split()}
    proto = om.model(nodes, kept, {"y": ("int64", None), "z": ("int64", None)})
    assert_right(proto, {"h": bound})


def test_a_bound_goes_through_a_saved_plan(tmp_path: Path) -> None:
    """Rank files say which sizes depend on data, so that processes return what there is."""
    path, bound = tmp_path / "m.onnx", {"chosen": (15, 3)}
    onnx.save(selected(), path)
    compiled = partitioner.compile(path, devices=2, strategy="inter", cluster="ideal", shapes=bound)
    compiled.save(tmp_path / "plan")
    feeds = random_inputs(compiled.graph, 0)
    results = partitioner.load(tmp_path / "plan").run(feeds)
    np.testing.assert_allclose(results["y"], om.run(selected(), feeds)[0], rtol=1e-6)


def test_micro_batches_have_no_place_in_a_bounded_output() -> None:
    bound = {"chosen": (15, 3)}
    with pytest.raises(OptionError, match=r"micro_batches=2: the size of output 'count' depends"):
        partitioner.compile(selected(), devices=2, cluster="ideal", shapes=bound, micro_batches=2)


@pytest.mark.parametrize("unknown", ["?", "-1", "None"])
def test_unknown_sizes_of_one_name_are_not_one_size(unknown: str) -> None:
    inputs = {"x": (F32, [unknown, 4, unknown])}
    proto = om.model([node("Relu", "x", "y")], inputs, {"y": (F32, [unknown, 4, unknown])})
    with pytest.raises(FrontendError, match=r"x\[\?, 4, \?\]; pass --shape x=N,4,N"):
        load_onnx(proto)
    assert assert_right(proto, {"x": (2, 4, 8)}).graph.types["y"].shape == (2, 4, 8)


def test_a_model_without_a_name_an_import_or_a_type_of_its_output() -> None:
    nodes = [node("MatMul", "x w", "h"), node("Gelu", "h", "y", MICROSOFT)]
    proto = om.model(nodes, {"x": (F32, [4, 4])}, {"y": (F32, None)}, {"w": floats(4, 6)})
    proto.graph.name = ""
    proto.graph.output[0].ClearField("type")
    assert assert_right(proto).graph.types["y"].shape == (4, 6)


def test_the_other_branch_is_an_error() -> None:
    compiled = partitioner.compile(
        branches(), devices=2, cluster="ideal", shapes={"h": (4, 6)}, strategy="inter"
    )
    x = floats(4, 4)
    right = om.run(branches(), {"x": x, "c": np.array(1)})[0]
    np.testing.assert_allclose(compiled.run({"x": x, "c": np.array(1)})["y"], right, rtol=1e-6)
    with pytest.raises(BackendError, match=r"has shape \{4,6\} but the computed .* is \{4,8\}"):
        compiled.run({"x": x, "c": np.array(0)})


@pytest.mark.parametrize(("pads", "shape"), [([1, 0, 1, 2], (6, 7)), ([2**40, 0, 0, 0], None)])
def test_a_node_that_onnx_runtime_does_not_infer_is_computed_if_it_is_small(
    pads: list[int], shape: tuple[int, ...] | None
) -> None:
    nodes = [node("Pad", "x p v", "h", MICROSOFT), node("Neg", "h", "y")]
    weights = {"p": np.array(pads), "v": np.array([0], np.float32)}
    inputs, outputs = {"x": (F32, [4, 5])}, {"y": (F32, None)}
    proto = om.model(nodes, inputs, outputs, weights, domains=[MICROSOFT])
    if shape is None:
        with pytest.raises(FrontendError, match=r"'h' of node 'Pad_0' \(Pad\) has no known"):
            load_onnx(proto)
    else:
        assert assert_right(proto).graph.types["h"].shape == shape


def test_a_graph_whose_name_is_no_text_is_saved(tmp_path: Path) -> None:
    """Protobuf hands over such a name as bytes."""
    node = helper.make_node("Relu", ["x"], ["y"])
    proto = om.model([node], {"x": ("float32", [4])}, {"y": ("float32", [4])})
    proto.graph.name = "~name~"
    broken = onnx.ModelProto.FromString(
        proto.SerializeToString().replace(b"~name~", b"\xe5name\xe5")
    )
    partitioner.compile(broken, devices=2).save(tmp_path / "plan")
    assert (tmp_path / "plan" / "graph.json").is_file()
