"""Our orders are those that PyTorch's schedule classes make, without processes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from partitioner.ir.pipeline import check, from_csv, pipeline_schedule, textbook_lanes

SIZES = [(lanes, m) for lanes in (1, 2, 3, 4, 5, 8) for m in range(1, 21)]
Table = list[list[Any]]


@dataclass
class FakeStage:
    """As much of a stage as PyTorch's schedules read to make their tables."""

    num_stages: int
    group_size: int
    group_rank: int = 0
    stage_index: int = 0
    submod: object = None
    stage_index_to_group_rank: object = None
    has_backward: bool = False
    is_first: bool = True
    is_last: bool = False
    ran: list[str] = field(default_factory=list)

    def forward_one_chunk(self, micro_batch: int, *_: object, **__: object) -> None:
        self.ran.append(f"{self.stage_index}F{micro_batch}")

    def backward_one_chunk(self, micro_batch: int, **_: object) -> None:
        self.ran.append(f"{self.stage_index}B{micro_batch}")

    def no_transfers(self, _: int) -> list[object]:
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = no_transfers

    def perform_reduce_grad(self, _: int) -> None:
        self.ran.append(f"{self.stage_index}REDUCE_GRAD")


def torch_made(kind: str, lanes: int, chunks: int, micro_batches: int) -> Any:
    """A schedule object of PyTorch."""
    stages = [FakeStage(lanes * chunks, lanes, stage_index=i) for i in range(chunks)]
    given = stages if chunks > 1 or "Inter" in kind else stages[0]
    return getattr(torch_schedules, f"Schedule{kind}")(given, micro_batches)


def torch_table(kind: str, lanes: int, chunks: int, micro_batches: int) -> Table:
    made = torch_made(kind, lanes, chunks, micro_batches)
    if kind not in ("GPipe", "1F1B"):
        return [made.pipeline_order[lane] for lane in range(lanes)]
    # What these run is written as a loop; their tables are for show, and the last lane's row of
    # 1F1B begins with F1 instead of F0.
    return [torch_run(kind, lane, lanes, micro_batches) for lane in range(lanes)]


def torch_run(kind: str, lane: int, lanes: int, micro_batches: int) -> list[str]:
    """What the loop of a schedule with one stage a lane runs on a lane."""
    stage = FakeStage(lanes, lanes, lane, lane, has_backward=True)
    made = getattr(torch_schedules, f"Schedule{kind}")(stage, micro_batches, loss_fn=lambda: None)
    made._initialize_stage = lambda *_: None
    inputs: list[tuple[()]] = [()] * micro_batches
    made._step_microbatches(inputs, [{}] * micro_batches)
    return stage.ran


def printed(table: Table) -> str:
    return "".join(
        ",".join("" if cell is None else str(cell) for cell in row) + "\n" for row in table
    )


@pytest.mark.parametrize(
    ("name", "kind", "chunks"),
    [
        ("gpipe", "GPipe", 1),
        ("1f1b", "1F1B", 1),
        ("interleaved", "Interleaved1F1B", 2),
        ("interleaved", "Interleaved1F1B", 3),
        ("zb1", "InterleavedZeroBubble", 1),
        ("zb1", "InterleavedZeroBubble", 2),
        ("zbv", "ZBVZeroBubble", 2),
        ("dualpipev", "DualPipeV", 2),
    ],
)
def test_orders_are_those_of_pytorch(name: str, kind: str, chunks: int) -> None:
    compared = 0
    for lanes, micro_batches in SIZES:
        try:
            table = torch_table(kind, lanes, chunks, micro_batches)
        except ValueError:  # PyTorch refuses this number of micro-batches
            continue
        lane_of = tuple(range(lanes)) * chunks
        if name in ("zbv", "dualpipev"):
            lane_of = textbook_lanes(name, 2 * lanes)
        ours = pipeline_schedule(name, lane_of, micro_batches)
        check(ours)
        theirs = from_csv(printed(table), name)
        assert ours.lanes == theirs.lanes, (lanes, micro_batches)
        assert ours == theirs
        compared += 1
    assert compared >= 50


@pytest.mark.parametrize(("name", "kind"), [("gpipe", "GPipe"), ("1f1b", "1F1B")])
def test_the_tables_for_show_agree_but_for_a_fault_of_the_last_row(name: str, kind: str) -> None:
    table = torch_made(kind, 4, 1, 6)._get_pipeline_order()
    rows = [[str(a) for a in table[lane] if a and a.stage_index >= 0] for lane in range(4)]
    rows = [[a for a in row if not a.endswith("REDUCE_GRAD")] for row in rows]
    ours = [[*map(str, lane)] for lane in pipeline_schedule(name, range(4), 6).lanes]
    assert rows[:3] == ours[:3]
    assert (rows[3] == ours[3]) == (name == "gpipe")
