"""What users see of plans in stages: stages, texts, page data, pictures, and other schedules."""

import itertools
from pathlib import Path

import pytest

from helpers.pages import schema_check
from helpers.plans import staged_plans
from partitioner.cost_model.memory.lifetimes import exact_lifetimes, safe_lifetimes
from partitioner.problem.memory_kinds import Holdings
from partitioner.report.findings.bottleneck import bottleneck
from partitioner.report.page.data import report_data
from partitioner.report.page.page import render
from partitioner.report.pictures.dot import dot
from partitioner.report.pictures.timeline import draw_timeline
from partitioner.report.schema import Report
from partitioner.report.stages import bubble_share, stages, step_facts, step_sentence
from partitioner.report.text.diff import diff, diff_text
from partitioner.report.text.explain import explain, explain_node, variations
from partitioner.report.text.show import show


def test_the_stages_are_those_of_the_plan() -> None:
    result = staged_plans.staged("1f1b")
    first, second = stages(result.schedule)
    assert (first["devices"], second["devices"]) == ([0], [1])
    assert first["nodes"] + second["nodes"] == len(result.graph.nodes)
    assert (first["in_flight"], second["in_flight"]) == (2, 1)
    assert first["sends_to"] == [1]
    assert second["sends_to"] == [0]
    resident = sum(peak.resident_bytes for peak in result.evaluation.peak.values())
    assert first["weights_bytes"] + second["weights_bytes"] == resident


def test_the_bubble_is_the_time_in_which_devices_do_nothing() -> None:
    result = staged_plans.staged("1f1b")
    figures, bubble = result.evaluation, bubble_share(result.evaluation, result.plan)
    assert sum(figures.load_s.values()) == pytest.approx((1 - bubble) * 2 * figures.latency_s)
    sentence = step_sentence(step_facts(result.plan, figures))
    assert sentence.startswith("2 stages, 4 micro-batches, 1f1b, bubble")


def test_messages_of_the_stages_are_the_bytes_that_devices_send() -> None:
    result = staged_plans.staged("1f1b")
    sent = sum(sum(stage["sends_bytes"]) for stage in stages(result.schedule))
    data = report_data(result)
    assert 4 * sent <= sum(data["traffic"]["bytes"]) == sum(result.evaluation.sent_bytes.values())


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow) if name == "replicated" else name
        for name in staged_plans.CASES
    ],
)
def test_data_of_the_page(name: str) -> None:
    result = staged_plans.staged(name)
    data = report_data(result)
    schema_check.check(data, Report)
    assert data["head"]["step"] is not None
    for device, entry in enumerate(data["memory"]):
        assert entry["peak_bytes"] == result.evaluation.needed_bytes[device]
        sums = [a + b for a, b in zip(entry["activations"], entry["buffers"], strict=True)]
        most = entry["weights_bytes"] + max(sums)
        assert most + entry["executor_bytes"] == entry["peak_bytes"]
        seconds = entry["seconds"]
        assert seconds is not None
        assert all(before <= after for before, after in itertools.pairwise(seconds))
    whole = data["timelines"][0]
    assert whole["turn"] == "micro-batch"
    assert whole["passes"] is not None
    assert {"setup", "reduce"} <= set(whole["passes"])
    assert "request" not in whole["label"]
    assert render(data)


@pytest.mark.parametrize("name", staged_plans.CASES)
def test_the_bottleneck_explains_the_whole_step(name: str) -> None:
    result = staged_plans.staged(name)
    limits = bottleneck(result)
    assert limits.total_s == result.evaluation.latency_s
    assert sum(limits.seconds.values()) == pytest.approx(limits.total_s)
    assert limits.turn == "step"


@pytest.mark.parametrize("name", staged_plans.CASES)
def test_kinds_of_memory_add_up_to_the_peak(name: str) -> None:
    result = staged_plans.staged(name)
    holdings = Holdings(result.graph, result.schedule)
    peaks = result.evaluation.peak, result.evaluation.exact_peak
    for exact, _ in ((False, safe_lifetimes), (True, exact_lifetimes)):
        for device, peak in peaks[exact].items():
            parts = holdings.at_peak(device, exact=exact)
            assert min(parts.values()) >= 0
            assert sum(parts.values()) == pytest.approx(peak.bytes, abs=len(parts))


def test_show() -> None:
    text = show(staged_plans.staged("interleaved"))
    assert "4 stages, 4 micro-batches, interleaved, bubble" in text
    assert "group 3: device 1 (stage 3)" in text
    assert "of one micro-batch" in text
    assert "request" not in text
    rows = [line.split() for line in text.splitlines()]
    assert ["stage", "devices", "nodes"] in [row[:3] for row in rows]
    assert any(row[:3] == ["F0", "->", "F1"] for row in rows)
    lanes = [line for line in text.splitlines() if line.startswith("devices ")]
    assert "2B1" in lanes[0]


def test_explain_simulates_other_schedules() -> None:
    result = staged_plans.staged("1f1b")
    own, *others = variations(result)
    assert own.step_s == result.evaluation.step_s
    assert own.peak_bytes == max(result.evaluation.held_bytes.values())
    by_name = {choice.name: choice for choice in others}
    gpipe = staged_plans.staged("gpipe").evaluation
    assert by_name["gpipe"].step_s == gpipe.step_s
    assert by_name["gpipe"].peak_bytes == max(gpipe.held_bytes.values())
    assert "it needs two stages on each lane" in by_name["zbv"].why_not
    assert by_name["1f1b, one micro-batch more"].batch == 5 / 4
    twice = by_name["1f1b, twice the micro-batches"]
    assert own.step_s is not None
    assert twice.step_s is not None
    assert own.step_s < twice.step_s < 2 * own.step_s
    text = explain(result)
    assert "2 stages, 4 micro-batches, 1f1b, bubble" in text
    assert "not zbv: lanes 0,1 of 2 stages" in text


def test_a_table_is_compared_with_the_schedules_by_name_only() -> None:
    names = [choice.name for choice in variations(staged_plans.staged("table"))]
    assert names[0] == "table (the plan's)"
    assert not any("micro-batches" in name for name in names)


def test_a_node_stays_on_its_stage() -> None:
    result = staged_plans.staged("replicated")
    text = explain_node(result, "/blocks/0/up/addmm")
    assert "for each micro-batch of stage 0" in text
    rows = text[text.index("strategies, all other") :].splitlines()
    assert any("n/dp" in row for row in rows)
    assert not any("2,3" in row for row in rows)


def test_diff_of_two_schedules() -> None:
    before, after = staged_plans.staged("1f1b"), staged_plans.staged("gpipe")
    changes = diff(before, after, ("a", "b"))
    assert not changes["moved"]
    figures = {figure["name"]: figure for figure in changes["figures"]}
    assert figures["micro-batches"]["before"] == 4
    assert figures["bubble"]["before"] == bubble_share(before.evaluation, before.plan)
    (sends,) = changes["traffic"]
    assert sends["bytes_before"] == sum(before.evaluation.sent_bytes.values())
    assert "bubble" in diff_text(changes)


def test_pictures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result = staged_plans.staged("1f1b")
    draw_timeline(result, tmp_path / "step.svg")
    text = (tmp_path / "step.svg").read_text()
    assert "compute-1-3" in text
    assert "comm-0-3" in text
    assert dot(result).startswith("digraph")
