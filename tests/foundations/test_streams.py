"""Standard streams without the letters that are printed."""

import os
import subprocess
import sys

import pytest

PROGRAM = r"""
from partitioner.foundations.streams import print_plainly
print_plainly()
print("12 \u00b5s \u00b1 2 % \u00e9 \u4e2d")
"""


def printed(**environment: str) -> bytes:
    """What a process prints in an environment."""
    cleared = {name: value for name, value in os.environ.items() if not name.startswith("LC_")}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=cleared | environment,
        capture_output=True,
        check=True,
    )
    return done.stdout.strip()


@pytest.mark.parametrize(
    "environment",
    [
        {"PYTHONIOENCODING": "ascii"},
        {"PYTHONIOENCODING": "ascii:surrogateescape"},
        {"LANG": "C", "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"},
    ],
)
def test_an_ascii_stream_gets_plain_letters(environment: dict[str, str]) -> None:
    assert printed(**environment) == b"12 us +- 2 % e ?"


@pytest.mark.parametrize("environment", [{"PYTHONIOENCODING": "utf-8"}, {"LANG": "C"}])
def test_other_streams_keep_all(environment: dict[str, str]) -> None:
    assert printed(**environment).decode() == "12 \u00b5s \u00b1 2 % \u00e9 \u4e2d"


def test_latin_1_has_micro_but_no_chinese() -> None:
    assert printed(PYTHONIOENCODING="latin-1") == "12 \u00b5s \u00b1 2 % \u00e9 ?".encode("latin-1")
