"""msr-fiddle/dnn-partitioning files: read, priced as their authors do, written, refused."""

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest

from helpers.problems.solver_instances import Json, dnnp
from partitioner.solver import SolverError, evaluate_choices, solve
from partitioner.solver.formats.dnnp import parse
from partitioner.solver.formats.dnnp_problem import to_problem, to_solution


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
    "'cpuLatency' of node 10 is None": _set("nodes", 0, "cpuLatency")(None),
    "'size' of node 10 is 'x'": _set("nodes", 0, "size")("x"),
    "'supportedOnFpga' of node 10 is 2, not 0 or 1": _set("nodes", 0, "supportedOnFpga")(2),
    r"'colorClass' of node 10 is \[\]": _set("nodes", 0, "colorClass")([]),
    "the edge from 10 to 99 has no node at 99": _set("edges", 0)(
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
