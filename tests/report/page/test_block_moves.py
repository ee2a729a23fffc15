"""Plans with one block elsewhere."""

from dataclasses import replace

import pytest

import partitioner
from partitioner import examples
from partitioner.cost_model.evaluate import evaluate
from partitioner.ir.plan import NodePlan
from partitioner.report.blocks import Block, blocks
from partitioner.report.page import block_moves
from partitioner.report.schema import BlockMoveRow


def _moves(result: partitioner.Compiled, outer: list[Block] | None = None) -> list[BlockMoveRow]:
    groups = [result.plan.nodes[node.name].group for node in result.graph.nodes]
    return block_moves.block_moves(result, outer or blocks(result.graph, groups))


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
    monkeypatch.setattr(block_moves, "MAX_WORK", 1)
    assert _moves(chain, outer) == []
