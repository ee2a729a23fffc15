"""The page writes numbers as the commands do."""

from importlib import resources
from pathlib import Path

import pytest

from helpers.pages import browser as headless
from partitioner.foundations import units

FORMS = ("seconds", "size", "flops", "share")
NUMBERS = [
    0.0,
    *(
        sign * lead * 10.0**power
        for sign in (1, -1)
        for power in range(-13, 16)
        for lead in (1, 1.2346, 9.994, 9.9951)
    ),
]


@pytest.mark.slow
@pytest.mark.skipif(headless.binary() is None, reason="no chromium is installed")
def test_the_page_writes_numbers_as_the_commands_do(tmp_path: Path) -> None:
    script = resources.files("partitioner.report.page").joinpath("web/js/text.js").read_text()
    (tmp_path / "page.html").write_text("<!doctype html><title>numbers</title>")
    chrome = headless.start(tmp_path / "profile")
    try:
        chrome.get((tmp_path / "page.html").as_uri())
        chosen = f"[{','.join(FORMS)}]"
        shown = chrome.execute_script(
            f"{script}; return {chosen}.map((form) => arguments[0].map(form));", NUMBERS
        )
    finally:
        chrome.quit()
    for form, texts in zip(FORMS, shown, strict=True):
        expected = [getattr(units, form)(number) for number in NUMBERS]
        assert dict(zip(NUMBERS, texts, strict=True)) == dict(zip(NUMBERS, expected, strict=True))
