"""Messages leave while the next run goes on, and no order of ranks waits for itself."""

import itertools
from collections.abc import Mapping, Sequence

import pytest

from partitioner.ir.messages import Group, Link, ends_of_messages
from partitioner.ir.phases import Part, RunOrder
from partitioner.ir.pipeline.generate import pipeline_schedule

CHAINS = {
    "forward": (0, 1, 2, 3),
    "gpipe": (0, 1, 2, 3),
    "1f1b": (0, 1, 2, 3),
    "zb1": (0, 1, 2, 3),
    "interleaved": (0, 1, 0, 1),
    "zbv": (0, 1, 1, 0),
    "dualpipev": (0, 1, 1, 0),
}


def order_of(name: str, micro_batches: int = 8) -> tuple[RunOrder, list[Link]]:
    """An order of a chain of stages, one rank a lane, and what its passes send each other."""
    lane_of = CHAINS[name]
    table = pipeline_schedule(name, lane_of, micro_batches)
    order = RunOrder(table, tuple((lane,) for lane in range(1 + max(lane_of))))
    number, links = order.phases.number, list[Link]()
    for a, b in itertools.pairwise(range(len(lane_of))):
        links.append((number(Part.FORWARD, a), number(Part.FORWARD, b), lane_of[a], lane_of[b]))
        if table.trains:
            back = number(Part.BACKWARD, b), number(Part.BACKWARD, a)
            links.append((*back, lane_of[b], lane_of[a]))
    last = number(Part.FORWARD, len(lane_of) - 1), number(Part.DELIVER)
    links += [(*last, lane_of[-1], rank) for rank in range(1 + max(lane_of))]
    return order, [link for link in links if link[2] != link[3]]


def finished(
    order: RunOrder,
    links: Sequence[Link],
    ends: Mapping[int, Mapping[tuple[Link, int], int]],
    groups: Sequence[Group] = (),
) -> bool:
    """Test whether ranks that wait for what they sent at these places all come to their ends.

    A message leaves only when the other rank has begun the run before that which reads it; ranks of
    a group begin a run of its phase together.
    """
    runs = {rank: order.runs(rank) for rank in ends}
    done, begun = dict.fromkeys(runs, 0), dict.fromkeys(runs, -1)

    def has_left(link: Link, micro_batch: int) -> bool:
        return begun[link[3]] >= runs[link[3]].index((link[1], micro_batch)) - 1

    def is_ready(rank: int) -> bool:
        place = done[rank]
        if not all(has_left(*message) for message, end in ends[rank].items() if end == place):
            return False
        begun[rank] = max(begun[rank], place)  # gets ready to receive, then waits
        phase, micro_batch = runs[rank][place]
        return all(
            done[link[2]] > runs[link[2]].index((link[0], micro_batch))
            for link in links
            if link[1] == phase and link[3] == rank
        )

    left = True
    while left:
        left = False
        for rank, of in runs.items():
            while done[rank] < len(of):
                run = of[done[rank]]
                met = next((ranks for at, ranks in groups if at == run[0] and rank in ranks), ())
                others = [one for one in met if one != rank]
                is_met = all(runs[one][done[one] : done[one] + 1] == (run,) for one in others)
                ready = [is_ready(one) for one in (rank, *others)]
                if not (is_met and all(ready)):
                    break
                for one in (rank, *others):
                    done[one] += 1
                left = True
    return done == {rank: len(of) for rank, of in runs.items()}


@pytest.mark.parametrize("name", CHAINS)
def test_ranks_that_wait_for_their_messages_finish(name: str) -> None:
    order, links = order_of(name)
    ranks = range(len(order.lanes))
    assert finished(order, links, {rank: ends_of_messages(order, links, rank) for rank in ranks})


def test_ranks_that_meet_within_a_phase_wait_for_no_message_behind_it() -> None:
    """Whatever they meet in, as a node that sends rows: else these three would wait for ever."""
    order = RunOrder(pipeline_schedule("gpipe", (0, 1), 6), ((0, 1), (2,)))
    first, second = (order.phases.number(Part.FORWARD, stage) for stage in (0, 1))
    back = order.phases.number(Part.BACKWARD, 0)
    back_second = order.phases.number(Part.BACKWARD, 1)
    links = [(first, second, 0, 2), (first, back, 1, 0), (back_second, back, 2, 1)]
    groups = [(first, (0, 1)), (back, (0, 1))]
    alone, joined = (
        {rank: ends_of_messages(order, links, rank, known) for rank in range(3)}
        for known in ((), groups)
    )
    assert not finished(order, links, alone, groups)
    assert finished(order, links, joined, groups)


@pytest.mark.parametrize("name", ["forward", "gpipe", "1f1b"])
def test_a_message_is_held_beside_one_run(name: str) -> None:
    order, links = order_of(name)
    deliver = order.phases.number(Part.DELIVER)
    links = [link for link in links if link[1] != deliver]
    for rank in range(len(order.lanes)):
        runs = order.runs(rank)
        for (link, micro_batch), end in ends_of_messages(order, links, rank).items():
            place = runs.index((link[0], micro_batch))
            assert end == place + 2, (rank, link, micro_batch)


def test_results_are_held_until_the_other_rank_delivers() -> None:
    """The first rank gets ready for the first results when it begins its last forward pass."""
    order, links = order_of("forward")
    deliver = order.phases.number(Part.DELIVER)
    (link,) = (link for link in links if link[1] == deliver and link[3] == 0)
    ends = [ends_of_messages(order, links, 3)[link, m] for m in range(8)]
    assert ends == [6, 7, 8, 9, 10, 11, 12, 13]


def test_a_rank_that_waits_for_itself_waits_for_no_message() -> None:
    order, links = order_of("forward", 2)
    first = links[0]
    turned = (first[1], first[0], first[3], first[2])  # each waits for the other
    ends = ends_of_messages(order, [*links, turned], 0)
    assert ends[first, 1] == len(order.runs(0))


def test_a_rank_is_no_further_than_those_that_it_communicates_with() -> None:
    """Rank 1 gets nothing before it delivers, and is as late as rank 2, with which it sums."""
    table = pipeline_schedule("forward", (0, 1), 6)
    order = RunOrder(table, ((0,), (1, 2)))
    first, second = (order.phases.number(Part.FORWARD, stage) for stage in (0, 1))
    deliver = order.phases.number(Part.DELIVER)
    links = [(first, second, 0, 2), (first, deliver, 0, 1)]
    alone, joined = (
        ends_of_messages(order, links, 0, groups) for groups in ((), [(second, (1, 2))])
    )
    assert alone[links[0], 0] == joined[links[0], 0] == 3
    assert alone[links[1], 0] == 7
    assert joined[links[1], 0] == 8
