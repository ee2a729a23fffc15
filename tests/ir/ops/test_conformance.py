"""Every row against ONNX's own node cases: real operands of every form that the standard names."""

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper, numpy_helper

from helpers.op_rows.rows import Case, check_row, make_trial
from partitioner.ir.errors import IRError
from partitioner.ir.graph import Attr
from partitioner.ir.ops import ROWS, rule_of

#: ONNX Runtime's errors have no common class.
REFUSED = tuple(
    kind
    for name, kind in vars(ort.capi.onnxruntime_pybind11_state).items()
    if isinstance(kind, type) and issubclass(kind, Exception) and not name.startswith("_")
)

#: Newest operator set that ONNX Runtime takes.
NEWEST = 26


def attribute(proto: onnx.AttributeProto) -> Attr:
    """An attribute as the IR holds it."""
    value = helper.get_attribute_value(proto)
    if isinstance(value, onnx.TensorProto):
        return numpy_helper.to_array(value)
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, list):
        return tuple(item.decode() if isinstance(item, bytes) else item for item in value)
    return value


def as_case(test: Any) -> Case | None:
    """A node case as a row case; None where it is no single node of a row, or holds no tensors."""
    nodes = test.model.graph.node if test.model is not None and test.data_sets else ()
    key = re.sub("^::", "", f"{nodes[0].domain}::{nodes[0].op_type}") if len(nodes) == 1 else ""
    operands = test.data_sets[0][0] if key in ROWS else ()
    if key not in ROWS or not all(isinstance(x, np.ndarray | np.generic) for x in operands):
        return None
    node = nodes[0]
    values = {i.name: np.asarray(x) for i, x in zip(test.model.graph.input, operands, strict=True)}
    inputs = tuple(values[name] if name else None for name in node.input)
    opset = next(o.version for o in test.model.opset_import if o.domain == node.domain)
    half = any(x is not None and x.dtype == np.float16 for x in inputs)
    return Case(
        key,
        inputs,
        {proto.name: attribute(proto) for proto in node.attribute},
        constants=tuple(i for i, x in enumerate(inputs) if i and x is not None),
        opset=min(opset, NEWEST),
        outputs=tuple(f"out{i}" if name else "" for i, name in enumerate(node.output)),
        min_cuts=0,
        tolerance=2e-3 if half else 1e-5,
    )


def single_nodes() -> Iterator[tuple[str, Case]]:
    """ONNX's node cases that rows answer for, by name."""
    from onnx.backend.test.case.node import collect_testcases

    for test in collect_testcases(None):
        case = None if "_expanded" in test.name else as_case(test)
        if case is not None:
            yield test.name, case


def outcome(case: Case) -> str:
    """Outcome of a case: refused by the runtime, opaque, equal, or the difference."""
    try:
        trial = make_trial(case)
    except (*REFUSED, IRError):  # IRError: an element type that the IR does not hold
        return "refused"
    if isinstance(rule_of(trial.graph, trial.node), str):
        return "opaque"
    try:
        check_row(case)
    except AssertionError as error:
        return f"{case}: {error}"
    return "equal"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_every_cut_of_onnx_node_cases() -> None:
    outcomes = {name: outcome(case) for name, case in single_nodes()}
    counts = Counter(outcomes.values())
    assert {n: o for n, o in outcomes.items() if o not in {"refused", "opaque", "equal"}} == {}
    assert counts["equal"] >= 900, counts
    assert counts["opaque"] <= 20, counts
