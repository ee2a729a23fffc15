"""PyTorch's pipeline schedules without processes: their tables, and what they run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.pipelining import schedules as torch_schedules

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


def torch_runtime(lane_of: Sequence[int], micro_batches: int) -> Any:
    """PyTorch's runtime of any table, on lane 0, with no table yet."""
    lanes = max(lane_of) + 1
    local = [stage for stage, lane in enumerate(lane_of) if lane == 0]
    stages = [FakeStage(len(lane_of), lanes, stage_index=stage) for stage in local]
    return torch_schedules._PipelineScheduleRuntime(stages, micro_batches)


def printed(table: Table) -> str:
    return "".join(
        ",".join("" if cell is None else str(cell) for cell in row) + "\n" for row in table
    )
