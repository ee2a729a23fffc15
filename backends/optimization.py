"""Levels of ONNX Runtime's graph optimizations; loads no ONNX Runtime."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

#: "disable" (cutting between operators changes no bit), "basic" (batch norms are folded into
#: convolutions), "extended", or "all", ONNX Runtime's own default, which also fuses across what was
#: separate and may compute in other element types.
Optimization: TypeAlias = Literal["disable", "basic", "extended", "all"]
OPTIMIZATIONS: tuple[Optimization, ...] = get_args(Optimization)
#: The level of every run that says nothing else: what `verify` compares is what runs.
DEFAULT: Optimization = "all"


def level_line(level: str) -> str:
    """A line that says at which level sessions ran."""
    return f"  sessions: ONNX Runtime's optimization level {level}"
