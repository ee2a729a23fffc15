"""How far predictions are from what was published or measured, as a row of a table."""

import statistics
from collections.abc import Sequence

#: Errors up to which predictions are counted.
_WITHIN = (0.05, 0.1, 0.2, 0.3)
WITHIN = (
    f"| predictions | number | {' | '.join(f'within {most:.0%}' for most in _WITHIN)} "
    "| median | largest | median with its sign |"
)


def within(title: str, errors: Sequence[float]) -> str:
    """A row of a table: how many errors are within 5, 10, 20 and 30 %, and their median sign."""
    shares = (sum(1 for e in errors if abs(e) <= most) / len(errors) for most in _WITHIN)
    cells = " | ".join(f"{share:.0%}" for share in shares)
    sizes = sorted(abs(error) for error in errors)
    bias = statistics.median(errors)
    return (
        f"| {title} | {len(errors)} | {cells} "
        f"| {statistics.median(sizes):.0%} | {sizes[-1]:.0%} | {bias:+.0%} |"
    )
