"""Our orders are those that PyTorch's schedule classes make, without processes."""

from __future__ import annotations

import pytest

from helpers.problems.torch_tables import printed, torch_made, torch_table
from partitioner.ir.pipeline.generate import pipeline_schedule, textbook_lanes
from partitioner.ir.pipeline.text import from_csv
from partitioner.ir.pipeline.timeline import check

SIZES = [(lanes, m) for lanes in (1, 2, 3, 4, 5, 8) for m in range(1, 21)]


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
