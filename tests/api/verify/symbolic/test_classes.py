"""Ranks that run the same steps are followed together, with the verdicts of each by itself."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import partitioner
from helpers.plans.mutated_programs import mutants
from helpers.plans.mutated_steps import local_mutants
from partitioner import examples
from partitioner.api.verify.symbolic.classes import ApartError, Starts, of_rank, packed, start_of
from partitioner.api.verify.symbolic.held import Held
from partitioner.api.verify.symbolic.ir_programs import programs_of, prove_programs
from partitioner.api.verify.symbolic.prove import prove
from partitioner.api.verify.symbolic.shares import Box, Joint

#: Of all mutants, every so manyth is proven in both ways.
STRIDE = 5


class Square(nn.Module):
    """The mean square of all elements."""

    def forward(self, x: Tensor) -> Tensor:
        return x.pow(2).mean()


def planned(devices: int, **options: Any) -> Any:
    model = examples.build("mlp", layers=3, hidden=16, batch=8)
    cluster = f"{devices}xideal"
    return partitioner.compile(model, devices=devices, cluster=cluster, time_limit_s=5, **options)


@pytest.mark.parametrize(
    ("devices", "options"),
    [(8, {"parallel": "tp"}), (8, {"parallel": "dp+tp"}), (4, {"parallel": "pp+tp"})],
)
def test_classes_have_the_verdicts_of_their_ranks(devices: int, options: dict[str, Any]) -> None:
    compiled = planned(devices, **options)
    graph = compiled.graph
    assert prove(graph, programs_of(compiled.programs, graph)).proven
    for mutant in itertools.islice(mutants(compiled.programs), 0, None, STRIDE):
        together = programs_of(mutant.programs, graph)
        alone = [replace(program, tokens=None) for program in together]
        assert prove(graph, together).verdict == prove(graph, alone).verdict, mutant.what


def test_nodes_that_stand_for_one_and_only_begin_alike_are_followed_apart() -> None:
    """A part of a mean is two nodes: on one rank, the second one reads another value."""
    module = nn.Sequential(nn.Linear(4, 4), Square())
    example = (torch.randn(4, 4),)
    options: dict[str, Any] = {"devices": 2, "cluster": "2xideal", "parallel": "dp"}
    compiled = partitioner.compile(module, example, training=True, **options)
    spoilt = [
        mutant
        for mutant in local_mutants(compiled.programs)
        if (mutant.kind, mutant.what) == ("operand", "/1/mean on one rank")
    ]
    assert spoilt
    assert prove_programs(compiled.graph, compiled.programs)
    for mutant in spoilt:
        assert not prove_programs(compiled.graph, mutant.programs)


def test_starts_compute_for_every_rank() -> None:
    starts: Any = start_of([0, 4, 8])
    assert isinstance(starts, Starts)
    assert (starts + 4, 4 + starts) == (start_of([4, 8, 12]), start_of([4, 8, 12]))
    assert (starts // 4, starts * 2) == (start_of([0, 1, 2]), start_of([0, 8, 16]))
    assert (starts - starts, starts % 4) == (0, 0)
    assert divmod(starts, 8) == (start_of([0, 0, 1]), start_of([0, 4, 0]))
    assert (8 - starts, -starts) == (start_of([8, 4, 0]), start_of([0, -4, -8]))
    assert starts != 0
    assert starts <= 8
    with pytest.raises(ApartError):
        _ = starts > 0
    with pytest.raises(ApartError):
        bool(starts)
    with pytest.raises(TypeError):
        range(starts)


def test_facts_of_a_class_are_those_of_its_ranks() -> None:
    loop = ("node", "k", 8)
    of_ranks = [
        (
            Held("x", (((2 * rank, 2),), ((0, 4),))),
            Held("y", (((0, 4),),), Joint("n", (Box(((loop, ((rank, 1),)),)), Box())), "sum"),
        )
        for rank in range(4)
    ]
    joint = packed(of_ranks)
    assert [of_rank(joint, rank) for rank in range(4)] == of_ranks
    with pytest.raises(ApartError):
        packed([*of_ranks, (Held("x", (((8, 1),), ((0, 4),))), of_ranks[0][1])])
