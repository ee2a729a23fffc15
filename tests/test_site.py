"""The hooks of the documentation's site."""

import json
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

import partitioner

ROOT = Path(partitioner.__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def site() -> ModuleType:
    spec = spec_from_file_location("site_hooks", ROOT / "docs/hooks/site.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_notebook_becomes_a_page(site: ModuleType, tmp_path: Path) -> None:
    outputs = [
        {"output_type": "stream", "name": "stdout", "text": ["\x1b[31mone\x1b[0m\n"]},
        {"output_type": "execute_result", "data": {"text/plain": ["2"]}},
    ]
    cells = [
        {"cell_type": "markdown", "source": ["# Title\n", "\n", "Text."]},
        {"cell_type": "code", "source": ["print(1)\n", "2"], "outputs": outputs},
        {"cell_type": "code", "source": ["pass"], "outputs": []},
    ]
    path = tmp_path / "book.ipynb"
    path.write_text(json.dumps({"cells": cells}))
    assert site.page_of(path) == (
        "# Title\n\n[Download this notebook](book.ipynb){ .md-button download }\n\nText.\n\n"
        "```python\nprint(1)\n2\n```\n\n"
        '```text title="Output"\none\n2\n```\n\n'
        "```python\npass\n```\n"
    )


def test_lines_of_errors_wrap_and_tables_do_not(site: ModuleType) -> None:
    error = '```text title="Output"\npartition: no\n```\n'
    table = '```text title="Output"\ndevice  load\n```\n'
    wrapped = error.replace("text title", "{ .text .wrapped title").replace('"\n', '" }\n')
    assert site.on_page_markdown(error + table) == wrapped + table


@pytest.mark.parametrize("missing", ["selenium", "transformers"])
def test_screenshots_are_kept_if_they_cannot_be_taken(
    site: ModuleType, missing: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(site, "find_spec", lambda name: None if name == missing else sys)
    monkeypatch.setattr(site.subprocess, "run", lambda *_, **__: pytest.fail("taken"))
    site._screenshots(tmp_path)
    assert not site.MADE
