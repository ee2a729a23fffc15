"""Drafts of files and folders: left by a killed process, removed by the next run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from partitioner.foundations.files import draft_file, draft_folder, replace_directory, write_file

_HOLD = """
import sys, time
from pathlib import Path
from partitioner.foundations.files import draft_file, draft_folder
with draft_folder(Path(sys.argv[1])) as folder, draft_file(Path(sys.argv[1])):
    (folder / "rank0.weights").write_bytes(b"half")
    print("ready", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "out"


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_drafts_of_a_killed_process_are_removed_by_the_next_run(place: Path) -> None:
    command = [sys.executable, "-c", _HOLD, str(place)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        held = _names(place.parent)
        assert len(held) == 2
        with draft_folder(place) as mine:
            assert set(_names(place.parent)) == {*held, mine.name}, "a living process keeps its"
        writer.kill()
    assert _names(place.parent) == held
    write_file(place.with_name("other"), b"")
    assert _names(place.parent) == sorted([*held, "other"]), "only those of the same place go"
    replace_directory(place, lambda folder: (folder / "a").touch(), force=False)
    assert _names(place.parent) == ["other", "out"]


def test_a_draft_goes_at_the_end_unless_it_was_moved(place: Path) -> None:
    with draft_file(place) as first, draft_folder(place) as second:
        assert first.is_file()
        assert second.is_dir()
        first.rename(place)
    assert _names(place.parent) == ["out"]


def test_what_only_looks_like_a_draft_stays(place: Path) -> None:
    for name in (".out.draft-mine", ".out.draft-abcdefgh9", ".output.draft-abcdefgh"):
        (place.parent / name).touch()
    (place.parent / ".out.draft-abcdefgh").symlink_to(".out.draft-mine")
    before = _names(place.parent)
    write_file(place, b"")
    assert _names(place.parent) == sorted([*before, "out"])
