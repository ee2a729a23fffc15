"""Decoding with caches that are cut along the sequence, against one process."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import partitioner
from helpers.onnx_files.decoders import (
    Attend,
    Keeping,
    Step,
    are_cut_along_keys,
    llama,
    qwen,
    writes,
)
from partitioner.api.compiled.module import ModuleProgram
from partitioner.backends.torch.graphs.eager import eager
from partitioner.backends.torch.graphs.phases import emit_phases
from partitioner.backends.torch.operators.vocabulary import write_part
from partitioner.cost_model.schedule.traffic import moves
from partitioner.ir.plan import resolve
from partitioner.rewrites.keys import has_few_queries, keys_in_parts
from partitioner.strategies.constraints import ConstraintError
from partitioner.strategies.kinds.batch import sequence_of

MODELS: dict[str, Callable[..., nn.Module]] = {"llama": llama, "qwen": qwen}


def cut(step: nn.Module, inputs: tuple[torch.Tensor, ...], devices: int) -> ModuleProgram:
    program = partitioner.compile(step, inputs, devices=devices, parallel="cp", time_limit_s=3)
    assert isinstance(program, ModuleProgram)
    return program


def assert_alike(some: tuple[torch.Tensor, ...], others: tuple[torch.Tensor, ...]) -> None:
    for one, other in zip(some, others, strict=True):
        torch.testing.assert_close(one, other, atol=2e-6, rtol=1e-5)


CASES = [
    ("llama", "sdpa", 2),
    ("llama", "eager", 3),
    *(
        pytest.param(name, attention, devices, marks=pytest.mark.slow)
        for name, attention, devices in (
            *(("llama", "eager", 2), ("llama", "sdpa", 3), ("qwen", "sdpa", 5)),
            *(("qwen", "eager", 2), ("llama", "eager", 5)),
        )
    ),
]


@pytest.mark.parametrize(("name", "attention", "devices"), CASES)
def test_a_step_over_a_static_cache(name: str, attention: str, devices: int) -> None:
    """Eleven positions, of which seven are filled, on a few devices: uneven parts."""
    torch.manual_seed(0)
    step = Step(MODELS[name](attention)).eval()
    inputs = step.example(size=11, at=7)
    program = cut(step, inputs, devices)
    sequence = sequence_of(program.graph)
    assert len(sequence.inputs) == 4
    assert set(sequence.inputs.values()) == {2}
    assert are_cut_along_keys(program)
    assert len(writes(program)) == 4
    assert all("v" in placed.layouts for placed in writes(program))
    assert_alike(program(*inputs), step(*inputs))


@pytest.mark.parametrize("attention", ["sdpa", pytest.param("eager", marks=pytest.mark.slow)])
def test_steps_with_the_caches_of_the_step_before(attention: str) -> None:
    """Two tokens, then one at a time; the second program is of one token."""
    torch.manual_seed(0)
    step = Step(llama(attention)).eval()
    ids, position, *caches = step.example(size=11, at=5, rows=2)
    programs = {
        rows: cut(step, (ids[:, :rows], position[:rows], *caches), devices=3) for rows in (2, 1)
    }
    held, alone = tuple(caches), tuple(caches)
    for rows in (2, 1, 1):
        ids = torch.randint(31, (1, rows))
        position = position[-1:] + 1 + torch.arange(rows)
        logits, *held = programs[rows](ids, position, *held)
        wanted, *alone = step(ids, position, *alone)
        assert_alike((logits, *held), (wanted, *alone))


@pytest.mark.parametrize("devices", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("attention", ["sdpa", pytest.param("eager", marks=pytest.mark.slow)])
def test_a_growing_cache(attention: str, devices: int) -> None:
    """The new token's keys are joined to nine others: one device has one more."""
    torch.manual_seed(0)
    step = Step(llama(attention, layers=1), grow=True).eval()
    inputs = step.example(size=10, at=9)
    program = cut(step, inputs, devices)
    assert are_cut_along_keys(program)
    assert all({"a0", "a1"} == placed.layouts.keys() for placed in writes(program))
    assert_alike(program(*inputs), step(*inputs))


@pytest.mark.slow
def test_caches_are_cut_beside_heads_and_batch() -> None:
    torch.manual_seed(0)
    step = Step(llama(layers=1)).eval()
    inputs = step.example(size=11, at=7, batch=3)
    for other in ("dp", "tp"):
        program = partitioner.compile(
            *(step, inputs), devices=6, parallel=f"cp+{other}", mesh={other: 2, "cp": 3},
            time_limit_s=4,
        )  # fmt: skip
        assert isinstance(program, ModuleProgram)
        assert are_cut_along_keys(program)
        assert_alike(program(*inputs), step(*inputs))


def test_a_row_that_sees_no_key_and_a_mask_of_numbers() -> None:
    class Masked(nn.Module):
        def forward(
            self, query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor
        ) -> torch.Tensor:
            attention = nn.functional.scaled_dot_product_attention
            return attention(query, key, key * 2, attn_mask=mask, enable_gqa=True)

    torch.manual_seed(0)
    query, key = torch.randn(2, 6, 2, 4), torch.randn(2, 2, 13, 4)
    flags = torch.rand(2, 1, 2, 13) > 0.5
    flags[1, :, 1] = False
    flags[0, :, 0, :9] = False  # nothing on the first of two devices
    numbers = torch.randn(6, 2, 13).masked_fill(torch.rand(6, 2, 13) > 0.7, float("-inf"))
    for mask in (flags, numbers):
        program = cut(Masked(), (query, key, mask), devices=2)
        assert are_cut_along_keys(program)
        assert_alike((program(query, key, mask),), (Masked()(query, key, mask),))


def test_a_softmax_whose_result_is_wider() -> None:
    class Wider(nn.Module):
        def forward(
            self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
        ) -> torch.Tensor:
            weights = torch.ops.aten._softmax.default(query @ key.mT, -1, True)
            return weights @ value

    torch.manual_seed(0)
    query, key = torch.randn(1, 4, 1, 4).half(), torch.randn(1, 4, 13, 4).half()
    value = torch.randn(1, 4, 13, 4)
    program = cut(Wider(), (query, key, value), devices=3)
    assert are_cut_along_keys(program)
    expected = torch.softmax((query @ key.mT).float(), -1) @ value
    torch.testing.assert_close(program(query, key, value), expected, atol=1e-5, rtol=1e-5)


def test_a_copy_to_a_negative_position_is_refused() -> None:
    """As on one device; `index_put` counts such positions from the end."""

    class Written(nn.Module):
        def forward(
            self, query: torch.Tensor, key: torch.Tensor, at: torch.Tensor, new: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            key = key.index_copy(2, at, new)
            return torch.softmax(query @ key.mT, -1) @ key, key

    query, key = torch.randn(1, 2, 1, 4), torch.zeros(1, 2, 6, 4)
    new, at = torch.ones(1, 2, 1, 4), torch.tensor([5])
    program = cut(Written(), (query, key, at, new), devices=3)
    assert writes(program)
    assert_alike(program(query, key, at, new), Written()(query, key, at, new))
    with pytest.raises(Exception, match="out of range"):
        program(query, key, at - 6, new)


def test_half_precision() -> None:
    """Scores and sums are in float32; a result is as near as its type allows."""
    torch.manual_seed(0)
    step = Step(llama(layers=1)).to(torch.bfloat16).eval()
    inputs = step.example(size=11, at=7)
    program = cut(step, inputs, devices=2)
    assert are_cut_along_keys(program)
    assert program.verify()
    for one, other in zip(program(*inputs), step(*inputs), strict=True):
        torch.testing.assert_close(one, other, atol=2e-2, rtol=2e-2)


def test_buffers_are_caches() -> None:
    """They stay where they lie from call to call: no communication has their size."""
    torch.manual_seed(0)
    module = Keeping(width=8, length=12).eval()
    x, position = torch.randn(1, 1, 8), torch.tensor([0])
    program = cut(module, (x, position), devices=3)
    assert len(sequence_of(program.graph).inputs) == 4
    assert are_cut_along_keys(program)
    homes = program.programs.homes
    assert all(
        "cp" in homes[name].placement.sharding.axes for name in program.traced.stored.values()
    )
    most = max(nbytes for task in program.run_schedule.tasks for _, _, nbytes in moves(task))
    assert most < 12 * 8 * 4 / 3
    assert program.verify()


def test_caches_are_cut_with_the_batch() -> None:
    torch.manual_seed(0)
    module = Keeping(width=8, length=7, batch=5).eval()
    x, position = torch.randn(5, 1, 8), torch.tensor([3])
    program = partitioner.compile(module, (x, position), devices=3, parallel="dp", time_limit_s=3)
    assert isinstance(program, ModuleProgram)
    homes = program.programs.homes
    for name in ("keys0", "values0", "keys1", "values1"):
        dims = homes[program.traced.stored[name]].placement.sharding.dims
        assert [bool(dim.axes) for dim in dims] == [True, False, False, False]
    most = max(nbytes for task in program.run_schedule.tasks for _, _, nbytes in moves(task))
    assert most <= 2 * 8 * 4  # a part of the result
    assert all(len(rank.in_place) == 4 for rank in program.programs.ranks)
    assert program.verify()


class Assigned(nn.Module):
    """A cache whose slice and rows at fixed positions are written, from an end too.

    One row is the whole of another buffer, which keeps a row for the next step.
    """

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("keys", torch.zeros(1, 2, 14, 4))
        self.register_buffer("late", torch.ones(1, 2, 4))

    def forward(self, query: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        self.keys[:, :, 3] = self.late
        self.late.copy_(new[:, :, 1])
        self.keys[:, :, 5:9] = new
        self.keys[:, :, -1] = new[:, :, 0] * 2
        return torch.softmax(query @ self.keys.mT, -1) @ self.keys


def test_a_slice_that_is_assigned() -> None:
    torch.manual_seed(0)
    query, new = torch.randn(1, 2, 1, 4), torch.randn(1, 2, 4, 4)
    program = cut(Assigned().eval(), (query, new), devices=3)
    assert are_cut_along_keys(program)
    resolved = {placed.node.op: placed for placed in resolve(program.graph, program.plan)}
    assert resolved["aten::slice_scatter"].layouts.keys() == {"v"}
    assert resolved["aten::select_scatter"].layouts.keys() == {"x"}
    assert program.verify()
    assert all(len(rank.in_place) == 3 for rank in program.programs.ranks)
    for rank in range(3):
        phases = emit_phases(program.programs, rank, program.graph, torch.device("cpu"))
        forward = phases.passes["forward"].module
        targets = [node.target for node in eager(forward).graph.nodes]
        assert targets.count(write_part) == 3


def test_a_plan_sends_what_the_page_says() -> None:
    """docs/concepts/sequence.md: an all-reduce of maxima, of sums and of results."""
    devices, heads, width = 4, 8, 64
    tensors = [torch.empty(1, heads, n, width, device="meta") for n in (1, 4096, 4096)]
    program = cut(Attend(), tuple(tensors), devices)
    sent = 0.0
    for task in program.run_schedule.tasks:
        sent += sum(nbytes for source, _, nbytes in moves(task) if source == 0)
    query = 4 * heads * width
    assert sent == 2 * (devices - 1) / devices * query * (1 + 2 / width)


class Operator(nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)


@pytest.mark.parametrize("module", [Attend(), Operator()], ids=lambda m: type(m).__name__)
def test_a_plan_cuts_a_long_cache(module: nn.Module) -> None:
    """One token over 100,000 on four devices, of which none has room for all, no kind asked for.

    The 64 heads of queries share one of keys: to gather their scores would take longer.
    """
    heads = (1, 64) if isinstance(module, Attend) else (64, 1)
    shapes = (1, *heads, 128), (1, 1, 100_000, 128), (1, 1, 100_000, 128)
    tensors = tuple(torch.empty(shape, device="meta") for shape in shapes)
    program = partitioner.compile(
        module, tensors, devices=4, mesh={"x": 4}, memory="50MB", time_limit_s=5
    )
    assert isinstance(program, ModuleProgram)
    print(
        program,
        [(n, {k: str(v) for k, v in p.cuts.items()}) for n, p in program.plan.nodes.items()],
    )
    assert are_cut_along_keys(program, "x")


def test_a_plan_of_parts_is_saved_and_loaded(tmp_path: Path) -> None:
    torch.manual_seed(0)
    step = Step(llama(layers=1)).eval()
    inputs = step.example(size=12, at=7)
    program = cut(step, inputs, devices=2)
    program.save(tmp_path / "parts")
    loaded = partitioner.load(tmp_path / "parts", step, inputs)
    assert loaded.plan.to_json() == program.plan.to_json()
    assert_alike(loaded(*inputs), step(*inputs))


def test_attention_of_many_queries_stays_whole() -> None:
    q, k = torch.empty(1, 2, 40, 8, device="meta"), torch.empty(1, 2, 64, 8, device="meta")
    program = partitioner.compile(Attend(), (q, k, k), devices=2)
    assert not has_few_queries(program.graph)
    assert keys_in_parts(program.graph) is program.graph


def test_a_cache_shorter_than_the_devices_is_refused() -> None:
    q, k = torch.empty(1, 2, 1, 8, device="meta"), torch.empty(1, 2, 3, 8, device="meta")
    with pytest.raises(ConstraintError, match=r"dim 2 of 'key' and dim 2 of 'value'\) has 3 elem"):
        partitioner.compile(Attend(), (q, k, k), devices=4, parallel="cp")


def test_sums_and_results_are_reduced_together() -> None:
    """Under a mask, too: what is read of the sums waits until both are there."""

    class Masked(nn.Module):
        def forward(
            self, query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor
        ) -> torch.Tensor:
            attention = nn.functional.scaled_dot_product_attention
            return attention(query, key, key * 2, attn_mask=mask)

    query, key = torch.randn(1, 4, 1, 8), torch.randn(1, 4, 64, 8)
    program = cut(Masked(), (query, key, torch.rand(1, 1, 1, 64) > 0.5), devices=2)
    assert are_cut_along_keys(program)
    sums = [task.comm for task in program.run_schedule.tasks if task.comm is not None]
    buckets = [comm.bucket for comm in sums if comm.reduce == "sum"]
    assert len(buckets) == 2
    assert buckets[0] is not None
    assert buckets[0] == buckets[1]
