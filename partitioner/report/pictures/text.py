"""Names out of a model, made fit to be drawn."""

from __future__ import annotations

#: Names are shortened to this many characters.
MAX_CHARACTERS = 60
ELISION = "\u2026"
_ROOM = 20  #: From this length on, the start is shown too.


def shown(text: str, limit: int = MAX_CHARACTERS) -> str:
    r"""Plain text on one line: control, bidi and other unseen characters appear as escapes.

    Args:
        text: Any text.
        limit: Most characters of the result; the middle is left out.

    >>> shown("a\nb\u202e")
    'a\\nb\\u202e'
    >>> shown("model.layers.0.self_attn.q_proj.MatMul", 20)
    'model.…_proj.MatMul'
    """
    cut = shorten(text, 4 * limit)  # escapes lengthen: no need to escape 10,000 characters
    return shorten("".join(map(_visible, cut)), limit)


def shorten(text: str, limit: int) -> str:
    """At most `limit` characters: most of the end, which tells more, and some of the start."""
    if len(text) <= limit:
        return text
    head = (limit - 1) // 3 if limit >= _ROOM else 0
    return text[:head] + ELISION + text[len(text) - (limit - 1 - head) :]


def _visible(character: str) -> str:
    if character.isprintable():
        return character
    return character.encode("unicode_escape").decode("ascii")
