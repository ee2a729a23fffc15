"""Files about the project agree with its metadata."""

import re
import tomllib
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.version import Version

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
    listed = [*project()["dependencies"], *extras["examples"], *extras["report"]]
    bounds = {}
    for requirement in map(Requirement, listed):
        (bound,) = (one for one in requirement.specifier if one.operator == ">=")
        bounds[requirement.name] = Version(bound.version)
    assert {name: Version(version) for name, version in tried.items()} == bounds
    workflow = (ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8")
    assert ".ci/floors\n" in workflow


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
    lines = [line.split("  #")[0].strip() for line in readme.splitlines()]
    assert all(step in lines for step in command.split(" && "))
