"""Writing a file: through links, or refused with one clear error."""

from __future__ import annotations

from pathlib import Path

import pytest

from partitioner.foundations.files import (
    FileError,
    check_file,
    refuse_to_replace,
    write_file,
    write_files,
)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("x" * 300, "File name too long"),
        (f"{'x' * 300}/y", "File name too long"),
        ("x/" * 3000 + "y", "File name too long"),
        ("nul\0", "null"),
        ("file/y", "there is no folder"),
        ("none/y", "there is no folder"),
        (".", "it is there and is not a file"),
        ("loop", "it is a link that leads to itself"),
        ("astray", "there is no folder"),
        ("folder_link", "it is there and is not a file"),
    ],
)
def test_what_cannot_be_written_is_one_error(tmp_path: Path, name: str, why: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "astray").symlink_to("none/file")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder_link").symlink_to("folder")
    before = sorted(tmp_path.iterdir())
    for refused in (check_file, lambda path: write_file(path, b"new")):
        with pytest.raises(FileError, match=why) as caught:
            refused(tmp_path / name)
        assert str(caught.value).startswith("cannot write ")
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("there", [True, False])
def test_a_link_stays_a_link(tmp_path: Path, there: bool) -> None:
    (tmp_path / "far").mkdir()
    if there:
        (tmp_path / "far" / "file").write_bytes(b"old")
    (tmp_path / "near").symlink_to("far/file")
    (tmp_path / "link").symlink_to("near")
    write_file(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "near").is_symlink()
    assert not (tmp_path / "far" / "file").is_symlink()
    assert (tmp_path / "far" / "file").read_bytes() == b"new"
    assert [path.name for path in (tmp_path / "far").iterdir()] == ["file"]


def test_a_link_out_of_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    """A refusal names the folder that is written into."""
    (tmp_path / "link").symlink_to("none/file")
    with pytest.raises(FileError, match=r"there is no folder .*/none$"):
        write_file(tmp_path / "link", b"")


def test_the_longest_names_are_written(tmp_path: Path) -> None:
    for name in ("x" * 255, "\N{GRINNING FACE}" * 63):
        write_files({tmp_path / name: b"new"})
        assert (tmp_path / name).read_bytes() == b"new"


def test_the_model_is_not_replaced_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").touch()
    (tmp_path / "r.html").symlink_to("m.onnx")
    with pytest.raises(FileError, match="it is the model itself"):
        refuse_to_replace(tmp_path / "m.onnx", tmp_path / "r.html")
    refuse_to_replace(tmp_path / "m.onnx", tmp_path / "other.html")
    refuse_to_replace(tmp_path / "m.onnx", tmp_path / ("x" * 300))
