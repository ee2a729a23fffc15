"""The graph of a micro-batch: its outputs are parts of the whole batch's, or it is refused."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import NodeProto, helper

from helpers.onnx_files import models
from helpers.onnx_files.onnx_models import model, run, to_proto
from partitioner import examples
from partitioner.backends.regions import cut
from partitioner.frontends.inputs import random_inputs
from partitioner.frontends.onnx.load import load_onnx
from partitioner.ir.errors import OptionError
from partitioner.ir.graph import Graph
from partitioner.ir.layout import MAX_SEGMENTS
from partitioner.rewrites.micro_batch_graph import (
    MOST_MICRO_BATCHES,
    MicroBatch,
    batch_size,
    even_parts,
    micro_batch_graph,
    same_size,
)

BATCH, COUNT = 6, 3
Built = tuple[Sequence[NodeProto], dict[str, Any], dict[str, Any], dict[str, np.ndarray]]


def weight(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def node(op: str, *inputs: str, out: str = "y", **attrs: Any) -> NodeProto:
    return helper.make_node(op, list(inputs), out.split(), **attrs)


def built(
    *nodes: NodeProto,
    x: Sequence[int | str | None] = (BATCH, 4),
    y: Mapping[str, Sequence[int | str | None] | None] | None = None,
    more: Mapping[str, Any] | None = None,
    dims: Mapping[str, int] | None = None,
    **weights: np.ndarray,
) -> Graph:
    inputs = {"x": ("float32", x), **(more or {})}
    outputs = {name: ("float32", shape) for name, shape in (y or {"y": None}).items()}
    return load_onnx(model(nodes, inputs, outputs, weights), dims or {}).graph


def check(graph: Graph, count: int = COUNT) -> MicroBatch:
    """Compare the outputs of the micro-batches with those of the whole batch."""
    micro = micro_batch_graph(graph, count)
    feeds = random_inputs(graph, seed=0)
    whole = run(to_proto(graph), feeds)
    regions = micro.parts.regions
    part = to_proto(micro.graph)
    onnx.checker.check_model(part, full_check=True)
    for index in range(count):
        own = {n: cut(a, regions[n][index]) if n in regions else a for n, a in feeds.items()}
        results = run(part, own)
        for name, result, all_of_it in zip(graph.outputs, results, whole, strict=True):
            expected = cut(all_of_it, regions[name][index]) if name in regions else all_of_it
            np.testing.assert_allclose(result, expected, 1e-5, 1e-6)
    for name in graph.outputs:  # the parts are all of an output
        if name in regions:
            numbers = np.arange(graph.types[name].numel).reshape(graph.types[name].shape)
            parts = [cut(numbers, region).reshape(-1) for region in regions[name]]
            assert sorted(itertools.chain(*parts)) == list(range(numbers.size))
    return micro


def test_a_convolution_with_batch_norm_and_a_reshape_to_the_batch() -> None:
    graph = built(
        node("Conv", "x", "w", out="c", pads=[1, 1, 1, 1]),
        node("BatchNormalization", "c", "s", "b", "m", "v", out="n"),
        node("Relu", "n", out="r"),
        node("Reshape", "r", "shape", out="f"),
        node("Gemm", "f", "g", out="y"),
        x=(BATCH, 2, 4, 4),
        y={"y": (BATCH, 5)},
        w=weight(3, 2, 3, 3),
        **{name: np.abs(weight(3)) for name in "sbmv"},
        shape=ints(BATCH, 48),
        g=weight(48, 5),
    )
    micro = check(graph)
    assert micro.graph.types["y"].shape == (BATCH // COUNT, 5)
    assert micro.parts.types["y"].shape == (BATCH, 5)
    check(graph, 6)
    check(graph, 1)


@pytest.mark.parametrize("places", [4, MAX_SEGMENTS + 16])
def test_the_batch_may_become_another_dim_or_a_part_of_one(places: int) -> None:
    graph = built(
        node("Transpose", "x", out="t", perm=[1, 0, 2]),  # (places, batch, 5)
        node("Reshape", "t", "rows", out="f"),  # of each micro-batch as many pieces as places
        node("MatMul", "f", "w", out="y"),
        node("Transpose", "t", out="z", perm=[2, 0, 1]),
        x=(BATCH, places, 5),
        y={"y": (places * BATCH, 3), "z": (5, places, BATCH)},
        rows=ints(places * BATCH, 5),
        w=weight(5, 3),
    )
    micro = check(graph)
    assert micro.parts.regions["y"][1] == (
        tuple((BATCH * row + 2, 2) for row in range(places)),
        ((0, 3),),
    )
    assert micro.parts.regions["z"][2] == (((0, 5),), ((0, places),), ((4, 2),))


def test_a_constant_of_the_batch_is_cut_where_its_parts_are_the_same() -> None:
    graph = built(
        node("Concat", "token", "x", out="y", axis=1),
        token=np.broadcast_to(weight(1, 2), (BATCH, 2)).copy(),
    )
    micro = check(graph)
    assert [c.type.shape for c in micro.graph.constants.values()] == [(2, 2)]


def test_what_is_expanded_at_run_time_is_expanded_to_the_part() -> None:
    """The table of places is an input, so that nothing of this can be folded."""
    graph = built(
        node("Expand", "table", "shape", out="e"),
        node("Relu", "e", out="r"),
        node("Add", "x", "r", out="y"),
        node("ReduceSum", "r", out="z", keepdims=0),  # wants all of it
        more={"table": ("float32", (1, 4))},
        y={"y": (BATCH, 4), "z": ()},
        shape=ints(BATCH, 4),
    )
    micro = check(graph)
    assert "z" not in micro.parts.regions
    assert sorted(n.op for n in micro.graph.nodes) == sorted(
        ["Expand", "Relu", "Expand", "Relu", "Add", "ReduceSum"]
    )


def test_inputs_without_the_batch_go_to_all_micro_batches() -> None:
    graph = built(
        node("Add", "x", "bias", out="a"),
        node("Mul", "a", "other", out="y"),
        node("Exp", "bias", out="z"),
        more={"bias": ("float32", (4,)), "other": ("float32", (BATCH, 1))},
        y={"y": (BATCH, 4), "z": (4,)},
    )
    micro = check(graph)
    assert same_size(graph) == ("x", "other")
    assert set(micro.parts.regions) == {"x", "other", "y"}  # z is the same in all of them


def test_symbols_tell_which_inputs_have_the_batch() -> None:
    shapes = {"a": ("n", 4), "b": ("m", 4), "c": ("n", 1), "d": (4,)}
    more = {name: ("float32", shape) for name, shape in shapes.items()}
    graph = built(
        node("Sum", "x", "a", "c", "d", out="s"),
        node("Transpose", "b", out="t"),
        node("MatMul", "s", "t", out="y"),
        x=("n", 4),
        more=more,
        dims={"n": BATCH, "m": BATCH},
    )
    assert same_size(graph) == ("x", "a", "c")
    check(graph)


@pytest.mark.parametrize("names", [["bias"], ["bias", "other"], ["scale", "bias"]])
def test_an_input_as_long_as_the_batch_by_chance_goes_to_all(names: list[str]) -> None:
    shapes = {"bias": (BATCH,), "other": (BATCH, BATCH), "scale": (BATCH, 1)}
    nodes = [node("Relu", "x", out="r")]
    for index, name in enumerate(names):
        op = {"bias": "Add", "scale": "Mul", "other": "MatMul"}[name]
        nodes.append(node(op, "r" if not index else f"v{index - 1}", name, out=f"v{index}"))
    last = f"v{len(names) - 1}"
    more = {name: ("float32", shapes[name]) for name in names}
    graph = built(*nodes, x=(BATCH, BATCH), more=more, y={last: (BATCH, BATCH)})
    micro = check(graph)
    assert set(micro.parts.regions) == {"x", last} | ({"scale"} & set(names))


def test_a_subgraph_that_reads_no_sample_runs_in_each() -> None:
    then, other = (
        helper.make_graph(
            [helper.make_node(op, ["k"], [f"k_{op}"])],
            op,
            [],
            [helper.make_tensor_value_info(f"k_{op}", 1, [4])],
        )
        for op in ("Exp", "Neg")
    )
    graph = built(
        node("If", "flag", out="c", then_branch=then, else_branch=other),
        node("Mul", "x", "c", out="y"),
        more={"flag": ("bool", ()), "k": ("float32", (4,))},
    )
    check(graph)


def test_samples_inside_a_subgraph_are_refused() -> None:
    then, other = (
        helper.make_graph(
            [helper.make_node(op, ["x"], [f"x_{op}"])],
            op,
            [],
            [helper.make_tensor_value_info(f"x_{op}", 1, [BATCH, 4])],
        )
        for op in ("Exp", "Neg")
    )
    graph = built(
        node("If", "flag", out="y", then_branch=then, else_branch=other),
        more={"flag": ("bool", ())},
    )
    with pytest.raises(OptionError, match=r"\(If\) may combine the samples of a batch"):
        micro_batch_graph(graph, COUNT)


@pytest.mark.parametrize(
    ("nodes", "weights", "message"),
    [
        ([node("ReduceMean", "x", axes=[0])], {}, r"\(ReduceMean\) combines the samples"),
        ([node("ReduceMax", "x", axes=[0])], {}, r"\(ReduceMax\) combines the samples"),
        ([node("Softmax", "x", axis=0)], {}, r"\(Softmax\) combines the samples of a batch, so"),
        ([node("CumSum", "x", "axis")], {"axis": ints(0)}, r"\(CumSum\) combines the samples"),
        (
            [node("Transpose", "x", out="t"), node("MatMul", "x", "t")],
            {},
            r"\(MatMul\) combines the samples",
        ),
        (
            [node("Slice", "x", "start", "end", "axis")],
            {"start": ints(0), "end": ints(3), "axis": ints(0)},
            r"\(Slice\) gives micro-batches parts of unequal sizes",
        ),
        (
            [node("Add", "x", "other")],
            {"other": weight(BATCH, 4)},
            r"\(Add\) reads other elements of the constant 'other' in each",
        ),
        (
            [node("Gather", "x", "first")],
            {"first": ints(0)},
            r"\(Gather\) combines the samples of a batch",
        ),
        (
            [node("Reshape", "x", "shape")],
            {"shape": ints(4, BATCH)},
            r"\(Reshape\) combines the samples",
        ),
    ],
)
def test_what_combines_samples_is_refused_by_name(
    nodes: Sequence[NodeProto], weights: dict[str, np.ndarray], message: str
) -> None:
    graph = built(*nodes, **weights)
    with pytest.raises(OptionError, match=rf"^micro_batches={COUNT}: '\w+' {message}"):
        micro_batch_graph(graph, COUNT)


def test_an_input_whose_parts_are_wanted_and_is_not_of_the_batch_is_refused() -> None:
    graph = built(
        node("Add", "x", "other", out="y"),
        x=("n", 4),
        more={"other": ("float32", ("m", 4))},
        dims={"n": BATCH, "m": BATCH},
    )
    with pytest.raises(OptionError, match="reads a part of the input 'other', whose dim 0 is not"):
        micro_batch_graph(graph, COUNT)


def test_values_of_an_input_without_the_batch_are_no_equal_parts() -> None:
    graph = built(
        node("Exp", "other", out="e"),
        node("Add", "x", "e", out="y"),
        x=("n", 4),
        more={"other": ("float32", ("m", 4))},
        dims={"n": BATCH, "m": BATCH},
    )
    with pytest.raises(OptionError, match=r"\(Exp\) reads a part of the input 'other'"):
        micro_batch_graph(graph, COUNT)


def test_an_index_that_counts_samples_is_refused() -> None:
    """EyeLike's diagonal lies elsewhere in each micro-batch."""
    graph = built(node("EyeLike", "x", out="e"), node("Add", "x", "e", out="y"), x=(BATCH, BATCH))
    with pytest.raises(OptionError, match=r"\(EyeLike\)"):
        micro_batch_graph(graph, COUNT)


def test_the_batch_has_equal_parts() -> None:
    graph = built(node("Exp", "x"), x=(7, 4))
    assert batch_size(graph) == 7
    assert even_parts(batch_size(graph)) == (1, 7)
    check(graph, 7)
    message = r"^micro_batches=3: the batch of 7 \(dim 0 of 'x'\) has no 3 equal parts: give one "
    with pytest.raises(OptionError, match=message + "of 1, 7$"):
        micro_batch_graph(graph, 3)
    with pytest.raises(OptionError, match="no 14 equal parts"):
        micro_batch_graph(graph, 14)


def test_a_model_without_a_batch_is_refused() -> None:
    with pytest.raises(OptionError, match="no input of the model has dims"):
        micro_batch_graph(built(node("Exp", "x"), x=(), y={"y": ()}), 2)
    with pytest.raises(OptionError, match="dim 0 of the first input 'x' has no elements"):
        micro_batch_graph(built(node("Exp", "x"), x=(0, 4)), 2)


#: One by default.
EXPORTED = [
    pytest.param(name, marks=[] if name == "llama" else pytest.mark.slow)
    for name in sorted(models.SOURCES)
]


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPORTED)
def test_exported_transformers_of_a_fixed_batch(name: str, exported: Callable[[str], Path]) -> None:
    graph = load_onnx(exported(name)).graph
    check(graph, models.BATCH)


@pytest.mark.parametrize("options", [{"batch": 6}, {"batch": 6, "channels": 4}])
def test_a_small_convolutional_net(options: dict[str, int]) -> None:
    check(load_onnx(examples.build("tiny", **options)).graph)


def test_a_batch_without_end_is_cut_into_thousands_at_most() -> None:
    assert even_parts(2**40)[-1] == MOST_MICRO_BATCHES
