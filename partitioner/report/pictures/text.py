"""Text from a model as printable text of limited length."""

from __future__ import annotations

MAX_CHARACTERS = 60  #: Names are shortened to this many.
ELISION = "\u2026"
_ROOM = 20  #: From this limit on, the start is kept too.


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
