"""Loads of experts: plans are priced by them, and experts lie so that devices have like loads."""

import math
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import partitioner
from helpers.modules.expert_models import Experts, Loss
from partitioner import examples
from partitioner.api.compiled.module import ModuleProgram
from partitioner.ir.errors import OptionError
from partitioner.ir.nodes.loads import LoadsError
from partitioner.ir.plan import PlacedNode, resolve
from partitioner.strategies.constraints import ConstraintError, Constraints

LAYER = "partitioner::experts"


def compiled(
    module: nn.Module, tokens: int, devices: int, kind: str | None, loads: Any, **options: Any
) -> ModuleProgram:
    """A program on links and launches that take no time, so that loads alone decide."""
    width = next(module.parameters()).shape[-1]
    program = partitioner.compile(
        module,
        tuple(torch.randn(2, tokens, width)),
        devices=devices,
        parallel=kind,
        time_limit_s=10,
        cluster="ideal",
        gap=1e-6,
        **({"constraints": {"loads": loads}} if loads else {}),
        **{"training": True, **options},
    )
    assert isinstance(program, ModuleProgram)
    return program


def layers(program: ModuleProgram) -> list[PlacedNode]:
    return [p for p in resolve(program.graph, program.plan) if LAYER in p.node.op]


#: Tokens, choices, the kind, the axes, loads, and the largest load of a part.
CASES: Mapping[str, tuple[int, int, str, dict[str, int], list[int], int]] = {
    "2": (6, 1, "dispatch", {"ep": 2}, [5, 4, 1, 1, 1], 6),
    "3": (7, 2, "dispatch", {"ep": 3}, [4, 3, 1, 1, 1], 4),
    "3 gathered": (7, 2, "ep", {"ep": 3}, [4, 3, 1, 1, 1], 4),
    "dp": (7, 1, "dp+dispatch", {"dp": 2, "ep": 3}, [2, 1, 1, 1, 1], 2),
}


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_one_device(case: str) -> None:
    """Experts lie as their loads ask for; names and the order of parameters are the module's."""
    tokens, chosen, kind, mesh, loads, most = CASES[case]
    torch.manual_seed(0)
    module = Loss(Experts(chosen=chosen, experts=len(loads)))
    program = compiled(
        module, tokens, math.prod(mesh.values()), kind, {"inner.*": loads}, mesh=mesh
    )
    for layer in layers(program):
        at = layer.layouts["e"]
        held = [sum(loads[i : i + n]) for i, n in at.pieces(layer.mesh, {"ep": 0, "dp": 0})]
        assert layer.loads[0] == pytest.approx(sum(held) / sum(loads))
        assert max(layer.loads) == pytest.approx(most / sum(loads))
        assert sum(layer.loads) == pytest.approx(1)
    inputs = torch.randn(2, tokens, 8)
    loss, grads = program.gradients(*inputs)
    expected = module(*inputs)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(grads[name], parameter.grad, msg=f"{name}: {{}}".format)


@cache
def skewed() -> ModuleProgram:
    """Eight experts on four devices; half of all tokens choose the first one."""
    torch.manual_seed(0)
    module = Loss(Experts(width=64, inner=32, experts=8, chosen=1))
    loads = {"inner.up": [7, 1, 1, 1, 1, 1, 1, 1]}
    return compiled(module, 64, 4, "dispatch", loads)


def test_the_most_loaded_expert_has_a_device_of_its_own() -> None:
    for layer in layers(skewed()):
        assert max(layer.loads) == pytest.approx(0.5)
        assert 1 in layer.layouts["e"].sizes()


def test_what_is_shown_names_the_loads(capsys: pytest.CaptureFixture[str]) -> None:
    program = skewed()
    (forward, _) = layers(program)
    shares = ", ".join(f"{100 * load:.3g} %" for load in forward.loads)
    program.show()
    assert f"; loads {shares}" in capsys.readouterr().out
    program.explain(forward.node.name)
    told = capsys.readouterr().out
    assert f"the parts of the experts get {shares} of the choices of tokens, 25 % each" in told
    assert "on the busiest device" in told


@pytest.mark.slow
def test_a_saved_plan_keeps_the_loads(tmp_path: Path) -> None:
    program = skewed()
    program.save(tmp_path / "plan")
    module, example = program.whole, tuple(torch.randn(2, 64, 64))
    loaded = partitioner.load(tmp_path / "plan", module, example)
    assert not loaded.warnings
    assert [layer.loads for layer in layers(loaded)] == [layer.loads for layer in layers(program)]
    assert loaded.evaluation.load_s == program.evaluation.load_s


WRONG: Mapping[str, tuple[Any, str]] = {
    "negative": ({"e": [-1, 1]}, r"constraints loads 'e': \[-1, 1\] is not a list of numbers"),
    "nothing": ({"e": [0, 0]}, "of at least 0, one for each expert and not all of them 0"),
    "no list": ({"e": 3}, "3 is not a list"),
    "large": ({"e": [10**400]}, "is not a list of numbers"),
    "yes or no": ({"e": [True, 1]}, "is not a list of numbers"),
    "text": ({"e": ["x"]}, "'x'.* is not a list"),
    "no table": ([1, 2], r"\[loads\] is a table of names"),
}


@pytest.mark.parametrize("case", WRONG)
def test_malformed_loads_are_refused(case: str) -> None:
    loads, refusal = WRONG[case]
    with pytest.raises(ConstraintError, match=refusal):
        Constraints.of({"loads": loads})


def test_loads_may_be_numbers_of_numpy() -> None:
    counts = np.bincount([0, 2, 2], minlength=3)
    loads = {"e": [*counts], "f": [*(counts / counts.sum()).astype(np.float32)]}
    assert dict(Constraints.of({"loads": loads}).loads) == {
        "e": (1.0, 0.0, 2.0),
        "f": pytest.approx((1 / 3, 0, 2 / 3)),
    }


def test_a_model_without_experts_has_no_loads() -> None:
    loads = {"loads": {"*": [1, 2]}}
    with pytest.raises(LoadsError, match="the model has none that is one operator"):
        partitioner.compile(nn.Linear(4, 4), (torch.randn(2, 4),), devices=2, constraints=loads)
    with pytest.raises(OptionError, match=r"loads '\*': no layer of experts of an ONNX model"):
        partitioner.compile(examples.build("mlp"), devices=2, constraints=loads)


def test_a_file_has_loads(tmp_path: Path) -> None:
    file = tmp_path / "loads.toml"
    file.write_text('[loads]\n"*.experts" = [1, 2.5]\n"layers.0.*" = [3, 1]\n')
    expected = (("*.experts", (1.0, 2.5)), ("layers.0.*", (3.0, 1.0)))
    assert Constraints.read(file).loads == expected
    assert not Constraints.read(file).bound


def test_the_example_of_the_page_of_experts(capsys: pytest.CaptureFixture[str]) -> None:
    page = Path(__file__).parents[2] / "docs/concepts/experts.md"
    (example,) = [
        block
        for block in re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL)
        if '"loads"' in block
    ]
    exec(compile(example, page.name, "exec"), {})
    assert "the parts of the experts get" in capsys.readouterr().out
