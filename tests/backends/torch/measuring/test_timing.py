"""Programs in PyTorch that are measured."""

import itertools
import weakref
from collections import Counter
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from partitioner.api.profiling.rank import (
    _LONG_RUN_S,
    _MOST_COPIES,
    _RUN_S,
    Device,
    Item,
    _as_in_model,
    _long_enough,
)
from partitioner.api.verify.first_difference import uncut_programs
from partitioner.backends.prepared import Prepared
from partitioner.backends.torch.measuring.clocks import Clock
from partitioner.backends.torch.measuring.timing import prepared
from partitioner.frontends.inputs import random_inputs
from partitioner.frontends.model import open_model


class Calls(TorchDispatchMode):
    """Counts calls of operators."""

    def __init__(self) -> None:
        super().__init__()
        self.number: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


class Operands(TorchDispatchMode):
    """Notes the addresses of the operands of each addmm."""

    def __init__(self) -> None:
        super().__init__()
        self.places: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket is torch.ops.aten.addmm:
            self.places.append(tuple(tensor.data_ptr() for tensor in args[:3]))
        return func(*args, **(kwargs or {}))


def made(module: nn.Module, x: torch.Tensor) -> Prepared:
    graph = open_model(module, (x,)).graph
    return prepared(uncut_programs(graph), graph, random_inputs(graph, seed=0), threads=1)


def test_several_operators_are_so_many_in_one_run() -> None:
    one = made(nn.Sequential(nn.Tanh(), nn.Sigmoid()), torch.ones(3, 2))
    assert one.several is not None
    five = one.several(5, None, False)
    with Calls() as calls:
        five.run()
    assert (calls.number["tanh"], calls.number["sigmoid"], five.copies) == (5, 5, 5)


def test_operators_in_memory_read_copies_of_their_own() -> None:
    one = made(nn.Linear(4, 5), torch.ones(3, 4))
    assert one.several is not None
    (x,) = open_model(nn.Linear(4, 5), (torch.ones(3, 4),)).graph.inputs
    three = one.several(3, {x}, False)
    with Operands() as operands:
        three.run()
        one.run()
    biases, inputs, weights = map(set, zip(*operands.places, strict=True))
    assert (len(inputs), len(weights), len(biases)) == (1, 4, 4), "and not those of the program"


def test_results_that_a_model_keeps_lie_there_together() -> None:
    one = made(nn.Tanh(), torch.ones(3, 4))
    assert one.several is not None
    last, *others = one.several(3, set(), False).run()  # type: ignore[misc]
    kept = one.several(3, set(), True).run()
    places = {result.data_ptr() for (result,) in kept}  # type: ignore[attr-defined]
    assert (last.shape, others, len(places)) == ((3, 4), [], 3)


def test_large_operands_are_copied_a_few_times_only() -> None:
    table = nn.Embedding(30_000, 256)
    ids = torch.arange(3)
    one = made(table, ids)
    assert one.several is not None
    (x,) = open_model(table, (ids,)).graph.inputs
    assert one.several(64, {x}, False).copies == 2, "of 31 MB each"
    assert one.several(64, None, False).copies == 64


def test_only_short_operators_are_several() -> None:
    device = Device.of("cpu")
    short = _long_enough(device, made(nn.Tanh(), torch.ones(2)), None)
    assert 1 < short.copies <= _MOST_COPIES
    long = made(nn.Linear(512, 512), torch.ones(2048, 512))
    assert _long_enough(device, long, None) is long


@pytest.mark.parametrize(("seconds", "copies"), [(0.6 * _RUN_S, 2), (2 * _RUN_S, 1)])
def test_a_run_takes_long_enough(seconds: float, copies: int) -> None:
    times = iter([0.0, 9.0, 9.0, 9.0 + seconds, 20.0, 29.0])  # of three runs, two are disturbed
    device = Device(Clock(lambda: next(times)), torch.zeros(0))
    program = Prepared(
        lambda: None, several=lambda number, *_: Prepared(lambda: None, copies=number)
    )
    assert _long_enough(device, program, None).copies == copies


def test_inputs_keep_the_order_of_their_dims() -> None:
    graph = open_model(nn.Tanh(), (torch.ones(2, 3, 4),)).graph
    (x,) = graph.inputs
    array = random_inputs(graph, seed=0)[x]
    array = np.ascontiguousarray(array.transpose(2, 0, 1)).transpose(1, 2, 0)
    ready = prepared(uncut_programs(graph), graph, {x: array}, threads=1)
    (result,) = ready.run()  # type: ignore[misc]
    assert result.shape == (2, 3, 4)
    assert result.stride() == (3, 1, 6), "of a tensor whose last dim is the outermost one"
    assert np.allclose(result.numpy(), np.tanh(array))


@pytest.mark.parametrize(("seconds", "runs"), [(0.5 * _LONG_RUN_S, 1), (_LONG_RUN_S, 0)])
def test_the_code_of_short_operators_is_read_before(seconds: float, runs: int) -> None:
    times = itertools.count(0.0, seconds)
    device = Device(Clock(lambda: next(times)), torch.zeros(0))
    ran: list[str] = []
    others = Prepared(partial(ran.append, "timed"))
    program = Prepared(partial(ran.append, "before"), several=lambda *_: others)
    item = Item(None, None, None, True, False, (), True, False, {})  # type: ignore[arg-type]
    ready = _as_in_model(device, item, program)
    ran.clear()
    ready.warm()
    assert ran == ["before"] * runs
    ready.run()
    assert ran[-1] == ("timed" if runs else "before")


@pytest.mark.parametrize("is_kept", [False, True])
def test_what_a_model_keeps_is_not_written_where_it_was_shortly_before(is_kept: bool) -> None:
    device = Device(Clock(itertools.count(0.0, 2 * _RUN_S).__next__), torch.zeros(0))
    made_by: list[weakref.ref[torch.Tensor]] = []

    def run() -> object:
        result = torch.ones(3)
        made_by.append(weakref.ref(result))
        return result

    program = Prepared(run, several=lambda *_: Prepared(run))
    item = Item(None, None, None, True, False, (), True, is_kept, {})  # type: ignore[arg-type]
    ready = _as_in_model(device, item, program)
    for _ in range(3):
        ready.warm()
        ready.run()
    alive = [reference() is not None for reference in made_by[-4:]]
    assert alive == [False, False, is_kept, False]
