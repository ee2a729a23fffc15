"""Rank files pass the checker, load in stock ONNX Runtime, and the simulator gives the results."""

from collections.abc import Callable
from pathlib import Path

import builders as hand
import numpy as np
import onnx
import onnxruntime as ort
import pytest

from partitioner.backends.onnx.emit import emit, emit_models
from partitioner.backends.simulator import Simulator, run_lockstep

CASES: dict[str, Callable[[], hand.Case]] = {
    "tensor_parallel": hand.tensor_parallel,
    "tensor_parallel max": lambda: hand.tensor_parallel("max"),
    "tensor_parallel prod": lambda: hand.tensor_parallel("prod"),
    "all_gather uneven": hand.all_gather,
    "all_gather even of three": lambda: hand.all_gather(sizes=(2, 2, 2)),
    "all_gather bool": lambda: hand.all_gather("bool"),
    "all_gather int64": lambda: hand.all_gather("int64", (1, 1)),
    "broadcast": hand.broadcast,
    "broadcast float16": lambda: hand.broadcast("float16"),
    "scatter": hand.scatter,
    "gather": hand.gather,
    "gather int16, one rank idle": lambda: hand.gather("int16", ranks=3),
    "all_to_all": hand.all_to_all,
    "all_to_all float16": lambda: hand.all_to_all("float16"),
    "reduce_scatter": hand.reduce_scatter,
    "reduce_scatter min of three": lambda: hand.reduce_scatter(reduce="min", ranks=3),
    "reduce_scatter prod int32": lambda: hand.reduce_scatter("int32", "prod"),
    "pipeline": hand.pipeline,
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> hand.Case:
    return CASES[request.param]()


def check(case: hand.Case, outputs: dict[str, np.ndarray]) -> None:
    assert list(outputs) == list(case.expected)
    for name, expected in case.expected.items():
        assert outputs[name].dtype == expected.dtype
        if expected.dtype.kind == "f":
            np.testing.assert_allclose(outputs[name], expected, rtol=case.rtol, atol=1e-5)
        else:
            np.testing.assert_array_equal(outputs[name], expected)


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
