"""Rank programs: the static check finds every fault that would hang or misread."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from partitioner.ir.exchange import Transfer
from partitioner.ir.graph import Node
from partitioner.ir.program import (
    Comm,
    CommKind,
    Compute,
    Output,
    Part,
    ProgramError,
    Programs,
    RankProgram,
)
from partitioner.ir.types import TensorType

KIND = TensorType.of("float32", (2,))
ALL = ((0, 2),)
SEND = Comm(
    3, CommKind.SEND, (0, 1), "a", "b", "float32", (Transfer(0, 1, (ALL,), (ALL,)),), why="relu"
)
REDUCE = Comm(5, CommKind.ALL_REDUCE, (0, 1), "a", "c", "float32", reduce="sum")

Change = Callable[[RankProgram], RankProgram]


def compute(source: str, target: str) -> Compute:
    return Compute(Node(target, "Relu", (source,), (target,)), "relu")


def program(rank: int, *steps: Compute | Comm, outputs: tuple[Output, ...] = ()) -> RankProgram:
    types = dict.fromkeys("xabcd", KIND)
    return RankProgram(rank, {"x": Part("x", None)}, {}, {}, types, steps, outputs)


def pair() -> tuple[RankProgram, RankProgram]:
    """Rank 0 sends to rank 1, then both reduce."""
    done = (Output("c", "y", None),)
    return (
        program(0, compute("x", "a"), SEND, REDUCE, outputs=done),
        program(1, compute("x", "a"), SEND, compute("b", "d"), REDUCE),
    )


def check(*ranks: RankProgram) -> None:
    Programs(ranks, {"x": KIND}, {"y": KIND}).check()


def edited(rank: int, change: Change) -> list[RankProgram]:
    return [change(p) if p.rank == rank else p for p in pair()]


def steps(*changed: Compute | Comm) -> Change:
    return lambda p: replace(p, steps=changed)


def test_sound_programs_pass() -> None:
    check(*pair())
    check()


def test_names_may_differ_between_ranks() -> None:
    renamed = replace(REDUCE, source="x", target="d")
    check(*edited(0, steps(compute("x", "a"), SEND, REDUCE)), program(2))
    check(program(0, compute("x", "a"), SEND, REDUCE), program(1, SEND, renamed))


@pytest.mark.parametrize(
    ("rank", "change", "message"),
    [
        (0, steps(compute("x", "a"), REDUCE, SEND), "rank 0: communication 3 after 5"),
        (0, steps(compute("x", "a"), SEND, SEND, REDUCE), "rank 0: communication 3 after 3"),
        (
            1,
            steps(compute("x", "a"), replace(SEND, why="other"), REDUCE),
            "communication 3 differs on rank 1",
        ),
        (
            1,
            steps(compute("x", "a"), SEND, replace(REDUCE, reduce="max")),
            "communication 5 differs on rank 1",
        ),
        (1, steps(compute("x", "a"), SEND), r"communication 5 wants ranks \(0, 1\), is on \[0\]"),
        (0, steps(SEND, REDUCE), "rank 0: 'a' is read before it is made"),
        (1, steps(compute("b", "d")), "rank 1: 'b' is read before it is made"),
        (0, steps(compute("x", "a"), compute("x", "a")), "rank 0: 'a' is made twice"),
        (0, steps(compute("x", "x")), "rank 0: 'x' is made twice"),
        (0, steps(compute("x", "z")), "rank 0: 'z' has no type"),
        (
            0,
            lambda p: replace(p, outputs=(Output("d", "y", None),)),
            "rank 0: output part 'd' is not made",
        ),
    ],
)
def test_a_fault_is_found(rank: int, change: Change, message: str) -> None:
    with pytest.raises(ProgramError, match=message):
        check(*edited(rank, change))


def test_a_rank_that_has_no_part_in_it_is_a_fault() -> None:
    with pytest.raises(ProgramError, match=r"wants ranks \(0, 1\), is on \[0, 1, 2\]"):
        check(*pair(), program(2, compute("x", "a"), REDUCE))


def test_constants_and_literals_are_there_from_the_start() -> None:
    made = program(0, compute("w", "a"), compute("s", "b"))
    with pytest.raises(ProgramError, match="'w' is read before"):
        check(made)
    check(replace(made, constants={"w": Part("w", None)}, literals={"s": np.zeros(2)}))


def test_who_sends_and_who_receives() -> None:
    assert (SEND.sources(), SEND.targets()) == ({0}, {1})
    assert REDUCE.sources() == REDUCE.targets() == {0, 1}
    assert pair()[1].comms == (SEND, REDUCE)


def sending(origin: str, *ranks: int) -> Compute:
    """A node whose ranks send each other rows."""
    node = Node(origin, "partitioner::experts", ("x",), (origin[-1],), {"ranks": ranks})
    return Compute(node, origin, phase=2)


FIRST, SECOND = sending("experts_a", 0, 1), sending("experts_b", 0, 1)


def test_nodes_that_send_rows_are_meetings() -> None:
    """A rank waits in them for what the others wait for, as in a collective of their phase."""
    passed_on = replace(SEND, target_phase=1)
    ranks = tuple(program(rank, FIRST, passed_on, REDUCE) for rank in range(2))
    programs = Programs(ranks, {"x": KIND}, {"y": KIND})
    programs.check()
    assert programs.meetings == {(2, (0, 1)), (0, (0, 1))}
    assert (FIRST.meeting, compute("x", "a").meeting) == ((0, 1), ())
    assert (REDUCE.meeting, passed_on.meeting) == ((0, 1), ())


SUM = replace(REDUCE, source="x")


@pytest.mark.parametrize(
    ("own", "others", "message"),
    [
        ((FIRST, SECOND), (SECOND, FIRST), r"ranks meet in \['experts_a', 'experts_b'\] and in"),
        ((FIRST, SUM), (SUM, FIRST), r"ranks meet in \['experts_a'\] and in what is around"),
        ((FIRST,), (), r"node 'experts_a' wants ranks \(0, 1\), is on \[0\]"),
    ],
)
def test_ranks_meet_in_nodes_that_send_rows_in_one_order(
    own: tuple[Compute | Comm, ...], others: tuple[Compute | Comm, ...], message: str
) -> None:
    with pytest.raises(ProgramError, match=message):
        check(program(0, *own), program(1, *others))
