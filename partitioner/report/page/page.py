"""The page: one HTML file made of the data, the libraries and the scripts of ``web``.

The page cannot reach a network: its content security policy forbids every load, and every script
but its own, which it lists by digest. The JSON data escapes all characters that could end its
script element.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from importlib import resources

from partitioner.report.schema import Diff, Report, Sweep

LIBRARIES = ("graph", "charts")


def _read(path: str) -> str:
    return resources.files("partitioner.report.page").joinpath("web", path).read_text("utf-8")


#: In the order in which constants need each other at start; functions are hoisted.
SCRIPTS = tuple(_read("scripts.txt").split())
_ESCAPES = str.maketrans(
    {mark: f"\\u{ord(mark):04x}" for mark in ("<", ">", "&", "\u2028", "\u2029")}
)
_SLOT = re.compile(r"@([a-z]+)@")


def render(data: Report | Diff | Sweep) -> str:
    """The HTML of a report; a ValueError if a figure is not finite."""
    scripts = {name: _read(f"vendor/{name}.js").strip() for name in LIBRARIES}
    body = "\n".join(_read(f"js/{name}.js") for name in SCRIPTS)
    scripts["app"] = f'(() => {{\n"use strict";\n{body}}})();'  # `page` is its only global
    digests = [hashlib.sha256(script.encode()).digest() for script in scripts.values()]
    slots = scripts | {
        "policy": "default-src 'none'; script-src "
        + " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
        + "; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; form-action 'none'",
        "style": _read("style.css"),
        "licences": _read("LICENSES.txt").replace("<", "\u2039"),
        "data": embedded(data),
    }
    return filled("page.html", slots)


def filled(path: str, slots: Mapping[str, str]) -> str:
    """A file of HTML below ``web`` with texts in its slots, which are like ``@name@``."""
    return _SLOT.sub(lambda slot: slots[slot[1]], _read(path))


def embedded(data: Report | Diff | Sweep) -> str:
    """The data as JSON that is safe in a script element."""
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.translate(_ESCAPES)
