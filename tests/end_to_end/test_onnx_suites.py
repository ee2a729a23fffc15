"""ONNX's own backend suites on ranks that are cut wherever a rule allows.

    python -m pytest -m "slow or sweep" tests/end_to_end/test_onnx_suites.py -s

prints the table: of the cases that ONNX Runtime passes, how each ends.
"""

import os
import re
from collections import Counter
from collections.abc import Mapping

import numpy as np
import onnx
import pytest
from onnx import helper

from helpers.onnx_files.onnx_suites import SUITES, Ended, SuiteCase, cases, end_of, runtime_passes
from partitioner.frontends.errors import FrontendError
from partitioner.frontends.onnx.load import load_onnx
from partitioner.frontends.onnx.reading.checks import OLDEST_OPSET
from partitioner.ir.types import numpy_dtype

#: Devices to cut over.
DEVICES = int(os.environ.get("SUITE_DEVICES", "2"))
#: Least number of cases of each suite that ONNX Runtime passes, and most that are refused. The
#: refused ones have sequences or optional values as inputs or outputs of the model.
EXPECTED = {
    "node": (1398, 22),
    "simple": (17, 6),
    "pytorch-operator": (24, 0),
    "pytorch-converted": (59, 0),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_models_older_than_onnx_runtime_runs() -> None:
    """They are converted, and give what ONNX expects."""
    old = [
        case
        for suite in SUITES
        for case in cases(suite)
        if case.opset < OLDEST_OPSET and not runtime_passes(case)
    ]
    ends = {case.name: end_of(case, DEVICES) for case in old}
    kinds = Counter(end.kind for end in ends.values())
    print(f"\n{len(ends)} models that ONNX Runtime does not run: {dict(kinds)}")
    assert set(kinds) == {"equal"}
    assert len(ends) >= 34


def reason(text: str) -> str:
    """A refusal without the names of the model and its parts."""
    return re.sub(r"'[^']*'", "_", text.partition("': ")[2])[:100]


def table(ends: Mapping[str, tuple[SuiteCase, Ended]]) -> str:
    """The counts of a suite."""
    kinds = Counter(end.kind for _, end in ends.values())
    equal = [end for _, end in ends.values() if end.kind == "equal"]
    refused = [(case, end) for case, end in ends.values() if end.kind == "refused"]
    reasons = Counter(reason(end.text) for case, end in refused if not case.has_strings)
    rows = [
        (len(ends), f"passed by ONNX Runtime, on {DEVICES} devices:"),
        (len(equal), "equal"),
        (sum(end.cuts > 0 for end in equal), "  of these cut"),
        (sum(end.baked for end in equal), "  of these with sizes and conditions as weights"),
        (kinds["wrong"], "wrong"),
        (kinds["traceback"], "traceback"),
        (sum(case.has_strings for case, _ in refused), "refused: strings"),
        *((count, f"refused: {text}") for text, count in reasons.most_common()),
    ]
    return "\n".join(f"{count:7,} {text}" for count, text in rows)


@pytest.mark.timeout(1800)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("suite", "every"),
    [
        pytest.param("node", 8, marks=pytest.mark.slow),
        *(
            pytest.param(suite, 1, marks=pytest.mark.sweep if suite == "node" else pytest.mark.slow)
            for suite in SUITES
        ),
    ],
)
def test_a_suite(suite: str, every: int) -> None:
    passing = [case for case in cases(suite) if runtime_passes(case)][::every]
    ends = {case.name: (case, end_of(case, DEVICES)) for case in passing}
    print(f"\n{suite}\n{table(ends)}")
    faults = {n: e.text for n, (_, e) in ends.items() if e.kind in ("wrong", "traceback")}
    assert not faults
    refused = [n for n, (c, e) in ends.items() if e.kind == "refused" and not c.has_strings]
    least, most = EXPECTED[suite]
    assert len(ends) >= least // every
    assert len(refused) <= most, refused


@pytest.mark.sweep
@pytest.mark.timeout(1800)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("suite", SUITES)
def test_folding_computes_what_the_operators_do(suite: str) -> None:
    """With all inputs as weights, folding leaves nothing but the outputs."""
    faults, equal = {}, 0
    for case in cases(suite):
        folded = case.with_weights(case.inputs) if case.has_tensors else case
        for value in folded.model.graph.output if case.has_tensors else ():
            # What an output's own node makes is not folded.
            folded.model.graph.node.add(
                op_type="Identity", input=[value.name], output=["o_" + value.name]
            )
            value.name = "o_" + value.name
        if case.has_tensors and runtime_passes(case) and runtime_passes(folded):
            end = end_of(folded, DEVICES)
            equal += end.kind == "equal"
            if end.kind != "equal" and not (end.kind == "refused" and "SequenceType" in end.text):
                faults[case.name] = end
    assert not faults
    assert equal >= {"node": 1300}.get(suite, 9)


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("suite", SUITES)
def test_shapes_without_declarations(suite: str) -> None:
    """What shape inference finds by itself is right."""
    wrong, known = {}, 0
    for case in cases(suite):
        for form in (case, case.baked) if case.has_tensors and runtime_passes(case) else ():
            model = onnx.ModelProto.FromString(form.model.SerializeToString())
            del model.graph.value_info[:]
            for value in model.graph.output:
                value.type.tensor_type.ClearField("shape")
            try:
                graph = load_onnx(model).graph
            except FrontendError:
                continue
            known += 1
            for name, expected in zip(graph.outputs, case.data[0][1], strict=True):
                type_ = graph.types[name]
                if (type_.shape, numpy_dtype(type_.dtype)) != (np.shape(expected), expected.dtype):
                    wrong[case.name] = f"{type_}, not {expected.dtype}{np.shape(expected)}"
    assert not wrong
    assert known > {"node": 2400}.get(suite, 9)


def one(expected: np.ndarray) -> SuiteCase:
    """A sum over the first dim, which 2 devices share."""
    x = np.arange(8, dtype=np.float32).reshape(4, 2)
    nodes = [helper.make_node("ReduceSum", ["x", "axes"], ["y"], keepdims=0)]
    infos = [
        helper.make_tensor_value_info("x", 1, [4, 2]),
        helper.make_tensor_value_info("axes", 7, [1]),
        helper.make_tensor_value_info("y", 1, None),
    ]
    model = helper.make_model(
        helper.make_graph(nodes, "sum", infos[:2], infos[2:]),
        opset_imports=[helper.make_opsetid("", 18)],
        ir_version=8,
    )
    return SuiteCase("own", "sum", model, [((x, np.array([0])), (expected,))], 1e-5, 1e-7)


def test_the_end_of_a_case() -> None:
    """A right one is equal and cut, its axes as a weight, and a wrong one is noticed."""
    right, wrong = np.array([12, 16], np.float32), np.array([12, 17], np.float32)
    end = end_of(one(right), 2)
    assert (end.kind, end.baked, end.cuts > 0) == ("equal", True, True)
    assert end_of(one(wrong), 2).kind == "wrong"
    assert runtime_passes(one(right))
    assert not runtime_passes(one(wrong))
