"""Results that ranks gather for the caller are spoken of, and priced where it is asked for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import partitioner
from partitioner import examples
from partitioner.cost_model.evaluate import evaluate
from partitioner.foundations import units
from partitioner.report.card import card
from partitioner.report.page.data import headline, report_data
from partitioner.report.text.explain import explain
from partitioner.solver.outcome import Infeasible


class Scores(nn.Module):
    """A loss and, if wanted, the scores that it is of."""

    def __init__(self, *, scores: bool, classes: int = 4096) -> None:
        super().__init__()
        self.scores, self.head = scores, nn.Linear(16, classes)

    def forward(self, x: torch.Tensor) -> Any:
        scores = self.head(x)
        loss = scores.square().mean()
        return (loss, scores) if self.scores else loss


def compiled(*, scores: bool, devices: int = 2, classes: int = 4096) -> Any:
    return partitioner.compile(
        Scores(scores=scores, classes=classes).train(),
        (torch.ones(64, 16),),
        devices,
        training=True,
        cluster=f"{devices}xh100",
        parallel="dp",
    )


def in_parts(objective: str, **options: Any) -> Any:
    """Layers whose product is cut over all devices, so that each makes a part of the result."""
    module = nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 1024))
    return partitioner.compile(
        module, torch.randn(512, 1024), devices=4, objective=objective, **options
    )


def lines(program: Any) -> list[str]:
    return [line for line in str(program).splitlines() if line.startswith("  delivery ")]


@pytest.mark.parametrize("devices", [2, 3])
def test_scores_that_ranks_gather_are_spoken_of(devices: int) -> None:
    program = compiled(scores=True, devices=devices)
    delivery = program.delivery
    assert dict(vars(delivery)) == program.summary["delivery"]
    whole = evaluate(program.graph, program.plan, program.cluster, program.graph.delivered)
    assert delivery.step_s == whole.step_s > program.evaluation.step_s
    assert delivery.more_step_s == pytest.approx(whole.step_s - program.evaluation.step_s)
    assert delivery.sent_bytes == (devices - 1) * 64 * 4096 * 4
    (line,) = lines(program)
    assert f"{units.seconds(delivery.more_step_s)} more" in line
    assert f": {units.seconds(whole.step_s)} in all" in line


def test_a_loss_that_every_rank_has_is_no_matter() -> None:
    program = compiled(scores=False)
    assert program.delivery is None
    assert "delivery" not in program.summary
    assert not lines(program)


def test_a_request_is_told_by_its_latency() -> None:
    program = in_parts("latency")
    delivery = program.delivery
    assert delivery.latency_s == program.evaluation.latency_s + delivery.more_latency_s
    assert delivery.clause("latency").startswith(units.seconds(delivery.more_latency_s))


def test_seconds_of_an_edited_file_may_be_none() -> None:
    program = in_parts("throughput")
    said = replace(program.delivery, step_s=0.0).sentence("throughput")
    assert " in all (" in said


def test_results_that_do_not_fit_are_refused_by_name() -> None:
    module, batch = nn.Linear(256, 8192), torch.randn(1024, 256)
    program = partitioner.compile(module, batch, devices=2, parallel="dp")
    alone = evaluate(program.graph, program.plan, program.cluster, delivers=False)
    needed, least = (max(of.needed_bytes.values()) for of in (program.evaluation, alone))
    assert needed >= least + program.graph.types["addmm"].nbytes // 2
    with pytest.raises(Infeasible, match="bytes of these bring the module's results") as refused:
        partitioner.compile(module, batch, devices=2, parallel="dp", memory=40_000_000)
    assert "to every rank, whole ('addmm' has " in str(refused.value)


def test_a_search_goes_on_where_results_do_not_fit_beside_a_plan() -> None:
    freely = in_parts("throughput")
    limit = max(freely.evaluation.needed_bytes.values()) - 1
    program = in_parts("throughput", memory=limit)
    assert max(program.evaluation.needed_bytes.values()) <= limit


def test_the_report_says_and_draws_it() -> None:
    program = in_parts("throughput")
    data = report_data(program)
    alone, delivered = data["timelines"]
    assert delivered["label"] == "one request, with its results brought to every rank"
    assert delivered["end_s"] == pytest.approx(program.delivery.latency_s)
    assert delivered["end_s"] > alone["end_s"]
    row = data["comms"][-1]
    assert (row["kind"], row["consumer"]) == ("all-gather", -1)
    assert -len(data["comms"]) in delivered["ref"]
    rate = units.per_second(1 / program.delivery.step_s)
    assert ", with the results on every rank: do not split for rate: " in data["head"]["verdict"]
    assert f", this plan {rate}, " in data["head"]["verdict"]
    head = data["head"]
    assert head["delivery"] in explain(program)
    shown_card = card(program)
    assert units.seconds(program.delivery.step_s) in shown_card
    assert units.times(head["gain"]) in shown_card
    whole = evaluate(program.graph, program.plan, program.cluster, program.graph.delivered)
    shown = head["delivered"]
    assert shown["communication"] == pytest.approx(
        sum(whole.comm_s.values()) / sum(whole.load_s.values())
    )
    assert shown["communication"] > head["communication"]
    assert shown["step_s"] == program.delivery.step_s
    assert shown["latency_s"] == program.delivery.latency_s


def test_a_step_in_stages_is_drawn_with_its_results() -> None:
    program = partitioner.compile(
        Scores(scores=True, classes=64).train(),
        (torch.ones(64, 16),),
        2,
        training=True,
        parallel="pp",
        micro_batches=4,
    )
    assert program.delivery is not None
    *_, last = report_data(program)["timelines"]
    assert last["label"] == "one step, with its results brought to every rank"
    assert last["end_s"] == pytest.approx(program.delivery.latency_s)
    whole = evaluate(program.graph, program.plan, program.cluster, program.graph.delivered)
    assert headline(program)["delivered"]["communication"] == pytest.approx(
        sum(whole.comm_s.values()) / sum(whole.load_s.values())
    )


def test_ranks_of_an_onnx_model_keep_their_parts() -> None:
    program = partitioner.compile(examples.build("mlp", layers=2, hidden=512, batch=64), devices=2)
    assert program.graph.delivered == frozenset()
    assert program.delivery is None
    assert headline(program)["delivered"] is None


def test_their_bytes_count_and_their_seconds_where_it_is_asked_for() -> None:
    program = compiled(scores=True)
    with_results = evaluate(program.graph, program.plan, program.cluster, program.graph.delivered)
    without = evaluate(program.graph, program.plan, program.cluster, delivers=False)
    whole = 64 * 4096 * 4
    assert with_results.step_s > program.evaluation.step_s == without.step_s
    delivered = program.evaluation.delivered
    assert delivered.step_s == with_results.step_s
    assert delivered.sent_bytes == with_results.sent_bytes
    assert without.delivered is with_results.delivered is None
    assert with_results.executor_peak == program.evaluation.executor_peak
    assert with_results.executor_peak[0].bytes >= without.executor_peak[0].bytes + whole / 2
    assert with_results.sent_bytes[0] == without.sent_bytes[0] + whole / 2
