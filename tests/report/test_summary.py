"""The summary agrees with the plan, whatever space of the search it comes from."""

import json
from pathlib import Path

import onnx
import pytest

import partitioner
from partitioner import examples
from partitioner.api.compiled.base import Compiled
from partitioner.foundations import units
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.plan import NodePlan, Plan
from partitioner.ir.rule import Cut
from partitioner.report.summary import lines, solved_by, split_facts, split_sentence
from partitioner.solver.milp.engines import HIGHS, Engine

ONE, TWO = DeviceMesh.single(0), DeviceMesh.single(1)
ALL, PAIR = DeviceMesh.line(4, "tp"), DeviceMesh.of({"tp": 2}, (2, 3))


@pytest.fixture(scope="module")
def model() -> onnx.ModelProto:
    return examples.build("mlp", layers=2, hidden=8, batch=4)


def said(result: Compiled, **changes: object) -> str:
    """The lines of a summary with some facts changed."""
    return "\n".join(lines({**result.summary, **changes}, result.verdict()))


def split_line(result: Compiled) -> str:
    (line,) = (line for line in str(result).splitlines() if line.startswith("  split"))
    return line.removeprefix("  split       ")


def replanned(model: onnx.ModelProto, devices: int, edit: dict[str, object]) -> Compiled:
    """The plan of a model with its groups and decisions replaced, given as constraints."""
    plan = json.loads(
        partitioner.compile(model, devices=devices, cluster=f"{devices}xideal").plan.to_json()
    )
    names = list(plan["nodes"])
    plan["groups"] = edit["groups"]
    plan["nodes"] = dict(zip(names, edit["nodes"], strict=True))  # type: ignore[call-overload]
    fixed = Plan.from_json(json.dumps(plan))
    return partitioner.compile(
        model, devices=devices, cluster=f"{devices}xideal", constraints=fixed
    )


@pytest.mark.parametrize(
    ("groups", "word"),
    [
        ([ONE], "single"),
        ([ONE, TWO], "inter"),
        ([ALL], "intra"),
        ([ALL, ONE], "intra"),
        ([PAIR], "intra"),
        ([PAIR, ONE], "hybrid"),
        ([ALL, PAIR], "hybrid"),
    ],
)
def test_the_kind_of_a_plan(groups: list[DeviceMesh], word: str) -> None:
    nodes = {str(index): NodePlan(index) for index in range(len(groups))}
    assert Plan("", {}, (*groups, ALL), nodes).kind == word  # the last group is not used


def test_facts_of_a_split() -> None:
    cuts = {"n": Cut(("tp",))}
    nodes = {"a": NodePlan(0), "b": NodePlan(1, cuts), "c": NodePlan(1), "d": NodePlan(1, cuts)}
    assert split_facts(Plan("", {}, (ONE, PAIR), nodes)) == {
        "nodes": 4,
        "cut_nodes": 2,
        "cut_over": ["tp=2 on 2,3"],
        "replicated_nodes": 1,
        "replicated_on": ["tp=2 on 2,3"],
    }


def test_one_device(model: onnx.ModelProto) -> None:
    result = partitioner.compile(model, devices=1)
    assert split_line(result) == "there is one device: nothing to split"
    assert "  plan        single on 1 of 1 devices" in str(result)


def test_a_placement_given_again_as_constraints(model: onnx.ModelProto) -> None:
    groups = [{"axes": {}, "devices": [device]} for device in (0, 1)]
    result = replanned(model, 2, {"groups": groups, "nodes": [{"group": i} for i in (0, 0, 1)]})
    assert split_line(result) == "whole operators placed on 2 devices; no operator is cut"
    assert result.plan.certificate is not None
    assert result.plan.certificate.strategy == "inter"


def test_a_plan_that_cuts_one_operator(model: onnx.ModelProto) -> None:
    groups = [{"axes": {}, "devices": [0]}, {"axes": {"tp": 2}, "devices": [2, 3]}]
    nodes = [{"group": 1, "cuts": {"n": "tp"}}, {"group": 0}, {"group": 0}]
    result = replanned(model, 4, {"groups": groups, "nodes": nodes})
    share = units.share(result.summary["sharded_flops_share"])
    assert 0 < result.summary["sharded_flops_share"] < 1
    assert split_line(result) == (
        f"1 of 3 operators cut over tp=2 on 2,3: {share} of the splittable FLOPs"
    )
    assert result.summary["strategy"] == "hybrid"


def test_a_replicated_model_is_called_so(model: onnx.ModelProto) -> None:
    groups = [{"axes": {"tp": 4}, "devices": [0, 1, 2, 3]}]
    result = replanned(model, 4, {"groups": groups, "nodes": [{"group": 0}] * 3})
    end = "the whole model is replicated on tp=4 on 0,1,2,3; one device alone does as much"
    assert split_line(result) == (
        f"nothing was split: no plan within the constraints that splits was found cheaper; {end}"
    )
    free = {**result.summary, "pinned": False, "status": "optimal"}
    assert split_sentence(free) == (
        f"nothing was split because communication and launches would cost more; {end}"
    )
    assert split_sentence({**free, "status": "feasible"}) == (
        "nothing was split: no plan that splits was found cheaper, and none was proven dearer; "
        + end
    )


def test_a_plan_far_from_its_bound_is_not_called_optimal(model: onnx.ModelProto) -> None:
    result = partitioner.compile(model, devices=2)
    assert "gap 11.2 %, within the gap asked for" in said(result, status="optimal", gap=0.112)
    assert "gap 0 %, optimal" in said(result, status="optimal", gap=2.2e-16)
    assert "stopped by the time limit" in said(result, status="time_limit")


def test_equal_peaks_are_counted(model: onnx.ModelProto) -> None:
    result = partitioner.compile(model, devices=2)
    line = said(result, peak_bytes=[2048] * 63 + [1024])
    assert "peak memory 63 x 2 KiB, 1 KiB (one device" in line
    many = said(result, peak_bytes=[1024, 3072] * 32)
    assert "peak memory 1 KiB to 3 KiB on 64 devices (one device" in many


def test_fewer_devices_are_named(model: onnx.ModelProto) -> None:
    result = partitioner.compile(model, devices=2)
    for count, is_named in ((1, False), (2, True)):  # of one device the verdict speaks
        fewer = {"devices": count, "cost": 1, "cost_here": 2}
        assert ("note: 2 devices would do better" in said(result, fewer_devices=fewer)) == is_named


def test_devices_that_a_plan_leaves_idle_are_not_needed() -> None:
    model = examples.build("mlp", layers=2, hidden=64, batch=4)
    result = partitioner.compile(model, cluster="16x8xh100")
    used, devices = result.summary["devices_used"], result.summary["devices"]
    assert used < devices == 128
    few = f"{used} devices do" if used > 1 else "one device does"
    assert f"note: {few} as well by throughput: the others are left idle" in str(result)


def test_families_without_a_plan_share_a_line(model: onnx.ModelProto, tmp_path: Path) -> None:
    pins = tmp_path / "pins.toml"
    pins.write_text('[[pin]]\nop = "Gemm"\ndevice = 1\n')
    result = partitioner.compile(model, devices=4, constraints=pins)
    (note,) = (line for line in str(result).splitlines() if "no plan in" in line)
    assert note.count("intra (") == 2
    assert note.endswith("pins.toml pin 1 leaves no strategy for 'layer0.out' (Gemm)")


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (units.per_second(60627.3), "60,627/s"),
        (units.per_second(12.3456), "12.35/s"),
        (units.per_second(units.finite(float("inf"))), "unlimited"),
        (units.seconds(999.6e-9), "1 µs"),
        (units.seconds(0.00099951), "1 ms"),
        (units.seconds(999.4e-9), "999 ns"),
        (units.seconds(1234.5), "1234 s"),
        (units.share(2.19e-16), "0 %"),
        (units.share(0.0000147), "< 0.01 %"),
        (units.share(0.1234), "12.3 %"),
        (units.relative(0.1234), "+12.3 %"),
        (units.relative(-0.1234), "-12.3 %"),
        (units.relative(1.42e-16), "0 %"),
        (units.times(1234.5), "1234x"),
        (units.size(1023.99 * 1024), "1 MiB"),
        (units.size(1.2345678 * 2**30), "1.23 GiB"),
        (units.size(1.2345678 * 2**30, 5), "1.2346 GiB"),
        (units.flops(999.6e6), "1 GFLOP"),
    ],
)
def test_numbers_for_people(shown: str, expected: str) -> None:
    assert shown == expected


def test_the_repr_is_a_line(model: onnx.ModelProto) -> None:
    result = partitioner.compile(model, devices=2, cluster="2xideal", strategy="intra")
    assert repr(result).startswith("<Compiled 'mlp' on 2xideal: intra plan by ")
    assert len(repr(result)) < 300


@pytest.mark.parametrize(
    ("solver", "status", "words"),
    [
        ("elimination / elimination", "optimal", "elimination (no integer program needed)"),
        (
            "local search / configuration LP",
            "optimal",
            "local search, bound by configuration LP (no integer program needed)",
        ),
        ("local search / node loads", "feasible", "local search, bound by node loads"),
        (
            f"{HIGHS.integer_program} / {HIGHS.integer_program}",
            "optimal",
            "HiGHS (integer program)",
        ),
        (
            f"pair splits / {Engine('CBC', 'PULP_CBC_CMD').integer_program}",
            "optimal",
            "pair splits, bound by CBC through PuLP (integer program)",
        ),
        (
            "decomposition into stages, steps simulated",
            "time_limit",
            "decomposition into stages, steps simulated",
        ),
    ],
)
def test_what_solved_a_plan_is_said_in_words(solver: str, status: str, words: str) -> None:
    assert solved_by(solver, status) == words


def test_texts_of_a_plan_say_what_solved_it(capsys: pytest.CaptureFixture[str]) -> None:
    model = examples.build("mlp", layers=2, hidden=8, batch=4)
    result = partitioner.compile(model, devices=2, strategy="intra", mesh={"tp": 2})
    words = "elimination (no integer program needed)"
    assert f"  search      {words}, seed 0" in str(result)
    assert f"plan by {words}: throughput cost" in repr(result)
    result.show()
    assert f"plan by {words}: throughput cost" in capsys.readouterr().out
