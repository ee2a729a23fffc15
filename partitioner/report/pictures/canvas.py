"""Picture files by matplotlib, with settings that make two drawings of a plan byte-equal."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from partitioner.foundations.files import check_file, write_file
from partitioner.ir.errors import PartitionerError
from partitioner.report.pictures.text import shown

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = (".svg", ".png", ".pdf")
_DPI = 200  #: Of PNG files: 7 inches are 1,400 pixels.
_FONT = "DejaVu Sans"  #: Comes with matplotlib.
_STYLE = {
    "font.family": _FONT,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "partitioner",
    "pdf.fonttype": 42,
    "hatch.linewidth": 0.5,
    "text.parse_math": False,  # a $ in a name is a $
    "text.usetex": False,
    "axes.unicode_minus": False,
}
#: No date and no version in the files.
_METADATA: dict[str, dict[str, Any]] = {
    ".svg": {"Date": None, "Creator": "partitioner"},
    ".png": {"Software": "partitioner"},
    ".pdf": {"CreationDate": None, "Creator": "partitioner", "Producer": "partitioner"},
}


class PictureError(PartitionerError, ValueError):
    """A picture that cannot be drawn."""


def require_matplotlib() -> None:
    """Check that matplotlib is installed before work that drawing would lose.

    Raises:
        PictureError: matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise PictureError("drawing needs matplotlib: pip install matplotlib (--dot needs nothing)")


def draw_file(path: str | Path, make: Callable[[], Figure]) -> None:
    """Write the figure that `make` returns, in the format of the path's suffix.

    Raises:
        PictureError: The suffix is none of `FORMATS`, or matplotlib is not installed.
        FileError: The file cannot be written.
    """
    target = Path(path)
    suffix = target.suffix.lower()
    if suffix not in FORMATS:
        raise PictureError(f"{target}: pictures are {', '.join(FORMATS)}, not {suffix!r}")
    require_matplotlib()
    check_file(target)
    buffer = io.BytesIO()
    from matplotlib import style

    with style.context(["default", _STYLE]):  # whatever the user's matplotlibrc says
        make().savefig(buffer, format=suffix[1:], metadata=_METADATA[suffix], dpi=_DPI)
    write_file(target, buffer.getvalue())


def drawable(text: str, limit: int) -> str:
    """Text as `shown`, with escapes also for characters that the font has no glyph for."""
    glyphs = _glyphs()
    line = shown(text, limit)
    return shown(
        "".join(c if ord(c) in glyphs else c.encode("unicode_escape").decode() for c in line),
        limit,
    )


@cache
def _glyphs() -> frozenset[int]:
    from matplotlib import font_manager, ft2font

    path = font_manager.findfont(_FONT, fallback_to_default=False)
    return frozenset(ft2font.FT2Font(path).get_charmap())
