"""The overview of a report: its boxes, lanes and what it says is cut."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping

import pytest
import torch
from torch import nn

import partitioner
from helpers.modules import small_gpt
from partitioner import examples
from partitioner.api.compiled.base import Compiled
from partitioner.report.page.ribbon import (
    COLUMNS,
    HEADS,
    POSITIONS,
    Words,
    loop_words,
    pattern,
    ribbon,
)
from partitioner.report.planned import lanes
from partitioner.report.schema import BoxRow, Ribbon

Loops = Mapping[str, Mapping[str, Words]]


def numbers(box: BoxRow) -> list[int]:
    ends = iter(box["nodes"])
    return [node for first, last in zip(ends, ends, strict=True) for node in range(first, last + 1)]


def words(rows: Ribbon, axis: str) -> set[str]:
    return {word for box in rows["boxes"] for cut in box["cuts"] if cut["axis"] == axis
            for word in cut["words"]}  # fmt: skip


@pytest.mark.parametrize(
    ("ops", "text"),
    [
        (["Conv", "BatchNormalization", "Relu"] * 3, "Conv-BN-Relu x 3"),
        (["Conv", "Relu", "Conv", "Relu", "Conv", "Add"], "Conv-Relu x 2, Conv-Add"),
        (["aten::addmm", "aten::sum.dim_IntList"], "addmm-sum"),
        ([f"Op{at}Operator" for at in range(9)] + ["Op0Operator"],
         "Op0Operator, Op1Operator, Op2Operator"),
    ],
)  # fmt: skip
def test_operators_as_text_name_the_pattern_that_repeats(ops: list[str], text: str) -> None:
    assert pattern(ops, [1.0] * len(ops)) == text


def test_of_many_operators_those_of_most_seconds_are_named() -> None:
    ops = [f"VeryLongOperator{at}" for at in range(9)]
    named = "VeryLongOperator8, VeryLongOperator7, VeryLongOperator6"
    assert pattern(ops, list(map(float, range(9)))) == named


@pytest.fixture(scope="module")
def stages() -> Compiled:
    model = examples.build("mlp", layers=6, hidden=32)
    return partitioner.compile(model, devices=3, strategy="inter", time_limit_s=3)


def test_every_node_that_takes_time_is_in_one_box_of_its_lane(stages: Compiled) -> None:
    own = lanes(stages)
    rows = ribbon(stages, own)
    outer = [box for box in rows["boxes"] if box["parent"] < 0]
    held = Counter(node for box in outer for node in numbers(box))
    timed = {
        stages.graph.order[task.placed.node.name]
        for task in stages.schedule.tasks
        if task.placed is not None and task.longest_s > 0
    }
    assert held == dict.fromkeys(timed, 1)
    for box in outer:
        devices = {at for lane in box["lanes"] for at in rows["lanes"][lane]["devices"]}
        for node in numbers(box):
            group = stages.plan.nodes[stages.graph.nodes[node].name].group
            assert set(own.among(stages.plan.groups[group].devices)) == devices
    assert all(0 <= box["start_s"] < box["end_s"] <= rows["end_s"] for box in outer)


def test_a_box_holds_what_it_opens_into(stages: Compiled) -> None:
    boxes = ribbon(stages, lanes(stages))["boxes"]
    inside: dict[int, list[int]] = {}
    for box in boxes:
        inside.setdefault(box["parent"], []).extend(numbers(box))
    for parent, nodes in inside.items():
        if parent >= 0:
            assert sorted(nodes) == numbers(boxes[parent])


@pytest.mark.parametrize(("parallel", "word"), [("dp", "batch"), ("tp", "heads")])
def test_a_training_plan_says_what_is_cut(parallel: str, word: str) -> None:
    model, arguments = small_gpt.small_gpt()
    program = partitioner.compile(
        model, arguments, 2, training=True, parallel=parallel, plan_only=True, time_limit_s=2
    )
    rows = ribbon(program, lanes(program))
    assert rows["training"]
    axes = {cut["axis"] for box in rows["boxes"] for cut in box["cuts"]}
    assert len(axes) == 1
    assert word in words(rows, axes.pop())
    parts = {box["part"]: box["start_s"] for box in reversed(rows["boxes"])}
    assert parts["forward"] < parts["backward"]
    labels = [box["label"] for box in rows["boxes"]]
    assert any(label.startswith("blocks.0") for label in labels)
    outer = [box for box in rows["boxes"] if box["parent"] < 0]  # sums of gradients lie in them
    for before, after in itertools.pairwise(sorted(outer, key=lambda box: box["start_s"])):
        assert before["end_s"] <= after["start_s"] + 1e-9


@pytest.mark.parametrize(
    ("model", "parallel", "mesh", "expected"),
    [
        ("llama", "tp", None, {"batch", "columns", "rows", "heads", "replicated", "weights"}),
        ("llama", "cp", None, {"positions", "replicated", "weights"}),
        ("squeezenet", "spatial", {"h": 2}, {"positions", "replicated", "weights", "sums"}),
        ("squeezenet", "tp", None, {"batch", "columns", "rows", "replicated", "weights", "sums"}),
    ],
)
def test_cuts_are_named_by_what_their_loops_run_over(
    model: str, parallel: str, mesh: dict[str, int] | None, expected: set[str]
) -> None:
    options = {"layers": 1, "hidden": 64, "batch": 4} if model == "llama" else {}
    result = partitioner.compile(
        examples.build(model, **options), devices=2, parallel=parallel, mesh=mesh, time_limit_s=2
    )
    rows = ribbon(result, lanes(result))
    axis = next(cut["axis"] for box in rows["boxes"] for cut in box["cuts"])
    assert words(rows, axis) <= expected
    assert ("heads" in words(rows, axis)) is ("heads" in expected)


def test_a_model_that_tells_modules_is_shown_by_them() -> None:
    model = examples.build("mlp", layers=6, hidden=32)
    for at, node in enumerate(model.graph.node):
        scopes = ["", "net", f"net.layers.{at // 3}", node.name]
        node.metadata_props.add(key="pkg.torch.onnx.name_scopes", value=repr(scopes))
        node.name = f"node_{at}"
    result = partitioner.compile(model, devices=1)
    boxes = ribbon(result, lanes(result))["boxes"]
    labels = " ".join(box["label"] for box in boxes)
    assert "layers.0" in labels
    assert "node_" not in labels


def loops_of(result: Compiled) -> Loops:
    static = frozenset(result.graph.constants)
    return loop_words(result.graph, result.placed, static)


@pytest.fixture(scope="module")
def llama() -> Loops:
    model = examples.build("llama", layers=1, hidden=64, batch=4)
    return loops_of(partitioner.compile(model, devices=1))


@pytest.mark.parametrize(
    ("node", "factor", "word"),
    [
        ("self_attn.q_proj", "m", POSITIONS),
        ("self_attn.q_proj", "n", COLUMNS),
        ("self_attn.q.split", "f2", HEADS),
        ("self_attn.q.heads", "d2", HEADS),
        ("self_attn.k.wide", "b1", HEADS),
        ("self_attn.scores", "b1", HEADS),
        ("self_attn.scores", "m", POSITIONS),
        ("self_attn.scores", "n", POSITIONS),
        ("self_attn.scores", "k", COLUMNS),
        ("self_attn.softmax", "d0", ("batch",)),
        ("input_layernorm.square", "b1", POSITIONS),
        ("mlp.sigmoid", "b2", COLUMNS),
    ],
)
def test_loops_of_attention(llama: Loops, node: str, factor: str, word: Words) -> None:
    assert llama[f"model.layers.0.{node}"][factor] == word


class Folded(nn.Module):
    """Samples and positions in one dim, and apart again."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.linear = nn.Embedding(50, 8), nn.Linear(8, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        batch, length = ids.shape
        mixed = self.linear(self.table(ids).reshape(batch * length, 8))
        return torch.relu(mixed.reshape(batch, length, 8))


def test_a_dim_that_was_put_together_is_taken_apart_by_its_parts() -> None:
    result = partitioner.compile(Folded(), torch.zeros(4, 6, dtype=torch.int64), devices=1)
    loops = loops_of(result)
    by_op = {node.op: loops[node.name] for node in result.graph.nodes}
    assert by_op["aten::relu"] == {"b0": ("batch",), "b1": POSITIONS, "b2": COLUMNS}
    assert by_op["aten::addmm"]["m"] == ("batch", "positions")
