"""Work for every device: from a plan that leaves devices idle to the nearest one that does not.

The best throughput of a small model may need fewer devices than were asked for. Who asks for four
parts gets four, and is told what fewer would do.
"""

from __future__ import annotations

from collections.abc import Sequence

from partitioner.solver import Outcome, Problem, evaluate_choices

#: Nodes that are tried for each idle device, those with the least load first.
MAX_TRIES = 200


def cover(problem: Problem, chosen: Sequence[int]) -> tuple[int, ...] | None:
    """Give each idle device one node, the one whose move costs least.

    Args:
        problem: What `chosen` is a plan of.
        chosen: One choice a node.

    Returns:
        A plan in which every device has work and memory suffices; None if there is none so near.
    """
    found = tuple(chosen)
    for device in range(problem.devices):
        if _loads(problem, found)[device] == 0:
            moved = _best_move(problem, found, device)
            if moved is None:
                return None
            found = moved
    return found


def _loads(problem: Problem, chosen: Sequence[int]) -> list[float]:
    """Seconds of each device's nodes, communications left out."""
    picked = [choices[pick] for choices, pick in zip(problem.nodes, chosen, strict=True)]
    return [sum(choice.load_s[device] for choice in picked) for device in range(problem.devices)]


def _best_move(problem: Problem, chosen: tuple[int, ...], device: int) -> tuple[int, ...] | None:
    busy = sum(load > 0 for load in _loads(problem, chosen))
    nodes = sorted(
        (choices[pick].load_s[d], node)
        for node, (choices, pick) in enumerate(zip(problem.nodes, chosen, strict=True))
        for d in range(problem.devices)
        if choices[pick].load_s[d] > 0
    )
    best: tuple[tuple[float, float], tuple[int, ...]] | None = None
    for _, node in nodes[:MAX_TRIES]:
        for pick, choice in enumerate(problem.nodes[node]):
            if choice.load_s[device] == 0:
                continue
            moved = (*chosen[:node], pick, *chosen[node + 1 :])
            outcome = evaluate_choices(problem, moved)
            if outcome.excess_bytes > 0 or sum(v > 0 for v in _loads(problem, moved)) <= busy:
                continue
            if best is None or _cost(outcome) < best[0]:
                best = (_cost(outcome), moved)
    return best[1] if best else None


def _cost(outcome: Outcome) -> tuple[float, float]:
    return outcome.step_s, sum(outcome.load_s)
