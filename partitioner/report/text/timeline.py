"""A step of a plan in stages as lines of text: the passes of each lane over time."""

from __future__ import annotations

from partitioner.cost_model.schedule.readings import LETTERS, Pass, passes
from partitioner.cost_model.schedule.simulate import Event, simulate
from partitioner.cost_model.schedule.task_list import Schedule
from partitioner.foundations import units
from partitioner.ir.mesh import numbers

WIDTH = 120  #: Columns of a step.
_IDLE, _BUSY = ".", "="
_OTHER = f"{_BUSY} messages, {_IDLE} bubbles"


def step_text(schedule: Schedule) -> list[str]:
    """A line for the first device of each lane; none for a plan without stages.

    ``F2----`` is the forward pass of micro-batch 2, ``==`` a message; dots are bubbles.
    """
    if schedule.order is None:
        return []
    timeline = simulate(schedule)
    end_s = timeline.makespan_s
    if not end_s:
        return []
    boxes = passes(schedule, timeline)
    names = [f"devices {numbers(lane)}" for lane in schedule.order.lanes]
    wide = max(map(len, names))
    lines = [
        f"one step of {units.seconds(end_s)}: F forward, B backward, W weight gradients; {_OTHER}"
    ]
    for name, lane in zip(names, schedule.order.lanes, strict=True):
        device = lane[0]
        first = [box for box in boxes if box.device == device]
        sent = [e for e in timeline.events if e.device == device and e.kind == "comm"]
        cells = [_IDLE] * WIDTH
        parts: list[Pass | Event] = [*sent, *first]
        for part in parts:
            start, stop = (round(WIDTH * t / end_s) for t in (part.start_s, part.end_s))
            width = stop - start
            if isinstance(part, Event):
                cells[start:stop] = _BUSY * width
                continue
            short = LETTERS.get(part.part, str(part.part))
            label = part.label if len(part.label) <= width else short
            cells[start:stop] = label.ljust(width, "-")[:width]
        lines.append(f"{name.ljust(wide)}  {''.join(cells)}")
    return lines
