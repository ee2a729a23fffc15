"""One speed-up a plan: the summary, the report, the card, `.speedup`, diff and a sweep agree."""

import html
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import partitioner
from partitioner import examples
from partitioner.api.compiled.base import Compiled
from partitioner.api.compiled.module import ModuleProgram
from partitioner.api.verify.symbolic.proof import IN_BLOCKS
from partitioner.cost_model.cluster.resolve import (
    cpu_fingerprint,
    gpu_fingerprint,
    resolve_cluster,
)
from partitioner.cost_model.evaluate import best_single
from partitioner.cost_model.memory.lives import MemoryPeak
from partitioner.foundations import units
from partitioner.ir.plan import Trial
from partitioner.report.card import card
from partitioner.report.measured import Measured
from partitioner.report.one_device import OneDevice
from partitioner.report.page.data import headline
from partitioner.report.summary import lines
from partitioner.report.text.diff import diff
from partitioner.report.text.explain import explain
from partitioner.report.verdict import Rival, rivals_of
from partitioner.search.outcome import Outcome
from partitioner.solver.outcome import Infeasible


def _mlp(layers: int = 4, hidden: int = 64, batch: int = 8, **options: object) -> Compiled:
    model = examples.build("mlp", layers=layers, hidden=hidden, batch=batch)
    return partitioner.compile(model, time_limit_s=5, **options)  # type: ignore[arg-type]


class _Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def _trained(**options: object) -> ModuleProgram:
    x = torch.zeros(16, 64)
    return partitioner.compile(_Loss(), x, 2, training=True, time_limit_s=5, **options)  # type: ignore[arg-type]


PLANS: dict[str, Callable[[], Compiled]] = {
    "placed": lambda: _mlp(devices=2, strategy="inter"),
    "cut": lambda: _mlp(devices=2, strategy="intra", cluster="2xideal"),
    "latency": lambda: _mlp(devices=2, strategy="intra", cluster="2xideal", objective="latency"),
    "memory": lambda: _mlp(devices=2, objective="memory"),
    "one device does not hold it": lambda: _mlp(devices=2, memory="48KiB", strategy="intra"),
    "requests in micro-batches": lambda: _mlp(devices=2, micro_batches=2, cluster="2xideal"),
    "on one device": lambda: _mlp(devices=1),
    "in blocks": lambda: _mlp(layers=8, hidden=256, devices=1, memory="1MiB"),
    "training": lambda: _trained(parallel="dp"),
    "training in stages": lambda: _trained(parallel="pp", micro_batches=4),
    "training in micro-batches": lambda: _trained(micro_batches=2),
}


@pytest.mark.parametrize("name", PLANS)
def test_all_that_name_the_speed_up_agree(name: str, tmp_path: Path) -> None:
    result = PLANS[name]()
    speedup = result.speedup
    assert (speedup is None) == (name in ("one device does not hold it", "in blocks"))
    if speedup is not None:
        assert speedup == result.one_device.step_s / result.evaluation.step_s

    assert result.summary["speedup"] == speedup
    head = headline(result)
    assert head["speedup"] == speedup
    assert (head["step_s_one"] is None) == (speedup is None)
    if not isinstance(result, ModuleProgram):
        again = partitioner.load(result.save(tmp_path / "plan", plan_only=True))
        assert again.speedup == speedup
    changes = diff(result, result, ("a", "b"))
    (figure,) = (f for f in changes["figures"] if f["name"] == "speed-up over one device")
    assert figure["before"] == figure["after"] == speedup
    verdict = result.verdict()  # the tiles have what the verdict says
    assert head["gain"] == verdict.gain
    tile = "-" if verdict.gain is None else units.times(verdict.gain)
    title = f"Gain, {head['gain_of']}"
    assert f'<small style="opacity:.75">{title}</small><br><b>{tile}</b>' in card(result)
    if verdict.best is not None:
        assert head["gain"] == verdict.best.cost / verdict.cost
        assert head["gain_of"] == f"predicted; over {verdict.best.name}"
    times = "" if speedup is None else f", {units.digits(speedup)} times one device"
    assert f"  step        {units.seconds(result.evaluation.step_s)}{times}\n" in explain(result)


@pytest.mark.parametrize("name", PLANS)
def test_the_verdict_is_one_in_all_that_show_it(name: str, tmp_path: Path) -> None:
    result = PLANS[name]()
    line = result.verdict().line
    assert str(result).splitlines()[0].endswith(f": {line}")
    assert headline(result)["verdict"].startswith(line)
    assert explain(result).splitlines()[1].startswith(line)
    assert line in html.unescape(card(result))
    if not isinstance(result, ModuleProgram):
        again = partitioner.load(result.save(tmp_path / "plan", plan_only=True))
        assert again.verdict().line == line


@pytest.mark.parametrize("name", PLANS)
def test_the_verdict_names_the_gain_over_the_best_that_fits(name: str) -> None:
    result = PLANS[name]()
    verdict, used = result.verdict(), result.evaluation.devices_used
    assert verdict.rivals[0].name in ("one h100", "one ideal")
    said, best = verdict.sentence, verdict.best
    assert (best is None) == (not result.one_device.fits)
    if best is None or used == 1:
        start = f"{used} devices hold what one " if used > 1 else "Runs "
        assert said.startswith(start)
        return
    gain = best.cost / verdict.cost
    times = f"{units.digits(gain)} times as fast as {best.name}: "
    if gain < 1 / best.least_gain:
        assert said.startswith("Do not split for ")
        assert best.name in said
    elif gain < best.least_gain:
        assert said.startswith(f"No better than {best.name}: ")
    elif result.objective == "memory":
        assert said.startswith(f"{units.times(gain)} less memory a device than one ")
    elif result.objective == "latency":
        assert said.startswith(f"Answers a request {times}")
    else:
        assert said.startswith(times)


def test_what_does_not_fit_whole_is_said_of_blocks() -> None:
    result = PLANS["in blocks"]()
    assert result.plan.blocks
    assert (
        result.verdict().sentence
        == "Runs in blocks on one h100, which does not hold the whole model"
    )
    assert "(the whole model does not fit one device)" in str(result)
    assert result.summary["proof"].endswith(f"1 rank computes the whole model, {IN_BLOCKS}")
    assert headline(result)["instead"].startswith("Instead: one h100 does not hold the model (")


@pytest.mark.slow
def test_a_plan_without_a_summary_has_the_same_speed_up() -> None:
    for name in ("placed", "one device does not hold it"):
        result = PLANS[name]()
        assert replace(result, summary={}).speedup == pytest.approx(result.speedup)


def test_a_sweep_has_the_speed_up_of_the_plan() -> None:
    model = examples.build("mlp", layers=4, hidden=64, batch=8)
    for objective in ("throughput", "latency"):
        options = {"objective": objective, "strategy": "inter", "time_limit_s": 5}
        result = partitioner.compile(model, devices=2, **options)  # type: ignore[arg-type]
        swept = partitioner.sweep(model, devices=[2], **options)  # type: ignore[arg-type]
        (point,) = swept.data["points"]
        assert point["speedup"] == result.speedup
        assert point["verdict"] == result.verdict().line
        is_split = result.evaluation.devices_used > 1
        said = f"{point['verdict']}." if is_split else "worth it: that plan uses one device."
        assert swept.data["answer"].endswith(f" {said}")


def test_one_device_runs_requests_whole_or_in_micro_batches_whichever_it_holds() -> None:
    result = PLANS["requests in micro-batches"]()
    whole = _mlp(devices=1).graph
    parts = (result.graph, result.plan.micro_batches)
    fast = best_single(whole, result.cluster, "throughput")[1]
    assert result.one_device.step_s == min(
        fast.step_s, best_single(result.graph, result.cluster, "throughput", 2)[1].step_s
    )
    slow = best_single(result.graph, result.cluster, "throughput", 2)[1]
    limit = (max(fast.held_bytes.values()) + max(slow.held_bytes.values())) // 2
    small = result.cluster.with_memory(limit)
    assert OneDevice.best(small, "throughput", "intra", parts, (whole, None)).step_s == slow.step_s


def test_a_device_that_holds_the_model_by_exact_liveness_holds_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    result = PLANS["on one device"]()
    limit = 100
    safe, exact = MemoryPeak(101, 60, 41, "x"), MemoryPeak(80, 60, 20, "x")
    figures = replace(
        result.evaluation,
        limit_bytes={0: limit},
        peak={0: safe},
        exact_peak={0: exact},
        executor_peak={},
    )
    assert not figures.fits
    monkeypatch.setattr("partitioner.report.one_device.best_single", lambda *_: (0, figures))
    single = OneDevice.best(result.cluster, "throughput", "inter", (result.graph, None))
    assert (single.held_bytes, single.fits) == (90, True)
    assert single.gain(result.evaluation, "throughput") == 1.0
    assert single.gain(result.evaluation, "memory") == 90 / result.evaluation.cost("memory")


@pytest.mark.parametrize("name", ["training in stages", "training in micro-batches"])
def test_a_step_in_micro_batches_is_compared_with_one_device_and_the_whole_batch(
    name: str,
) -> None:
    result = PLANS[name]()
    x = torch.zeros(16, 64)
    whole = partitioner.compile(_Loss(), x, 1, training=True, time_limit_s=5)
    alone_s = whole.evaluation.step_s
    in_parts = best_single(result.graph, result.cluster, "throughput", result.plan.micro_batches)
    assert alone_s < in_parts[1].step_s
    assert result.one_device.step_s == pytest.approx(alone_s)
    assert result.summary["speedup"] == pytest.approx(alone_s / result.evaluation.step_s)


def test_recomputation_is_compared_with_one_device_that_keeps_all() -> None:
    again = _trained(recompute=True)
    whole = partitioner.compile(_Loss(), torch.zeros(16, 64), 1, training=True, time_limit_s=5)
    assert again.one_device.step_s <= whole.evaluation.step_s * 1.0001


def test_a_plan_for_a_stream_says_what_whole_copies_would_serve() -> None:
    result = PLANS["placed"]()
    alone_per_s = 1 / result.one_device.step_s
    copies = units.per_second(2 * alone_per_s)
    here = units.per_second(result.evaluation.throughput_per_s)
    said = f"Do not split for rate: 2 whole copies (--strategy copies) would serve {copies}, this"
    assert result.verdict().sentence.startswith(f"{said} plan {here}")
    assert f"; 2 whole copies {copies}." in headline(result)["instead"]
    assert result.summary["one_device"]["copies"] == 2
    assert result.summary["one_device"]["copies_per_s"] == pytest.approx(2 * alone_per_s)
    rivals = [rival for rival in result.summary["alternatives"] if not rival["is_split"]]
    assert [(rival["name"], rival["cost"]) for rival in rivals] == [
        ("one h100", result.one_device.step_s),
        ("2 whole copies", pytest.approx(result.one_device.step_s / 2)),
    ]


def test_a_bound_above_what_copies_cost_is_said_to_hold_for_partitions() -> None:
    result = PLANS["placed"]()
    copies_s = 1 / result.one_device.copies_per_s
    said = " (the bound is of what was searched alone)"
    for bound_s, is_said in ((copies_s * 1.01, True), (copies_s * 0.99, False)):
        plan = lines({**result.summary, "bound": bound_s}, result.verdict())[1]
        assert plan.startswith("  plan ")
        assert plan.endswith(said) == is_said
        assert result.verdict().bound_note(bound_s) == (said if is_said else "")
    plan = replace(result.plan, certificate=replace(result.plan.certificate, bound=copies_s * 1.01))
    assert headline(replace(result, plan=plan))["status"].endswith(said)


def test_a_split_that_no_device_can_do_without_is_compared_with_the_smallest() -> None:
    model = examples.build("mlp", layers=8, hidden=64, batch=8)
    result = partitioner.compile(model, devices=4, memory="72KiB", time_limit_s=5)
    spaces = [rival for rival in result.rivals if rival.is_split and rival.fits]
    verdict = replace(
        result.verdict(),
        rivals=(result.rivals[0], Rival("inter (2 x one device)", 1.0, 2, is_split=True)),
    )
    assert not any(rival.devices < 4 for rival in spaces)
    assert result.verdict().sentence.startswith("4 devices hold what one h100 does not (")
    times = units.digits(1.0 / verdict.cost)
    assert verdict.sentence.endswith(
        f", {times} times as fast as inter (2 x one device) on 2 of them"
    )
    less = replace(verdict, objective="memory")
    assert less.sentence.endswith("x less memory a device than inter (2 x one device) on 2 of them")
    assert "times as fast" not in replace(verdict, measured_s=1.0).sentence


def test_a_measured_plan_is_judged_by_its_measurement() -> None:
    result = PLANS["cut"]()
    alone_s = result.one_device.step_s
    for measured_s, said in ((alone_s * 2, "do not split for rate: "), (alone_s / 4, "2 times as")):
        line = result.verdict(measured_s).line
        assert line.startswith(f"Measured: {said}")
        assert units.per_second(1 / measured_s) in line
        assert f"{units.per_second(1 / result.verdict(measured_s).best.cost)} as predicted" in line


@pytest.mark.parametrize(
    ("device", "said"),
    [(cpu_fingerprint(), "Predicted from "), (gpu_fingerprint("NVIDIA H100"), "Measured: ")],
)
def test_a_run_on_other_devices_is_no_verdict_on_the_plan(device: str, said: str) -> None:
    result = _mlp(devices=2, strategy="intra", objective="latency")
    measured = Measured("", "onnxruntime", device, 1, "", 1, 1.0, 1.0, None, ())
    head = headline(result, comparison=SimpleNamespace(measured=measured))  # type: ignore[arg-type]
    assert head["latency_measured_s"] == 1.0
    assert head["verdict"].startswith(said)


def test_a_run_on_the_devices_of_a_profile_is_one_of_the_plan() -> None:
    measured = Measured("", "onnxruntime", cpu_fingerprint(), 1, "", 1, 1.0, 1.0, None, ())
    cluster = resolve_cluster("2xlocal", 2)
    assert measured.is_on(cluster)
    assert not replace(measured, device="another, 2 cores").is_on(cluster)


@pytest.mark.parametrize("devices", [2, 16])  # few are searched at once, many by levels
def test_a_training_step_is_compared_with_data_parallelism(devices: int) -> None:
    def compiled(parallel: str | None) -> ModuleProgram:
        return partitioner.compile(
            _Loss(),
            torch.zeros(64, 64),
            devices,
            training=True,
            cluster=f"{devices}xh100",
            parallel=parallel,
        )

    free, usual = compiled(None), compiled("dp")
    rivals = [rival for rival in free.rivals if rival.name == "data parallelism"]
    if free.cost == usual.cost:  # it is the plan
        assert not rivals
        return
    (rival,) = rivals
    assert rival.cost == pytest.approx(usual.cost)
    assert (rival.ask, rival.fits, rival.devices) == ("--parallel dp", True, devices)
    assert f"; data parallelism {units.seconds(rival.cost)} a step" in free.verdict().instead


class _Scored(_Loss):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        scores = self.layers(x)
        return scores.square().mean(), scores


def test_data_parallelism_brings_results_to_every_rank_as_the_plan_does() -> None:
    model, x, wanted = _Scored(), torch.zeros(4096, 64), {"training": True, "time_limit_s": 5}
    free = partitioner.compile(model, x, 2, **wanted)
    usual = partitioner.compile(model, x, 2, parallel="dp", **wanted)
    (rival,) = (rival for rival in free.rivals if rival.name == "data parallelism")
    assert rival.cost == pytest.approx(usual.delivery.step_s)
    assert rival.cost > usual.evaluation.step_s


def test_one_device_that_takes_no_time_is_said_to() -> None:
    result = partitioner.compile(nn.Flatten(0, 1), torch.zeros(8, 8, 8), 2, strategy="intra")
    assert result.delivery is not None
    delivered = units.seconds(result.delivery.step_s)
    assert result.verdict().sentence == (
        f"Do not split: one h100 takes no time, this plan {delivered}"
    )


def test_explain_certifies_a_latency() -> None:
    result = PLANS["latency"]()
    bound = units.seconds(result.plan.certificate.bound)  # type: ignore[union-attr]
    (line,) = (line for line in explain(result).splitlines() if line.startswith("  latency "))
    assert f", bound {bound}, gap 0 %, optimal" in line


def test_a_plan_that_was_chosen_by_runs_is_judged_by_its_own() -> None:
    result = PLANS["cut"]()
    measured_s = result.one_device.step_s / 8
    trials = (Trial("a", 1.0, 0.01, 0.0, False), Trial("b", 1.0, measured_s, 0.0, True))
    certificate = replace(result.plan.certificate, trials=trials)
    tuned = replace(result, plan=replace(result.plan, certificate=certificate))
    assert ": Measured: 4 times as fast as 2 whole copies: " in str(tuned)


def test_one_devices_plan_is_said_to_leave_the_others_idle() -> None:
    result = partitioner.compile(examples.build("tiny"), devices=4, objective="latency")
    assert result.plan.kind == "single"
    assert result.verdict().sentence == "Runs on one h100: nothing is split"
    assert "  plan        single on 1 of 4 devices, the others idle: latency cost" in str(result)


@pytest.mark.parametrize("name", ["latency", "memory", "on one device", "training"])
def test_copies_are_no_rival_of_other_plans(name: str) -> None:
    result = PLANS[name]()
    assert "whole copies" not in str(result) + headline(result)["verdict"]


def test_copies_are_of_devices_that_hold_the_model() -> None:
    result = PLANS["on one device"]()
    three = _mlp(devices=3, strategy="inter").cluster
    spec = three.devices[0]
    small = replace(spec, name="small", memory_bytes=10_000)
    mixed = replace(three, devices=(spec, small, spec))
    single = OneDevice.best(mixed, "throughput", "inter", (result.graph, None))
    assert single.copies == 2
    assert single.copies_per_s == pytest.approx(2 / single.step_s)


def test_a_sweep_brings_results_to_every_rank_as_compile_does() -> None:
    model, x, wanted = _Scored(), torch.zeros(4096, 64), {"training": True, "time_limit_s": 5}
    result = partitioner.compile(model, x, 2, parallel="dp", **wanted)
    (point,) = partitioner.sweep(model, x, [2], parallel="dp", **wanted).data["points"]
    assert point["verdict"] == result.verdict().line
    assert point["verdict"] != replace(result.verdict(), delivery=None).line
    assert "with the results on every rank" in point["verdict"]


def test_a_sweep_counts_borders_as_compile_does() -> None:
    model = examples.build("tiny")
    result = partitioner.compile(model, devices=2, strategy="inter", cluster="2xlocal")
    (point,) = partitioner.sweep(model, devices=[2], strategy="inter", clusters=["2xlocal"]).data[
        "points"
    ]
    assert point["step_s"] == result.evaluation.step_s


@pytest.mark.parametrize("parallel", ["pp", "tp", "zero3"])
def test_a_kind_that_is_asked_for_is_compared_with_data_parallelism(parallel: str) -> None:
    options = {"micro_batches": 4} if parallel == "pp" else {}
    result, usual = _trained(parallel=parallel, **options), _trained(parallel="dp")
    (rival,) = (rival for rival in result.rivals if rival.name == "data parallelism")
    assert rival.cost == pytest.approx(usual.verdict().cost)
    assert (rival.fits, rival.is_known, rival.ask) == (True, True, "--parallel dp")
    assert f"; data parallelism {units.seconds(rival.cost)} a step" in result.verdict().instead
    assert not any(rival.name == "data parallelism" for rival in usual.rivals)


def test_data_parallelism_that_does_not_fit_is_said_not_to() -> None:
    result = _trained(parallel="zero3", memory=270_000)  # half of it is kept by each device
    (rival,) = (rival for rival in result.rivals if rival.name == "data parallelism")
    assert (rival.fits, rival.is_known, rival.is_open) == (False, False, False)
    assert result.verdict().instead.endswith("; data parallelism does not fit")
    assert "data parallelism" not in result.verdict().sentence
    assert "each device would hold " in result.summary["not_searched"]["dp (dp=2)"]


@pytest.mark.parametrize("is_begun", [True, False])
def test_what_was_not_planned_in_time_is_said_to_be_no_rival(
    is_begun: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: object) -> Outcome:
        _[-1].work.stop()  # type: ignore[attr-defined]
        raise Infeasible("no plan was found", proven=False)

    if is_begun:
        monkeypatch.setattr("partitioner.search.ways.table.find_plan", stopped)
    else:
        monkeypatch.setattr("partitioner.search.ways.table.NODE_S", 1.0)
    verdict = _trained(parallel="tp").verdict()
    said = "; not compared with data parallelism, which was not planned in time"
    assert verdict.sentence.endswith(said)
    assert verdict.instead.endswith("; data parallelism was not planned in time")
    assert verdict.best is verdict.rivals[0]


class _Wide(nn.Module):
    """Activations that are far larger than the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(8)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


@pytest.fixture(scope="module")
def wide_bytes() -> int:
    """What one device needs for a training step of the whole batch."""
    x = torch.zeros(8192, 16)
    whole = partitioner.compile(_Wide(), x, 1, training=True, time_limit_s=5).evaluation
    return max(whole.needed_bytes.values())


def test_one_device_runs_as_few_micro_batches_as_it_holds(wide_bytes: int) -> None:
    x, limit = torch.zeros(8192, 16), wide_bytes * 2 // 3
    options = {"training": True, "time_limit_s": 5, "memory": limit}
    result = partitioner.compile(_Wide(), x, 2, parallel="dp", **options)
    single = result.one_device
    assert (single.micro_batches, single.fits) == (2, True)
    assert result.rivals[0].name == "one h100 in 2 micro-batches"
    assert result.rivals[0].ask == "--devices 1 --micro-batches 2"
    alone = partitioner.compile(_Wide(), x, 1, micro_batches=2, **options)
    assert single.step_s == pytest.approx(alone.evaluation.step_s)
    assert " as fast as one h100 in 2 micro-batches: " in result.verdict().sentence
    memory = options.pop("memory")
    swept = partitioner.sweep(_Wide(), x, [2], parallel="dp", memory=[memory], **options)
    assert swept.data["points"][0]["verdict"] == result.verdict().line


def test_data_parallelism_runs_as_few_micro_batches_as_its_devices_hold(wide_bytes: int) -> None:
    x, limit = torch.zeros(8192, 16), wide_bytes // 3
    options = {"training": True, "time_limit_s": 5, "memory": limit}
    result = partitioner.compile(_Wide(), x, 2, parallel="tp", micro_batches=4, **options)
    (rival,) = (one for one in result.rivals if one.name.startswith("data parallelism"))
    assert (rival.name, rival.fits) == ("data parallelism in 2 micro-batches", True)
    assert rival.ask == "--parallel dp --micro-batches 2"
    usual = partitioner.compile(_Wide(), x, 2, parallel="dp", micro_batches=2, **options)
    assert rival.cost == pytest.approx(usual.verdict().cost)
    with pytest.raises(Infeasible):
        partitioner.compile(
            _Wide(), x, 2, parallel="dp", recompute=False, micro_batches=1, **options
        )


def test_copies_that_run_a_batch_in_parts_have_no_option() -> None:
    single = replace(PLANS["placed"]().one_device, micro_batches=4)
    rivals = [(rival.name, rival.ask) for rival in rivals_of("throughput", single, "h100")]
    assert rivals == [
        ("one h100 in 4 micro-batches", "--devices 1 --micro-batches 4"),
        ("2 whole copies in 4 micro-batches", ""),
    ]


def test_a_plan_on_one_device_is_no_alternative_to_itself() -> None:
    result = partitioner.compile(examples.build("tiny"), devices=4, objective="latency")
    assert result.verdict().instead == ""
    assert "  instead " not in str(result)
    assert headline(result)["instead"] == ""
    busy = replace(result.verdict(), objective="throughput", rivals=PLANS["placed"]().rivals)
    slow = replace(busy, rivals=tuple(replace(one, cost=busy.cost / 4) for one in busy.rivals))
    copies = units.per_second(4 / busy.cost)
    assert slow.sentence == (
        f"Runs on one h100: nothing is split; one h100 (--devices 1) would serve {copies}, this "
        f"plan {units.per_second(1 / busy.cost)}"
    )
    assert slow.instead == f"2 whole copies {copies}"


def test_what_a_plan_saves_of_memory_counts_its_results() -> None:
    verdict = PLANS["placed"]().verdict()
    held = max(verdict.evaluation.needed_bytes.values())
    rival = verdict.best
    assert f", with {units.size(held)} on the fullest device in place of " in verdict.sentence
    less = replace(rival, held_bytes=held)
    assert " on the fullest device" not in replace(verdict, rivals=(less,)).sentence


def test_a_difference_is_of_what_verdicts_count() -> None:
    model, x, wanted = _Scored(), torch.zeros(4096, 64), {"training": True, "time_limit_s": 5}
    one, other = (partitioner.compile(model, x, 2, parallel=p, **wanted) for p in ("dp", "zero3"))
    data = diff(one, other, ("one", "other"))
    here, there = (units.seconds(plan.verdict().cost) for plan in (one, other))
    assert f": {there} against {here}" in data["verdict"]
    assert data["verdicts"] == (
        f"one: {one.verdict().line}.",
        f"other: {other.verdict().line}.",
    )


def test_a_sweep_compares_training_with_data_parallelism() -> None:
    swept = partitioner.sweep(
        _Loss(), torch.zeros(16, 64), [2], clusters=["2xideal"], training=True, time_limit_s=5
    )
    (point,) = swept.data["points"]
    free = _trained(cluster="2xideal")
    assert free.verdict().best.name == "data parallelism"
    assert point["verdict"] == free.verdict().line


def test_a_plan_that_lost_its_certificate_is_judged_by_what_was_asked_for() -> None:
    result = PLANS["memory"]()
    bare = replace(result, plan=replace(result.plan, certificate=None))
    assert bare.verdict().line == result.verdict().line
    assert bare.cost == result.cost == max(result.summary["peak_bytes"])
