"""Numbers as text for people: seconds, bytes, shares and rates with units.

All have three significant digits, no exponent and no fraction from 1,000 on; `text.js` of the
report's page has the same functions.
"""

from __future__ import annotations

import datetime as dt
import math

_FLOPS: tuple[str, ...] = ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP")
_NOISE = 1e-9  #: A share below it is a rounding error.


def digits(value: float, count: int = 3) -> str:
    """``0.012345 -> "0.0123"``, ``1234.5 -> "1234"``."""
    if round_to(value, count) >= 10.0**count:
        return f"{value:.0f}"
    text = f"{value:.{count}g}"
    return f"{float(text):.12f}".rstrip("0") if "e" in text else text


def round_to(value: float, count: int) -> float:
    """The size of a number as it is shown with so many digits."""
    return abs(float(f"{value:.{count}g}"))


def seconds(value: float) -> str:
    """``0.00123 -> "1.23 ms"``."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if abs(value) >= 0.9995 * scale:  # rounded to three digits, it is one of the unit
            return f"{digits(value / scale)} {unit}"
    return f"{digits(value / 1e-9)} ns" if value else "0 s"


def change(value: float) -> str:
    """``+1.2 ms``, ``-3 µs``, ``+0 s``: a difference of seconds."""
    return f"{'-' if value < 0 else '+'}{seconds(abs(value))}"


def size(value: float, count: int = 3) -> str:
    """``1536 -> "1.5 KiB"`` (powers of 1024); `count` digits, where close sizes are compared."""
    amount, units = float(value), ["B", "KiB", "MiB", "GiB", "TiB"]
    while round_to(amount, max(count, 4)) >= 1024 and len(units) > 1:
        amount, units = amount / 1024, units[1:]
    return f"{digits(amount, count)} {units[0]}"


def flops(value: float) -> str:
    """``2.1e9 -> "2.1 GFLOP"``."""
    amount, units = float(value), _FLOPS
    while round_to(amount, 3) >= 1000 and len(units) > 1:
        amount, units = amount / 1000, units[1:]
    return f"{digits(amount)} {units[0]}"


def cost(objective: str, value: float) -> str:
    """A cost by an objective: bytes for "memory", else seconds."""
    return size(value) if objective == "memory" else seconds(value)


def share(value: float) -> str:
    """``0.123 -> "12.3 %"``; rounding errors are 0."""
    if _NOISE < value < 1e-4:
        return "< 0.01 %"
    return f"{digits(100 * value) if abs(value) > _NOISE else 0} %"


def relative(value: float) -> str:
    """``0.123 -> "+12.3 %"``: what a figure gained or lost; less than 0.005 % is 0."""
    if abs(value) < 5e-5:
        return "0 %"
    return f"{'+' if value > 0 else ''}{digits(100 * value)} %"


def times(value: float) -> str:
    """``3.617 -> "3.62x"``."""
    return f"{digits(value)}x"


def count(number: int, noun: str) -> str:
    """``1, "node" -> "1 node"``, ``5001, "node" -> "5,001 nodes"``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def per_second(value: float | None) -> str:
    """Requests a second: ``60627.3 -> "60,627/s"``; None, as in JSON, is unlimited."""
    if value is None:
        return "unlimited"
    return f"{value:,.0f}/s" if value >= 1000 else f"{value:.4g}/s"


def finite(value: float) -> float | None:
    """A rate for JSON, which has no infinity: None where it is unlimited."""
    return value if math.isfinite(value) else None


def now() -> str:
    """Date and time to the second: ISO 8601, UTC."""
    return dt.datetime.now(dt.UTC).isoformat(timespec="seconds")


def short(value: float) -> float:
    """A figure with nine significant digits: enough to draw, and short as JSON."""
    return float(f"{value:.9g}")
