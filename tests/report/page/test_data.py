"""The report's data fits its schema and agrees with the referee."""

import json
import math
from dataclasses import replace

import pytest

import partitioner
from helpers.modules import small_gpt
from helpers.pages import schema_check
from partitioner import examples
from partitioner.api.compiled.base import Compiled
from partitioner.cost_model.evaluate import evaluate
from partitioner.ir.pieces.folding import Block, blocks
from partitioner.ir.plan import NodePlan
from partitioner.report.findings.alternatives import not_taken
from partitioner.report.findings.bottleneck import bottleneck
from partitioner.report.page import data as data_module
from partitioner.report.page.data import report_data, space_rows
from partitioner.report.schema import BlockMoveRow, NodeRow, Report
from partitioner.search import neighbourhood

MODELS = {
    "mlp": {"layers": 3, "hidden": 32},
    "llama": {"layers": 2},
}
CASES = [
    "mlp inter throughput 4xh100",
    "mlp intra throughput 4xh100",
    "llama auto latency 4xh100",
    "llama intra throughput 2x2xh100",
    "mlp auto memory 2xcpu",
    "mlp inter throughput 3xideal",
    "mlp auto throughput 1xh100",
]


@pytest.fixture(scope="module", params=CASES)
def compiled(request: pytest.FixtureRequest) -> Compiled:
    name, strategy, objective, cluster = request.param.split()
    model = examples.build(name, **MODELS[name])
    return partitioner.compile(
        model, cluster=cluster, strategy=strategy, objective=objective, time_limit_s=3
    )


@pytest.fixture(scope="module")
def data(compiled: Compiled) -> Report:
    return report_data(compiled)


@pytest.mark.slow
def test_data_fits_its_schema_and_json(data: Report) -> None:
    schema_check.check(data, Report)
    assert json.loads(json.dumps(data, allow_nan=False)) == data


def test_the_head_is_what_the_referee_says(compiled: Compiled, data: Report) -> None:
    head, figures = data["head"], compiled.evaluation
    assert head["step_s"] == figures.step_s
    assert head["latency_s"] == figures.latency_s
    assert head["cost"] == compiled.cost
    assert 0 < head["balance"] <= 1
    assert 0 <= head["communication"] <= 1
    assert head["limit"].endswith(".")
    is_alone = figures.devices_used == 1  # then one device is no other way
    assert head["instead"].endswith("." if head["instead"] or not is_alone else "")
    assert "\n" not in head["limit"] + head["instead"]


def test_the_nodes_agree_with_the_plan(compiled: Compiled, data: Report) -> None:
    graph = compiled.graph
    assert [row["name"] for row in data["nodes"]] == [node.name for node in graph.nodes]
    busy = dict.fromkeys(range(len(compiled.cluster)), 0.0)
    for row in data["nodes"]:
        group = data["groups"][row["group"]]
        whole = len(group["devices"]) == 1
        assert row["kind"] == ("whole" if whole else "sharded" if row["cut"] else "replicated")
        for tensor in (*row["inputs"], *row["outputs"]):
            assert tensor["shape"] == list(graph.types[tensor["name"]].shape)
            assert all(
                part <= size for part, size in zip(tensor["local"], tensor["shape"], strict=True)
            )
        assert row["local_flops"] <= row["flops"] * (1 + 1e-9)
        assert (row["options"] > 1) == (row["runner_up"] is not None)
    timeline = data["timelines"][0]
    for device, kind, spent in zip(
        timeline["device"], timeline["kind"], timeline["duration_s"], strict=True
    ):
        busy[device] += spent
        assert kind in (0, 1)
    for device, spent in busy.items():
        assert spent == pytest.approx(compiled.evaluation.load_s[device], rel=1e-6)


def test_edges_are_those_of_the_graph_and_every_communication_is_on_one(
    compiled: Compiled, data: Report
) -> None:
    graph = compiled.graph
    expected = {
        (graph.order[graph.producers[value].name], v, value)
        for v, node in enumerate(graph.nodes)
        for value in node.reads
        if value in graph.producers
    }
    assert {(edge["u"], edge["v"], edge["value"]) for edge in data["edges"]} == expected
    carried = {comm for edge in data["edges"] for comm in edge["comms"]}
    for index, comm in enumerate(data["comms"]):
        outside = comm["producer"] == -1 or comm["consumer"] == -1
        assert index in carried or outside
        assert comm["bytes"] >= 0


def test_events_refer_to_nodes_and_communications(data: Report) -> None:
    for timeline in data["timelines"]:
        columns = ("device", "kind", "ref", "request", "start_s", "duration_s")
        assert len({len(timeline[column]) for column in columns}) == 1  # type: ignore[literal-required]
        for kind, ref in zip(timeline["kind"], timeline["ref"], strict=True):
            assert (ref < 0) == (kind == 1)
            assert -len(data["comms"]) <= ref < len(data["nodes"])
        assert all(0 <= index < len(timeline["ref"]) for index in timeline["critical"])


def test_what_a_training_repeats_is_a_step() -> None:
    model, arguments = small_gpt.small_gpt()
    program = partitioner.compile(
        model, arguments, 2, training=True, parallel="dp", plan_only=True, time_limit_s=2
    )
    labels = [timeline["label"] for timeline in report_data(program)["timelines"]]
    assert labels == ["one step", "one step, with its results brought to every rank"]


def test_memory_adds_up_to_the_peak(compiled: Compiled, data: Report) -> None:
    for device, entry in enumerate(data["memory"]):
        assert entry["peak_bytes"] == compiled.evaluation.needed_bytes[device]
        assert entry["peak_bytes"] == compiled.summary["peak_bytes"][device]
        totals = [
            entry["weights_bytes"] + a + b
            for a, b in zip(entry["activations"], entry["buffers"], strict=True)
        ]
        most = max(totals, default=entry["weights_bytes"])
        assert most + entry["executor_bytes"] == entry["peak_bytes"]
        live = entry["live"]
        total = sum(live["bytes"]) + live["more_bytes"]
        assert total == pytest.approx(entry["peak_bytes"], abs=len(live["bytes"]) + live["more"])
        assert entry["position"] == sorted(set(entry["position"]))
        times, end_s = entry["seconds"], data["timelines"][0]["end_s"]
        assert (times is None) == (end_s == 0)
        assert times is None or times == sorted(times)
        assert 0 <= (entry["peak_s"] or 0) <= end_s


def test_traffic_adds_up_to_what_is_sent(compiled: Compiled, data: Report) -> None:
    traffic, sent = data["traffic"], compiled.evaluation.sent_bytes
    for device in range(len(compiled.cluster)):
        rows = zip(traffic["source"], traffic["bytes"], strict=True)
        total = sum(nbytes for source, nbytes in rows if source == device)
        assert total == pytest.approx(sent[device], abs=len(data["comms"]) + 1)
    assert sum(link["total_bytes"] for link in traffic["links"]) == sum(traffic["bytes"])
    assert traffic["links"][-1]["size"] == len(compiled.cluster)


def test_the_bottleneck_explains_all_of_its_time(compiled: Compiled) -> None:
    limits, figures = bottleneck(compiled), compiled.evaluation
    assert math.fsum(limits.seconds.values()) == pytest.approx(limits.total_s)
    expected = figures.latency_s if compiled.objective == "latency" else figures.step_s
    assert limits.total_s == pytest.approx(expected)


def test_the_searched_spaces_begin_with_the_chosen_one(compiled: Compiled, data: Report) -> None:
    rows = data["head"]["spaces"]
    assert [row["chosen"] for row in rows] == [True, *[False] * (len(rows) - 1)]
    assert rows[0]["cost"] == compiled.cost
    assert rows[0]["why"] == ""
    assert all(row["why"] for row in rows[1:])
    searched = compiled.plan.certificate.space if compiled.plan.certificate else ""
    assert {row["space"] for row in rows} >= set(searched.split(", "))


def test_a_space_says_what_keeps_its_plan_from_being_chosen() -> None:
    figures = {"busiest": 1, "compute_s": 2e-3, "comm_s": 1e-3, "fits": True, "devices_used": 4}
    spaces = [
        {"space": "slow link", "cost": 4e-3, **figures, "comm_s": 2e-3},
        {"space": "best", "cost": 3e-3, **figures},
        {"space": "near", "cost": 3.0033e-3, **figures, "comm_s": 0.5e-3, "compute_s": 1e-3},
        {"space": "uneven", "cost": 5e-3, **figures, "compute_s": 4e-3},
        {"space": "equal", "cost": 3e-3, **figures, "devices_used": 2},
    ]
    summary = {
        "cost": 3e-3,
        "spaces": spaces,
        "ruled_out": {"dear": 2.99e-3},
        "not_searched": {"late": "the time was over"},
    }
    rows = {row["space"]: row["why"] for row in space_rows(summary, "throughput")}
    assert rows == {
        "best": "",
        "equal": "costs the same, on 2 devices in place of 4",
        "near": "costs 3.3 \u00b5s more",
        "slow link": "device 1 communicates 1 ms more",
        "uneven": "device 1 computes 2 ms more",
        "dear": "none of its plans costs less than 2.99 ms",
        "late": "the time was over",
    }
    memory = {row["space"]: row["why"] for row in space_rows(summary, "memory")}
    assert memory["uneven"] == "costs 1.67 times as much"


def test_notes_are_sentences(data: Report) -> None:
    assert all(note[0] == note[0].upper() and note[-1] in ".!?" for note in data["head"]["notes"])


def _moves(result: partitioner.Compiled, outer: list[Block] | None = None) -> list[BlockMoveRow]:
    groups = [result.plan.nodes[node.name].group for node in result.graph.nodes]
    return data_module.block_moves(result, outer or blocks(result.graph, groups))


@pytest.fixture(scope="module")
def chain() -> partitioner.Compiled:
    """Layers on two devices."""
    model = examples.build("mlp", layers=8, hidden=512, batch=64)
    return partitioner.compile(model, devices=2, strategy="inter")


def test_a_moved_block_costs_what_the_referee_says(chain: partitioner.Compiled) -> None:
    names = [node.name for node in chain.graph.nodes]
    groups = [chain.plan.nodes[name].group for name in names]
    border = next(at for at in range(1, len(groups)) if groups[at] != groups[at - 1])
    (move, *_) = _moves(chain, [Block(border - 2, border - 1)])
    moved = {name: NodePlan(groups[border]) for name in names[border - 2 : border]}
    plan = replace(chain.plan, nodes={**chain.plan.nodes, **moved}, certificate=None)
    expected = evaluate(chain.graph, plan, chain.cluster).step_s - chain.evaluation.step_s
    assert move["change"] == pytest.approx(expected)
    assert move["at"] == str(chain.plan.groups[groups[border - 1]])
    assert move["to"] == str(chain.plan.groups[groups[border]])
    assert (move["first"], move["last"]) == (border - 2, border - 1)


def test_a_dearer_plan_has_its_reason(chain: partitioner.Compiled) -> None:
    half = len(chain.graph.nodes) // 2
    dear = max(_moves(chain, [Block(0, half - 1)]), key=lambda move: move["change"])
    assert dear["change"] > 0
    assert "the bottleneck" in dear["reason"]
    assert "computes" in dear["reason"]


def test_a_block_that_is_not_cut() -> None:
    model = examples.build("mlp", layers=4, hidden=1024, batch=256)
    result = partitioner.compile(model, devices=2, strategy="intra")
    (axis,) = (name for name, _ in result.plan.groups[0].axes)
    moves = _moves(result, [Block(0, len(result.graph.nodes) - 1)])
    assert [move["to"] for move in moves] == [f"not cut over {axis}"]
    bare = {name: NodePlan(0) for name in result.plan.nodes}
    plan = replace(result.plan, nodes=bare, certificate=None)
    whole = evaluate(result.graph, plan, result.cluster)
    assert moves[0]["change"] == pytest.approx(whole.step_s - result.evaluation.step_s)
    assert moves[0]["change"] > 0


def test_what_would_be_better_says_why_it_is_not_taken() -> None:
    model = examples.build("mlp", layers=4, hidden=512, batch=64)
    split = partitioner.compile(model, cluster="2xideal", strategy="inter")
    certificate = split.plan.certificate
    assert certificate is not None
    searched = replace(certificate, objective="throughput", cost=2.0, bound=1.0)
    all_on_one = {name: NodePlan(0) for name in split.plan.nodes}
    bad = replace(split.plan, nodes=all_on_one, certificate=searched)
    whole = evaluate(split.graph, bad, split.cluster)
    result = replace(split, plan=bad, evaluation=whole)
    better = [row for row in report_data(result)["nodes"] if _is_shorter(row)]
    assert better
    (reason,) = {row["runner_up"]["why"] for row in better if row["runner_up"]}
    assert reason.startswith("the search ended with a gap of 50 %: a smaller --gap")
    position = split.graph.order[better[0]["name"]]
    asked = replace(result, summary={**split.summary, "bound_by": {"pin x": [position, position]}})
    node = split.graph.nodes[position]
    assert not_taken(asked, [node]) == "constrained by pin x"
    hasty = replace(bad, certificate=replace(searched, objective="latency"))
    assert not_taken(replace(result, plan=hasty), [node]).startswith("a shorter step was not asked")
    assert not_taken(replace(result, plan=replace(bad, certificate=None)), [node]) == (
        "the plan was not searched for"
    )


def _is_shorter(row: NodeRow) -> bool:
    other = row["runner_up"]
    return other is not None and other["fits"] and other["step_change_s"] < -1e-12


def test_no_line_of_a_proven_plan_would_be_better(compiled: Compiled, data: Report) -> None:
    shorter = [row["runner_up"] for row in data["nodes"] if _is_shorter(row)]
    assert all(other and other["why"] for other in shorter)
    assert all("better" not in move["reason"] for move in data["moves"])
    certificate = compiled.plan.certificate
    assert certificate is not None
    if certificate.status == "optimal" and compiled.objective == "throughput":
        assert not any(move["fits"] and move["change"] < 0 for move in data["moves"])


def test_a_change_that_does_not_fit_comes_last(chain: partitioner.Compiled) -> None:
    limit = max(chain.evaluation.held_bytes.values())
    cluster = chain.cluster.with_memory(limit)
    tight = replace(chain, cluster=cluster, evaluation=evaluate(chain.graph, chain.plan, cluster))
    half = len(chain.graph.nodes) // 2
    over = _moves(tight, [Block(0, half - 1), Block(half, len(chain.graph.nodes) - 1)])[-1]
    assert not over["fits"]
    assert over["reason"].endswith("over its memory")


def test_large_graphs_stop_at_the_work_that_is_allowed(
    chain: partitioner.Compiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = len(chain.graph.nodes) // 2
    outer = [Block(0, half - 1), Block(half, len(chain.graph.nodes) - 1)]
    assert _moves(chain, outer)
    monkeypatch.setattr(neighbourhood, "MAX_MOVES", 1)
    assert _moves(chain, outer) == []
