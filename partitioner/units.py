"""Numbers as text for people: seconds, bytes, shares and rates with units."""

from __future__ import annotations

import math


def seconds(value: float) -> str:
    """``0.00123 -> "1.23 ms"``."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if value >= 0.9995 * scale:  # rounded to three digits, it is one of the unit
            amount = value / scale
            return f"{amount:.3g} {unit}" if amount < 999.5 else f"{amount:.0f} {unit}"
    return f"{value / 1e-9:.3g} ns" if value else "0 s"


def change(value: float) -> str:
    """``+1.2 ms``, ``-3 us``, ``+0 s``: a difference of seconds."""
    return f"{'-' if value < 0 else '+'}{seconds(abs(value))}"


def size(value: float) -> str:
    """``1536 -> "1.5 KiB"`` (powers of 1024)."""
    amount = float(value)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(amount) < 1024:
            return f"{amount:.4g} {unit}"
        amount /= 1024
    return f"{amount:.4g} TiB"


def cost(objective: str, value: float) -> str:
    """A cost by an objective: bytes for "memory", else seconds."""
    return size(value) if objective == "memory" else seconds(value)


def share(value: float) -> str:
    """``0.123 -> "12.3 %"``; rounding errors are 0."""
    if 1e-9 < value < 1e-4:
        return "< 0.01 %"
    return f"{100 * value if value >= 1e-4 else 0:.3g} %"


def per_second(value: float | None) -> str:
    """Requests a second: ``60627.3 -> "60,627/s"``; None, as in JSON, is unlimited."""
    if value is None:
        return "unlimited"
    return f"{value:,.0f}/s" if value >= 1000 else f"{value:.4g}/s"


def finite(value: float) -> float | None:
    """A rate for JSON, which has no infinity: None where it is unlimited."""
    return value if math.isfinite(value) else None
