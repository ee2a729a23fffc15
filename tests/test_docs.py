"""What the documentation prints is run: snippets, pins, commands on the tutorial's model."""

import doctest
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import onnx
import pytest
import torch

import partitioner
from partitioner import examples
from partitioner.cli import main
from partitioner.constraints import Constraints

ROOT = Path(partitioner.__file__).resolve().parents[1]
DOCS = ROOT / "docs"


def blocks(page: str, language: str) -> list[str]:
    text = (DOCS / page).read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tutorial's llama.onnx."""
    folder = tmp_path_factory.mktemp("docs")
    onnx.save(examples.build("llama", layers=2, hidden=256), folder / "llama.onnx")
    return folder


@pytest.mark.parametrize("page", ["tutorial.md", "reference/python.md"])
def test_python_snippets_run(home: Path, page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    (snippet,) = blocks(page, "python")
    exec(compile(snippet, page, "exec"), {})


@pytest.mark.parametrize("page", ["concepts/levels.md", "how-to/hand-written.md"])
def test_the_session_of_a_page(page: str) -> None:
    (session,) = blocks(page, "pycon")
    example = doctest.DocTestParser().get_doctest(session, {}, page, page, 0)
    result = doctest.DocTestRunner(verbose=False).run(example)
    assert result.attempted == session.count(">>>")
    assert not result.failed


def test_the_hand_written_model_trains_under_torchrun(tmp_path: Path) -> None:
    (script,) = blocks("how-to/hand-written.md", "python")
    (tmp_path / "hand.py").write_text(script)
    (command,) = blocks("how-to/hand-written.md", "console")
    arguments = shlex.split(command)
    assert arguments[0] == "torchrun"
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", *arguments[1:]],
        cwd=tmp_path,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONPATH": str(ROOT),
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert re.search(r"433 parameters: \d", done.stdout)


def test_the_pins_and_commands_of_the_constraints_page(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(home)
    pins = blocks("how-to/constraints.md", "toml")
    for name, text in zip(("pins.toml", "cut.toml"), pins, strict=True):
        Path(name).write_text(text)
        assert Constraints.read(Path(name)).pins
    for block in blocks("how-to/constraints.md", "console"):
        for line in block.splitlines():
            command = shlex.split(line, comments=True)
            if command[0] == "cp":
                Path(command[2]).write_bytes(Path(command[1]).read_bytes())
            else:
                assert command[0] == "partition"
                assert main([*command[1:], "--time-limit", "10"]) == 0, line
    assert "no plan in intra (tp=4)" in capsys.readouterr().out


def test_the_pages_of_pytorch_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    script, factories = blocks("how-to/pytorch.md", "python")
    names: dict[str, object] = {}
    exec(compile(script, "pytorch.md", "exec"), names)
    Path("models.py").write_text(factories)
    program = torch.export.export(names["net"], (names["x"],), strict=False)
    torch.export.save(program, "net.pt2")
    shutil.rmtree("net.partition")
    monkeypatch.delitem(sys.modules, "models", raising=False)
    for block in blocks("how-to/pytorch.md", "console"):
        for line in block.splitlines():
            assert main(shlex.split(line)[1:]) == 0, line
    monkeypatch.delitem(sys.modules, "models", raising=False)
    out = capsys.readouterr().out
    assert out.count("equal: 2 ranks against the whole module") == 2
    assert "measured on this machine: 1 request" in out


def test_the_commands_of_the_problem_files_page(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(home)
    (block,) = blocks("reference/problem-files.md", "console")
    for line in block.splitlines():
        command = shlex.split(line)
        assert command[0] == "partition"
        assert main(command[1:]) == 0, line
    out = capsys.readouterr().out
    assert out.count("\nfeasible\n") == 2
    assert "in the format of google/iopddl" in out
    assert "in the format of msr-fiddle/dnn-partitioning" in out


def test_every_page_is_in_the_navigation_and_links_lead_somewhere() -> None:
    listed = set(re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8")))
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    assert listed == pages
    for page in pages:
        text = (DOCS / page).read_text(encoding="utf-8")
        for link in re.findall(r"\]\(([^)#:]+\.md)(?:#[\w-]+)?\)", text):
            assert ((DOCS / page).parent / link).is_file(), f"{page}: {link}"


@pytest.mark.parametrize(
    "command",
    [
        "partition",
        *(f"partition {name}" for name in ("run", "show", "sweep", "diff", "report", "solve")),
    ],
)
def test_every_option_of_the_command_line_is_documented(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([*command.split(), "--help"])
    options = set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
    page = (DOCS / "reference/cli.md").read_text(encoding="utf-8")
    assert {o for o in options if o not in page} <= {"--help", "--output", "--quiet"}
