"""Standard streams whose encoding lacks letters that are printed, such as µ in ASCII."""

from __future__ import annotations

import codecs
import io
import sys
import unicodedata

#: What stands for a letter that an encoding lacks; other letters lose their accents, else are "?".
_PLAIN = {"µ": "u", "±": "+-", "\u00d7": "x", "\u2212": "-", "→": "->", "…": "..."}
_ERRORS = "partitioner.plain"


def print_plainly() -> None:
    """Have stdout and stderr print plain letters for those that their encoding lacks."""
    codecs.register_error(_ERRORS, _plain)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=_ERRORS)


def _plain(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end]
    bases = (_PLAIN.get(letter) or unicodedata.normalize("NFKD", letter)[0] for letter in text)
    return "".join(base if base.isascii() else "?" for base in bases), error.end
