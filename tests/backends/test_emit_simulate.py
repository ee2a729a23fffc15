"""Rank files pass the checker, load in stock ONNX Runtime, and the simulator gives the results."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import rank_programs as hand
from rank_cases import CASES, check

from partitioner.backends.onnx.emit import emit, emit_models
from partitioner.backends.simulator import Simulator, run_lockstep


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
