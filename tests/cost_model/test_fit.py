"""Estimates from measurements of other forms."""

import math

import pytest

from partitioner.cost_model.entries import Entry
from partitioner.cost_model.fit import Fit
from partitioner.cost_model.forms import Form

FLOPS_PER_S, BYTES_PER_S = 1e11, 1e10


def form(op: str, *behind: str) -> Form:
    return Form(op, (), (), (), behind)


def entry(op: str, flops: float, moved_bytes: int, *, seconds: float | None = None) -> Entry:
    """A measurement that attains the roofline, if no seconds are given."""
    by_roofline = max(flops / FLOPS_PER_S, moved_bytes / BYTES_PER_S)
    taken_s = by_roofline if seconds is None else seconds
    key = f"{op} {flops} {moved_bytes}"
    return Entry(key, op, "float32", flops, moved_bytes, taken_s, 0.0, 9, "onnxruntime 1", "2026")


def product(op: str, m: int, n: int, k: int) -> Entry:
    return entry(op, 2 * m * n * k, 4 * (m * n + m * k + n * k))


def test_products_with_a_vector_say_little_of_square_ones() -> None:
    vectors = [product("Gemm", 1, n, 4096) for n in (512, 1024, 2048, 4096)]
    squares = [product("MatMul", 512, n, 512) for n in (256, 512, 1024)]
    wanted = product("Gemm", 256, 512, 512)
    estimate = Fit([*vectors, *squares]).estimate(form("Gemm"), wanted.flops, wanted.moved_bytes)
    assert estimate is not None
    assert estimate.source == "fitted"
    assert estimate.seconds == pytest.approx(wanted.seconds, rel=0.05)


def test_measurements_of_the_operator_count_more_than_those_of_others() -> None:
    slow = [entry("Erf", 2**20, size * 2**20, seconds=0.01 * size) for size in (1, 2, 4)]
    fast = [entry("Relu", 2**20, size * 2**20) for size in (1, 2, 3, 4)]
    fit = Fit([*slow, *fast])
    own, other = (fit.estimate(form(op), 2**20, 3 * 2**20) for op in ("Erf", "Relu"))
    assert own is not None
    assert other is not None
    assert own.seconds > 3 * other.seconds


def test_an_operator_never_measured_takes_what_like_ones_took() -> None:
    fit = Fit([entry("Relu", 2**20, size * 2**20) for size in (1, 2, 4)])
    estimate = fit.estimate(form("Sigmoid"), 2**20, 3 * 2**20)
    assert estimate is not None
    assert estimate.seconds == pytest.approx(3 * 2**20 / BYTES_PER_S, rel=0.05)


def test_work_far_from_all_measurements_of_others_has_no_estimate() -> None:
    fit = Fit([entry("Relu", 2**10, 2**12)])
    assert fit.estimate(form("Sigmoid"), 2**20, 2**22) is None
    assert fit.estimate(form("Relu"), 2**20, 2**22) is not None


def test_what_is_computed_by_another_kernel_says_nothing_of_operators_alone() -> None:
    fit = Fit([entry("Relu behind Conv", 2**20, 2**22, seconds=0.0)])
    assert fit.estimate(form("Sigmoid"), 2**20, 2**22) is None
    behind = fit.estimate(form("Sigmoid", "Conv"), 2**20, 2**22)
    assert behind is not None
    assert behind.seconds < 1e-6


def test_a_form_behind_others_takes_what_its_operator_takes_alone() -> None:
    fit = Fit([entry("Relu", 2**20, 2**22)])
    estimate = fit.estimate(form("Relu", "Conv"), 2**20, 2**22)
    assert estimate is not None
    assert estimate.seconds == pytest.approx(2**22 / BYTES_PER_S)


def test_the_error_is_the_spread_of_the_measurements() -> None:
    one = entry("Relu", 2**20, 2**22)
    exact = Fit([one]).estimate(form("Relu"), 2**20, 2**22)
    apart = [one, entry("Relu", 2**20 + 1, 2**22, seconds=4 * one.seconds)]
    spread = Fit(apart).estimate(form("Relu"), 2**20, 2**22)
    assert exact is not None
    assert spread is not None
    assert exact.error == 0
    assert spread.error == pytest.approx(math.log(2), rel=0.05)
