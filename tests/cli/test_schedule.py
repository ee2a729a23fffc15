"""`partition schedule`: tables and CSV of named schedules and of files, and its one-line errors."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import partitioner
from helpers.pages.command_line import one_line
from partitioner.cli import schedule as cli_schedule
from partitioner.cli.main import main
from partitioner.ir.pipeline.generate import pipeline_schedule
from partitioner.ir.pipeline.text import from_csv

TABLE = """\
1f1b: 3 stages on lanes 0,1,0, 2 micro-batches
12 time units (F 1, B 2, I 1, W 1), 25 % bubbles

time    0   1   2   3   4   5   6   7   8   9   10  11
lane 0  0F0 0F1 2F0 2B0 -   2F1 2B1 -   0B0 -   0B1 -
lane 1  .   1F0 1F1 .   .   1B0 -   .   1B1 -   .   .

micro-batches in flight
stage  0 1 2
most   2 2 1
stage activations held at once, by lane: 3,2
"""


def run(*argv: str) -> int:
    return main(["schedule", *argv])


def test_a_table_by_name_and_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    named = ["1f1b", "--lanes", "0,1,0", "--micro-batches", "2"]
    assert run(*named) == 0
    table = capsys.readouterr().out
    assert table == TABLE
    assert run(*named, "--format", "csv") == 0
    text = capsys.readouterr().out
    assert from_csv(text, "1f1b") == pipeline_schedule("1f1b", (0, 1, 0), 2)
    (tmp_path / "1f1b.csv").write_text(text)
    assert run(str(tmp_path / "1f1b.csv")) == 0
    assert capsys.readouterr().out == table


def test_the_session_of_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    page = Path(partitioner.__file__).resolve().parents[1] / "docs/concepts/pipeline-schedules.md"
    (session,) = re.findall(
        r'```console\npartition (.*)\n```\n+```text title="Output"\n((?s:.*?))```',
        page.read_text("utf-8"),
    )
    assert main(session[0].split()) == 0
    assert capsys.readouterr().out == session[1]


def test_stages_take_the_lanes_of_the_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("zbv", "--stages", "4", "--micro-batches", "2") == 0
    assert "4 stages on lanes 0,1,1,0, 2 micro-batches\n" in capsys.readouterr().out
    assert run("forward", "--stages", "1", "--lanes", "0", "--micro-batches", "1") == 0
    table = capsys.readouterr().out
    assert "1 stage on lanes 0, 1 micro-batch\n1 time units (F 1, B 2, I 1, W 1), 0 % b" in table


def test_edges_are_those_of_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    towers = ["--edges", "0-2,1-2"]
    assert run("gpipe", "--stages", "3", "--micro-batches", "1", *towers, "--format", "csv") == 0
    assert capsys.readouterr().out == "0F0,0B0\n1F0,1B0\n2F0,2B0\n"
    (tmp_path / "towers.csv").write_text("1F0,0F0,2F0\n")
    assert run(str(tmp_path / "towers.csv"), *towers) == 0
    assert "lane 0  1F0 0F0 2F0\n" in capsys.readouterr().out
    assert run(str(tmp_path / "towers.csv")) == 1
    error = one_line(capsys.readouterr().err)
    assert error == "partition: lane 0: 1F0 waits for 0F0, which stands after it\n"
    assert run(str(tmp_path / "towers.csv"), "--edges", "") == 0


@pytest.mark.parametrize(
    ("argv", "code", "said"),
    [
        (["zb2"], 1, "'zb2' is no file and no schedule: there are gpipe, 1f1b, interleaved,"),
        (["."], 1, "cannot read .: Is a directory"),
        (["bytes.csv"], 1, "cannot read bytes.csv: it is not UTF-8 text"),
        (["x.csv"], 1, "x.csv: lane 0: 'x' is no action"),
        (["long.csv"], 1, "long.csv has more than 9 characters"),
        (["1f1b"], 2, "1f1b needs --micro-batches, and --stages or --lanes"),
        (["1f1b", "--stages", "2"], 2, "1f1b needs --micro-batches"),
        (["x.csv", "--stages", "2"], 2, "--stages is of a NAME: x.csv is a file"),
        (["x.csv", "--micro-batches", "2"], 2, "--micro-batches is of a NAME: x.csv is a file"),
        (
            ["gpipe", "--stages", "2", "--lanes", "0,1,0", "--micro-batches", "2"],
            2,
            "--lanes has lanes of 3 stages, but --stages is 2",
        ),
        (["gpipe", "--lanes", "0,a"], 2, "for '--lanes': '0,a': 'a' is not a whole number"),
        (["gpipe", "--edges", "0-1,2"], 2, "for '--edges': '0-1,2' are no edges like 0-1,1-2"),
        (["zbv", "--stages", "3", "--micro-batches", "2"], 1, "zbv: 3 stages do not fill lanes"),
        (
            ["dualpipev", "--stages", "4", "--micro-batches", "2"],
            1,
            "dualpipev: 2 micro-batches for 4 stages",
        ),
    ],
)
def test_errors_are_one_line(
    argv: list[str],
    code: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli_schedule, "_MOST_CHARACTERS", 9)
    Path("x.csv").write_text("0F0,x")
    Path("bytes.csv").write_bytes(b"\xff")
    Path("long.csv").write_text("0F0,0F1,0F2")
    assert run(*argv) == code
    out, err = capsys.readouterr()
    assert not out
    assert said in one_line(err)
