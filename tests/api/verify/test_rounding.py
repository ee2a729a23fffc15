"""Verdicts of models that magnify rounding: right plans are equal, wrong ones are not."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import helper
from torch import Tensor, nn

import partitioner
from helpers.drawn import drawn_plans
from helpers.onnx_files import onnx_models as om
from partitioner.api.compiled.base import Compiled, origin
from partitioner.api.compiled.onnx_model import OnnxModel
from partitioner.api.verify.compare import Verification, VerificationError
from partitioner.api.verify.onnx_model import verify
from partitioner.backends.onnx.files.emit import emit
from partitioner.cli.main import main
from partitioner.frontends.onnx.load import load_onnx
from partitioner.ir.graph import Constant
from partitioner.ir.loops.factors import FactorKind
from partitioner.ir.ops import rule_of
from partitioner.ir.rule import Rule

F32 = "float32"
node = helper.make_node


def behind_a_sigmoid() -> onnx.ModelProto:
    """Outputs of 1e-4: the difference of two products of thousands, behind a Sigmoid."""
    rng = np.random.default_rng(1)
    weight = (50 * rng.standard_normal((2048, 8))).astype(np.float32)
    other = (weight + 1e-3 * rng.standard_normal(weight.shape)).astype(np.float32)
    nodes = [
        node("MatMul", ["x", "w"], ["a"], "a"),
        node("MatMul", ["x", "v"], ["b"], "b"),
        node("Sub", ["a", "b"], ["c"], "c"),
        node("Sub", ["c", "nine"], ["d"], "d"),
        node("Sigmoid", ["d"], ["y"], "y"),
    ]
    weights = {"w": weight, "v": other, "nine": np.array(9, np.float32)}
    return om.model(nodes, {"x": (F32, [4, 2048])}, {"y": (F32, [4, 8])}, weights)


def quantized(*, floats: bool) -> onnx.ModelProto:
    """Two convolutions between steps of 8 bits; the result is in steps, or in floats of these."""
    rng = np.random.default_rng(0)
    weights = {
        "s": np.array(0.05, np.float32),
        "z": np.array(128, np.uint8),
        "t": np.array(0.01, np.float32),
        "zw": np.array(0, np.int8),
        "w": rng.integers(-60, 60, (8, 8, 3, 3)).astype(np.int8),
        "u": np.array(0.3, np.float32),
    }
    nodes = [node("DequantizeLinear", ["w", "t", "zw"], ["wf"], "wf")]
    for before, after, scale in (("x", "a", "s"), ("b", "c", "u"), ("d", "e", "u")):
        nodes.append(node("QuantizeLinear", [before, scale, "z"], [f"{after}q"], f"{after}q"))
        nodes.append(node("DequantizeLinear", [f"{after}q", scale, "z"], [after], after))
    nodes.insert(3, node("Conv", ["a", "wf"], ["b"], "b", pads=[1] * 4))
    nodes.insert(6, node("Conv", ["c", "wf"], ["d"], "d", pads=[1] * 4))
    end, dtype = ("e", F32) if floats else ("eq", "uint8")
    kept = nodes if floats else nodes[:-1]
    return om.model(kept, {"x": (F32, [1, 8, 12, 12])}, {end: (dtype, [1, 8, 12, 12])}, weights)


def summed(model: onnx.ModelProto) -> Compiled:
    """Each product is a sum over two devices, which adds up in another order."""
    graph = load_onnx(model).graph
    decisions: dict[str, drawn_plans.Decision] = {}
    for of in graph.nodes:
        rule = rule_of(graph, of)
        assert isinstance(rule, Rule)
        factors = [n for n, f in rule.factors.items() if f.kind is FactorKind.REDUCE]
        is_cut = of.op in ("Conv", "MatMul", "ReduceMean")
        cuts = {factors[0]: "tp"} if is_cut else {}
        decisions[of.name] = (drawn_plans.TP2, cuts)
    return drawn_plans.compiled(model, 2, **decisions)


def spoilt(
    compiled: Compiled, name: str, change: Callable[[np.ndarray], np.ndarray], folder: Path
) -> Verification:
    """The verdict on rank files whose weight of a name is another."""
    graph, model = compiled.graph, compiled.model
    assert isinstance(model, OnnxModel)
    weight = Constant.of(change(graph.constants[name].load()))
    wrong = replace(graph, constants={**graph.constants, name: weight})
    folder.mkdir()
    emit(compiled.programs, wrong, folder, origin(compiled.plan, graph), None)
    return verify(model.traced, compiled.programs, folder)


NETS = {
    "sigmoid": (behind_a_sigmoid, "w"),
    "steps": (lambda: quantized(floats=False), "w"),
    "floats of steps": (lambda: quantized(floats=True), "w"),
}


@pytest.mark.parametrize("name", NETS)
def test_what_the_models_own_rounding_explains_is_equal(name: str) -> None:
    build, _ = NETS[name]
    compiled = summed(build())
    for seed in range(3):
        verification = compiled.verify(seed=seed)
        assert verification.equal, str(verification)
        assert "equal within the model's own rounding" in str(verification)
        assert "for the model's own rounding of" in str(verification)


def _first_off(weight: np.ndarray) -> np.ndarray:
    """One element is another by a tenth of the largest."""
    changed = weight.copy()
    changed.flat[0] += weight.dtype.type(0.1 * np.abs(weight).max())
    return changed


@pytest.mark.parametrize(
    "change",
    [lambda w: np.roll(w, 1, axis=0), lambda w: w[:, ::-1].copy(), _first_off],
    ids=["rolled", "reversed", "one element"],
)
@pytest.mark.parametrize("name", ["sigmoid", "floats of steps", "steps"])
def test_wrong_ranks_of_the_same_models_differ(
    name: str, change: Callable[[np.ndarray], np.ndarray], tmp_path: Path
) -> None:
    build, weight = NETS[name]
    compiled = summed(build())
    verification = spoilt(compiled, weight, change, tmp_path / "wrong")
    assert not verification.equal, str(verification)
    assert str(verification).startswith("DIFFERENT")


def one_hot() -> onnx.ModelProto:
    """Rows of a table by a one-hot vector, and their deviation by E[x^2] - E[x]^2."""
    rng = np.random.default_rng(0)
    nodes = [
        node("Unsqueeze", ["x", "last"], ["u"], "u"),
        node("Equal", ["u", "classes"], ["e"], "e"),
        node("Cast", ["e"], ["h"], "h", to=1),
        node("MatMul", ["h", "w"], ["f"], "f"),
        node("ReduceMean", ["f"], ["m"], "m", axes=[1]),
        node("Mul", ["f", "f"], ["ff"], "ff"),
        node("ReduceMean", ["ff"], ["mm"], "mm", axes=[1]),
        node("Mul", ["m", "m"], ["m2"], "m2"),
        node("Sub", ["mm", "m2"], ["y"], "y"),
    ]
    weights = {
        "last": np.array([-1]),
        "classes": np.arange(3, 40),
        "w": (3 * rng.standard_normal((37, 24)) + 10).astype(np.float32),
    }
    outputs = {"y": (F32, [4, 1, 24])}
    return om.model(nodes, {"x": ("int64", [4, 30])}, outputs, weights, opset=13)


def test_classes_of_a_one_hot_vector_are_all_drawn() -> None:
    compiled = summed(one_hot())
    drawn = compiled.model.random_inputs(0)["x"]
    assert set(range(3, 40)) >= set(drawn.reshape(-1).tolist())
    assert len(np.unique(drawn)) > 25
    for seed in range(3):
        verification = compiled.verify(seed=seed)
        assert verification.verdict == "equal", str(verification)


@pytest.mark.parametrize("op", ["RandomNormal", "RandomUniformLike", "Bernoulli", "Dropout"])
def test_a_model_that_draws_without_a_seed_is_named(op: str) -> None:
    operands = {"RandomNormal": [], "Dropout": ["h", "half", "on"]}.get(op, ["h"])
    attributes = {"shape": [4, 6]} if op == "RandomNormal" else {}
    nodes = [
        node("Relu", ["x"], ["h"], "h"),
        node(op, operands, ["r"], "noise", **attributes),
        node("Add", ["h", "r"], ["y"], "y"),
    ]
    weights = {"half": np.array(0.5, np.float32), "on": np.array(True)} if op == "Dropout" else {}
    model = om.model(nodes, {"x": (F32, [4, 6])}, {"y": (F32, [4, 6])}, weights)
    compiled = partitioner.compile(model, devices=2)
    with pytest.raises(VerificationError, match=rf"'noise' \({op}\) draws random numbers without"):
        compiled.verify()
    nodes[1].attribute.append(helper.make_attribute("seed", 3.0 if op != "Dropout" else 3))
    model = om.model(nodes, {"x": (F32, [4, 6])}, {"y": (F32, [4, 6])}, weights)
    assert partitioner.compile(model, devices=2).verify()


def test_a_body_that_draws_without_a_seed_is_named() -> None:
    def branch(name: str, **seed: float) -> onnx.GraphProto:
        drawn = node("RandomNormal", [], [f"{name}_r"], shape=[4, 6], **seed)
        return om.body([drawn], {}, {f"{name}_r": (F32, [4, 6])})

    def compiled(**seed: float) -> Compiled:
        branches = {f"{name}_branch": branch(name, **seed) for name in ("then", "else")}
        nodes = [
            node("ReduceMax", ["x"], ["m"], "m", keepdims=0),
            node("Greater", ["m", "one"], ["c"], "c"),
            node("If", ["c"], ["i"], "choice", **branches),
            node("Add", ["i", "x"], ["y"], "y"),
        ]
        weights = {"one": np.array(1, np.float32)}
        model = om.model(nodes, {"x": (F32, [4, 6])}, {"y": (F32, [4, 6])}, weights)
        return partitioner.compile(model, devices=2)

    with pytest.raises(VerificationError, match=r"'choice' \(If with RandomNormal\) draws random"):
        compiled().verify()
    assert compiled(seed=3.0).verify()


def test_an_output_that_is_an_input_has_no_rounding() -> None:
    model = behind_a_sigmoid()
    model.graph.output.insert(0, model.graph.input[0])
    verification = summed(model).verify()
    assert "equal within the model's own rounding" in str(verification)
    assert [output.name for output in verification.outputs] == ["x", "y"]


def test_inputs_of_a_file_are_verified(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    onnx.save(drawn_plans.mlp(), tmp_path / "m.onnx")
    compiled = partitioner.compile(tmp_path / "m.onnx", devices=2, cluster="ideal")
    compiled.save(tmp_path / "out")
    (name,) = compiled.model.input_types
    np.savez(tmp_path / "in.npz", **{name: np.ones((4, 8), np.float32)})
    command = ["verify", str(tmp_path / "out"), "--inputs"]
    assert main([*command, str(tmp_path / "in.npz")]) == 0
    assert capsys.readouterr().out.startswith(
        "equal: 2 ranks against the whole model, given inputs"
    )
    np.savez(tmp_path / "other.npz", z=np.ones(3))
    assert main([*command, str(tmp_path / "other.npz")]) == 1
    assert "input 'z' is not one of the model's" in capsys.readouterr().err


class TwoNorms(nn.Module):
    """A normalisation of values whose mean the one before has made all but zero."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.BatchNorm1d(64), nn.BatchNorm1d(64)
        nn.init.constant_(self.one.bias, 1e-8)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x)).square().mean()


def test_a_running_mean_that_is_zero_but_for_rounding_is_equal() -> None:
    torch.manual_seed(0)
    options = {"parallel": "dp", "training": True}
    program = partitioner.compile(TwoNorms(), (torch.randn(48, 64),), cluster="3xcpu", **options)
    for seed in range(2):
        verification = program.verify(seed=seed)
        assert verification.equal, str(verification)
