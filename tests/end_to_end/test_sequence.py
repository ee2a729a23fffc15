"""The sequence is cut over devices: each form of attention forced, against one process."""

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import partitioner
from helpers.plans.sequences import (
    ATTENTION,
    FORMS,
    Block,
    cuts_of,
    forced,
    is_of_form,
    trains_alike,
)
from partitioner.api.compiled.module import ModuleProgram
from partitioner.cost_model.cluster.topology import Cluster, DeviceSpec, LinkLevel
from partitioner.strategies.constraints import ConstraintError
from partitioner.strategies.kinds.batch import sequence_of

MIXES = {"cp+dp": (2, 3), "cp+tp": (2, 2), "ring+dp": (2, 2), "ring+tp": (2, 2)}


@pytest.mark.parametrize("parallel", MIXES)
@pytest.mark.slow
def test_sequences_are_cut_beside_batch_or_heads(parallel: str) -> None:
    torch.manual_seed(0)
    other = parallel.rpartition("+")[2]
    mesh = dict(zip((other, "cp"), MIXES[parallel], strict=True))
    module, inputs = Block(), (torch.randn(3, 11, 16), torch.randn(3, 11, 16))
    program = partitioner.compile(
        *(module, inputs), devices=math.prod(mesh.values()), training=True, parallel=parallel,
        mesh=mesh, time_limit_s=4,
    )  # fmt: skip
    assert isinstance(program, ModuleProgram)
    for cuts in cuts_of(program) + cuts_of(program, f"{ATTENTION}_step"):
        assert {axis for cut in cuts.values() for axis in cut.axes} == set(mesh)
    trains_alike(program, module, inputs, steps=3)


UNEVEN = [
    *(("gather", 3), ("heads", 2), ("ring", 3)),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (("gather", 2), ("ring", 4))),
]


@pytest.mark.parametrize(("form", "devices"), UNEVEN)
def test_uneven_sequences_with_grouped_heads(form: str, devices: int) -> None:
    torch.manual_seed(0)
    module, inputs = Block(), (torch.randn(1, 11, 16), torch.randn(1, 11, 16))
    program = forced(module, inputs, form, devices)
    assert sequence_of(program.graph).inputs == {"x": 1, "y": 1}
    assert is_of_form(program, form)
    kinds = Counter(str(comm.kind) for comm in program.programs.ranks[0].comms)
    assert kinds["all_to_all"] >= (4 if form == "heads" else 0)
    trains_alike(program, module, inputs)


def test_a_model_without_a_sequence_is_refused() -> None:
    with pytest.raises(ConstraintError, match=r"parallel cp: no input has a dim beside the batch"):
        partitioner.compile(nn.Linear(8, 8), torch.randn(8), devices=2, parallel="cp")


def test_a_sequence_shorter_than_the_devices_is_refused() -> None:
    inputs = torch.randn(1, 3, 16), torch.randn(1, 3, 16)
    with pytest.raises(ConstraintError, match=r"dim 1 of 'x' and dim 1 of 'y'\) has 3 elements, f"):
        partitioner.compile(Block(), inputs, devices=4, parallel="cp")


def test_a_ring_in_inference_that_is_saved_and_loaded(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module, inputs = Block().eval(), (torch.randn(1, 12, 16), torch.randn(1, 12, 16))
    program = partitioner.compile(
        module, inputs, devices=2, parallel="ring", mesh={"cp": 2}, time_limit_s=2
    )
    assert isinstance(program, ModuleProgram)
    assert is_of_form(program, "ring")
    program.save(tmp_path / "ring")
    loaded = partitioner.load(tmp_path / "ring", module, inputs)
    assert loaded.plan.to_json() == program.plan.to_json()
    for one, other in zip(loaded(*inputs), module(*inputs), strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)


def test_a_ring_without_a_causal_mask() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            q = self.mix(x).unsqueeze(1)
            y = x + functional.scaled_dot_product_attention(q, q, q).squeeze(1)
            return y.square().mean(), y

    torch.manual_seed(0)
    module, inputs = Plain(), (torch.randn(2, 7, 8),)
    program = forced(module, inputs, "ring", 3)
    assert is_of_form(program, "ring")
    trains_alike(program, module, inputs, steps=2)


def test_a_ring_is_refused_where_rows_and_keys_differ() -> None:
    class Crossed(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q = x.unsqueeze(1)
            return functional.scaled_dot_product_attention(q, q[:, :, 1:], q[:, :, 1:])

    with pytest.raises(ConstraintError, match=r"parallel ring: no attention of at least 4 posi"):
        partitioner.compile(Crossed(), torch.randn(1, 8, 8), devices=2, parallel="ring")


def test_a_long_context_is_split_along_the_sequence() -> None:
    """One sample of 100,000 tokens, two query heads on four devices, no kind asked for."""
    module = Block(width=16, heads=2, kv=1)
    inputs = tuple(torch.empty(1, 100_000, 16, device="meta") for _ in range(2))
    program = partitioner.compile(module, inputs, devices=4, mesh={"x": 4}, time_limit_s=5)
    assert all("q" in cuts for cuts in cuts_of(program))
    # causal rows are shared out from either end: all devices have the same work
    assert all(len(cuts["q"].segments or ()) > 1 for cuts in cuts_of(program))


def sent_for_attention(program: ModuleProgram, rank: int = 0) -> Counter[bool]:
    """Bytes that a rank sends to others for attention and its results, by pass (backward: True)."""
    sent: Counter[bool] = Counter()
    for comm in program.programs.ranks[rank].comms:
        reader = program.graph.by_name.get(comm.why)
        value = program.graph.producers.get(comm.source.partition("@")[0])
        ends = [node.name for node in (reader, value) if node is not None]
        if any("attention" in name for name in ends) and comm.dtype == "bfloat16":
            nbytes = sum(2 * t.numel for t in comm.transfers if t.source == rank != t.target)
            sent[comm.why in program.graph.backward] += nbytes
    return sent


@pytest.mark.parametrize("form", FORMS)
def test_plans_send_what_the_page_says(form: str) -> None:
    """docs/concepts/sequence.md, of four devices and two layers of bfloat16."""
    ranks, rows, width = 4, 4096, 512
    module = Block(width, heads=8, kv=8).to(torch.bfloat16)
    inputs = tuple(
        torch.empty(1, rows, width, device="meta", dtype=torch.bfloat16) for _ in range(2)
    )
    program = forced(module, inputs, form, ranks, training=False)
    assert is_of_form(program, form)
    query = 2 * rows * width  # bytes, as many as those of the keys, and of the values
    gathered = (ranks - 1) * 2 * query // ranks
    changed = (ranks - 1) * (2 * query + 2 * query) // ranks**2
    layers = 2
    wanted = layers * (changed if form == "heads" else gathered)
    assert sent_for_attention(program) == {False: wanted}


def test_a_ring_sends_as_much_again_for_each_gradient() -> None:
    ranks, rows, width = 4, 4096, 512
    module = Block(width, heads=8, kv=8).to(torch.bfloat16)
    inputs = tuple(
        torch.empty(1, rows, width, device="meta", dtype=torch.bfloat16) for _ in range(2)
    )
    program = forced(module, inputs, "ring", ranks)
    passed = 2 * (ranks - 1) * 2 * (2 * rows * width) // ranks
    assert sent_for_attention(program) == {False: passed, True: 2 * passed}


def of_speed(overlap: float) -> Cluster:
    device = DeviceSpec("device", {"bfloat16": 1e14, "float32": 1e13}, 1e12, 80 * 10**9, 1e-6)
    return Cluster("four", (device,) * 4, (LinkLevel("link", 4, 1e10, 1e-6, overlap=overlap),))


@pytest.mark.parametrize(
    ("cheapest", "rows", "kv", "overlap"),
    [
        pytest.param("heads", 65536, 8, 0.0, marks=pytest.mark.slow),
        ("ring", 65536, 8, 0.8),
        ("gather", 4096, 1, 0.0),
    ],
)
def test_the_cheapest_form_is_taken(cheapest: str, rows: int, kv: int, overlap: float) -> None:
    """Heads move least, a ring hides what it moves, and few keys are best gathered at once."""
    module = Block(512, heads=8, kv=kv).to(torch.bfloat16)
    inputs = tuple(torch.empty(1, rows, 512, device="meta", dtype=torch.bfloat16) for _ in range(2))
    options: dict[str, Any] = {"cluster": of_speed(overlap), "time_limit_s": 5}
    program = partitioner.compile(module, inputs, parallel="cp", **options)
    assert isinstance(program, ModuleProgram)
    assert is_of_form(program, cheapest)
    whole = (form for form in FORMS if kv > 1 or form != "heads")
    forms = {
        form: forced(module, inputs, form, 4, training=False, cluster=of_speed(overlap))
        for form in whole
    }
    costs = {form: one.evaluation.step_s for form, one in forms.items()}
    assert min(costs, key=costs.__getitem__) == cheapest
    assert program.evaluation.step_s <= min(costs.values()) * 1.01
