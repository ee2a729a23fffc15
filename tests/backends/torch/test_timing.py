"""Programs in PyTorch that are measured."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from partitioner.backends.prepared import Prepared
from partitioner.backends.torch.timing import prepared
from partitioner.frontends.inputs import random_inputs
from partitioner.frontends.model import open_model
from partitioner.profiling.profile import on_one_device
from partitioner.profiling.rank import _MOST_COPIES, _RUN_S, _long_enough


class Calls(TorchDispatchMode):
    """Counts calls of operators."""

    def __init__(self) -> None:
        super().__init__()
        self.number: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def made(module: nn.Module, x: torch.Tensor) -> Prepared:
    graph = open_model(module, (x,)).graph
    return prepared(on_one_device(graph), graph, random_inputs(graph, seed=0), threads=1)


def test_several_operators_are_so_many_in_one_run() -> None:
    one = made(nn.Sequential(nn.Tanh(), nn.Sigmoid()), torch.ones(3, 2))
    assert one.several is not None
    five = one.several(5)
    with Calls() as calls:
        five.run()
    assert (calls.number["tanh"], calls.number["sigmoid"], five.copies) == (5, 5, 5)


def test_only_short_operators_are_several() -> None:
    short = _long_enough(made(nn.Tanh(), torch.ones(2)))
    assert 1 < short.copies <= _MOST_COPIES
    long = made(nn.Linear(512, 512), torch.ones(2048, 512))
    assert _long_enough(long) is long


@pytest.mark.parametrize(("seconds", "copies"), [(0.6 * _RUN_S, 2), (2 * _RUN_S, 1)])
def test_a_run_takes_long_enough(
    monkeypatch: pytest.MonkeyPatch, seconds: float, copies: int
) -> None:
    clock = iter([0.0, 9.0, 9.0, 9.0 + seconds, 20.0, 29.0])  # of three runs, two are disturbed
    monkeypatch.setattr("partitioner.profiling.rank.time.perf_counter", lambda: next(clock))
    program = Prepared(lambda: None, several=lambda number: Prepared(lambda: None, copies=number))
    assert _long_enough(program).copies == copies
