"""Estimates from measurements of other forms."""

import math

import pytest

from partitioner.cost_model.profiles.entries import Entry
from partitioner.cost_model.profiles.fit import Fit
from partitioner.cost_model.profiles.forms import Form

FLOPS_PER_S, BYTES_PER_S = 1e11, 1e10


def form(op: str, *behind: str, dtype: str = "float32", written: int = 0, work: str = "") -> Form:
    """A form with a result of so many elements."""
    results = ((dtype, (written,)),) if written else ()
    return Form(op, (("work", work),), (), results, behind)


def entry(
    op: str,
    flops: float,
    moved_bytes: int,
    *,
    seconds: float | None = None,
    dtype: str = "float32",
    written: int = 0,
) -> Entry:
    """A measurement that attains the roofline, if no seconds are given."""
    by_roofline = max(flops / FLOPS_PER_S, moved_bytes / BYTES_PER_S)
    taken_s = by_roofline if seconds is None else seconds
    key = form(op, dtype=dtype, written=written, work=f"{flops} {moved_bytes}").key
    return Entry(key, op, dtype, flops, moved_bytes, taken_s, 0.0, 9, "onnxruntime 1", "2026")


def product(op: str, m: int, n: int, k: int) -> Entry:
    return entry(op, 2 * m * n * k, 4 * (m * n + m * k + n * k))


def test_products_with_a_vector_say_little_of_square_ones() -> None:
    vectors = [product("Gemm", 1, n, 4096) for n in (512, 1024, 2048, 4096)]
    squares = [product("MatMul", 512, n, 512) for n in (256, 512, 1024)]
    wanted = product("Gemm", 256, 512, 512)
    estimate = Fit([*vectors, *squares]).estimate(
        form("Gemm"), "float32", wanted.flops, wanted.moved_bytes
    )
    assert estimate is not None
    assert estimate.source == "fitted"
    assert estimate.seconds == pytest.approx(wanted.seconds, rel=0.05)


def test_measurements_of_the_operator_count_more_than_those_of_others() -> None:
    slow = [entry("Erf", 2**20, size * 2**20, seconds=0.01 * size) for size in (1, 2, 4)]
    fast = [entry("Relu", 2**20, size * 2**20) for size in (1, 2, 3, 4)]
    fit = Fit([*slow, *fast])
    own, other = (fit.estimate(form(op), "float32", 2**20, 3 * 2**20) for op in ("Erf", "Relu"))
    assert own is not None
    assert other is not None
    assert own.seconds > 3 * other.seconds


def test_an_operator_never_measured_takes_what_like_ones_took() -> None:
    fit = Fit([entry("Relu", 2**20, size * 2**20) for size in (1, 2, 4)])
    estimate = fit.estimate(form("Sigmoid"), "float32", 2**20, 3 * 2**20)
    assert estimate is not None
    assert estimate.seconds == pytest.approx(3 * 2**20 / BYTES_PER_S, rel=0.05)


def test_work_far_from_all_measurements_of_others_has_no_estimate() -> None:
    fit = Fit([entry("Relu", 2**10, 2**12)])
    assert fit.estimate(form("Sigmoid"), "float32", 2**20, 2**22) is None
    assert fit.estimate(form("Relu"), "float32", 2**20, 2**22) is not None


def test_what_is_computed_by_another_kernel_says_nothing_of_operators_alone() -> None:
    fit = Fit([entry("Relu behind Conv", 2**20, 2**22, seconds=0.0)])
    assert fit.estimate(form("Sigmoid"), "float32", 2**20, 2**22) is None
    behind = fit.estimate(form("Sigmoid", "Conv"), "float32", 2**20, 2**22)
    assert behind is not None
    assert behind.seconds < 1e-6


def test_a_form_behind_others_takes_what_its_operator_takes_alone() -> None:
    fit = Fit([entry("Relu", 2**20, 2**22)])
    estimate = fit.estimate(form("Relu", "Conv"), "float32", 2**20, 2**22)
    assert estimate is not None
    assert estimate.seconds == pytest.approx(2**22 / BYTES_PER_S)


def test_the_error_is_the_spread_of_the_measurements() -> None:
    one = entry("Relu", 2**20, 2**22)
    exact = Fit([one]).estimate(form("Relu"), "float32", 2**20, 2**22)
    apart = [one, entry("Relu", 2**20 + 1, 2**22, seconds=4 * one.seconds)]
    spread = Fit(apart).estimate(form("Relu"), "float32", 2**20, 2**22)
    assert exact is not None
    assert spread is not None
    assert exact.error == 0
    assert spread.error == pytest.approx(math.log(2), rel=0.05)


def test_rates_are_those_of_the_size() -> None:
    """A copy that leaves the caches tells of another large operator, one of the caches does not."""
    small = [entry("Relu", 2**20, size * 2**20) for size in (1, 2, 4)]
    large = [entry("Relu", 2**26, 2**28, seconds=20 * 2**28 / BYTES_PER_S)]
    gathers = [entry("Gather", 2**20, size * 2**20) for size in (1, 2, 4)]
    alone, beside = (
        fit.estimate(form("Gather"), "float32", 2**26, 2**28)
        for fit in (Fit([*small, *gathers]), Fit([*small, *large, *gathers]))
    )
    assert alone is not None
    assert beside is not None
    assert alone.seconds == pytest.approx(2**28 / BYTES_PER_S, rel=0.05)
    assert beside.seconds == pytest.approx(20 * 2**28 / BYTES_PER_S, rel=0.05)


def test_written_bytes_have_rates_of_their_own() -> None:
    """Of two products that move as much, the one that writes it takes longer."""
    reads = [entry("MatMul", 2**20, 2**26 + 4 * n, written=n) for n in (2**10, 2**11)]
    writes = [entry("Relu", 2**20, 2**26 + n, seconds=0.2, written=2**24 - 4 * n) for n in (0, 1)]
    fit = Fit([*reads, *writes])
    little, much = (
        fit.estimate(form("MatMul", written=written), "float32", 2**20, 2**26)
        for written in (2**10, 2**24)
    )
    assert little is not None
    assert much is not None
    assert little.seconds == pytest.approx(2**26 / BYTES_PER_S, rel=0.1)
    assert much.seconds > 10 * little.seconds


def test_rates_come_from_all_element_types() -> None:
    """A few tiny integer sums say nothing of the peaks of a device: they pay for launches."""
    launch_s = 3e-5
    tiny = [entry("Add", n, 24 * n, seconds=launch_s, dtype="int64") for n in (1, 64)]
    floats = [entry("Add", n, 12 * n, seconds=launch_s) for n in (2**10, 2**12, 2**14)]
    estimate = Fit([*tiny, *floats]).estimate(form("Add"), "int64", 9216, 221184)
    assert estimate is not None
    assert estimate.seconds < 4 * launch_s
