"""Programs that are ready to be measured: their kernels, and the step of an optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from helpers import factories
from partitioner import examples
from partitioner.api.profiling.candidates import Candidate, candidates, local_graph
from partitioner.api.verify.first_difference import uncut_programs
from partitioner.backends.onnx.measuring import timing as onnx_timing
from partitioner.backends.prepared import Prepared
from partitioner.backends.torch.measuring import timing as torch_timing
from partitioner.cost_model.cluster.resolve import resolve_cluster
from partitioner.frontends.inputs import random_inputs
from partitioner.frontends.model import open_model
from partitioner.frontends.torch.options import OF_MATRICES, OPTIMIZERS


def prepared(model: object, op: str, batch: object = None, **options: object) -> list[Prepared]:
    """The programs of the forms of an operator on two devices, smallest last."""
    graph = open_model(model, batch, **options).graph  # type: ignore[arg-type]
    cluster = resolve_cluster("2xideal")
    backend = onnx_timing if batch is None else torch_timing

    def ready(candidate: Candidate) -> Prepared:
        local = local_graph(graph, candidate, cluster)
        return backend.prepared(uncut_programs(local), local, random_inputs(local, seed=0), 1)

    found = [one for one in candidates(graph, cluster, "auto", None) if one.form.op == op]
    return [ready(one) for one in sorted(found, key=lambda one: -one.moved_bytes)]


def test_kernels_are_timed_by_the_runtime() -> None:
    first, *_ = prepared(examples.build("mlp", layers=2, hidden=8, batch=6), "Relu")
    for _ in range(3):
        first.run()
    assert first.own_seconds is not None
    seconds = first.own_seconds()
    assert len(seconds) == 3
    assert all(0 < one < 1 for one in seconds)


def test_changes_of_layout_at_the_border_are_no_kernels() -> None:
    def seconds(**took: int) -> float:
        return onnx_timing.kernel_seconds(
            [{"args": {"op_name": op}, "dur": duration} for op, duration in took.items()]
        )

    assert seconds(ReorderInput=30, Conv=10, Relu=2) == pytest.approx(12e-6)
    assert seconds(Conv=20) == pytest.approx(20e-6)
    assert seconds(Conv=0) == pytest.approx(0.5e-6)


@pytest.fixture
def two_ranks() -> Iterator[None]:
    store = FakeStore()
    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=store)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.usefixtures("two_ranks")
def test_updates_are_steps_of_the_optimizer(
    optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stepped: list[list[torch.Tensor]] = []
    known = torch_timing.OPTIMIZERS

    def noted(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        stepped.append(list(parameters))
        return known[optimizer](parameters)

    monkeypatch.setattr(torch_timing, "OPTIMIZERS", {**known, optimizer: noted})
    module, batch = factories.classifier(training=True), factories.batch(labels=True)
    ready = prepared(module, "partitioner::update", batch, training=True, optimizer=optimizer)
    assert stepped
    assert {one.copies for one in ready} >= {len(parameters) for parameters in stepped}
    kinds = {isinstance(parameters[0].data, DTensor) for parameters in stepped}
    stay = optimizer in OF_MATRICES  # matrices alone, which it looks at whole
    assert kinds == ({False} if stay else {True, False}), "stored in parts, and whole"


def test_the_profiler_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for one in prepared(examples.build("mlp", layers=1, hidden=8, batch=6), "MatMul"):
        one.run()
        assert one.own_seconds is not None
        one.own_seconds()
    assert not list(tmp_path.iterdir())
