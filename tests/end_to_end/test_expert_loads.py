"""Loads of experts: plans are priced by them, and experts lie so that devices have like loads."""

import math
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from expert_models import Experts, Loss
from torch import nn

import partitioner
from partitioner import examples
from partitioner.compiled.module import ModuleProgram
from partitioner.cost_model.compute import node_seconds
from partitioner.cost_model.dispatch import dispatch_comms
from partitioner.cost_model.even_mesh import EvenMesh, stand_in
from partitioner.cost_model.traffic import sent_numel
from partitioner.ir.dispatch import Dispatch
from partitioner.ir.errors import OptionError
from partitioner.ir.layout import DimLayout
from partitioner.ir.loads import LoadsError
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.ops import rules_of
from partitioner.ir.plan import PlacedNode, Plan, PlanError, place, resolve
from partitioner.ir.rule import Rule
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
    "5": (11, 2, "dispatch", {"ep": 5}, [9, 9, 1, 1, 6, 1, 1, 1, 1], 9),
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


def placed_evenly(program: ModuleProgram, mesh: DeviceMesh) -> list[PlacedNode]:
    """The nodes of the layer with tokens and experts cut evenly."""
    graph, found = program.graph, []
    for node in graph.nodes:
        rule = rules_of(graph)[node.name]
        if isinstance(rule, Rule) and rule.dispatch is not None:
            sizes = {name: rule.factors[name].size for name in ("t", "e")}
            cut = {name: DimLayout.even(size, ("ep",), mesh) for name, size in sizes.items()}
            found.append(place(graph, node, mesh, cut, rule))
    return found


def test_seconds_are_those_of_the_experts_of_a_device() -> None:
    """Evenly cut, the first device has 8 of 14 parts of the work, and the others 2."""
    program = skewed()
    for layer in placed_evenly(program, DeviceMesh.of({"ep": 4})):
        inside = layer.inside(program.graph)
        assert inside.rule is not None
        flops = [
            inside.rule.local_flops(inside.layouts, inside.mesh, point)
            for _, point in inside.mesh.coords()
        ]
        assert flops == pytest.approx([inside.rule.flops * part / 14 for part in (8, 2, 2, 2)])
        seconds = node_seconds(program.graph, layer, program.cluster)
        assert seconds[0] == pytest.approx(4 * seconds[1])


def test_prices_on_large_meshes_are_those_of_the_busiest_device() -> None:
    program = skewed()
    mesh = DeviceMesh.of({"ep": 4})
    even = EvenMesh(mesh, stand_in(mesh), program.cluster)
    pairs = zip(placed_evenly(program, mesh), placed_evenly(program, even.model), strict=True)
    for layer, stood_in in pairs:
        explicit = node_seconds(program.graph, layer, program.cluster)
        assert even.node_seconds(program.graph, stood_in) == pytest.approx(max(explicit.values()))


def test_devices_are_sent_the_tokens_of_their_experts() -> None:
    """Each device has 16 tokens; the first one's two experts get 8 of 14."""
    forward, _ = placed_evenly(skewed(), DeviceMesh.of({"ep": 4}))
    _, there, back = (sent_numel(comm.transfers) for comm in dispatch_comms(forward))
    share = [part / 14 for part in (8, 2, 2, 2)]
    bytes_there, bytes_back = 4 * (64 + 1) + 4 * 2, 4 * 64
    for device, part in enumerate(share):
        assert there[device] == pytest.approx(16 * (1 - part) * bytes_there, abs=3)
        assert back[device] == pytest.approx(3 * 16 * part * bytes_back, abs=3)


def test_the_most_loaded_expert_has_a_device_of_its_own() -> None:
    for layer in layers(skewed()):
        assert max(layer.loads) == pytest.approx(0.5)
        assert 1 in layer.layouts["e"].sizes()


def test_equal_loads_are_no_loads() -> None:
    torch.manual_seed(0)
    module = Loss(Experts(chosen=2))
    plans = {
        compiled(module, 6, 2, "dispatch", loads).plan.to_json()
        for loads in (None, {"inner": [0.2] * 5})
    }
    assert len(plans) == 1


@pytest.mark.parametrize(("chosen", "owned"), [(1, [0, 3]), (2, [1, 2]), (3, [0])])
def test_the_expected_share_of_rows(chosen: int, owned: list[int]) -> None:
    """One choice is as its load says; the most loaded expert's tokens all come."""
    loads = (0.3, 0.1, 0.2, 0.15, 0.25)
    pieces = [(expert, 1) for expert in owned]
    share = Dispatch("t", "e", chosen, 0, 0, loads=loads).share(pieces, 5)
    load = sum(loads[expert] for expert in owned)
    if chosen == 1:
        assert share == pytest.approx(load)
    assert chosen * max(loads[expert] for expert in owned) <= share + 1e-12
    assert share <= min(1.0, chosen * load) + 1e-12
    whole = Dispatch("t", "e", chosen, 0, 0, loads=loads).share([(0, 5)], 5)
    assert whole == pytest.approx(1.0)


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


@pytest.mark.parametrize(
    ("cut", "refusal"),
    [
        ("ep:1,1,1,1|1,1,1", "does not fit size 8 over 4 parts"),
        ("ep:1,1,1,1|1,1,1,0", "does not fit size 8 over 4 parts"),
        ("ep:4,4,0,0", "is cut into parts of 4,4,0,0 over ep; every part must have at least 1"),
        ("ep:1,-1,4,4", "is not like 'tp'"),
    ],
)
def test_an_edited_plan_must_place_each_expert_once(cut: str, refusal: str) -> None:
    program = skewed()
    text, count = re.subn(r'"e": "ep:[^"]*"', f'"e": "{cut}"', program.plan.to_json())
    assert count == 2
    with pytest.raises((PlanError, ConstraintError, ValueError), match=re.escape(refusal)):
        resolve(program.graph, Plan.from_json(text))


WRONG: Mapping[str, tuple[Any, str]] = {
    "no such name": ({"inner.ip": [1] * 5}, "no layer of experts has .*; did you mean 'inner.up'"),
    "too few": ({"*": [1, 2]}, r"2 numbers for a layer of 5 experts \('/inner/experts'\)"),
    "too much": ({"inner": [9, 1, 1, 1, 1]}, "expert 0 of .* has 0.692 of the choices; .* 1/2 of"),
    "negative": ({"inner": [-1, 1, 1, 1, 1]}, r"constraints loads 'inner': \[-1, .* not a list of"),
    "nothing": ({"inner": [0] * 5}, "is not a list of numbers of at least 0"),
    "no list": ({"inner": 3}, "3 is not a list"),
    "no table": ([1, 2], r"\[loads\] is a table of names"),
}


@pytest.mark.parametrize("case", WRONG)
def test_loads_that_no_layer_can_have_are_refused(case: str) -> None:
    loads, refusal = WRONG[case]
    with pytest.raises((LoadsError, ConstraintError), match=refusal):
        compiled(Loss(Experts(chosen=2)), 6, 2, "ep", loads)


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
