"""Layers of experts whose tokens are sent to the devices of their experts alone."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import partitioner
from helpers.modules.expert_models import Experts, Loss
from partitioner import examples
from partitioner.api.compiled.module import ModuleProgram
from partitioner.backends.torch.running import all_ranks
from partitioner.cost_model.equal_devices.even_mesh import EvenMesh, stand_in
from partitioner.cost_model.prices.compute import node_seconds
from partitioner.cost_model.schedule.traffic import sent_bytes
from partitioner.ir.errors import OptionError
from partitioner.ir.loops.factors import Dispatch
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.ops import rules_of
from partitioner.ir.plan import place, resolve
from partitioner.ir.rule import Cut, Rule

LAYER = "partitioner::experts"


def compiled(
    module: nn.Module, example: object, devices: int, kind: str, **options: Any
) -> ModuleProgram:
    program = partitioner.compile(
        module, example, devices=devices, parallel=kind, time_limit_s=10, **options
    )
    assert isinstance(program, ModuleProgram)
    return program


def cuts(program: ModuleProgram) -> list[str]:
    placed = resolve(program.graph, program.plan)
    return [layer.cut_text for layer in placed if LAYER in layer.node.op]


def check(program: ModuleProgram, module: nn.Module, inputs: Tensor) -> None:
    loss, grads = program.gradients(*inputs)
    module.zero_grad()
    expected = module(*inputs)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=1e-6)
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(grads[name], parameter.grad, rtol=1e-5, atol=1e-6)


#: Tokens, choices, experts, and the axes: tokens and experts of other numbers than devices.
CASES = {
    "2": (6, 1, 5, {"ep": 2}),
    "3": (7, 2, 5, {"ep": 3}),
    "5": (11, 5, 9, {"ep": 5}),
    "dp": (7, 2, 5, {"dp": 2, "ep": 3}),
    "dp inside": (7, 1, 5, {"ep": 3, "dp": 2}),
    "tp": (9, 2, 3, {"ep": 2, "tp": 3}),
    "6 on 5": (11, 2, 6, {"ep": 5}),  # torch.chunk would leave two without any
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_one_device(name: str) -> None:
    tokens, chosen, experts, mesh = CASES[name]
    torch.manual_seed(0)
    module = Loss(Experts(chosen=chosen, experts=experts, grouped=name == "3"))
    kind = "+".join("dispatch" if axis == "ep" else axis for axis in mesh)
    program = compiled(
        module,
        tuple(torch.randn(2, tokens, 8)),
        math.prod(mesh.values()),
        kind,
        mesh=mesh,
        training=True,
    )
    for text in cuts(program):
        assert "e/ep" in text
        assert "t/ep" in text or "t/dp*ep" in text or "t/ep*dp" in text
    for _ in range(2):
        check(program, module, torch.randn(2, tokens, 8))


def test_one_expert_may_get_all_tokens_and_others_none() -> None:
    torch.manual_seed(0)
    module = Loss(Experts(chosen=1, experts=3))
    program = compiled(module, tuple(torch.randn(2, 8, 8)), 3, "dispatch", training=True)
    for expert in range(3):
        with torch.no_grad():
            module.inner.norm.bias.fill_(1.0)
            module.inner.router.weight.zero_()
            module.inner.router.weight[expert] += 5.0
        program = compiled(module, tuple(torch.randn(2, 8, 8)), 3, "dispatch", training=True)
        check(program, module, torch.randn(2, 8, 8))


def test_inference_has_the_values_of_one_device() -> None:
    torch.manual_seed(0)
    module, x = Experts(chosen=2), torch.randn(7, 8)
    program = compiled(module, (x,), 3, "dispatch")
    with torch.no_grad():
        torch.testing.assert_close(program(x), module(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_rank_may_get_one_token_of_a_narrow_type(dtype: torch.dtype) -> None:
    """Its columns of bytes begin where no int32 may."""
    torch.manual_seed(0)
    module, x = Experts(experts=4, chosen=1).to(dtype), torch.randn(4, 8).to(dtype)
    program = compiled(module, (x,), 2, "dispatch")
    with torch.no_grad():
        for _ in range(20):
            x = torch.randn(4, 8).to(dtype)
            torch.testing.assert_close(program(x), module(x), rtol=2e-2, atol=2e-2)


def test_the_devices_of_a_group_ascend_as_those_of_a_process_group_do() -> None:
    torch.manual_seed(0)
    program = compiled(Experts(chosen=2), (torch.randn(7, 8),), 3, "dispatch")
    (group,) = program.plan.groups
    mixed = replace(program.plan, groups=(replace(group, devices=(2, 0, 1)),))
    (layer,) = (one for one in resolve(program.graph, mixed) if LAYER in one.node.op)
    assert {layer.group(point) for _, point in layer.mesh.coords()} == {(0, 1, 2)}


@pytest.mark.parametrize(("chosen", "owned", "count"), [(1, 2, 8), (2, 3, 5), (4, 1, 4), (3, 2, 4)])
def test_the_expected_share_of_rows(chosen: int, owned: int, count: int) -> None:
    """Beside all choices, counted one by one."""
    choices = list(itertools.combinations(range(count), chosen))
    hit = sum(any(expert < owned for expert in choice) for choice in choices)
    share = Dispatch("t", "e", chosen, 0, 0).share([(0, owned)], count)
    assert share == pytest.approx(hit / len(choices))


def _formula(rows: Sequence[float], width: int, chosen: int, ranks: int) -> float:
    """Bytes that a device sends for rows that leave it, and for rows that came to it.

    float32; ids and places are int32, counts int64.
    """
    leaving, came = rows
    scales, numbers = 4 * chosen, 4 * (chosen + 1)
    forward = leaving * (4 * width + scales + numbers) + came * 4 * width
    backward = leaving * (8 * width + scales + numbers) + came * (4 * width + scales)
    return forward + backward + 2 * 8 * (ranks - 1)


def test_a_layer_is_expected_to_send_what_the_formula_says() -> None:
    """2 of 6 experts on three devices: a token goes to 3/5 of the others."""
    tokens, width, chosen, devices = 15, 8, 2, 3
    module = Loss(Experts(width=width, chosen=chosen, experts=6))
    program = compiled(
        module, tuple(torch.randn(2, tokens, width)), devices, "dispatch", training=True
    )
    numel = sum(
        p.numel() for n, p in module.named_parameters() if ".up" not in n and ".down" not in n
    )
    reduced = 2 * (devices - 1) / devices * 4 * (numel + 1)  # gradients of what is whole, the loss
    share = 1 - math.comb(4, 2) / math.comb(6, 2)
    rows = tokens / devices * (devices - 1) * share
    expected = _formula((rows, rows), width, chosen, devices) + reduced
    sent = sent_bytes(program.schedule)
    assert sent == pytest.approx(dict.fromkeys(range(devices), expected))


def test_ranks_send_the_rows_that_chose_their_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, width, chosen, devices = 15, 8, 1, 3
    torch.manual_seed(0)
    module = Loss(Experts(width=width, chosen=chosen, experts=6))
    inputs = torch.randn(2, tokens, width)
    program = compiled(module, tuple(inputs), devices, "dispatch", training=True)
    operator = torch.ops._c10d_functional.all_to_all_single.default
    run, sent = all_ranks._COLLECTIVES[operator], [0] * devices

    def counted(calls: Sequence[tuple[Any, ...]]) -> list[Tensor]:
        for rank, (tensor, _, leaving, _) in enumerate(calls):
            others = sum(n for to, n in enumerate(leaving) if to != rank)
            sent[rank] += others * tensor.element_size()
        return run(calls)

    monkeypatch.setitem(all_ranks._COLLECTIVES, operator, counted)  # type: ignore[arg-type]
    program.gradients(*inputs)
    with torch.no_grad():
        ids = module.inner.router(module.inner.norm(inputs[0])).argmax(-1).view(devices, -1)
    rows = torch.zeros(devices, devices)
    for rank, own in enumerate(ids):
        for expert in own.tolist():
            rows[rank, expert // 2] += expert // 2 != rank
    for rank in range(devices):
        both = float(rows[rank].sum()), float(rows[:, rank].sum())
        assert sent[rank] == _formula(both, width, chosen, devices)


@pytest.mark.parametrize(("chosen", "sends"), [(1, True), (6, False)])
def test_the_search_sends_tokens_where_it_is_cheaper(chosen: int, sends: bool) -> None:
    """Of 8 experts on four devices, one or six for each token."""
    with torch.device("meta"):
        module = Loss(Experts(width=2048, inner=1024, experts=8, chosen=chosen))
        example = torch.empty(2, 16384, 2048)
    program = compiled(module, tuple(example), 4, "ep", training=True)
    assert ["t/ep" in text for text in cuts(program)] == [sends, sends]


def test_prices_on_large_meshes_are_those_of_each_device() -> None:
    with torch.device("meta"):
        module = Loss(Experts(width=64, inner=32, experts=8, chosen=2))
        example = torch.empty(2, 64, 64)
    program = compiled(module, tuple(example), 4, "dispatch", training=True)
    graph, cluster = program.graph, program.cluster
    mesh = DeviceMesh.of({"ep": 4})
    even = EvenMesh(mesh, stand_in(mesh), cluster)
    for node in graph.nodes:
        rule = rules_of(graph)[node.name]
        if not isinstance(rule, Rule) or rule.dispatch is None:
            continue

        def placed(on: DeviceMesh, rule: Rule = rule, node: Any = node) -> Any:
            layouts = {f: Cut(("ep",)).layout(rule.factors[f].size, on) for f in ("t", "e")}
            return place(graph, node, on, layouts, rule)

        explicit = node_seconds(graph, placed(mesh), cluster)
        seconds = even.node_seconds(graph, placed(even.model))
        assert explicit == pytest.approx(dict.fromkeys(range(4), seconds))


def test_onnx_models_are_refused() -> None:
    with pytest.raises(OptionError, match="'dispatch' of an ONNX model: its layers of experts"):
        partitioner.compile(examples.build("mlp"), devices=2, parallel="dispatch")
