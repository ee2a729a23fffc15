"""Modules of rare kinds compute and differentiate as by themselves, or are refused by name."""

import re

import pytest
from odd_modules import MODULES, REFUSED, outcome

#: The cases of the default suite.
FAST = {"nested inputs", "oblique weights", "unregistered parameters"}


@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in FAST else pytest.mark.slow) for n in MODULES]
)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_odd_modules(name: str, devices: int) -> None:
    said = outcome(name, devices)
    if name in REFUSED:
        assert re.match(f"refused: .*{REFUSED[name]}", said)
        assert "\n" not in said
    else:
        assert said == "equal"
