"""The part of Graphviz's language that we write, read back strictly.

Grammar: https://graphviz.org/doc/info/lang.html. Anything else is an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

_TOKEN = re.compile(r'\s*("(?:[^"\\\n]|\\.)*"|[A-Za-z_][A-Za-z_0-9]*|[0-9.]+|->|[][{}=])')


@dataclass
class Drawn:
    """A graph or cluster: attributes of "graph" and of its nodes, edges, clusters."""

    name: str
    nodes: dict[str, dict[str, str]] = field(default_factory=dict)
    edges: dict[tuple[str, str], dict[str, str]] = field(default_factory=dict)
    clusters: list[Drawn] = field(default_factory=list)


def read(text: str) -> Drawn:
    """The graph of a .dot file."""
    tokens = list(_tokens(text))[::-1]
    assert tokens.pop() == "digraph"
    drawn = _body(tokens, tokens.pop())
    assert not tokens
    return drawn


def _tokens(text: str) -> Iterator[str]:
    at = 0
    while text[at:].strip():
        found = _TOKEN.match(text, at)
        assert found, text[at : at + 60]
        yield found[1]
        at = found.end()


def _body(tokens: list[str], name: str) -> Drawn:
    drawn = Drawn(name)
    assert tokens.pop() == "{"
    while (head := tokens.pop()) != "}":
        assert head.isidentifier(), head
        if head == "subgraph":
            drawn.clusters.append(_body(tokens, tokens.pop()))
        elif tokens[-1] == "->":
            tokens.pop()
            target = tokens.pop()
            drawn.edges[head, target] = _attributes(tokens)
        else:
            drawn.nodes[head] = _attributes(tokens)
    return drawn


def _attributes(tokens: list[str]) -> dict[str, str]:
    found = {}
    assert tokens.pop() == "["
    while (key := tokens.pop()) != "]":
        assert key.isidentifier(), key
        assert tokens.pop() == "="
        found[key] = _plain(tokens.pop())
    return found


def _plain(value: str) -> str:
    """Text of a value, as Graphviz draws it in a label."""
    if not value.startswith('"'):
        assert value.isalnum() or value.replace(".", "").isdigit(), value
        return value
    escapes = {"n": "\n", '"': '"', "\\": "\\"}
    text = re.sub(r"\\(.)", lambda found: escapes[found[1]], value[1:-1])
    assert not re.search(r"&(?!amp;)", text), text
    return text.replace("&amp;", "&")
