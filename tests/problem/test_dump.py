"""`--dump-problem` and `partitioner.dump_problem`: the files hold the problems of `compile`."""

import gzip
import re
from pathlib import Path

import onnx
import pytest

import partitioner
from helpers.problems.enumeration import brute_force
from helpers.problems.solver_instances import placement, spmd
from partitioner import examples
from partitioner.cli.main import main
from partitioner.problem.dump import write_problem
from partitioner.solver.formats import iopddl
from partitioner.solver.formats.json_files import read
from partitioner.solver.milp import formulation
from partitioner.solver.milp.highs import new_highs
from partitioner.solver.pairwise.solve import solve as solve_pairwise
from partitioner.solver.problem import SolverError
from partitioner.solver.referee import evaluate_choices
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
    assert "p.json.gz: the problem of intra (x=2) in the format of google/iopddl" in out
    assert "no mesh was given: this is the one of a single axis" in out
    assert sorted(path.name for path in here.iterdir()) == ["m.onnx", "p.json.gz"]
    assert gzip.decompress(Path("p.json.gz").read_bytes()).startswith(b'{"problem"')
    problem = read(Path("p.json.gz"), iopddl.parse)
    result = partitioner.compile("m.onnx", devices=2, strategy="intra", mesh={"tp": 2}, gap=0.0)
    assert solve_pairwise(problem).cost == pytest.approx(result.cost * 1e12, rel=1e-6)
    Path("p.json.gz").unlink()


def test_a_mesh_is_taken_and_uneven_devices_are_said(here: Path) -> None:
    found = partitioner.dump_problem(
        "m.onnx", here / "p.json", 4, strategy="intra", mesh={"x": 2, "y": 2}
    )
    assert "the problem of intra (x=2 y=2)" in found.notes[0]
    assert "no mesh was given" not in str(found)
    assert "an upper estimate: " in str(found)
    found.path.unlink()


def test_equal_requests_write_equal_files(here: Path) -> None:
    for strategy, suffix in (("intra", "json"), ("inter", "lp")):
        texts = []
        for name in (f"a.{suffix}.gz", f"b.{suffix}.gz"):
            path = partitioner.dump_problem("m.onnx", here / name, 2, strategy=strategy).path
            texts.append(path.read_bytes())
            path.unlink()
        assert texts[0] == texts[1]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ["p.lp", "p.mps", "p.lp.gz", "p.mps.gz"])
def test_the_integer_program_has_the_optimum_of_the_problem(
    tmp_path: Path, name: str, seed: int
) -> None:
    """Any solver reads it: here HiGHS does, with its own options."""
    problem = placement(seed, 5, 2, limit=16.0) if seed % 2 else spmd(seed, 5, 3, limit=24.0)
    best = brute_force(problem, "throughput")
    assert best is not None
    dump = write_problem(problem, tmp_path / name, "the space")
    assert dump.format == name.removesuffix(".gz").removeprefix("p.")
    unit = float(re.search(r"1 of the objective is (\S+) s", str(dump))[1])
    data = dump.path.read_bytes()
    plain = tmp_path / f"plain.{dump.format}"
    plain.write_bytes(gzip.decompress(data) if name.endswith(".gz") else data)
    solver = new_highs()
    solver.setOptionValue("mip_rel_gap", 0.0)
    solver.readModel(str(plain))
    solver.run()
    values = solver.getSolution().col_value
    names = [solver.getColName(column)[1] for column in range(solver.getNumCol())]
    taken = {name for name, value in zip(names, values, strict=True) if round(value)}
    chosen = [
        next(p for p in range(len(choices)) if f"s_{v}_{p}" in taken)
        for v, choices in enumerate(problem.nodes)
    ]
    assert evaluate_choices(problem, chosen).value("throughput") == pytest.approx(best[1], rel=1e-4)
    assert solver.getObjectiveValue() * unit == pytest.approx(best[1], rel=1e-3)


def test_rows_of_a_program_have_the_names_of_their_constraints(tmp_path: Path) -> None:
    problem = placement(1, 5, 2, limit=16.0)
    write_problem(problem, tmp_path / "p.lp", "the space")
    rows = re.findall(r"^([a-z]+)_\d[\d_]*:", (tmp_path / "p.lp").read_text(), re.MULTILINE)
    assert {"choose", "leave", "meet", "carry", "hold", "open"} <= {*rows}
    assert rows.count("choose") == len(problem.nodes)


@pytest.mark.usefixtures("here")
def test_a_program_of_a_model_names_its_size(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["m.onnx", "--devices", "2", "--strategy", "inter", "--dump-problem", "p.lp"]
    assert main(options) == 0
    assert "p.lp: the integer program of inter (2 x one device) in CPLEX's LP format: " in (
        capsys.readouterr().out
    )
    Path("p.lp").unlink()


def test_a_program_that_is_too_large_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formulation, "MOST_ENTRIES", 20)
    with pytest.raises(SolverError, match=r"p.lp: the integer program of intra has more than .* "):
        write_problem(placement(1, 5, 2), tmp_path / "p.lp", "intra")
    assert not list(tmp_path.iterdir())


def test_pins_reach_the_placement_problem(here: Path) -> None:
    node = next(iter(partitioner.compile("m.onnx").graph.nodes)).name
    Path("pins.toml").write_text(f'[[pin]]\nnodes = ["{node}"]\ndevice = 1\n')
    free = partitioner.dump_problem("m.onnx", here / "q.lp", 2, strategy="inter")
    assert " s_0_1 " in free.path.read_text()
    pinned = partitioner.dump_problem(
        "m.onnx", here / "q.lp", 2, strategy="inter", constraints="pins.toml"
    )
    assert " s_0_1 " not in pinned.path.read_text()
    pinned.path.unlink()
    Path("pins.toml").unlink()


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        ([], 2, "a problem file holds one problem: give strategy intra or inter"),
        (["--strategy", "inter"], 2, "give a name that ends in .lp or .mps"),
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
    with pytest.raises(SearchError, match="strategy 'both' is not auto, intra, inter or copies"):
        partitioner.dump_problem("m.onnx", here / "p.json", 2, strategy="both")


def test_a_problem_of_joined_kinds_wants_a_mesh_where_there_are_several(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kinds = ["--strategy", "intra", "--parallel", "dp+tp"]
    assert main(["m.onnx", "--devices", "6", *kinds, "--dump-problem", "p.json"]) == 2
    assert "parallel 'dp+tp' may have several meshes, give one" in capsys.readouterr().err
    assert not (here / "p.json").exists()
