"""CSV of schedules: ours read back, PyTorch reads ours, we read PyTorch's, faults are named."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.problems.torch_tables import printed, torch_made, torch_runtime
from partitioner.ir.pipeline.actions import PipelineScheduleError
from partitioner.ir.pipeline.generate import SCHEDULES, pipeline_schedule, textbook_lanes
from partitioner.ir.pipeline.text import from_csv, to_csv
from partitioner.ir.pipeline.timeline import check

TRAINING = [name for name in SCHEDULES if name != "forward"]


@pytest.mark.parametrize("name", SCHEDULES)
def test_round_trip(name: str) -> None:
    schedule = pipeline_schedule(name, textbook_lanes(name, 4), 8)
    assert from_csv(to_csv(schedule), name) == schedule
    assert from_csv(to_csv(schedule, header=True)) == schedule
    assert from_csv(to_csv(schedule)).name == "csv"


def test_a_row_a_lane_a_cell_an_action() -> None:
    text = to_csv(pipeline_schedule("1f1b", (0, 1, 0), 1), header=True)
    assert text == "# name: 1f1b\n# lanes: 0,1,0\n0F0,2F0,2B0,0B0\n1F0,1B0\n"


@pytest.mark.parametrize("name", TRAINING)
def test_pytorch_reads_what_we_print_and_we_read_what_it_lowers(name: str, tmp_path: Path) -> None:
    schedule = pipeline_schedule(name, textbook_lanes(name, 4), 8)
    pytorch_reads_and_lowers(schedule.lane_of, to_csv(schedule), tmp_path)


def test_pytorch_reads_any_lanes(tmp_path: Path) -> None:
    for name in ("gpipe", "1f1b"):
        for lane_of in ((0, 1, 0), (0, 1, 2, 1, 0), (0, 0, 1, 1, 2)):
            schedule = pipeline_schedule(name, lane_of, 5)
            pytorch_reads_and_lowers(lane_of, to_csv(schedule), tmp_path)


def pytorch_reads_and_lowers(lane_of: tuple[int, ...], text: str, folder: Path) -> None:
    ours = from_csv(text)
    (folder / "ours.csv").write_text(text)
    runtime = torch_runtime(lane_of, ours.micro_batches)
    runtime._load_csv(str(folder / "ours.csv"))
    assert from_csv(printed([*runtime.pipeline_order.values()])) == ours
    runtime._dump_csv(str(folder / "lowered.csv"))
    lowered = (folder / "lowered.csv").read_text()
    assert "SEND_F" in lowered
    assert "UNSHARD" in lowered
    assert from_csv(lowered) == ours


def test_idle_steps_and_overlaps_of_pytorch_are_read() -> None:
    made = torch_made("DualPipeV", 2, 2, 5)
    text = printed([made.pipeline_order[lane] for lane in range(2)])
    assert "(0F3;3B1)OVERLAP_F_B" in text
    check(from_csv(text))
    assert from_csv(",,0F0,,\r\n") == from_csv("0F0\n")
    assert from_csv("0F0,(0F1;0B0)OVERLAP_F_B,0B1") == from_csv("0F0, 0F1, 0B0, 0B1\n\n")


SENT = "0F0,0SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD\n1UNSHARD,1RECV_F0,1F0,1B0,1SEND_B0,1RESHARD"


def test_communication_is_dropped() -> None:
    assert to_csv(from_csv(SENT)) == "0F0,0B0\n1F0,1B0\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the table holds no action"),
        (",,\n", "the table holds no action"),
        ("0F0,F1", r"lane 0: 'F1' is no action; one is a stage, a kind and a micro-batch"),
        ("0F0\n1X0", "lane 1: '1X0' is no action"),
        ("0F", "lane 0: '0F' is no action"),
        ("0UNSHARD1", "lane 0: '0UNSHARD1' is no action"),
        ("0OVERLAP_F_B0", "lane 0: '0OVERLAP_F_B0' is no action"),
        ("\u06600F0", "is no action"),
        ("0F" + "1" * 5000, r"lane 0: '0F1{35}\.\.\.' is no action"),
        ("(0F0;0SEND_F0)OVERLAP_F_B", "overlaps SEND_F, which computes nothing"),
        ('0F0,"0F1', "no CSV: unexpected end of data"),
        ("0F0\n0F1,1F0", "lane 1: 0F1 is of stage 0, which lane 0 runs"),
        ("0F0,999999999F0", "stage 1 has no action, but stage 999999999 has"),
        ("# lanes: 1,0\n0F0\n1F0", "the comment says lanes 1,0, but the rows are of lanes 0,1"),
        (SENT.replace("0F0,0SEND_F0", "0SEND_F0,0F0"), "0SEND_F0 does not stand after 0F0"),
        (SENT.replace("1RECV_F0,1F0", "1F0,1RECV_F0"), "1RECV_F0 does not stand before 1F0"),
        (SENT.replace("0RECV_B0,0B0", "0B0,0RECV_B0"), "0RECV_B0 does not stand before 0B0"),
        (SENT.replace("1B0,1SEND_B0", "1SEND_B0,1B0"), "1SEND_B0 does not stand after 1B0"),
        (SENT.replace("0B0,0RED", "0RED") + ",0B0", "lane 1: 0B0 is of stage 0"),
        (SENT.replace("0B0,0REDUCE_GRAD", "0REDUCE_GRAD,0B0"), "before the last backward pass"),
        (SENT.replace("0SEND_F0", "0SEND_F7"), "lane 0: 0SEND_F7 does not stand after 0F7"),
        (SENT.replace("1UNSHARD", "0UNSHARD"), "0UNSHARD is of stage 0, which this lane does not"),
        (SENT.replace("1UNSHARD", "5UNSHARD"), "5UNSHARD is of stage 5, which this lane does not"),
        (SENT.replace(",1SEND_B0", ""), "0RECV_B0 stands 1 times in the table, and 1SEND_B0 0"),
        (SENT.replace("0SEND_F0", "0SEND_F0,0SEND_F0"), "0SEND_F0 stands 2 times in the table"),
        ("0F0,0SEND_F0,1RECV_F0,1F0", "each must stand once, on two lanes"),
    ],
)
def test_faults(text: str, message: str) -> None:
    with pytest.raises(PipelineScheduleError, match=message) as raised:
        from_csv(text)
    assert "\n" not in str(raised.value)


CELLS = ("0F0", "0B0", "1F0", "1B0", "0I0", "0W0", "0SEND_F0", "1RECV_F0", "0UNSHARD", "", "#", '"')
CELL = st.sampled_from(CELLS) | st.text(max_size=4)
TABLE = st.lists(st.lists(CELL, max_size=6).map(",".join), max_size=4).map("\n".join)


@settings(max_examples=500, deadline=None, derandomize=True, database=None)
@given(TABLE)
def test_any_text_is_a_table_or_refused_in_one_line(text: str) -> None:
    try:
        schedule = from_csv(text)
        check(schedule)
    except PipelineScheduleError as error:
        assert "\n" not in str(error)  # noqa: PT017
    else:
        assert from_csv(to_csv(schedule)) == schedule
