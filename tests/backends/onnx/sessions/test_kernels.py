"""The kernels of ONNX Runtime are traced back to the nodes that they compute."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from partitioner.backends.errors import BackendError
from partitioner.backends.onnx.measuring.timing import kernel_runs, nodes_of_kernels
from partitioner.backends.onnx.sessions.segments import SessionConfig, session_options

F32 = TensorProto.FLOAT


def weight(name: str, *shape: int) -> onnx.TensorProto:
    array = np.random.default_rng(0).random(shape, np.float32)
    return numpy_helper.from_array(np.asarray(array, np.float32), name)


def model() -> onnx.ModelProto:
    """Two convolutions of a residual block, a matrix product with a bias, a spelt-out GELU."""
    make = helper.make_node
    nodes = [
        make("Conv", ["x", "w1"], ["c1"], name="conv1", pads=[1, 1, 1, 1]),
        make("BatchNormalization", ["c1", "s", "s", "s", "s"], ["n1"], name="norm1"),
        make("Relu", ["n1"], ["r1"], name="relu1"),
        make("Conv", ["r1", "w2"], ["c2"], name="conv2", pads=[1, 1, 1, 1]),
        make("Add", ["c2", "r1"], ["sum"], name="add"),
        make("Relu", ["sum"], ["r2"], name="relu2"),
        make("GlobalAveragePool", ["r2"], ["g"], name="pool"),
        make("Flatten", ["g"], ["f"], name="flat"),
        make("MatMul", ["f", "w3"], ["m"], name="product"),
        make("Add", ["m", "b3"], ["mb"], name="bias"),
        make("Div", ["mb", "sqrt2"], ["d"], name="gelu_div"),
        make("Erf", ["d"], ["e"], name="gelu_erf"),
        make("Add", ["e", "one"], ["e1"], name="gelu_add"),
        make("Mul", ["mb", "e1"], ["p"], name="gelu_mul"),
        make("Mul", ["p", "half"], ["y"], name="gelu_half"),
    ]
    scalars = {"sqrt2": 2**0.5, "one": 1.0, "half": 0.5}
    constants = [weight("w1", 32, 16, 3, 3), weight("w2", 32, 32, 3, 3), weight("s", 32)]
    constants += [weight("w3", 32, 64), weight("b3", 64)]
    constants += [numpy_helper.from_array(np.float32(v), name) for name, v in scalars.items()]
    graph = helper.make_graph(
        nodes,
        "block",
        [helper.make_tensor_value_info("x", F32, (1, 16, 16, 16))],
        [helper.make_tensor_value_info("y", F32, (1, 64))],
        constants,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


@pytest.mark.parametrize("level", ["disable", "all"])
def test_every_node_is_of_one_kernel(tmp_path: Path, level: str) -> None:
    whole = model()
    config = SessionConfig(optimization=level, profile=tmp_path, optimized=tmp_path)
    options = session_options(config, None)
    session = ort.InferenceSession(
        whole.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    for _ in range(2):
        session.run(None, {"x": np.ones((1, 16, 16, 16), np.float32)})
    runs = kernel_runs(Path(session.end_profiling()))
    optimized = Path(session.get_session_options().optimized_model_filepath)
    owners = nodes_of_kernels(whole.graph.node, optimized)
    groups = {tuple(node.name for node in nodes) for nodes in owners.values()}
    assert sorted(name for group in groups for name in group) == sorted(
        node.name for node in whole.graph.node
    )
    gelu = tuple(f"gelu_{part}" for part in ("div", "erf", "add", "mul", "half"))
    if level == "disable":
        assert all(len(group) == 1 for group in groups)
    else:
        assert gelu in groups
        assert ("product", "bias") in groups
        assert any(group[:3] == ("conv1", "norm1", "relu1") for group in groups)
    assert len(runs) == 2
    names = [kernel.name for kernel in runs[1]]
    assert set(owners) <= set(names)
    assert all(kernel.begin_s <= kernel.end_s <= 0 for kernel in runs[1])


def test_a_sum_and_an_activation_behind_a_blocked_convolution_are_of_its_kernel(
    tmp_path: Path,
) -> None:
    """ONNX Runtime names the result of a blocked kernel anew."""
    make = helper.make_node
    kernels = [
        make("ReorderInput", ["x"], ["t0"], name="ReorderInput"),
        make("Conv", ["t0", "w1"], ["t1"], name="r1_nchwc"),
        make("Conv", ["t1", "w2", "", "t1"], ["t2"], name="c2_nchwc"),
        make("GlobalAveragePool", ["t2"], ["t3"], name="g_nchwc"),
        make("ReorderOutput", ["t3"], ["g"], name="ReorderOutput"),
        make("Flatten", ["g"], ["f"], name="flat"),
    ]
    path = tmp_path / "optimized.onnx"
    onnx.save(helper.make_model(helper.make_graph(kernels, "g", [], [])), path)
    owners = nodes_of_kernels(model().graph.node[:8], path)
    assert {kernel: [node.name for node in nodes] for kernel, nodes in owners.items()} == {
        "r1_nchwc": ["conv1", "norm1", "relu1"],
        "c2_nchwc": ["conv2", "add", "relu2"],
        "g_nchwc": ["pool"],
        "flat": ["flat"],
    }


def test_two_convolutions_in_a_row_are_two_kernels(tmp_path: Path) -> None:
    """The second one is named after its activation: it does not go to the first one."""
    make = helper.make_node
    nodes = [
        make("MaxPool", ["x"], ["p"], name="pool", kernel_shape=[2, 2]),
        make("Conv", ["p", "w"], ["c1"], name="conv1"),
        make("BatchNormalization", ["c1", "s", "s", "s", "s"], ["n1"], name="norm1"),
        make("Relu", ["n1"], ["r1"], name="relu1"),
        make("Conv", ["r1", "w"], ["c2"], name="conv2"),
        make("BatchNormalization", ["c2", "s", "s", "s", "s"], ["n2"], name="norm2"),
        make("Sum", ["n2", "p"], ["sum"], name="sum"),
    ]
    kernels = [
        make("MaxPool", ["x"], ["t0"], name="p_nchwc"),
        make("Conv", ["t0", "w"], ["t1"], name="r1_nchwc"),
        make("Conv", ["t1", "w", "", "t0"], ["t2"], name="n2_nchwc"),
    ]
    path = tmp_path / "optimized.onnx"
    onnx.save(helper.make_model(helper.make_graph(kernels, "g", [], [])), path)
    owners = nodes_of_kernels(nodes, path)
    assert {kernel: [node.name for node in of] for kernel, of in owners.items()} == {
        "p_nchwc": ["pool"],
        "r1_nchwc": ["conv1", "norm1", "relu1"],
        "n2_nchwc": ["conv2", "norm2", "sum"],
    }


def test_a_profile_without_bytes_is_refused(tmp_path: Path) -> None:
    text = '[{"name": "a_kernel_time", "ts": 0, "dur": 1, "args": {"op_name": "Add"}},'
    text += '{"name": "model_run", "ts": 0, "dur": 2, "args": {}}]'
    (tmp_path / "profile.json").write_text(text)
    with pytest.raises(BackendError, match="does not report bytes"):
        kernel_runs(tmp_path / "profile.json")


def test_weights_in_files_of_their_own_are_not_read(tmp_path: Path) -> None:
    """They lie beside the model, not beside the graph that ONNX Runtime wrote of it."""
    whole = model()
    weights = whole.graph.initializer[0]
    weights.ClearField("raw_data")
    weights.data_location = TensorProto.EXTERNAL
    entry = weights.external_data.add()
    entry.key, entry.value = "location", "elsewhere.weights"
    (tmp_path / "optimized.onnx").write_bytes(whole.SerializeToString())
    by_kernel = nodes_of_kernels(whole.graph.node, tmp_path / "optimized.onnx")
    names = {kernel: [node.name for node in nodes] for kernel, nodes in by_kernel.items()}
    assert names == {node.name: [node.name] for node in whole.graph.node}
