"""Einsum: the equation is the rule."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

from partitioner.ir.ops.table import OpaqueError, OpRow, OpView
from partitioner.ir.rule import Rule


def einsum(view: OpView) -> Rule:
    """Letters are factors; those that the result lacks are summed.

    A multiply-add for each point of all letters: what one loop nest costs. Runtimes contract three
    and more operands in pairs and may do less.

    Raises:
        OpaqueError: A term repeats a letter (a diagonal).
    """
    terms, result = _terms(str(view.attr("equation", "")), [len(s or ()) for s in view.shapes])
    for term in (*terms, result):
        if len(set(term)) != len(term):
            raise OpaqueError(f"equation {view.attr('equation')!r} takes a diagonal")
    dims = [_named(t, s or ()) for t, s in zip(terms, view.shapes, strict=True)]
    out = _named(result, view.out_shape())
    letters = {name for names in dims for name in names if name != "1"}
    return Rule.of(
        dims,
        [out],
        view.shapes,
        view.out_shapes,
        reduce=dict.fromkeys(sorted(letters - set(out)), "sum"),
        flops=2.0 if len(terms) > 1 else 1.0,
    )


def _named(term: list[str], shape: tuple[int, ...]) -> list[str]:
    return ["1" if size == 1 else name for name, size in zip(term, shape, strict=True)]


def _terms(equation: str, ranks: list[int]) -> tuple[list[list[str]], list[str]]:
    """Factor names of each operand and of the result; ``...`` becomes ``e0 e1 ...``."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    texts = left.split(",")
    widths = [
        rank - len(text.replace("...", ""))
        for text, rank in zip(texts, ranks, strict=True)
        if "..." in text
    ]
    most = max(widths, default=0)
    terms = [
        _letters(t, r - len(t.replace("...", "")), most) for t, r in zip(texts, ranks, strict=True)
    ]
    return terms, _letters(right if arrow else _implicit(left), most, most)


def _letters(text: str, width: int, most: int) -> list[str]:
    """Names of one term whose ellipsis covers the last `width` of `most` dims."""
    found: list[str] = []
    for part in re.findall(r"\.\.\.|[A-Za-z]", text):
        ellipsis = [f"e{i}" for i in range(most - width, most)]
        found += ellipsis if part == "..." else [f"i{part}"]
    return found


def _implicit(left: str) -> str:
    """The result where none is written: the ellipsis, then letters that occur once, sorted."""
    counts = Counter(re.findall(r"[A-Za-z]", left))
    once = "".join(sorted(letter for letter, count in counts.items() if count == 1))
    return ("..." if "..." in left else "") + once


ROWS: Mapping[str, OpRow] = {"Einsum": OpRow(einsum)}
