"""Orders of published schedules for a chain of stages, each lane in closed form."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence

from partitioner.ir.pipeline.actions import Action, ActionKind

_F, _B = ActionKind.FORWARD, ActionKind.FULL_BACKWARD
_I, _W = ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT

#: Phases of a lane: how often each is run, and its words: a chunk and a kind ("0F"), or "W", the
#: W of the oldest I without one.
_Phases = Sequence[tuple[int, str]]


def interleaved(lanes: int, chunks: int, micro_batches: int) -> tuple[tuple[Action, ...], ...]:
    """Interleaved 1F1B (arXiv:2104.04473, section 2.2), stage s on lane s mod `lanes`.

    A lane runs a round of micro-batches through its first stage (chunk), then the same round
    through its second, and so on; backward from the last chunk to the first.
    """
    orders = []
    for lane in range(lanes):
        forward, backward = _round_trip(lane, lanes, chunks, micro_batches, _B)
        ahead = (chunks - 1) * round_size(lanes, micro_batches) + 2 * (lanes - 1 - lane)
        ahead = min(ahead, len(forward))
        pairs = zip(forward[ahead:], backward, strict=False)
        paired = [action for pair in pairs for action in pair]
        orders.append((*forward[:ahead], *paired, *backward[len(forward) - ahead :]))
    return tuple(orders)


def zero_bubble(lanes: int, chunks: int, micro_batches: int) -> tuple[tuple[Action, ...], ...]:
    """ZB-H1 (arXiv:2401.10241, section 3.1), stage s on lane s mod `lanes`.

    As 1F1B, but the backward pass is split: lane r defers its W by r micro-batches, so that the
    last lanes fill the end with them. Each lane holds as much as the first lane of 1F1B.
    """
    orders = []
    for lane in range(lanes):
        forward, backward = _round_trip(lane, lanes, chunks, micro_batches, _I)
        weights = [Action(action.stage, _W, action.micro_batch) for action in backward]
        ahead = (chunks - 1) * round_size(lanes, micro_batches) + lanes - 1 - lane
        ahead = min(ahead, len(forward))
        order = forward[:ahead]
        for step, action in enumerate(backward):
            order += forward[ahead + step : ahead + step + 1]
            order.append(action)
            order += weights[step - lane : step - lane + 1] if step >= lane else []
        orders.append((*order, *weights[max(0, len(backward) - lane) :]))
    return tuple(orders)


def zbv(lanes: int, micro_batches: int) -> tuple[tuple[Action, ...], ...]:
    """ZB-V (arXiv:2401.10241, section 6): lane r runs stages r and 2 `lanes` - 1 - r.

    Fewer than 2 `lanes` - 1 micro-batches take the order of as many, without those that are not.
    """
    n = max(2 * lanes - 1, micro_batches)
    orders = []
    for r in range(lanes):
        phases = (
            (2 * (lanes - r) - 1, "0F"),
            (r, "1F 0F"),
            (lanes - r, "1F 1I 1W"),
            (n - 2 * lanes + r + 1, "0F 0I 0W 1F 1I 1W"),
            (lanes - r - 1, "0I 0W 1F 1I 1W"),
            (r, "0I 1I"),
            (lanes - r, "0I 0W"),
            (r, "1W"),
            (r, "0W"),
        )
        order = _spell(phases, (r, 2 * lanes - 1 - r))
        orders.append(tuple(action for action in order if action.micro_batch < micro_batches))
    return tuple(orders)


def dualpipev(lanes: int, micro_batches: int) -> tuple[tuple[Action, ...], ...]:
    """DualPipeV (github.com/deepseek-ai/DualPipe): lane r runs stages r and 2 `lanes` - 1 - r.

    Where the source overlaps a forward with a backward pass, the forward pass stands first.
    """
    orders = []
    for r in range(lanes):
        rest = lanes - r - 1
        phases = (
            (2 * rest, "0F"),
            (r + 1, "0F 1F"),
            (rest, "1I W 1F"),
            (micro_batches - 2 * lanes + r + 1, "0F 1B 1F 0B"),
            (rest, "1B 1F 0B"),
            # r + 1 backward passes as a whole, then as many in halves, of chunks 1 and 0 by turns.
            ((r + 1) // 2, "1B 0B"),
            ((r + 1) % 2, "1B 0I"),
            ((r + 1) // 2, "1I 0I"),
            (rest, "W 0I"),
            (r + 1, "W"),
        )
        orders.append(_spell(phases, (r, 2 * lanes - 1 - r)))
    return tuple(orders)


def round_size(lanes: int, micro_batches: int) -> int:
    """Micro-batches of a round: they pass a chunk one after the other (all, or about `lanes`)."""
    return micro_batches // rounds(lanes, micro_batches)


def rounds(lanes: int, micro_batches: int) -> int:
    """Number of rounds."""
    return max(1, micro_batches // lanes)


def _round_trip(
    lane: int, lanes: int, chunks: int, micro_batches: int, backward: ActionKind
) -> tuple[list[Action], list[Action]]:
    size = round_size(lanes, micro_batches)
    steps = [
        (chunk, m)
        for start in range(0, micro_batches, size)
        for chunk in range(chunks)
        for m in range(start, min(start + size, micro_batches))
    ]
    return (
        [Action(chunk * lanes + lane, _F, m) for chunk, m in steps],
        [Action((chunks - 1 - chunk) * lanes + lane, backward, m) for chunk, m in steps],
    )


def _spell(phases: _Phases, stage_of: tuple[int, int]) -> tuple[Action, ...]:
    """The actions that phases stand for; each chunk and kind counts its own micro-batches."""
    count: dict[tuple[int, ActionKind], int] = defaultdict(int)
    pending: deque[Action] = deque()
    order = []
    for times, words in phases:
        for word in words.split() * times:
            if word == "W":
                halved = pending.popleft()
                order.append(Action(halved.stage, _W, halved.micro_batch))
                continue
            stage, kind = stage_of[int(word[0])], ActionKind(word[1])
            counted = _I if kind is _B else kind
            action = Action(stage, kind, count[stage, counted])
            count[stage, counted] += 1
            order.append(action)
            if kind is _I:
                pending.append(action)
    return tuple(order)
