"""msr-fiddle/dnn-partitioning files: read, priced as their authors do, written, refused."""

import copy
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers.problems.enumeration import brute_force
from helpers.problems.solver_instances import Json, dnnp
from partitioner.cli.main import main
from partitioner.solver.formats.dnnp import Split, evaluate, parse, parse_split
from partitioner.solver.formats.files import to_problem, to_solution
from partitioner.solver.formats.json_files import FormatError, read
from partitioner.solver.joint.solve import solve
from partitioner.solver.problem import SolverError
from partitioner.solver.referee import evaluate_choices


def load(data: Json, solution: dict[str, list[dict[str, list[int]]]]) -> float:
    """The largest load by the authors' definition, straight from the file."""
    sides = (*solution["fpgas"], *solution["cpus"])
    accelerators = data["maxFPGAs"]
    where = {node: d for d, side in enumerate(sides) for node in side["nodes"]}
    loads = [0.0] * len(sides)
    for node in data["nodes"]:
        d = where[node["id"]]
        loads[d] += node["fpgaLatency" if d < accelerators else "cpuLatency"]
    cost = {edge["sourceId"]: edge["cost"] for edge in data["edges"]}
    for source, paid in cost.items():
        ends = {where[e["destId"]] for e in data["edges"] if e["sourceId"] == source}
        others = ends - {where[source]}
        for d in (*others, where[source]) if others else ():
            loads[d] += paid if d < accelerators else 0.0
    return max(loads)


@pytest.mark.parametrize("seed", range(12))
def test_a_plan_costs_what_the_authors_say(seed: int) -> None:
    data = dnnp(seed)
    instance = parse(data)
    problem = to_problem(instance)
    rng = random.Random(seed)
    chosen = [rng.randrange(len(choices)) for choices in problem.nodes]
    solution = to_solution(instance, chosen)
    outcome = evaluate_choices(problem, chosen)
    assert outcome.step_s == pytest.approx(load(data, solution))
    size = {node["id"]: node["size"] for node in data["nodes"]}
    held = [sum(size[n] for n in side["nodes"]) for side in solution["fpgas"]]
    assert outcome.peak_bytes == pytest.approx((*held, 0.0, 0.0))
    placed = sorted(n for sides in solution.values() for side in sides for n in side["nodes"])
    assert placed == sorted(size)


@pytest.mark.parametrize("seed", range(6))
def test_colours_stay_together_and_unsupported_nodes_go_to_a_cpu(seed: int) -> None:
    data = dnnp(seed)
    instance = parse(data)
    solution = to_solution(instance, solve(to_problem(instance)).chosen)
    for side in solution["fpgas"]:
        nodes = [node for node in data["nodes"] if node["id"] in side["nodes"]]
        assert all(node["supportedOnFpga"] for node in nodes)
    for colour in (0, 1, "c"):
        same = {node["id"] for node in data["nodes"] if node["colorClass"] == colour}
        homes = [s for sides in solution.values() for s in sides if same & set(s["nodes"])]
        assert len(homes) <= 1


def test_merged_nodes_are_in_topological_order() -> None:
    data = dnnp(1)
    for node in data["nodes"]:
        node["colorClass"] = None
    data["nodes"].reverse()
    instance = parse(data)
    position = {name: p for p, group in enumerate(instance.members) for name in group}
    assert all(position[e["sourceId"]] < position[e["destId"]] for e in data["edges"])


def test_a_cycle_of_colours_is_kept() -> None:
    data = dnnp(0, 3)
    for node, colour in zip(data["nodes"], (0, 1, 0), strict=True):
        node |= {"colorClass": colour, "supportedOnFpga": 1}
    data["edges"] = [
        {"sourceId": 10, "destId": 11, "cost": 1.0},
        {"sourceId": 11, "destId": 12, "cost": 2.0},
    ]
    instance = parse(data)
    assert instance.members == ((10, 12), (11,))
    assert [(v.producer, v.cost_s, v.readers) for v in instance.values] == [
        (0, 1.0, (1,)),
        (1, 2.0, (0,)),
    ]
    outcome = evaluate_choices(to_problem(instance), (0, 1))
    first, second = (sum(data["nodes"][i]["fpgaLatency"] for i in at) for at in ((0, 2), (1,)))
    assert outcome.load_s == pytest.approx((first + 3.0, second + 3.0, 0.0, 0.0))


def _set(*path: str | int) -> Callable[[Any], Callable[[Json], None]]:
    def to(value: object) -> Callable[[Json], None]:
        def spoil(data: Any) -> None:
            for step in path[:-1]:
                data = data[step]
            data[path[-1]] = value

        return spoil

    return to


FAULTS: dict[str, Callable[[Json], None]] = {
    "'nodes' is not a list": _set("nodes")(None),
    r"nodes\[2\] is an int, not an object": _set("nodes", 2)(7),
    "there are no nodes": _set("nodes")([]),
    "a node's id is '3', not an integer": _set("nodes", 0, "id")("3"),
    "node 11 appears twice": _set("nodes", 0, "id")(11),
    "'fpgaLatency' of node 10 is -1": _set("nodes", 0, "fpgaLatency")(-1),
    "'fpgaLatency' of node 10 is too large": _set("nodes", 0, "fpgaLatency")(10**400),
    "'cpuLatency' of node 10 is None": _set("nodes", 0, "cpuLatency")(None),
    "'size' of node 10 is 'x'": _set("nodes", 0, "size")("x"),
    "'supportedOnFpga' of node 10 is 2, not 0 or 1": _set("nodes", 0, "supportedOnFpga")(2),
    r"'colorClass' of node 10 is \[\]": _set("nodes", 0, "colorClass")([]),
    "the edge from 10 to 99 has no node 99": _set("edges", 0)(
        {"sourceId": 10, "destId": 99, "cost": 1.0}
    ),
    "'cost' of the edge from 10 to 11 is nan": _set("edges", 0)(
        {"sourceId": 10, "destId": 11, "cost": float("nan")}
    ),
    "edges from node 10 cost 1 and 2: one value leaves": _set("edges")(
        [{"sourceId": 10, "destId": 11 + i, "cost": 1.0 + i} for i in range(2)]
    ),
    "'maxFPGAs' is 1.5, not a whole number": _set("maxFPGAs")(1.5),
    "'maxCPUs' of the file is None": _set("maxCPUs")(None),
    "'maxSizePerFPGA' of the file is True": _set("maxSizePerFPGA")(True),
    "of its colour needs a CPU, and there is none": _set("maxCPUs")(0),
}


@pytest.mark.parametrize("message", FAULTS)
def test_a_malformed_file_is_refused_in_one_line(message: str) -> None:
    data = dnnp(0)
    data["nodes"][3]["supportedOnFpga"] = 0
    parse(copy.deepcopy(data))
    FAULTS[message](data)
    with pytest.raises(SolverError, match=message) as error:
        parse(data)
    assert "\n" not in str(error.value)


def test_no_device_at_all_is_refused() -> None:
    with pytest.raises(SolverError, match="maxFPGAs and maxCPUs are both 0"):
        parse({**dnnp(0), "maxFPGAs": 0, "maxCPUs": 0})


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
