"""A plan as a short card of HTML, for a notebook's cell."""

from __future__ import annotations

import html

from partitioner.foundations import units
from partitioner.report.measured import Comparison
from partitioner.report.page.data import headline
from partitioner.report.page.page import filled
from partitioner.report.planned import Planned

#: Letters of a text from the model, and devices and spaces, that the card shows.
MOST_LETTERS = 400
MOST_ROWS = 8


def card(result: Planned, comparison: Comparison[Planned] | None = None) -> str:
    """The verdict, figures, spaces and loads: under 20 kB, no script, the notebook's colours."""
    head = headline(result, comparison=comparison)
    figures, measured_s, delivery = result.evaluation, head["step_measured_s"], result.delivery
    step_s, communication, gain = head["step_s"], head["communication"], head["gain"]
    if delivery is not None and head["delivered"] is not None:  # as in the verdict
        step_s, communication = delivery.step_s, head["delivered"]["communication"]
    step = "Step time" if head["turn"] == "step" else "Time between requests"
    tiles = [
        (
            f"{step}, {'predicted' if measured_s is None else 'measured'}",
            units.seconds(step_s if measured_s is None else measured_s),
        ),
        (f"Gain, {head['gain_of']}", "-" if gain is None else units.times(gain)),
        ("Communication", units.share(communication)),
        ("Memory free", units.share(max(head["headroom"], 0.0))),
        ("Devices", f"{head['devices_used']} of {head['devices']}"),
    ]
    most = max(figures.load_s.values(), default=0.0) or 1.0
    devices = sorted(figures.load_s)[:MOST_ROWS]
    rows = [
        _row(
            f"{device}: {result.cluster.devices[device].name}",
            figures.load_s[device] / most,
            f"{units.seconds(figures.load_s[device])}, {units.size(figures.needed_bytes[device])}",
        )
        for device in devices
    ]
    if len(figures.load_s) > len(devices):
        rows.append(_row(f"{len(figures.load_s) - len(devices)} more devices", 0.0, ""))
    spaces = [
        f"{space['space']} {units.cost(head['objective'], space['cost'])}"
        + (" (chosen)" if space["chosen"] else "")
        for space in head["spaces"][:MOST_ROWS]
        if space["cost"] is not None
    ]
    texts = {
        "name": result.name,
        **{name: head[name] for name in ("cluster", "verdict", "limit", "instead")},
        "searched": f"Searched: {', '.join(spaces)}." if len(spaces) > 1 else "",
    }
    parts = {"tiles": "".join(_tile(*tile) for tile in tiles), "devices": "".join(rows)}
    return filled("card.html", {name: _safe(text) for name, text in texts.items()} | parts)


def _tile(name: str, value: str) -> str:
    return filled("card-tile.html", {"name": _safe(name), "value": _safe(value)})


def _row(name: str, share: float, text: str) -> str:
    slots = {"name": _safe(name), "width": f"{100 * share:.1f}", "text": _safe(text)}
    return filled("card-row.html", slots)


def _safe(text: str) -> str:
    """A text without markup, unseen characters or more than `MOST_LETTERS`."""
    seen = "".join(letter if letter.isprintable() else "\ufffd" for letter in text)
    short = seen if len(seen) <= MOST_LETTERS else f"{seen[:MOST_LETTERS]}…"
    return html.escape(short, quote=True)
