"""The contest's format and the commands on it: round trips, and one line for anything wrong."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.problems.pairwise_cases import instance, optimum, second_opinion
from partitioner.cli.main import main
from partitioner.solver.formats.iopddl import parse, parse_solution, write
from partitioner.solver.formats.json_files import FormatError, read
from partitioner.solver.pairwise.problem import evaluate

EXAMPLE: dict[str, Any] = {
    "nodes": {"intervals": [[0, 2], [1, 3]], "costs": [[5, 1], [6, 1]], "usages": [[1, 3], [1, 3]]},
    "edges": {"nodes": [[0, 1]], "costs": [[0, 2, 2, 0]]},
    "usage_limit": 4,
}


@pytest.mark.parametrize("name", ["p.json", "p.json.gz"])
@pytest.mark.parametrize("seed", range(10))
def test_a_problem_comes_back_as_it_was_written(tmp_path: Path, name: str, seed: int) -> None:
    problem = instance(seed)
    write(problem, tmp_path / name)
    again = read(tmp_path / name, parse)
    assert again.limit == problem.limit
    for field in ("offsets", "costs", "usages", "intervals", "edges", "edge_offsets", "edge_costs"):
        assert np.array_equal(getattr(again, field), getattr(problem, field))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("seed", range(100))
def test_the_referee_agrees_with_a_second_one(seed: int) -> None:
    problem = instance(seed)
    draw = np.random.default_rng(seed)
    for _ in range(5):
        chosen = tuple(draw.integers(0, problem.sizes).tolist())
        outcome = evaluate(problem, chosen)
        priced = outcome.cost, outcome.peak_usage, not outcome.fault
        assert priced == second_opinion(problem, chosen)


@pytest.mark.parametrize("wrapped", ["[1, 0]", '{"solution": [1, 0]}', '{"strategies": [1, 0]}'])
def test_solutions_are_read_alone_or_in_an_object(wrapped: str) -> None:
    assert parse_solution(json.loads(wrapped)) == [1, 0]


def changed(where: str, value: object) -> dict[str, Any]:
    data = json.loads(json.dumps(EXAMPLE))
    owner, _, name = where.rpartition(".")
    (data[owner] if owner else data)[name] = value
    return {"problem": data}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ([], 'no "problem" object'),
        ({"problem": 3}, 'no "problem" object'),
        (changed("nodes", []), '"nodes" is [], not an object'),
        (changed("nodes.costs", 7), '"costs" is 7, not a list'),
        (changed("nodes.costs", [[5, 1], 6]), 'entry 1 of "costs" is 6, not a list'),
        (changed("nodes.costs", [[5, 1], []]), "node 1 has not as many usages as costs"),
        (changed("nodes.costs", [[5, 1.5], [6, 1]]), '"costs" has 1.5, not a whole number'),
        (changed("nodes.costs", [[5, True], [6, 1]]), '"costs" has true, not a whole number'),
        (changed("nodes.costs", [[5, "x"], [6, 1]]), '"costs" has "x", not a whole number'),
        (changed("nodes.costs", [[5, -1], [6, 1]]), "cost -1 is negative"),
        (changed("nodes.costs", [[5, 10**40], [6, 1]]), "a huge number, more than 64 bits"),
        (changed("nodes.usages", [[1, 3]]), "1 usages for 2 nodes"),
        (changed("nodes.usages", [[1, 3], [-1, 3]]), "usage -1 is negative"),
        (changed("nodes.intervals", [[0, 2], [3, 1]]), "interval [3, 1) of node 1 is not one"),
        (changed("nodes.intervals", [[0, 2], [3]]), 'entry 1 of "intervals" has 1 numbers, not 2'),
        (changed("nodes.intervals", [[0, 2]]), "intervals of shape (1, 2) for 2 nodes"),
        (changed("edges.nodes", [[0, 2]]), "edge 0 joins nodes [0, 2], not within 2 nodes"),
        (changed("edges.nodes", [[0, 1, 1]]), 'entry 0 of "nodes" has 3 numbers, not 2'),
        (changed("edges.nodes", []), "edges of shape (0, 2) for 2 offsets"),
        (changed("edges.costs", [[0, 2, 2]]), "edge 0 has 3 costs for 2 x 2 strategies"),
        (changed("usage_limit", 1.5), '"usage_limit" is 1.5, not a whole number'),
        (changed("usage_limit", -1), "usage limit -1 is negative"),
    ],
)
def test_a_malformed_problem_is_refused_in_one_line(
    tmp_path: Path, data: object, words: str
) -> None:
    path = tmp_path / "p.json"
    path.write_text(json.dumps(data))
    with pytest.raises(FormatError) as caught:
        read(path, parse)
    assert words in str(caught.value)
    assert str(caught.value).count(str(path)) == 1
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["3", "{}", "[1, true]", '[1, "0"]', '{"solution": {}}'])
def test_a_malformed_solution_is_refused(text: str) -> None:
    with pytest.raises(FormatError, match="not a list of strategy indices"):
        parse_solution(json.loads(text))


def test_solve_and_evaluate_on_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    problem, target = tmp_path / "p.json", tmp_path / "s.json"
    problem.write_text(json.dumps({"problem": EXAMPLE}))
    best = optimum(parse({"problem": EXAMPLE}))
    assert main(["solve", str(problem), "-o", str(target), "--time-limit", "60"]) == 0
    assert target.read_text() == '{"solution": [0, 1]}\n'
    out = capsys.readouterr().out
    assert f"cost       {best}\nbound      {best}\ngap        0 %\nstatus     optimal" in out
    assert re.search(r"\nseconds    \d+\.\d\nsolver     [\w ]+ / [\w ()]+\n", out)
    assert main(["evaluate", str(problem), str(target)]) == 0
    assert capsys.readouterr().out == f"cost        {best}\npeak usage  4 (limit 4)\nfeasible\n"
    assert main(["solve", str(problem), "--json", "--seed", "2"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["cost"], facts["status"], facts["reason"]) == (best, "optimal", None)


def test_infeasible_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    problem, solution = tmp_path / "p.json", tmp_path / "s.json"
    problem.write_text(json.dumps(changed("usage_limit", 1)))
    solution.write_text("[0, 0]")
    assert main(["solve", str(problem), "-o", str(solution)]) == 3
    line = "status     infeasible: at time 1 the least usage is 2, above the limit 1\n"
    assert line in capsys.readouterr().out
    assert json.loads(solution.read_text()) == [0, 0]
    assert main(["evaluate", str(problem), str(solution)]) == 1
    assert "infeasible: usage 2 at time 1 > limit 1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["solve", "none.json"], "none.json: No such file or directory"),
        (["solve", "kind.json"], "no known kind of problem"),
        (["solve", "kind.json", "-o", "no/s.json"], "there is no folder no"),
        (["evaluate", "p.json", "short.json"], "1 strategies for 2 nodes"),
    ],
)
def test_one_line_for_what_is_wrong(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("kind.json").write_text("{}")
    Path("p.json").write_text(json.dumps({"problem": EXAMPLE}))
    Path("short.json").write_text("[0]")
    assert main(arguments) == 1
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1
