"""Graphs of micro-batches that are guessed from two others, beside those that are traced."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import partitioner
from partitioner.frontends.model import ModuleInput, open_model
from partitioner.frontends.torch.trace import sample_graph
from partitioner.ir.graph import Graph, Node
from partitioner.ir.types import TensorType
from partitioner.rewrites.in_proportion import in_proportion


class Attention(nn.Module):
    """One layer of attention over a loss: sizes of views, an expansion and means of the batch."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        mixed = torch.softmax(q @ k.transpose(-1, -2), -1) @ v
        joined = mixed.transpose(1, 2).reshape(batch * length, width)
        loss: torch.Tensor = (self.out(joined).square().sum(1) / (batch * length)).sum()
        return loss


def opened(module: nn.Module, *shape: int) -> ModuleInput:
    result = open_model(module, (torch.randn(*shape),), training=True)
    assert isinstance(result, ModuleInput)
    return result


@pytest.mark.parametrize(("known", "wanted"), [(2, 3), (2, 4), (2, 6), (3, 2), (6, 4), (4, 6)])
def test_a_guess_is_what_the_tracer_gives(known: int, wanted: int) -> None:
    model = opened(Attention(8), 12, 5, 8)
    whole = model.traced.traced
    part, traced = (model.in_micro_batches(count).traced for count in (known, wanted))
    guess = whole.in_proportion(part, known, wanted)
    assert guess is not None
    assert guess.graph.digest == traced.graph.digest
    assert guess.offered.digest == traced.offered.digest


class Turned(nn.Module):
    """A linear layer over a tensor that is contiguous if the batch is one sample."""

    def __init__(self, factor: Callable[[int], Any]) -> None:
        super().__init__()
        self.layer, self.factor = nn.Linear(8, 8), factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = (self.layer(x.transpose(0, 1)) * self.factor(len(x))).square().mean()
        return loss


@pytest.mark.parametrize(
    ("factor", "same"),
    [
        (lambda _: 2.0, True),
        (lambda size: 3.0 if size == 1 else 2.0, False),
        (lambda _: torch.tensor(2.0), True),
        (lambda size: torch.tensor(3.0 if size == 1 else 2.0), False),
    ],
    ids=["all sizes alike", "one sample otherwise", "a constant", "one sample's constant"],
)
def test_one_sample_is_what_others_are_if_the_module_calls_the_same(
    factor: Callable[[int], Any], *, same: bool
) -> None:
    model = opened(Turned(factor), 8, 5, 8)
    part, sample = model.in_micro_batches(2), model.in_micro_batches(8)
    graph = sample_graph(model.traced, part, sample)
    assert (graph is not None) == same
    if graph is not None:  # it is traced as other calls
        ops = [{node.op for node in one.nodes} for one in (graph, part.graph, sample.graph)]
        assert ops[0] == ops[1] != ops[2]
        assert [graph.types[name] for name in graph.inputs] == [
            sample.graph.types[name] for name in sample.graph.inputs
        ]


@pytest.mark.parametrize("by_size", [False, True])
def test_one_sample_each_is_proven_to_be_the_whole_batch(*, by_size: bool) -> None:
    module = Turned(float if by_size else lambda _: 2.0)
    x = torch.randn(4, 5, 8)
    program = partitioner.compile(module, x, 1, training=True, micro_batches=4, recompute=False)
    assert ("not proven" in " ".join(program.summary["notes"])) == by_size


class Swapped(nn.Module):
    """A module whose results change names, or places, if the batch is of two samples."""

    def __init__(self, *, named: bool) -> None:
        super().__init__()
        self.layer, self.named = nn.Linear(8, 8), named

    def forward(self, x: torch.Tensor) -> Any:
        one, other = self.layer(x).square().mean(), self.layer(x).mean()
        names = ("loss", "aux") if len(x) > 2 or not self.named else ("aux", "loss")
        results = (one, other) if len(x) > 2 or self.named else (other, one)
        return dict(zip(names, results, strict=True))


@pytest.mark.parametrize("named", [False, True])
def test_results_in_other_places_are_not_proven_to_be_those_of_the_whole_batch(
    *, named: bool
) -> None:
    x, module = torch.randn(4, 8), Swapped(named=named)
    program = partitioner.compile(module, x, 1, training=True, micro_batches=2, recompute=False)
    assert "not proven" in " ".join(program.summary["notes"])


class Squared(nn.Module):
    """A model with one size that grows with the square of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        loss: torch.Tensor = (y @ y.t()).reshape(-1).mean()
        return loss


def test_what_is_not_in_proportion_has_no_guess() -> None:
    model = opened(Squared(), 12, 4)
    part = model.in_micro_batches(2).traced
    assert model.traced.traced.in_proportion(part, 2, 3) is None


def _graph(size: int, **attrs: object) -> Graph:
    types = {name: TensorType.of("float32", (size, 3)) for name in "xy"}
    node = Node("node", "aten::mul.Scalar", ("x",), ("y",), attrs)  # type: ignore[arg-type]
    return Graph("graph", ("x",), ("y",), (node,), types, {}, {"aten": 1})


@pytest.mark.parametrize(
    ("whole", "part", "expected"),
    [
        (7, 7, 7),
        (12, 6, 3),
        (12, 7, None),  # neither the same nor half
        (6, 3, None),  # has no fourth part
        (12.0, 6.0, 3.0),
        (0.5, 1.0, 2.0),  # a mean
        (0.5, 0.7, None),
        ((12, 4, 6), (6, 4, 3), None),
        ((12, 4, 8), (6, 4, 4), (3, 4, 2)),
        ((12, 4), (6, 4, 1), None),
        ("mean", "mean", "mean"),
        ("mean", "sum", None),
        (12, 6.0, None),
    ],
)
def test_numbers_are_the_same_or_in_proportion(
    whole: object, part: object, expected: object
) -> None:
    found = in_proportion(_graph(12, n=whole), _graph(6, n=part), 2, 4)
    assert (None if found is None else found.nodes[0].attrs["n"]) == expected
    if found is not None:
        assert found.types["y"].shape == (3, 3)


def test_graphs_of_other_nodes_or_values_have_nothing_between_them() -> None:
    whole, part = _graph(12), _graph(6)
    (node,) = part.nodes
    others = [
        replace(part, nodes=(replace(node, op="aten::div.Scalar"),)),
        replace(part, nodes=(replace(node, attrs={"more": 1}),)),
        replace(part, types={name: TensorType.of("float64", (6, 3)) for name in "xy"}),
        replace(part, opsets={"aten": 2}),
        replace(part, types={**part.types, "z": part.types["x"]}),
    ]
    assert in_proportion(whole, part, 2, 3) is not None
    assert [in_proportion(whole, other, 2, 3) for other in others] == [None] * len(others)
