"""Measured bytes of a rank against bytes that are known."""

from pathlib import Path

import pytest

from helpers.plans import rank_programs as hand
from helpers.plans.measured import measured_bytes
from partitioner.backends.errors import BackendError
from partitioner.backends.onnx.files.emit import emit
from partitioner.ir.program import Comm, CommKind, Output, Part, Programs

N = 256
TENSOR = N * N * 4


def programs() -> Programs:
    """Two ranks: y = (x @ w) summed over both."""
    type_ = hand.f32(N, N)
    comm = Comm(0, CommKind.ALL_REDUCE, (0, 1), "p", "y", "float32", reduce="sum")
    ranks = tuple(
        hand.rank(
            number,
            [hand.op("MatMul", "x w", "p"), comm],
            dict.fromkeys("xwpy", type_),
            {"x": Part("x", None)},
            {"w": Part("W", None)},
            outputs=[Output("y", f"y{number}", None)],
        )
        for number in range(2)
    )
    return Programs(ranks, {"x": type_}, {"y0": type_, "y1": type_})


def test_weights_packed_copies_and_peak(tmp_path: Path) -> None:
    emit(programs(), hand.graph({"W": hand.random(N, N)}), tmp_path)
    measured = measured_bytes(tmp_path, 1, {"x": hand.random(N, N)})
    assert measured.weights == TENSOR
    assert TENSOR <= measured.sessions <= 1.2 * TENSOR  # MatMul packs its constant operand
    assert 2 * TENSOR <= measured.peak <= 2.2 * TENSOR  # x and p; the all-reduce is in place
    assert measured.total == max(measured.weights, measured.sessions) + measured.peak


def test_no_such_rank(tmp_path: Path) -> None:
    emit(programs(), hand.graph({"W": hand.random(N, N)}), tmp_path)
    with pytest.raises(BackendError, match="rank 2 is not one of 2"):
        measured_bytes(tmp_path, 2, {"x": hand.random(N, N)})
