"""Releases of PyTorch that were not tried: a note where they work, one line where they do not."""

import re
from pathlib import Path

import pytest
import torch

import partitioner
from partitioner.backends.torch.tried import TRIED, UntriedError, naming_untried, untried
from partitioner.cli.main import main
from partitioner.ir.errors import OptionError

LINE = (
    r"PyTorch 2\.99\.1\+cu140 was not tried, only 2\.13 and 2\.14 were: its private interfaces may "
    r"differ; pip install 'torch>=2\.13,<2\.15' takes a tried one"
)


@pytest.fixture
def unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.99.1+cu140")


def test_the_installed_release_was_tried() -> None:
    assert untried() == ""


@pytest.mark.parametrize("release", TRIED)
def test_a_tried_release_with_any_ending(
    release: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", f"{release[0]}.{release[1]}.7+cpu")
    assert untried() == ""


@pytest.mark.parametrize("version", ["2.12.1", "2.15.0a0+git123", "3.13.0", "12.14"])
def test_another_release_says_what_was_tried(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    assert untried().startswith(f"PyTorch {version} was not tried, only 2.13 and 2.14 were: ")


@pytest.mark.usefixtures("unknown")
def test_a_plan_has_a_note() -> None:
    program = partitioner.compile(torch.nn.Linear(4, 4), torch.randn(2, 4), devices=2)
    (note,) = (one for one in program.summary["notes"] if "was not tried" in one)
    assert re.fullmatch(LINE, note)
    assert program.verify()


@pytest.mark.usefixtures("unknown")
def test_what_is_missing_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def missing(*_: object, **__: object) -> None:
        raise AttributeError("module 'torch._C'\nhas no attribute '_gone'")

    monkeypatch.setattr("partitioner.api.compiler.open_with", missing)
    line = LINE + r" \(AttributeError: module 'torch\._C' has no attribute '_gone'\)"
    with pytest.raises(UntriedError, match=f"^{line}$"):
        partitioner.compile(torch.nn.Linear(4, 4), torch.randn(2, 4), devices=2)
    target = str(tmp_path / "m.partition")
    assert main(["helpers.factories:build", "--devices", "2", "-q", "-o", target]) == 1
    assert re.fullmatch(f"partition: {line}\n", capsys.readouterr().err)


@pytest.mark.usefixtures("unknown")
def test_errors_of_users_are_left_alone() -> None:
    with pytest.raises(OptionError, match=r"^size$"), naming_untried():
        raise OptionError("size")
    with pytest.raises(KeyError, match="foreseen"), naming_untried(KeyError):
        raise KeyError("foreseen")


def test_errors_under_a_tried_release_are_left_alone() -> None:
    with pytest.raises(AttributeError, match=r"^ours$"), naming_untried():
        raise AttributeError("ours")
