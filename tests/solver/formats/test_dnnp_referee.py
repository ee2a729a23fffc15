"""The referee of placement files against the solver's own, and placement on the command line."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from helpers.problems.solver_instances import Json, dnnp
from partitioner.cli.main import main
from partitioner.solver import brute_force, evaluate_choices
from partitioner.solver.formats.dnnp import parse
from partitioner.solver.formats.dnnp_problem import to_problem, to_solution
from partitioner.solver.formats.dnnp_referee import Split, evaluate, parse_split
from partitioner.solver.formats.json_files import FormatError, read


def split(solution: dict[str, Any]) -> Split:
    fpgas, cpus = (tuple(tuple(e["nodes"]) for e in solution[k]) for k in ("fpgas", "cpus"))
    return Split(fpgas, cpus)


@pytest.mark.parametrize("seed", range(20))
def test_the_referee_agrees_with_the_solvers_own(seed: int) -> None:
    instance = parse(dnnp(seed))
    problem = to_problem(instance)
    rng = random.Random(seed)
    for _ in range(20):
        chosen = [rng.randrange(len(choices)) for choices in problem.nodes]
        of_solver = evaluate_choices(problem, chosen)
        outcome = evaluate(instance, split(to_solution(instance, chosen)))
        assert outcome.cost_s == pytest.approx(of_solver.step_s)
        assert outcome.fullest_bytes == max(of_solver.peak_bytes)
        assert bool(outcome.fault) == (of_solver.excess_bytes > 0)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Json:
    monkeypatch.chdir(tmp_path)
    data = dnnp(4, 7)
    Path("p.json").write_text(json.dumps(data))
    return data


def test_solve_and_evaluate_on_the_command_line(
    files: Json, capsys: pytest.CaptureFixture[str]
) -> None:
    best = brute_force(to_problem(parse(files)), "throughput")
    assert best is not None
    assert main(["solve", "p.json", "-o", "s.json", "--json", "--seed", "1"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["cost"] == pytest.approx(best[1], rel=1e-4)
    assert facts["bound"] <= best[1] * (1 + 1e-9)
    assert facts["status"] == "optimal"
    assert main(["evaluate", "p.json", "s.json"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"cost        {facts['cost']:.12g}\npeak usage  ")
    assert out.endswith("(limit 16)\nfeasible\n")
    assert main(["solve", "p.json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = ["objective", "cost", "bound", "gap", "status", "seconds", "solver"]
    assert [line.split()[0] for line in lines] == names


def test_a_problem_without_a_feasible_plan(files: Json, capsys: pytest.CaptureFixture[str]) -> None:
    files |= {"maxCPUs": 0, "maxSizePerFPGA": 1.0}
    for node in files["nodes"]:
        node |= {"supportedOnFpga": 1, "size": 1.0, "colorClass": None}
    Path("p.json").write_text(json.dumps(files))
    assert main(["solve", "p.json", "-o", "s.json"]) == 3
    assert "status     infeasible: no plan fits" in capsys.readouterr().out
    assert not Path("s.json").exists()


def solved(files: Json) -> dict[str, list[dict[str, list[int]]]]:
    assert main(["solve", "p.json", "-o", "s.json"]) == 0
    solution: dict[str, list[dict[str, list[int]]]] = json.loads(Path("s.json").read_text())
    assert read(Path("s.json"), parse_split) == split(solution)
    assert {len(solution["fpgas"]), len(solution["cpus"])} == {files["maxFPGAs"]}
    return solution


def test_one_line_says_what_is_infeasible(files: Json, capsys: pytest.CaptureFixture[str]) -> None:
    good = solved(files)
    ids = sorted(node["id"] for node in files["nodes"])

    def fault(solution: dict[str, Any]) -> str:
        capsys.readouterr()
        Path("s.json").write_text(json.dumps(solution))
        assert main(["evaluate", "p.json", "s.json"]) == 1
        return capsys.readouterr().out.splitlines()[-1]

    def alone(side: str, nodes: list[int]) -> dict[str, Any]:
        return {"fpgas": [], "cpus": [], side: [{"nodes": nodes}]}

    more = {**good, "cpus": [*good["cpus"], {"nodes": [99]}]}
    assert fault(more) == "infeasible: CPU 2 has node 99, which the problem does not have"
    assert fault(alone("cpus", [*ids, ids[0]])) == "infeasible: node 10 is on CPU 0 and on CPU 0"
    lines = fault(alone("cpus", ids[1:]))
    assert lines == "infeasible: 1 of 7 nodes are on no device, the first is 10"
    three = {"fpgas": [], "cpus": [{"nodes": ids[:1]}, {"nodes": ids[1:2]}, {"nodes": ids[2:]}]}
    assert fault(three) == "infeasible: 3 CPUs are used, the problem has 2"
    colours = {node["id"]: node["colorClass"] for node in files["nodes"]}
    pair = next([a, b] for a in ids for b in ids if a < b and colours[a] == colours[b] is not None)
    torn = {"fpgas": [], "cpus": [{"nodes": pair[:1]}, {"nodes": [i for i in ids if i != pair[0]]}]}
    assert fault(torn) == (
        f"infeasible: nodes {pair[0]} and {pair[1]} are of one colour class, but on CPU 0 and CPU 1"
    )
    files["nodes"][0]["supportedOnFpga"] = 0
    Path("p.json").write_text(json.dumps(files))
    assert "or one of its colour class, cannot be on accelerator 0" in fault(alone("fpgas", ids))
    files["nodes"][0]["supportedOnFpga"] = 1
    files["maxSizePerFPGA"] = 2
    Path("p.json").write_text(json.dumps(files))
    held = sum(node["size"] for node in files["nodes"])
    assert fault(alone("fpgas", ids)) == f"infeasible: accelerator 0 holds {held:.12g} > limit 2"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[]", 'not an object with the lists "fpgas" and "cpus"'),
        ('{"fpgas": []}', 'not an object with the lists "fpgas" and "cpus"'),
        ('{"fpgas": [1], "cpus": []}', 'an entry of "fpgas" has no list "nodes"'),
        ('{"fpgas": [], "cpus": [{"nodes": [true]}]}', 'an entry of "cpus" has no list "nodes"'),
    ],
)
def test_a_malformed_solution_is_refused(text: str, words: str) -> None:
    with pytest.raises(FormatError, match=words):
        parse_split(json.loads(text))


def test_the_line_of_a_malformed_problem(files: Json, capsys: pytest.CaptureFixture[str]) -> None:
    files["nodes"][0]["size"] = -1
    Path("p.json").write_text(json.dumps(files))
    assert main(["solve", "p.json"]) == 1
    error = capsys.readouterr().err
    assert "p.json: 'size' of node 10 is -1" in error
    assert error.count("\n") == 1
