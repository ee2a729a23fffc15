"""The notebooks of the documentation run, and print the outputs that they hold."""

from pathlib import Path

import nbformat
import pytest

import partitioner
from helpers.pages import notebooks

FOLDER = Path(partitioner.__file__).resolve().parents[1] / "docs" / "notebooks"
PATHS = sorted(FOLDER.glob("*.ipynb"))


def test_there_are_three_of_less_than_a_megabyte() -> None:
    assert [path.stem for path in PATHS] == ["onnx", "reading", "training"]
    assert all(path.stat().st_size < 2**20 for path in PATHS)


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_a_notebook(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Renew the outputs with `tests/helpers/pages/notebooks.py`."""
    monkeypatch.setenv("PYTHONPATH", str(FOLDER.parents[1]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    held = nbformat.read(path, as_version=4)
    assert notebooks.printed(notebooks.run(path)) == notebooks.printed(held)


def test_texts_of_a_stream_are_joined() -> None:
    texts = [("stdout", "a"), ("stdout", "b\n"), ("stderr", "c"), ("stdout", "d")]
    outputs = [nbformat.v4.new_output("stream", name=name, text=text) for name, text in texts]
    joined = [(output.name, output.text) for output in notebooks._joined(outputs)]
    assert joined == [("stdout", "ab\n"), ("stderr", "c"), ("stdout", "d")]
