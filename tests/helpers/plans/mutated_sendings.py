"""Rank programs in which one node, inside of which ranks send each other rows, is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from helpers.plans.mutated_programs import Mutant
from partitioner.ir.graph import AMONG, Node
from partitioner.ir.program import Compute, Programs, RankProgram

Change = Callable[[Node, int], Node | None]  #: The node of a rank, or None where it stays.


def sending_mutants(programs: Programs) -> Iterator[Mutant]:
    """Every mutation of every node of all ranks of a group, and of one rank alone."""
    origins = dict.fromkeys(step.origin for rank in programs.ranks for step in _sending(rank))
    groups = dict.fromkeys(_group(step.node) for rank in programs.ranks for step in _sending(rank))
    regrouped = {rank: of for of in zip(*groups, strict=True) for rank in of}
    changes: list[tuple[str, str, Change]] = [
        ("dropped", "each rank for its own rows", _dropped),
        ("group", "among others", lambda node, rank: _among(node, regrouped[rank])),
        ("group", "without the last rank", _left_by_last),
        ("swapped", "owners", lambda node, _: _with(node, owners=_turned(node.attrs["owners"]))),
        ("swapped", "members", lambda node, _: _with(node, member=_next_member(node))),
        ("region", "rows", lambda node, rank: _beside(node, rank, "token_starts")),
        ("region", "owners", lambda node, rank: _beside(node, rank, "starts")),
        ("region", "all rows", lambda node, _: _with(node, all_tokens=_more(node, "all_tokens"))),
    ]
    for origin in origins:
        for kind, what, change in changes:
            if what != "among others" or len(groups) > 1:
                mutated = partial(_changed, programs, origin, change)
                yield Mutant(kind, f"{origin}: {what}", mutated)


def _sending(program: RankProgram) -> list[Compute]:
    computes = (step for step in program.steps if isinstance(step, Compute))
    return [step for step in computes if AMONG in step.node.attrs]


def _group(node: Node) -> tuple[int, ...]:
    ranks = node.attrs[AMONG]
    assert isinstance(ranks, tuple)
    return tuple(map(int, ranks))


def _changed(programs: Programs, origin: str, change: Change) -> Programs:
    def changed(program: RankProgram) -> RankProgram:
        own = [id(step) for step in _sending(program) if step.origin == origin]
        return replace(
            program,
            steps=tuple(
                replace(step, node=change(step.node, program.rank) or step.node)
                if isinstance(step, Compute) and id(step) in own
                else step
                for step in program.steps
            ),
        )

    return replace(programs, ranks=tuple(map(changed, programs.ranks)))


def _with(node: Node, **attrs: object) -> Node:
    return replace(node, attrs={**node.attrs, **attrs})  # type: ignore[dict-item]


def _dropped(node: Node, _: int) -> Node:
    sent = {AMONG, "member", "owners", "token_starts", "token_lengths", "all_tokens"}
    attrs = {name: value for name, value in node.attrs.items() if name not in sent}
    return replace(node, op=node.op.removesuffix("_sent"), attrs=attrs)


def _among(node: Node, group: tuple[int, ...]) -> Node:
    return _with(node, **{AMONG: group})


def _left_by_last(node: Node, rank: int) -> Node:
    ranks = _group(node)
    return _among(node, ranks[-1:] if rank == ranks[-1] else ranks[:-1])


def _turned(owners: object) -> tuple[int, ...]:
    assert isinstance(owners, tuple)
    return (*owners[1:], owners[0])


def _next_member(node: Node) -> int:
    return (_group(node).index(_group(node)[int(str(node.attrs["member"]))]) + 1) % len(
        _group(node)
    )


def _beside(node: Node, rank: int, name: str) -> Node | None:
    """The node of the last rank of a group with the parts of the one before it."""
    starts = node.attrs[name]
    assert isinstance(starts, tuple)
    is_last = rank == _group(node)[-1]
    return _with(node, **{name: tuple(max(int(at) - 1, 0) for at in starts)}) if is_last else None


def _more(node: Node, name: str) -> int:
    return int(str(node.attrs[name])) + 1
