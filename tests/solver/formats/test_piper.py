"""msr-fiddle/piper files: read, planned as well as can be, priced as their authors do, refused."""

import copy
import json
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers.problems.piper_files import Json, all_plans, piper, price
from partitioner.cli.main import main
from partitioner.solver.formats.piper import evaluate_plan, parse, parse_plan, to_solution
from partitioner.solver.outcome import Infeasible
from partitioner.solver.problem import SolverError
from partitioner.solver.stages.graph import PlannedStage, enumerate_downsets
from partitioner.solver.stages.graph_search import plan_stages
from partitioner.solver.work import Work


def test_some_models_have_plans() -> None:
    models = [piper(seed) for seed in range(24)]
    feasible = [any(map(math.isfinite, (price(m, p) for p in all_plans(m)))) for m in models]
    assert feasible.count(True) >= 12


def test_the_random_files_are_varied() -> None:
    """Brute force is a test only if plans differ: some have stages, degrees and small ways."""
    plans = []
    for seed in range(24):
        with suppress(Infeasible):
            plans.append(plan_stages(parse(piper(seed)), Work()).stages)
    assert 14 < len(plans) < 24, len(plans)
    assert any(len(plan) > 1 for plan in plans)
    stages = [stage for plan in plans for stage in plan]
    assert any(stage.data_degree > 1 for stage in stages)
    assert any(stage.tensor_degree > 1 for stage in stages)
    assert any({"plain", "small"} <= set(stage.configs.values()) for stage in stages)


def test_the_referee_agrees_on_any_plan() -> None:
    allowed = 0
    for seed in range(8):
        data = piper(seed)
        instance = parse(data)
        for plan in list(all_plans(data))[::11]:
            stages = [PlannedStage(configs, d, t) for configs, d, t in plan]
            outcome, wanted = evaluate_plan(instance, stages), price(data, plan)
            assert bool(outcome.faults) == math.isinf(wanted)
            if not outcome.faults:
                assert max(outcome.time_s) == pytest.approx(wanted, rel=1e-12)
                allowed += 1
    assert allowed > 20


def test_every_broken_rule_is_named() -> None:
    data = piper(0) | {"maxDevices": 3, "mbsInBatch": 4, "maxMemoryPerDevice": 1.0}
    data["edges"] = [{"sourceId": 0, "destId": 7, "communicationCost": 1.0}]
    for node in data["nodes"]:
        for ways in node["TMPCs"].values():
            for way in ways:
                way |= {"syncTimeFw": {"0": 0.0}, "syncTimeBw": {"7": 0.0}}
    instance = parse(data)
    plain = dict.fromkeys((0, 7, 14), "plain")
    (over,) = evaluate_plan(instance, [PlannedStage(plain, 1, 1)]).faults
    assert over.startswith("stage 0 holds ")
    assert over.endswith(" bytes of 1")
    back = PlannedStage({0: "plain"}, 4, 1)
    first = PlannedStage({7: "plain", 14: "plain"}, 2, 1)
    assert evaluate_plan(instance, [first, back]).faults == (
        "edge from 0 to 7 leads back",
        "6 devices are taken, there are 3",
        "data degrees sum to 6, over 4 micro-batches",
    )
    twice = PlannedStage({0: "plain", 7: "none"}, 3, 1)
    assert evaluate_plan(instance, [first, twice]).faults == (
        "stage 1: data degree 3 does not divide 4 micro-batches",
        "node 7 is in stages 0 and 1",
        "node 7 on 1 devices has no 'none'",
        "edge from 0 to 7 leads back",
        "5 devices are taken, there are 3",
        "data degrees sum to 5, over 4 micro-batches",
    )
    assert evaluate_plan(instance, [first]).faults == (
        "the stages do not hold the instance's nodes",
    )


def test_downsets_hold_what_their_nodes_need() -> None:
    data = piper(0) | {"edges": []}
    assert len(enumerate_downsets(parse(data)) or ()) == 8
    data["edges"] = [{"sourceId": 0, "destId": 14, "communicationCost": 1.0}]
    for node in data["nodes"]:
        for ways in node["TMPCs"].values():
            for way in ways:
                way |= {"syncTimeFw": {"0": 0.0}, "syncTimeBw": {"14": 0.0}}
    downsets = enumerate_downsets(parse(data))
    assert downsets is not None
    assert downsets[0] == frozenset()
    assert downsets[-1] == {0, 7, 14}
    assert set(downsets) == {frozenset(s) for s in ([], [0], [7], [0, 7], [0, 14], [0, 7, 14])}


def test_no_number_of_devices_is_refused() -> None:
    with pytest.raises(SolverError, match="no number of devices holds any node"):
        plan_stages(replace(parse(piper(1)), devices=0), Work())


def _way(data: Json, key: str, value: object) -> None:
    data["nodes"][0]["TMPCs"]["1"][1][key] = value


def _edge(**changed: object) -> Callable[[Json], None]:
    return lambda data: data["edges"].append(
        {"sourceId": 0, "destId": 7, "communicationCost": 1.0} | changed
    )


def _set(key: str, value: Any) -> Callable[[Json], None]:
    return lambda data: data.__setitem__(key, value)


FAULTS: dict[str, Callable[[Json], None]] = {
    "'nodes' is not a list": _set("nodes", 3),
    "there are no nodes": _set("nodes", []),
    "'bandwidth' is 0": _set("bandwidth", 0),
    "'maxDevices' is 1.5, not a whole number": _set("maxDevices", 1.5),
    "'mbsInBatch' of the file is None": _set("mbsInBatch", None),
    "'maxMemoryPerDevice' of the file is -1": _set("maxMemoryPerDevice", -1),
    "a node's id is 'x', not an integer": lambda data: data["nodes"][0].update(id="x"),
    "node 0 appears twice": lambda data: data["nodes"].append(data["nodes"][0]),
    "'TMPCs' of node 0 is a list, not an object": lambda data: data["nodes"][0].update(TMPCs=[]),
    "node 0: 'one' is not a number of devices": (
        lambda data: data["nodes"][0]["TMPCs"].update(one=[])
    ),
    r"1\[0\] is an int, not an object": lambda data: data["nodes"][0]["TMPCs"].update({"1": [3]}),
    "node 0 on 1: 'plain' is not the name of one TMPC": lambda data: _way(data, "id", "plain"),
    "'timePerSample' of node 0 on 1 is nan": lambda data: _way(data, "timePerSample", math.nan),
    "'timePerSample' of node 0 on 1 is too large": lambda data: _way(data, "timePerSample", 1e308),
    "'bandwidth' of the file is too small: it must be 0, or 1e-60 to 1e": _set("bandwidth", 1e-308),
    "'memoryUsageA' of node 0 on 1 is '3'": lambda data: _way(data, "memoryUsageA", "3"),
    "node 0 on 1: TMPCs 'plain' and 'small' differ in parameters or syncs": (
        lambda data: _way(data, "parameterSize", 99.0)
    ),
    "'syncTimeBw' of node 0 on 1 is a NoneType": lambda data: _way(data, "syncTimeBw", None),
    "'7' of 'syncTimeBw' of node 0 on 1 is None": lambda data: _way(data, "syncTimeBw", {}),
    "the edge from 0 to 99 has no node 99": _edge(destId=99),
    "the edge from 0 to 7 appears twice": _edge(),
    "the edges form a cycle: ": _edge(sourceId=7, destId=0),
    "'communicationCost' of the edge from 0 to 14 is inf": _edge(
        destId=14, communicationCost=math.inf
    ),
}


@pytest.mark.parametrize("message", FAULTS)
def test_a_malformed_file_is_refused_in_one_line(message: str) -> None:
    data = piper(0)
    data["nodes"].sort(key=lambda node: node["id"])
    data["edges"] = []
    _edge()(data)
    for node in data["nodes"]:
        for ways in node["TMPCs"].values():
            for way in ways:
                way |= {"syncTimeFw": {"0": 0.0}, "syncTimeBw": {"7": 0.0}}
    parse(copy.deepcopy(data))
    FAULTS[message](data)
    with pytest.raises(SolverError, match=message) as error:
        parse(data)
    assert "\n" not in str(error.value)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Json:
    monkeypatch.chdir(tmp_path)
    data = piper(2)
    Path("p.json").write_text(json.dumps(data))
    return data


def test_solve_and_evaluate_on_the_command_line(
    files: Json, capsys: pytest.CaptureFixture[str]
) -> None:
    best = min(price(files, plan) for plan in all_plans(files))
    assert math.isfinite(best)
    assert main(["solve", "p.json", "-o", "s.json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:5] == [
        "objective  time per sample (largest of a stage)",
        f"cost       {best:.10g}",
        f"bound      {best:.10g}",
        "gap        0 %",
        "status     optimal",
    ]
    assert main(["evaluate", "p.json", "s.json"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"cost        {best:.12g}\npeak usage  ")
    assert out.endswith(f"(limit {files['maxMemoryPerDevice']:.12g})\nfeasible\n")
    plan = json.loads(Path("s.json").read_text())
    stated = [
        (
            dict(map(tuple, stage["TMPCids"])),
            stage["dataParallelDegree"],
            stage["tensorParallelDegree"],
        )
        for stage in plan["stages"]
    ]
    assert price(files, stated) == pytest.approx(best, rel=1e-12)
    assert main(["solve", "p.json", "--json", "--gap", "50%"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["bound"] <= best * (1 + 1e-9) <= facts["cost"] * (1 + 2e-9)


def test_an_infeasible_problem_and_plan_on_the_command_line(
    files: Json, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["solve", "p.json", "-o", "s.json"]) == 0
    capsys.readouterr()
    Path("p.json").write_text(json.dumps(files | {"maxMemoryPerDevice": 1.0}))
    assert main(["solve", "p.json", "-o", "t.json"]) == 3
    assert "\nstatus     infeasible: no cut into stages fits" in capsys.readouterr().out
    assert not Path("t.json").exists()
    assert main(["evaluate", "p.json", "s.json"]) == 1
    *figures, fault = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in figures] == ["cost", "peak"]
    assert fault.startswith("infeasible: stage 0 holds ")
    Path("s.json").write_text('{"stages": []}')
    assert main(["evaluate", "p.json", "s.json"]) == 1
    assert capsys.readouterr().out == "infeasible: the stages do not hold the instance's nodes\n"


PLAN = {
    "nodes": [0, 7],
    "dataParallelDegree": 2,
    "tensorParallelDegree": 1,
    "TMPCids": [[0, "plain"], [7, "small"]],
}


def test_a_plan_comes_back_as_it_was_written() -> None:
    stages = (PlannedStage({0: "plain", 7: "small"}, 2, 1),)
    assert to_solution(stages) == {"stages": [PLAN | {"TMPCids": [(0, "plain"), (7, "small")]}]}
    for names in (PLAN["TMPCids"], {"0": "plain", "7": "small"}):
        assert parse_plan({"stages": [PLAN | {"TMPCids": names}]}) == stages


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (3, r"stages\[0\] is an int, not an object"),
        ({"dataParallelDegree": 1.5}, "'dataParallelDegree' is 1.5, not a whole number"),
        ({"tensorParallelDegree": None}, r"'tensorParallelDegree' of stages\[0\] is None"),
        *(
            ({"TMPCids": names}, r"stages\[0\] does not name one TMPC for each of its nodes")
            for names in (
                None,
                3,
                [[0, "plain"]],
                [[0], [7]],
                [["x", "a"], [7, "b"]],
                {"0": 1, "7": 2},
            )
        ),
        ({"nodes": [0, 0, 7]}, "does not name one TMPC for each"),
        ({"nodes": None}, "does not name one TMPC for each"),
    ],
)
def test_a_malformed_plan_is_refused(changed: Any, words: str) -> None:
    with pytest.raises(SolverError, match=words):
        parse_plan({"stages": [PLAN | changed if isinstance(changed, dict) else changed]})
    with pytest.raises(SolverError, match="'stages' is not a list"):
        parse_plan({"stages": None})
