"""What all pictures share: files that are byte-equal for equal plans, colours, short safe texts.

The colours are those that colour-blind readers can tell apart: Okabe and Ito, "Color Universal
Design" (2008), https://jfly.uni-koeln.de/color/. Colour never stands alone: groups are named, and
communication has a line or hatch of its own.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from partitioner.foundations.files import check_file, write_file
from partitioner.ir.errors import PartitionerError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BLUE = "#0072B2"
ORANGE = "#E69F00"
GREEN = "#009E73"
PURPLE = "#CC79A7"
SKY = "#56B4E9"
YELLOW = "#F0E442"
VERMILLION = "#D55E00"

REQUESTS = (BLUE, GREEN, SKY, PURPLE, YELLOW)  #: Of the compute of requests, in turn.
GROUPS = (SKY, ORANGE, GREEN, YELLOW, PURPLE, BLUE)  #: Of device groups, in turn.
COMM = VERMILLION
IDLE = "#EEEEEE"
INK = "#222222"
QUIET = "#777777"
PAPER = "#FFFFFF"

#: How much of a group's colour is left where a node is cut, and where it is not.
STRONG, LIGHT, FAINT = 0.60, 0.30, 0.12

MAX_CHARACTERS = 60  #: Names are shortened to this many.
ELISION = "\u2026"
_ROOM = 20  #: From this limit on, the start is kept too.

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
    """Refuse, as a PictureError, a machine without matplotlib, before work is lost."""
    if find_spec("matplotlib") is None:
        raise PictureError("drawing needs matplotlib: pip install matplotlib (--dot needs nothing)")


def draw_file(path: str | Path, make: Callable[[], Figure]) -> None:
    """Write the figure that `make` returns, in the format of the path's suffix."""
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


def shown(text: str, limit: int = MAX_CHARACTERS) -> str:
    r"""Text on one line, with escapes for control, bidi and other unprintable characters.

    Args:
        limit: Most characters of the result; those in the middle are left out.

    >>> shown("a\nb\u202e")
    'a\\nb\\u202e'
    >>> shown("model.layers.0.self_attn.q_proj.MatMul", 20)
    'model.…_proj.MatMul'
    """
    cut = shorten(text, 4 * limit)  # escapes lengthen: no need to escape 10,000 characters
    seen = (c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in cut)
    return shorten("".join(seen), limit)


def shorten(text: str, limit: int) -> str:
    """Cut to `limit` characters at most: most of the end, which tells more, some of the start."""
    if len(text) <= limit:
        return text
    head = (limit - 1) // 3 if limit >= _ROOM else 0
    return text[:head] + ELISION + text[len(text) - (limit - 1 - head) :]


def group_colour(index: int) -> str:
    """Colour of a device group."""
    return GROUPS[index % len(GROUPS)]


def tint(colour: str, share: float) -> str:
    """A colour mixed with white: `share` of it is left, 0 .. 1.

    >>> tint("#000000", 0.5)
    '#808080'
    """
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(255 - (255 - part) * share):02X}" for part in parts)
