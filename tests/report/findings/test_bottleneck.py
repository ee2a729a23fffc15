"""The sentences of the head, on plans whose bottleneck is known."""

from dataclasses import replace
from pathlib import Path

import pytest
from onnx import helper

import partitioner
from helpers.modules.staged_models import Plain, seeded
from helpers.plans.staged import staged_plan
from partitioner import examples
from partitioner.api.compiled.base import Compiled
from partitioner.cli.main import main
from partitioner.cost_model.cluster.resolve import resolve_cluster
from partitioner.cost_model.evaluate import evaluate, one_device
from partitioner.frontends.torch.options import ModuleOptions
from partitioner.frontends.torch.source import Example
from partitioner.frontends.torch.trace import trace_module
from partitioner.report.findings.bottleneck import WAITING, Bottleneck, bottleneck, limit_sentence
from partitioner.report.page.data import headline
from partitioner.report.planned import Planned


def _compiled(devices: int, **options: object) -> Compiled:
    sizes = {key: options.pop(key) for key in ("layers", "hidden", "batch") if key in options}
    model = examples.build("mlp", **sizes)  # type: ignore[arg-type]
    return partitioner.compile(model, devices=devices, time_limit_s=5, **options)  # type: ignore[arg-type]


def test_small_kernels_are_bound_by_launches() -> None:
    # Enough layers that a cut, whose message takes its start-up, leaves two chains of launches.
    head = headline(_compiled(2, layers=16, hidden=16, strategy="inter"))
    assert head["limit"].startswith(("Kernel launches: device", "Communication: device"))


def test_one_device() -> None:
    head = headline(_compiled(1, layers=2, hidden=16))
    assert "Runs on one h100: nothing is split".lower() in head["verdict"].lower()
    assert head["speedup"] == pytest.approx(1.0)


def test_large_layers_are_bound_by_memory_bandwidth() -> None:
    head = headline(_compiled(1, layers=2, hidden=2048, batch=1, cluster="1xcpu"))
    assert head["limit"].startswith("Memory bandwidth: device 0")


def test_a_free_cluster() -> None:
    head = headline(_compiled(2, layers=2, hidden=16, cluster="2xideal"))
    assert head["limit"].startswith("Arithmetic: device 0 is busy")
    assert ": no better than 2 whole copies: " in head["verdict"]


@pytest.mark.slow
def test_a_split_that_memory_forces() -> None:
    head = headline(_compiled(4, layers=8, hidden=256, memory="1MiB"))
    assert ": 4 devices hold what one h100 does not (" in head["verdict"]
    assert head["speedup"] is None
    assert head["step_s_one"] is None


def test_a_split_that_does_not_pay() -> None:
    head = headline(_compiled(2, layers=1, hidden=16, objective="latency", strategy="intra"))
    assert ": no better than one h100: " in head["verdict"]


def test_the_memory_objective_speaks_of_bytes() -> None:
    head = headline(_compiled(2, layers=4, hidden=64, objective="memory"))
    assert head["limit"].startswith("Memory: device ")
    assert "x less memory a device than one h100: " in head["verdict"]


FAST_AND_SLOW = """
[[devices]]
preset = "cpu"

[[devices]]
preset = "h100"

[[levels]]
name = "link"
bandwidth_bytes_per_s = 25e9
latency_s = 1e-5
"""


def test_of_unequal_devices_the_best_alone_is_compared_with(tmp_path: Path) -> None:
    (tmp_path / "two.toml").write_text(FAST_AND_SLOW)
    result = _compiled(2, layers=8, hidden=256, cluster=str(tmp_path / "two.toml"))
    head = headline(result)
    fast = one_device(result.graph, result.cluster, 1)
    assert head["step_s_one"] == fast.step_s
    assert head["speedup"] == pytest.approx(fast.step_s / result.evaluation.step_s)
    assert result.summary["one_device"]["step_s"] == fast.step_s
    assert [rival.name for rival in result.rivals][:2] == ["one h100", "2 whole copies"]


def test_a_plan_that_does_not_fit_says_so_first() -> None:
    result = _compiled(2, layers=4, hidden=64, strategy="inter")
    tight = replace(result.evaluation, limit_bytes=dict.fromkeys((0, 1), 1024))
    limits, certificate = bottleneck(result), result.plan.certificate
    assert certificate is not None
    for objective in ("throughput", "latency", "memory"):
        plan = replace(result.plan, certificate=replace(certificate, objective=objective))
        sentence = limit_sentence(replace(result, plan=plan, evaluation=tight), limits)
        assert sentence.startswith("Does not fit: device ")
        assert "over its limit" in sentence


def test_waiting_is_not_communication() -> None:
    seconds = {"waiting": 0.6, "send": 0.1, "launches": 0.3}
    limits = Bottleneck(None, 1.0, seconds, counts={}, balance=1.0, longest=("", 0.0))
    assert limits.communication_s == {"send": 0.1}


def test_a_training_step_over_two_devices_waits_for_the_other_one() -> None:
    example = Example(Plain.batch(0, 8), {})
    graph = trace_module(seeded(Plain), example, ModuleOptions(True)).graph
    plan = replace(staged_plan(graph, [(0,), (1,)], "1f1b", 1), pipeline=None, stages=())
    cluster = resolve_cluster(None, 2)
    figures = evaluate(graph, plan, cluster)
    limits = bottleneck(
        Planned(name="", graph=graph, cluster=cluster, plan=plan, evaluation=figures, summary={})
    )
    assert limits.total_s == figures.step_s == figures.latency_s
    assert sum(limits.seconds.values()) == pytest.approx(limits.total_s)
    assert limits.seconds[WAITING] > 0.1 * limits.total_s


def test_nothing_takes_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    value = [helper.make_tensor_value_info(name, 1, [2]) for name in ("x", "y")]
    nodes = [helper.make_node("Identity", ["x"], ["y"])]
    graph = helper.make_graph(nodes, "g", value[:1], value[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
    result = partitioner.compile(model, devices=2, cluster="2xideal")
    result.save(tmp_path / "p", plan_only=True)
    assert main(["explain", str(tmp_path / "p")]) == 0
    assert "time of " in capsys.readouterr().out
