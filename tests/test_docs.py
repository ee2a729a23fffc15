"""The documentation's snippets, pins and commands run on the tutorial's model."""

import doctest
import html
import io
import re
import runpy
import shlex
import shutil
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from http.server import HTTPServer
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import pytest
import torch

import partitioner
from helpers.drawn import drawn_plans
from helpers.pages import shown_outputs
from helpers.processes.torch_jobs import RunJob, job_parameters
from jobs.kinds.digits_jobs import JOBS
from partitioner import examples
from partitioner.api.option_table import described
from partitioner.cli.app import COMMANDS
from partitioner.cli.main import main
from partitioner.strategies.constraints import Constraints

ROOT = Path(partitioner.__file__).resolve().parents[1]
DOCS = ROOT / "docs"


def blocks(page: str, language: str) -> list[str]:
    text = (DOCS / page).read_text(encoding="utf-8")
    return re.findall(rf'```{language}(?: title="[^"\n]*")?\n(.*?)```', text, re.DOTALL)


@pytest.fixture(scope="module")
def option_tables() -> ModuleType:
    """The hook of the site that makes tables of options."""
    spec = spec_from_file_location("option_tables", DOCS / "hooks/options.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tutorial's llama.onnx."""
    folder = tmp_path_factory.mktemp("docs")
    onnx.save(examples.build("llama", hidden=512, seq=2048), folder / "llama.onnx")
    return folder


@pytest.mark.parametrize("page", ["tutorial.md", "reference/python.md"])
def test_python_snippets_run(home: Path, page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    snippets = blocks(page, "python")
    assert snippets
    for snippet in snippets:
        exec(compile(snippet, page, "exec"), {})


def test_the_first_example_of_the_readme_cuts(capsys: pytest.CaptureFixture[str]) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    snippet = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)[0]
    exec(compile(snippet, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert re.search(r"[1-9]\d* of \d+ operators cut over", printed)
    assert "_c10d_functional.all_gather" in printed
    shown = readme.split("It prints, among others:")[1].split("```")[1].splitlines()[1:]
    assert len(shown) == 4
    assert all(line in printed for line in shown)


def test_the_line_split_says_why_nothing_is_cut() -> None:
    module = torch.nn.Linear(8, 8)
    pins = {"pin": [{"nodes": ["*"], "device": 0}]}
    pinned = partitioner.compile(module, torch.zeros(2, 8), devices=2, constraints=pins)
    alone = partitioner.compile(module, torch.zeros(2, 8), devices=1)
    placed = partitioner.compile(
        torch.nn.Sequential(module, module), torch.zeros(2, 8), cluster="2xideal", strategy="inter"
    )
    sentences = (
        "nothing was split: no plan within the constraints",
        "there is one device",
        "no operator is cut",
    )
    for program, sentence in zip((pinned, alone, placed), sentences, strict=True):
        (split,) = (line for line in str(program).splitlines() if line.startswith("  split "))
        assert sentence in split


@pytest.mark.parametrize(
    "page",
    [
        "concepts/levels.md",
        "how-to/hand-written.md",
        "how-to/pipelines.md",
        "how-to/training.md",
        "troubleshooting.md",
    ],
)
def test_the_session_of_a_page(page: str) -> None:
    for session in blocks(page, "pycon"):
        example = doctest.DocTestParser().get_doctest(session, {}, page, page, 0)
        result = doctest.DocTestRunner(verbose=False).run(example)
        assert result.attempted == session.count(">>>")
        assert not result.failed


def run_command(command: str, folder: Path) -> str:
    """The output of a command with python or torchrun, which prints nothing on stderr."""
    done = shown_outputs.start(command, folder)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_script_of_the_training_page(tmp_path: Path) -> None:
    script = blocks("how-to/training.md", "python")[0]
    (tmp_path / "train.py").write_text(script)
    printed = run_command(blocks("how-to/training.md", "console")[-1], tmp_path)
    assert re.search(r"1\.\d\d -> 0\.[01]\d, (1[5-9]|20) of 20 right", printed)


def test_the_server_of_the_page_on_serving() -> None:
    script = blocks("how-to/serving.md", "python")[0]
    names: dict[str, Any] = {"__name__": "serve"}
    exec(compile(script, "serving.md", "exec"), names)
    inputs = {"x": np.ones((4, 8), np.float32)}

    def asked(port: int, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        body = io.BytesIO()
        np.savez(body, **arrays)  # type: ignore[arg-type]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}", body.getvalue()) as answer:
            return dict(np.load(io.BytesIO(answer.read())))

    result = partitioner.compile(drawn_plans.mlp(), devices=2, strategy="intra")
    with (
        result,
        result.session() as session,
        HTTPServer(("127.0.0.1", 0), names["handler"](session)) as server,
    ):
        threading.Thread(target=server.serve_forever, daemon=True).start()
        found, wanted = asked(server.server_port, inputs), result.run(inputs)
        with pytest.raises(urllib.error.HTTPError, match="is missing"):
            asked(server.server_port, {})
        again = asked(server.server_port, inputs)
        server.shutdown()
    assert found.keys() == again.keys() == wanted.keys()
    for name, array in wanted.items():
        assert np.array_equal(found[name], array)
        assert np.array_equal(again[name], array)


@pytest.mark.slow
def test_the_module_of_the_page_on_serving(tmp_path: Path) -> None:
    (tmp_path / "serve_module.py").write_text(blocks("how-to/serving.md", "python")[-1])
    printed = run_command(blocks("how-to/serving.md", "console")[0], tmp_path)
    assert printed.splitlines() == ["answered (8, 4)"] * 2


def test_the_module_of_the_readme(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    snippet, _ = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    torch.manual_seed(0)
    exec(compile(snippet, "README.md", "exec"), {})
    assert "all_gather_into_tensor" in capsys.readouterr().out


@pytest.mark.parametrize("job", job_parameters(JOBS))
def test_digits_are_learned_on_ranks_as_by_one_process(run_job: RunJob, job: str) -> None:
    run_job("kinds/digits_jobs.py", job)


def test_digits_from_the_files_of_mnist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pixels = np.arange(8 * 28 * 28, dtype=np.uint32).astype(np.uint8)
    (tmp_path / "train-images-idx3-ubyte").write_bytes(bytes(16) + pixels.tobytes())
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(bytes(8) + bytes(range(8)))
    flags = ["--data", ".", "--batch", "4", "--steps", "3", "--every", "1", "--curve", "curve.txt"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["mnist.py", *flags])
    runpy.run_path(str(DOCS / "examples/mnist.py"), run_name="__main__")
    curve = [float(line) for line in Path("curve.txt").read_text().splitlines()]
    said = [f"step {step}: loss {loss:.4f}" for step, loss in enumerate(curve, 1)]
    assert capsys.readouterr().out.splitlines() == said
    assert len(said) == 3


@pytest.mark.sweep
@pytest.mark.timeout(600)
def test_the_commands_of_digits_give_one_curve(tmp_path: Path) -> None:
    (block, _) = blocks("how-to/training.md", "console")
    commands = block.splitlines()
    assert len(commands) == 5
    curves = []
    for command in commands:
        path = str(DOCS / "examples/mnist.py")
        full = command.replace("docs/examples/mnist.py", path) + " --steps 60 --curve curve.txt"
        assert "step 60: loss " in run_command(full, tmp_path)
        curves.append([float(x) for x in (tmp_path / "curve.txt").read_text().split()])
        (tmp_path / "curve.txt").unlink()
    assert curves[0][-1] < 0.5 * curves[0][0]
    for curve in curves[1:]:
        assert curve == pytest.approx(curves[0], abs=1e-4)


@pytest.mark.slow
def test_the_pins_and_commands_of_the_constraints_page(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(home)
    pins = blocks("how-to/constraints.md", "toml")
    for name, text in zip(("layout.toml", "pins.toml", "cut.toml"), pins, strict=True):
        Path(name).write_text(text)
        assert Constraints.read(Path(name)).bound
    (script,) = blocks("how-to/constraints.md", "python")
    exec(compile(script, "constraints.md", "exec"), {})
    for block in blocks("how-to/constraints.md", "console"):
        for line in block.splitlines():
            command = shlex.split(line, comments=True)
            if command[0] == "cp":
                Path(command[2]).write_bytes(Path(command[1]).read_bytes())
            else:
                assert command[0] == "partition"
                assert main([*command[1:], "--time-limit", "2"]) == 0, line
    assert "no plan in intra (x=4)" in capsys.readouterr().out


@pytest.mark.slow
def test_the_pages_of_pytorch_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    script, factories = blocks("how-to/pytorch.md", "python")
    names: dict[str, object] = {}
    exec(compile(script, "pytorch.md", "exec"), names)
    Path("models.py").write_text(factories)
    (config,) = blocks("how-to/pytorch.md", "json")
    Path("tiny-llama").mkdir()
    Path("tiny-llama/config.json").write_text(config)
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


@pytest.mark.slow
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
    assert out.count("\nfeasible\n") == 1
    assert "in the format of google/iopddl" in out
    assert "the integer program of inter" in out


def test_every_page_is_in_the_navigation_and_links_lead_somewhere() -> None:
    listed = set(re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8")))
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    notebooks = {path.relative_to(DOCS).with_suffix(".md") for path in DOCS.rglob("*.ipynb")}
    made = {path.as_posix() for path in notebooks}  # docs/hooks/site.py makes their pages
    assert listed == pages | made
    for page in pages:
        text = (DOCS / page).read_text(encoding="utf-8")
        for link in re.findall(r"\]\(([^)#:]+\.md)(?:#[\w-]+)?\)", text):
            target = ((DOCS / page).parent / link).resolve()
            assert target.is_file() or target.relative_to(DOCS).as_posix() in made, (
                f"{page}: {link}"
            )


def found(name: str, folders: Sequence[Path]) -> Path | None:
    """A file or folder by the name that a page gives it, in the first of the folders with one."""
    paths = (folder / f"{name}{ending}" for folder in folders for ending in ("", ".py"))
    return next((path for path in paths if path.exists()), None)


def paths_of_the_map() -> list[tuple[str, Path | None, str]]:
    """Paths in the tables of CONTRIBUTING.md: name, what it is, and the row.

    They begin in a folder that the row or the table's head named, the last one first, at the root
    or in partitioner/.
    """
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = []
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        head = [ROOT, ROOT / "partitioner"]
        for number, row in enumerate(table.splitlines()):
            folders = list(head)
            for name in re.findall(r"`([\w./-]+)`", row):
                if "/" in name or name.endswith((".py", ".md", ".toml", ".yml")):
                    path = found(name, folders)
                    named.append((name, path, row))
                    if path is not None:
                        folders.insert(0, path if path.is_dir() else path.parent)
            head = folders if number == 0 else head
    return named


def test_the_map_and_where_it_goes_name_paths_that_exist() -> None:
    named = paths_of_the_map()
    assert len(named) > 200
    assert [(name, row[:60]) for name, path, row in named if path is None] == []


def test_names_that_the_map_gives_to_files_are_in_them() -> None:
    paths = {name: path for name, path, _ in paths_of_the_map() if path is not None}
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    pairs = re.findall(r"`(\w+)` (?:in|of) `([\w./-]+\.py)`", text)
    assert len(pairs) > 10
    for name, file in pairs:
        assert re.search(rf"\b{name}\b", paths[file].read_text(encoding="utf-8")), (name, file)


def test_pages_name_modules_that_exist() -> None:
    rooms = {path.name for path in (ROOT / "partitioner").iterdir() if path.is_dir()} | {"tests"}
    for page in DOCS.rglob("*.md"):
        for name in re.findall(r"`(\w+/[\w./-]*[\w/])`", page.read_text(encoding="utf-8")):
            if name.split("/")[0] in rooms:
                assert found(name, [ROOT, ROOT / "partitioner"]), f"{page.name}: {name}"


@pytest.mark.parametrize(
    "command",
    [
        "partition",
        *(f"partition {name}" for name in COMMANDS),
    ],
)
def test_every_option_of_the_command_line_is_documented(
    command: str, option_tables: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command.split()[1:], "--help"]) == 0
    options = set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
    page = (DOCS / "reference/cli.md").read_text(encoding="utf-8")
    made = option_tables.with_tables(page, "reference/cli.md")
    if command != "partition":
        (made,) = (one for one in made.split("\n## ") if re.match(rf"`{command}\b", one))
    assert {o for o in options if o not in made} <= {"--help"}


def test_the_reference_of_python_lists_each_keyword(option_tables: ModuleType) -> None:
    page = (DOCS / "reference/python.md").read_text(encoding="utf-8")
    made = option_tables.with_tables(page, "reference/python.md")
    parts = re.split(r"\n::: partitioner\.\S*?\.(\w+)\n", made)
    text_of = dict(zip(parts[1::2], parts[2::2], strict=True))
    for name, options in option_tables.TABLES.items():
        if name == "plan":
            continue
        for keyword, row in described(options).items():
            line = next(x for x in text_of[name].splitlines() if x.startswith(f"| `{keyword}` |"))
            assert row.python_help in html.unescape(line)
