"""Commands of the documentation print what the pages show below them."""

from pathlib import Path

import pytest

from helpers.pages import shown_outputs

DOCS = shown_outputs.ROOT / "docs"
PAGES = [path.relative_to(DOCS).as_posix() for path in shown_outputs.pages()]
SLOW = {
    *("how-to/generate.md", "how-to/hand-written.md", "how-to/pipelines.md"),
    *("reference/python.md", "tutorial.md"),
}


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=[pytest.mark.slow] if page in SLOW else []) for page in PAGES],
)
def test_the_outputs_of_a_page(page: str, tmp_path: Path) -> None:
    """Renew them with `python tests/helpers/pages/shown_outputs.py docs/PAGE`."""
    text = (DOCS / page).read_text(encoding="utf-8")
    shown_outputs.write_files(text, tmp_path)
    for item in shown_outputs.shown(text):
        printed = shown_outputs.run(item.command, tmp_path)
        if item.output:
            new = shown_outputs.expected(item.output, printed)
            assert shown_outputs.comparable(new) == shown_outputs.comparable(item.output), (
                item.command
            )


def test_a_wrong_output_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    block = '```console\npartition nothing.onnx\n```\n\n```text title="Output"\n{}\n```\n'
    page.write_text(block.format("partition: all is well"))
    assert "partition: nothing.onnx: no such file" in shown_outputs.renewed(page, tmp_path)
    page.write_text(block.format("partition: nothing.onnx: no such file"))
    assert shown_outputs.renewed(page, tmp_path) == page.read_text()


def test_commands_may_begin_with_variables_and_run_up_to_the_last_output(tmp_path: Path) -> None:
    page, command = tmp_path / "page.md", "python -c 'import os; print(os.environ[\"WORD\"])'"
    text = f'```console\nWORD=a {command}\n```\n\n```text title="Output"\n?\n```\n'
    late = "\n```console\nWORD=b nothing-like-this\n```\n"
    page.write_text(text + late)
    assert shown_outputs.renewed(page, tmp_path) == text.replace("?", "a") + late
    page.write_text(late)
    assert shown_outputs.renewed(page, tmp_path) == late
