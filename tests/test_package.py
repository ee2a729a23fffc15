"""The package's layout: one package, lazy at the top, no second copy of a class."""

import subprocess
import sys
from pathlib import Path

import pytest

import partitioner

ROOT = Path(partitioner.__file__).resolve().parents[1]
HEAVY = ("highspy", "networkx", "numpy", "onnx", "onnxruntime", "pulp", "scipy", "torch")


def test_public_names_are_sorted_and_few() -> None:
    assert partitioner.__all__ == sorted(partitioner.__all__)
    assert len(partitioner.__all__) == 19
    assert set(partitioner.__all__) <= set(dir(partitioner))
    assert isinstance(partitioner.__version__, str)


@pytest.mark.parametrize("name", sorted({*partitioner.__all__} - {"__version__"}))
def test_every_public_name_is_imported_and_documented(name: str) -> None:
    value = getattr(partitioner, name)
    assert value.__name__ == name
    page = (ROOT / "docs/reference/python.md").read_text(encoding="utf-8")
    assert f"::: {value.__module__}.{name}\n" in page


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'partitioner' has no attribute 'nothing'"):
        partitioner.nothing  # noqa: B018


def test_import_loads_nothing_heavy() -> None:
    code = f"import partitioner, sys; print(sorted(sys.modules.keys() & {set(HEAVY)!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("folder", ["ir", "cost_model", "backends"])
def test_the_folders_are_relative_links_into_the_package(folder: str) -> None:
    link = ROOT / "partitioner" / folder
    assert str(link.readlink()) == f"../{folder}"
    assert (ROOT / folder / "__init__.py").is_file()


def test_the_folder_of_an_editable_install_has_the_package_alone() -> None:
    assert [path.name for path in (ROOT / ".editable").iterdir() if path.suffix != ".egg-info"] == [
        "partitioner"
    ]
    assert str((ROOT / ".editable/partitioner").readlink()) == "../partitioner"


@pytest.mark.parametrize(
    "statement", ["import ir", "from backends import x", "import cost_model.a"]
)
def test_lint_refuses_a_second_copy(statement: str, tmp_path: Path) -> None:
    pytest.importorskip("ruff")  # of the dev extra, not of test
    (tmp_path / "wrong.py").write_text(f"{statement}\n")
    ruff = [sys.executable, "-m", "ruff", "check", "--config", str(ROOT / "pyproject.toml")]
    done = subprocess.run(
        [*ruff, "--select", "TID251", "wrong.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "a second copy of every class" in done.stdout
