"""Rank files pass the checker, load in stock ONNX Runtime, and the simulator gives the results."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from helpers.plans import rank_programs as hand
from helpers.plans.rank_cases import CASES, check
from partitioner.backends.onnx.files.emit import emit, emit_models
from partitioner.backends.onnx.running.simulator import Simulator, run_lockstep
from partitioner.ir.exchange import Transfer
from partitioner.ir.graph import Graph
from partitioner.ir.program import Comm, CommKind, Output, Part, Programs

ONE = Part("one", None)


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> hand.Case:
    return CASES[request.param]()


def test_files_pass_the_checker_and_load_in_stock_onnx_runtime(
    case: hand.Case, tmp_path: Path
) -> None:
    emit(case.programs, case.graph, tmp_path)
    files = sorted(tmp_path.glob("*.onnx"))
    assert [path.name for path in files] == [f"rank{r}.onnx" for r in range(len(files))]
    for path, program in zip(files, case.programs.ranks, strict=True):
        onnx.checker.check_model(path, full_check=True)
        session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
        fed = {value.name: tuple(value.shape) for value in session.get_inputs()}
        assert fed == {name: program.types[name].shape for name in program.inputs}
        for output in program.outputs:
            shapes = {value.name: tuple(value.shape) for value in session.get_outputs()}
            assert shapes[output.value] == program.types[output.value].shape
        assert session.get_outputs()


def stages() -> tuple[Programs, Graph]:
    """Three ranks in a row: the middle one neither reads an input nor delivers an output."""
    type_ = hand.f32(2, 3)
    types = dict.fromkeys(("x", "a", "b", "y", "partitioner.sent0"), type_)

    def send(seq: int, value: str, source: int) -> Comm:
        move = Transfer(source, source + 1, hand.rows(0, 2, 3), hand.rows(0, 2, 3))
        ranks = (source, source + 1)
        return Comm(seq, CommKind.SEND, ranks, value, value, "float32", (move,))

    first = [hand.op("Neg", "x", "partitioner.sent0"), hand.op("Abs", "partitioner.sent0", "a")]
    ranks = (
        hand.rank(0, [*first, send(0, "a", 0)], types, {"x": Part("x", None)}),
        hand.rank(1, [send(0, "a", 0), hand.op("Exp", "a", "b"), send(1, "b", 1)], types),
        hand.rank(
            2,
            [send(1, "b", 1), hand.op("Neg", "b", "y")],
            types,
            outputs=[Output("y", "y", None)],
        ),
        hand.rank(3, [hand.op("Neg", "x", "a"), hand.op("Exp", "a", "b")], types, {}, {"x": ONE}),
    )
    return Programs(ranks, {"x": type_}, {"y": type_}), hand.graph(
        {"one": np.ones((2, 3), np.float32)}
    )


def test_ranks_without_inputs_and_outputs_of_the_model_load_in_stock_onnx_runtime(
    tmp_path: Path,
) -> None:
    """At its default options, which drop every node that leads to no graph output."""
    programs, graph = stages()
    emit(programs, graph, tmp_path)
    names = []
    for rank in range(4):
        path = tmp_path / f"rank{rank}.onnx"
        onnx.checker.check_model(path, full_check=True)
        session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
        names.append([value.name for value in session.get_outputs()])
        session.run(None, {v.name: np.zeros(v.shape, np.float32) for v in session.get_inputs()})
    assert names == [["partitioner.sent0'"], ["partitioner.sent1"], ["y"], ["b"]]
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    y = run_lockstep(tmp_path, {"x": x})["y"]
    np.testing.assert_allclose(y, -np.exp(x), rtol=1e-6)


def test_lockstep_gives_the_expected_outputs(case: hand.Case, tmp_path: Path) -> None:
    emit(case.programs, case.graph, tmp_path)
    check(case, run_lockstep(tmp_path, case.inputs))
    in_memory = emit_models(case.programs, case.graph)
    check(case, run_lockstep(in_memory, case.inputs, optimization="all"))


def test_many_requests_in_flight_keep_apart(case: hand.Case) -> None:
    simulator = Simulator(emit_models(case.programs, case.graph))
    for count in (2, 5):
        for result in simulator.run([case.inputs] * count):
            check(case, dict(result.outputs))


def test_requests_with_different_inputs_come_out_in_order() -> None:
    case = hand.pipeline()
    simulator = Simulator(emit_models(case.programs, case.graph))
    requests = [{"x": np.full((3, 4), float(n), np.float32)} for n in range(-3, 4)]
    for inputs, result in zip(requests, simulator.run(requests), strict=True):
        x = inputs["x"]
        np.testing.assert_array_equal(result.outputs["y"], 2 * np.maximum(-x, 0) + x)
