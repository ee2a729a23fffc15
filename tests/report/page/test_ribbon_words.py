"""Words for the loops of operators, as they follow values through a graph."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import partitioner
from partitioner import examples
from partitioner.api.compiled.base import Compiled
from partitioner.report.page.ribbon import LoopWords, Words

HEADS, COLUMNS, POSITIONS = ("heads",), ("columns",), ("positions",)


def loops_of(result: Compiled) -> LoopWords:
    static = frozenset(result.graph.constants)
    return LoopWords.of(result.graph, result.placed, static)


@pytest.fixture(scope="module")
def llama() -> LoopWords:
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
def test_loops_of_attention(llama: LoopWords, node: str, factor: str, word: Words) -> None:
    assert llama.loops[f"model.layers.0.{node}"][factor] == word


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
    loops = loops_of(result).loops
    by_op = {node.op: loops[node.name] for node in result.graph.nodes}
    assert by_op["aten::relu"] == {"b0": ("batch",), "b1": POSITIONS, "b2": COLUMNS}
    assert by_op["aten::addmm"]["m"] == ("batch", "positions")
