"""`--dump-problem` and `partitioner.dump_problem`: the files hold the problems of `compile`."""

import gzip
import json
from pathlib import Path

import onnx
import pytest

import partitioner
from partitioner import examples
from partitioner.cli.main import main
from partitioner.solver import solve
from partitioner.solver.formats import iopddl
from partitioner.solver.formats.dnnp import parse
from partitioner.solver.formats.dnnp_problem import to_problem
from partitioner.solver.formats.json_files import read
from partitioner.solver.pairwise import solve as solve_pairwise
from partitioner.solver.work import Work
from partitioner.strategies.spaces import SearchError


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dump")
    onnx.save(examples.build("llama", layers=1, hidden=64), folder / "m.onnx")
    return folder


@pytest.fixture
def here(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(home)
    return home


@pytest.mark.slow
def test_the_sharding_problem_has_the_cost_of_compile(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["m.onnx", "--devices", "2", "--strategy", "intra"]
    assert main([*options, "--dump-problem", "p.json.gz"]) == 0
    out = capsys.readouterr().out
    assert "p.json.gz: the problem of intra (tp=2) in the format of google/iopddl" in out
    assert "no mesh was given: this is the one of a single axis" in out
    assert sorted(path.name for path in here.iterdir()) == ["m.onnx", "p.json.gz"]
    assert gzip.decompress(Path("p.json.gz").read_bytes()).startswith(b'{"problem"')
    problem = read(Path("p.json.gz"), iopddl.parse)
    result = partitioner.compile("m.onnx", devices=2, strategy="intra", mesh={"tp": 2}, gap=0.0)
    assert solve_pairwise(problem).cost == pytest.approx(result.cost * 1e12, rel=1e-6)
    Path("p.json.gz").unlink()


@pytest.mark.slow
def test_the_placement_problem_has_the_cost_of_compile(here: Path) -> None:
    found = partitioner.dump_problem("m.onnx", here / "q.json", 2, strategy="inter")
    assert found.format == "dnnp"
    assert "a sender pays for a value once, not once a receiver" in str(found)
    written = solve(to_problem(read(found.path, parse)), gap=0.0, work=Work.within(60), effort=2)
    result = partitioner.compile("m.onnx", devices=2, strategy="inter", gap=0.0)
    assert written.bound <= result.cost * (1 + 1e-9)
    assert written.cost == pytest.approx(result.cost, rel=0.02)
    found.path.unlink()


def test_a_mesh_is_taken_and_uneven_devices_are_said(here: Path) -> None:
    found = partitioner.dump_problem(
        "m.onnx", here / "p.json", 4, strategy="intra", mesh={"dp": 2, "tp": 2}
    )
    assert "the problem of intra (dp=2 tp=2)" in found.notes[0]
    assert "no mesh was given" not in str(found)
    assert "an upper estimate: " in str(found)
    found.path.unlink()


def test_equal_requests_write_equal_files(here: Path) -> None:
    for strategy in ("intra", "inter"):
        texts = []
        for name in ("a.json.gz", "b.json.gz"):
            path = partitioner.dump_problem("m.onnx", here / name, 2, strategy=strategy).path
            texts.append(path.read_bytes())
            path.unlink()
        assert texts[0] == texts[1]


def test_pins_reach_the_placement_problem(here: Path) -> None:
    node = next(iter(partitioner.compile("m.onnx").graph.nodes)).name
    Path("pins.toml").write_text(f'[[pin]]\nnodes = ["{node}"]\ndevice = 1\n')
    found = partitioner.dump_problem(
        "m.onnx", here / "q.json", 2, strategy="inter", constraints="pins.toml"
    )
    assert "pinned nodes: 1; " in str(found)
    data = json.loads(found.path.read_text())
    assert [entry["id"] for entry in data["nodes"] if entry["colorClass"] == 1] == [0]
    found.path.unlink()
    Path("pins.toml").unlink()


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        ([], 2, "a problem file holds one problem: give strategy intra or inter"),
        (["--strategy", "inter", "--mesh", "tp=2"], 2, "--mesh shapes intra plans"),
        (["--strategy", "intra", "--mesh", "tp=3"], 2, "mesh tp(3) = 3 != 2 devices"),
    ],
)
def test_what_cannot_be_written(
    here: Path, options: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["m.onnx", "--devices", "2", "-q", *options, "--dump-problem", "p.json"]
    assert main(arguments) == code
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
    assert not (here / "p.json").exists()


@pytest.mark.parametrize(
    "option",
    ["-o d", "--plan-only", "--force", "--json", "--dot g.dot", "--seed 3", "--objective latency"],
)
def test_options_of_plans_are_refused(
    here: Path, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["m.onnx", "--strategy", "intra", "--dump-problem", "p.json", *option.split()]) == 2
    assert "--dump-problem plans nothing: leave out --" in capsys.readouterr().err
    assert not (here / "p.json").exists()


def test_the_model_is_not_replaced(here: Path) -> None:
    with pytest.raises(partitioner.PartitionerError, match="it is the model itself"):
        partitioner.dump_problem("m.onnx", here / "m.onnx", 2, strategy="intra")
    with pytest.raises(SearchError, match="strategy 'both' is not auto, intra or inter"):
        partitioner.dump_problem("m.onnx", here / "p.json", 2, strategy="both")
