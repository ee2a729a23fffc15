"""Files about the project agree with its metadata."""

import importlib.util
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement
from packaging.version import Version

from partitioner.backends.runtimes import TRIED

ROOT = Path(__file__).parents[1]


def project() -> dict[str, Any]:
    data = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert isinstance(data["project"], dict)
    return data["project"]


def test_the_citation_names_the_licence_of_the_metadata() -> None:
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"license: {project()['license']}" in citation


def test_the_workflow_runs_the_checks_with_the_versions_that_the_metadata_names() -> None:
    workflow = (ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8")
    (listed,) = re.findall(r"python: \[(.*?)\]", workflow)
    named = [c for c in project()["classifiers"] if re.fullmatch(r".*Python :: 3\.\d+", c)]
    assert re.findall(r"3\.\d+", listed) == [c.rsplit(" ", 1)[1] for c in named]
    assert ".ci/run" in workflow


def test_floors_are_the_lower_bounds_of_the_metadata() -> None:
    lines = (ROOT / ".ci/floors.txt").read_text(encoding="utf-8").splitlines()
    tried = dict(line.split("==") for line in lines if not line.startswith("#"))
    extras = project()["optional-dependencies"]
    kinds = ("onnxruntime", "onnxruntime-gpu", "torch", "examples", "report")
    listed = [*project()["dependencies"], *(one for kind in kinds for one in extras[kind])]
    bounds = {}
    for requirement in map(Requirement, listed):
        (bound,) = (one for one in requirement.specifier if one.operator == ">=")
        bounds[requirement.name] = Version(bound.version)
    assert {name: Version(version) for name, version in tried.items()} == bounds
    workflow = (ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8")
    assert ".ci/floors\n" in workflow


def test_upper_bounds_are_the_tried_releases() -> None:
    bounds = {}
    extras = project()["optional-dependencies"]
    for requirement in map(Requirement, [*project()["dependencies"], *extras["torch"]]):
        bounds[requirement.name] = [s.version for s in requirement.specifier if s.operator == "<"]
    first, last = TRIED[0], TRIED[-1]
    assert bounds["torch"] == [f"{last[0]}.{last[1] + 1}"]
    floors = (ROOT / ".ci/floors.txt").read_text(encoding="utf-8")
    assert f"torch=={first[0]}.{first[1]}.0\n" in floors
    assert [torch.__version__.startswith(f"{a}.{b}.") for a, b in TRIED].count(True) == 1
    assert bounds["numba"]  # compiled code is kept through private classes


def test_the_newest_versions_are_tried_once_a_week() -> None:
    workflow = (ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8")
    assert ".ci/newest\n" in workflow
    assert "schedule:" in workflow
    for script in ("floors", "newest"):
        text = (ROOT / ".ci" / script).read_text(encoding="utf-8")
        assert '.ci/examples.py" "$root/README.md"' in text
    newest = (ROOT / ".ci/newest").read_text(encoding="utf-8")
    assert not re.search(r"pip install.* -c ", newest)


def test_the_examples_are_those_of_the_readme() -> None:
    spec = importlib.util.spec_from_file_location("examples_of_ci", ROOT / ".ci/examples.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    found = list(script.commands((ROOT / "README.md").read_text(encoding="utf-8")))
    assert found[:2] == [
        "python -m partitioner.examples llama llama.onnx --hidden 512 --seq 2048",
        "partition llama.onnx --devices 4 --objective latency",
    ]
    assert all(command.startswith(("partition ", "python -m ")) for command in found)
    assert any(command.startswith("partition profile ") for command in found)
    assert {"--json" in command for command in script.JSON} == {True, False}


def test_nothing_tells_people_to_install_an_unpublished_name() -> None:
    own = re.escape(project()["name"])
    folders = ("partitioner", "backends", "ir", "cost_model", "docs")
    files = [path for folder in folders for path in sorted((ROOT / folder).rglob("*"))]
    texts = [path for path in files if path.suffix in {".py", ".md", ".ipynb", ".html", ".js"}]
    assert len(texts) > 500
    for path in (*texts, ROOT / "README.md", ROOT / "CONTRIBUTING.md"):
        lines = path.read_text(encoding="utf-8").splitlines()
        told = rf"pip install[^&]*[\s'\"]({own}|partitioner)\b"
        found = [line for line in lines if re.search(told, line)]
        assert not found, f"{path}: {found}"


def test_the_page_install_is_in_the_navigation_and_on_the_first_screen() -> None:
    assert "Install: install.md" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    index = (ROOT / "docs/index.md").read_text(encoding="utf-8")
    assert "install.md" in index[: index.index("</div>")]
    page = (ROOT / "docs/install.md").read_text(encoding="utf-8")
    for extra in project()["optional-dependencies"]:
        assert f"'.[{extra}]'" in page
    assert "python -m build" in page


@pytest.mark.slow
def test_the_source_archive_holds_the_package_and_no_test(tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "dist"
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    for name in filter(None, listed.split("\0")):
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_symlink():
            target.symlink_to((ROOT / name).readlink())
        elif (ROOT / name).is_file():
            shutil.copyfile(ROOT / name, target)
    out.mkdir()
    code = f"from setuptools.build_meta import build_sdist; build_sdist({str(out)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, check=True)
    (archive,) = out.iterdir()
    with tarfile.open(archive) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    assert not [name for name in names if re.search(r"(^|/)(test_|tests?/)", name)]
    package = {name.partition("/")[2] for name in names if name.startswith(".editable/")}
    assert {"partitioner/ir/graph.py", "partitioner/report/page/web/page.html"} <= package
    files = {"api/options.toml", "backends/torch/files/exported_operators.txt"}
    assert {f"partitioner/{name}" for name in files} <= package
    data = Path("partitioner/cost_model/cluster/data")
    assert {str(data / path.name) for path in (ROOT / data).iterdir()} <= package


def test_data_files_belong_to_the_package_beside_them() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    setuptools = tomllib.loads(text)["tool"]["setuptools"]
    folder = ROOT / "partitioner/cost_model/cluster"
    (pattern,) = setuptools["package-data"]["partitioner.cost_model.cluster"]
    assert {*folder.glob(pattern)} == {*(folder / "data").iterdir()} != set()
    assert "partitioner.cost_model.cluster.data*" in setuptools["packages"]["find"]["exclude"]


def test_what_the_tests_run_with_is_within_the_bounds() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = dict(line.split("==") for line in lines if not line.startswith("#"))
    pinned = {name.lower().replace("_", "-"): version for name, version in pinned.items()}
    for requirement in map(Requirement, project()["dependencies"]):
        version = pinned.get(requirement.name.lower().replace("_", "-"))
        assert version is None or requirement.specifier.contains(version), requirement


def test_the_image_plans_the_example_of_the_readme() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (command,) = re.findall(r'CMD \["sh", "-c", "(.*)"\]', (ROOT / "Dockerfile").read_text())
    lines = [
        step.split("  #")[0].strip() for line in readme.splitlines() for step in line.split("&&")
    ]
    assert all(step in lines for step in command.split(" && "))
