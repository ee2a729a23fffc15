"""Blocks compose with micro-batches, stages, meshes and many devices, within limits of memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import partitioner
from helpers.modules.trained_images import Loss, vgg
from helpers.plans.memory_rungs import OFF
from partitioner import examples
from partitioner.api.compiled.base import Compiled
from partitioner.ir.plan import Plan
from partitioner.rewrites.block_graph import block_graph
from partitioner.rewrites.staging import changing_nodes, stages_of_all
from partitioner.search.blocks.find_blocks import find_staged_blocks
from partitioner.search.request import Budget, Request
from partitioner.solver.outcome import Infeasible

MLP = examples.build("mlp", layers=4, hidden=32, batch=8)
SLOW = pytest.mark.slow


def check(program: Compiled, limit: int, *, identical: bool = False) -> None:
    """The plan is in blocks, within the limit, right, and claims no more than was searched."""
    assert program.plan.blocks
    assert max(program.summary["peak_bytes"]) <= limit
    certificate = program.plan.certificate
    assert certificate is not None
    assert certificate.status in ("feasible", "time_limit")
    assert 0 < certificate.bound < certificate.cost
    assert "in blocks" in certificate.space
    found = program.verify(seed=1)
    assert found.equal, str(found)
    assert not identical or all(output.error == 0 for output in found.outputs)


@pytest.mark.parametrize(
    ("devices", "limit", "options"),
    [
        (1, 8100, {"micro_batches": 1}),
        (1, 8500, {"micro_batches": 2}),
        (2, 9361, {"micro_batches": 4}),
        (2, 9361, {"schedule": "forward"}),
        pytest.param(4, 6000, {"parallel": "pp+tp", "mesh": {"pp": 2, "tp": 2}}, marks=SLOW),
    ],
)
def test_requests_in_micro_batches_run_in_blocks(
    devices: int, limit: int, options: dict[str, Any], tmp_path: Path
) -> None:
    """The saved plan loads, and is kept where it is asked for."""
    cluster = f"{devices}xcpu"
    asked = {"cluster": cluster, "memory": limit, "time_limit_s": 15}
    program = partitioner.compile(MLP, None, devices, **asked, **options)
    count = options.get("micro_batches")
    assert program.plan.micro_batches == count if count else program.plan.micro_batches
    check(program, limit, identical=devices == 1)
    program.save(tmp_path / "out")
    again = partitioner.load(tmp_path / "out")
    assert again.plan == program.plan
    assert again.graph.digest == program.graph.digest
    kept = partitioner.compile(MLP, None, devices, **asked, constraints=program.plan)
    assert (kept.plan.blocks, kept.plan.nodes) == (program.plan.blocks, program.plan.nodes)
    assert kept.graph.digest == program.graph.digest


@SLOW
def test_more_than_eight_devices_run_in_blocks() -> None:
    model = examples.build("mlp", layers=4, hidden=180, batch=8)
    options: dict[str, Any] = {"cluster": "12xcpu", "memory": 40_000, "time_limit_s": 30}
    check(partitioner.compile(model, None, 12, **options), 40_000)


def images(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(samples, 3, 121, 87), torch.full((samples,), 3)


@pytest.fixture(scope="module")
def one_image() -> int:
    """Bytes that a step of one image takes."""
    program = partitioner.compile(Loss(vgg(8, 8)), images(1), 1, training=True, cluster="1xcpu")
    return int(program.summary["peak_bytes"][0])


@pytest.mark.parametrize(
    ("devices", "samples", "share", "options"),
    [
        (1, 3, 0.55, {"micro_batches": 3}),
        pytest.param(
            *(2, 4, 0.8),
            {"parallel": "pp", "micro_batches": 4, "schedule": "gpipe"},
            marks=SLOW,
        ),
        pytest.param(
            *(3, 3, 0.7),
            {"parallel": "pp", "micro_batches": 3, "schedule": "interleaved"},
            marks=SLOW,
        ),
        pytest.param(
            *(4, 4, 0.6),
            {"parallel": "pp", "micro_batches": 4, "schedule": "interleaved"},
            marks=SLOW,
        ),
        pytest.param(2, 6, 0.55, {"parallel": "dp", "micro_batches": 3}, marks=SLOW),
        pytest.param(
            *(4, 4, 0.6),
            {
                "parallel": "pp+dp",
                "mesh": {"pp": 2, "dp": 2},
                "micro_batches": 2,
                "schedule": "1f1b",
            },
            marks=SLOW,
        ),
    ],
)
def test_micro_batches_are_trained_in_blocks_within_the_limit(
    devices: int,
    samples: int,
    share: float,
    options: dict[str, Any],
    one_image: int,
    tmp_path: Path,
) -> None:
    """Measured bytes of each rank, too, as foretold; the saved plan is loaded again."""
    torch.manual_seed(0)
    module, example = Loss(vgg(8, 8)), images(samples)
    limit = int(share * one_image)
    options = {"cluster": f"{devices}xcpu", "training": True, "time_limit_s": 40, **options}
    program = partitioner.compile(module, example, devices, memory=limit, **options)
    check(program, limit)
    assert program.plan.micro_batches == options["micro_batches"]
    measured = program.profile(*example, steps=1).measured
    assert measured is not None
    peaks = [rank.peak_bytes or 0 for rank in measured.ranks]
    assert 0 < max(peaks) <= limit
    foretold = [program.evaluation.executor_peak[rank].bytes for rank in range(devices)]
    assert peaks == pytest.approx(foretold, rel=OFF)
    if "schedule" in options:
        assert program.plan.pipeline is not None
        assert program.plan.pipeline.schedule == options["schedule"]
    program.save(tmp_path / "out")
    again = partitioner.load(tmp_path / "out", module, example)
    assert again.plan == program.plan
    assert again.graph.digest == program.graph.digest


def test_both_passes_of_a_block_are_on_one_stage(one_image: int) -> None:
    options: dict[str, Any] = {"training": True, "micro_batches": 1, "time_limit_s": 40}
    limit, module = int(0.55 * one_image), Loss(vgg(8, 8))
    program = partitioner.compile(module, images(1), cluster="1xcpu", memory=limit, **options)
    graph = program.graph
    units = changing_nodes(graph)
    stages = stages_of_all(graph, {node.name: at for at, node in enumerate(units)})
    pairs = [(name, twin) for name, twin in graph.twins.items() if ".block" in name]
    assert pairs
    for name, twin in pairs:
        number = name.partition(".block")[2].partition(".")[0]
        assert f".block{number}" in twin or ".block" not in twin
        assert stages[name] <= stages[twin] or "again" in name
    assert block_graph(program.model.module.traced.uncut, program.plan.blocks).twins == graph.twins


def test_what_no_blocks_bring_within_memory_is_refused(one_image: int) -> None:
    program = partitioner.compile(Loss(vgg(8, 8)), images(1), cluster="1xcpu", training=True)
    cluster = program.cluster.with_memory(one_image // 20)
    request = Request(time_limit_s=10)
    with pytest.raises(Infeasible, match=r"none in blocks was found \(searched: 1 micro-batches"):
        find_staged_blocks(program.graph, cluster, request, Budget.of(request), 1)


def test_a_plan_in_blocks_and_stages_is_data() -> None:
    options: dict[str, Any] = {"cluster": "1xcpu", "memory": 8500, "micro_batches": 2}
    plan = partitioner.compile(MLP, None, 1, **options).plan
    assert Plan.from_json(plan.to_json()) == plan
    assert (plan.micro_batches, len(plan.blocks.stretches)) == (2, 4)
