"""The example models: valid, alive, deterministic; and the command that writes them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from partitioner import examples
from partitioner.examples.__main__ import main

LARGE = ("alexnet", "vgg19", "zfnet512")  # 240 to 570 MB of weights
ZOO = tuple(sorted({*examples.NAMES} - {"llama", "mlp", "tiny"}))
LOGITS = {"densenet121", "llama", "mlp"}  # they end without a softmax


def params(*names: str) -> list[Any]:
    """The large ones marked slow."""
    return [pytest.param(n, marks=pytest.mark.slow) if n in LARGE else n for n in sorted(names)]


def run(path: Path, seed: int) -> np.ndarray:
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    random = np.random.default_rng(seed)
    feeds = {
        value.name: random.standard_normal(value.shape, np.float32)
        if value.type == "tensor(float)"
        else random.integers(0, 1024, value.shape)
        for value in session.get_inputs()
    }
    return session.run(None, feeds)[0]


def weights(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    return {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}


@pytest.mark.parametrize("name", params(*examples.NAMES))
def test_a_model_is_valid_and_its_output_depends_on_its_input(
    name: str, zoo: Callable[[str], Path]
) -> None:
    onnx.checker.check_model(str(zoo(name)), full_check=True)
    first, second = run(zoo(name), 1), run(zoo(name), 2)
    assert np.isfinite(first).all()
    assert first.std() > 0.1 * np.abs(first).mean()
    assert np.abs(first - second).max() > 0.05 * np.abs(first).max()


@pytest.mark.parametrize("name", params(*{*examples.NAMES} - LOGITS))
def test_a_softmax_is_neither_uniform_nor_saturated(name: str, zoo: Callable[[str], Path]) -> None:
    assert onnx.load(zoo(name)).graph.node[-1].op_type == "Softmax"
    shares = run(zoo(name), 1).reshape(-1, run(zoo(name), 1).shape[1])
    assert shares.max() < 0.9
    assert (shares.max(axis=1) > 1.5 / shares.shape[1]).all()


@pytest.mark.parametrize("name", sorted({*ZOO} - {*LARGE}))
def test_zoo_weights_are_initializers_and_vary(name: str) -> None:
    model = examples.build(name)
    assert model.ir_version == 10
    assert [value.name.split("/")[-1] for value in model.graph.input] == ["data_0"]
    assert "ConstantOfShape" not in {node.op_type for node in model.graph.node}
    read = {key for node in model.graph.node for key in node.input}
    for key, value in weights(model).items():
        assert key in read
        assert value.dtype == np.int64 or value.std() > 0, key


def test_zoo_variances_are_positive() -> None:
    model = examples.build("resnet50")
    stored = weights(model)
    norms = [node for node in model.graph.node if node.op_type == "BatchNormalization"]
    assert len(norms) == 53
    assert all((stored[node.input[4]] > 0).all() for node in norms)


def test_zoo_graphs_keep_their_operators() -> None:
    kinds = [node.op_type for node in examples.build("densenet121").graph.node]
    assert (kinds.count("Conv"), kinds.count("Concat"), len(kinds)) == (121, 58, 910)


@pytest.mark.parametrize("name", ["llama", "mlp", "shufflenet", "tiny"])
def test_the_seed_decides_the_bytes(name: str) -> None:
    assert examples.build(name) == examples.build(name)
    assert examples.build(name) != examples.build(name, seed=1)


def test_llama_has_the_sizes_asked_for() -> None:
    model = examples.build(
        "llama", layers=3, hidden=64, heads=4, kv_heads=1, intermediate=96, vocab=50, batch=2, seq=8
    )
    dims = [dim.dim_value for dim in model.graph.output[0].type.tensor_type.shape.dim]
    assert dims == [2, 8, 50]
    assert weights(model)["model.layers.2.self_attn.k_proj.weight"].shape == (64, 16)
    assert "model.layers.3.self_attn.k_proj.weight" not in weights(model)


def test_llama_is_causal() -> None:
    model = examples.build("llama", seq=8, vocab=16)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    tokens = np.arange(8).reshape(1, 8)
    changed = tokens.copy()
    changed[0, 5] = 15
    before, after = (session.run(None, {"input_ids": ids})[0][0] for ids in (tokens, changed))
    np.testing.assert_allclose(before[:5], after[:5], atol=1e-6)
    assert np.abs(before[5:] - after[5:]).max(axis=1).min() > 1e-3


def test_llama_turns_positions() -> None:
    model = examples.build("llama", seq=8, vocab=16)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    tokens = np.array([[3, 1, 4, 1, 5, 9, 2, 6]])
    swapped = tokens[:, [1, 0, 2, 3, 4, 5, 6, 7]]
    first, second = (session.run(None, {"input_ids": ids})[0][0, -1] for ids in (tokens, swapped))
    assert np.abs(first - second).max() > 1e-4  # without rotary embeddings they would be equal


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("lama", {}, r"unknown example 'lama'; there are alexnet, .*, zfnet512"),
        ("mlp", {"heads": 2}, r"mlp has no option 'heads'; it has layers, hidden, batch, seed"),
        ("mlp", {"batch": 0}, r"batch of mlp is 0, but must be at least 1"),
        ("llama", {"heads": 3}, r"hidden 256 is not divisible by 2 x heads = 6"),
        ("llama", {"kv_heads": 3}, r"heads 8 is not divisible by kv_heads 3"),
        ("resnet50", {"batch": 2}, r"resnet50 has no option 'batch'; it has seed"),
    ],
)
def test_a_wrong_request_is_explained(name: str, options: dict[str, int], message: str) -> None:
    with pytest.raises(examples.ExampleError, match=message):
        examples.build(name, **options)


def test_the_command_writes_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "model.onnx"
    assert main(["mlp", str(out), "--hidden", "32", "--layers", "2"]) == 0
    assert onnx.load(out) == examples.build("mlp", hidden=32, layers=2)
    assert capsys.readouterr().out == f"{out}: mlp, 3 nodes, 0.0 MB\n"


def test_the_command_says_why_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["llama", str(tmp_path / "out.onnx"), "--heads", "3"]) == 1
    assert capsys.readouterr().err.startswith("error: hidden 256 is not divisible")
    assert main(["mlp", str(tmp_path / "none" / "out.onnx")]) == 1
    assert capsys.readouterr().err.startswith(f"error: cannot write {tmp_path}")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arguments", [[], ["lama", "out.onnx"], ["mlp"], ["mlp", "o", "--wide"]])
def test_wrong_usage_exits_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert "usage: python -m partitioner.examples" in capsys.readouterr().err
