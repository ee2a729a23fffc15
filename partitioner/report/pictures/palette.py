"""Colours that colour-blind readers can tell apart.

Okabe and Ito, "Color Universal Design" (2008), https://jfly.uni-koeln.de/color/. Colour never
stands alone: groups are named, and communication has a line or hatch of its own.
"""

from __future__ import annotations

BLUE = "#0072B2"
ORANGE = "#E69F00"
GREEN = "#009E73"
PURPLE = "#CC79A7"
SKY = "#56B4E9"
YELLOW = "#F0E442"
VERMILLION = "#D55E00"

GROUPS = (SKY, ORANGE, GREEN, YELLOW, PURPLE, BLUE)  #: Of device groups, in turn.
COMM = VERMILLION
IDLE = "#EEEEEE"
INK = "#222222"
QUIET = "#777777"
PAPER = "#FFFFFF"

#: How much of a group's colour is left where a node is cut, and where it is not.
STRONG, LIGHT, FAINT = 0.60, 0.30, 0.12


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
