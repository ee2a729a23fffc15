"""A plan as a short card of HTML, for a notebook's cell."""

from __future__ import annotations

import html

from partitioner.foundations import units
from partitioner.report.measured import Comparison
from partitioner.report.page.data import headline
from partitioner.report.planned import Planned

#: Letters of a text from the model, and devices and spaces, that the card shows.
MOST_LETTERS = 200
MOST_ROWS = 8


def card(result: Planned, comparison: Comparison[Planned] | None = None) -> str:
    """The verdict, figures, spaces and loads: under 20 kB, no script, the notebook's colours."""
    head = headline(result, comparison=comparison)
    figures, measured_s = result.evaluation, head["step_measured_s"]
    step = "Step time" if head["turn"] == "step" else "Time between requests"
    tiles = [
        (
            f"{step}, {'predicted' if measured_s is None else 'measured'}",
            units.seconds(head["step_s"] if measured_s is None else measured_s),
        ),
        ("Speed-up", "-" if head["speedup"] is None else units.times(head["speedup"])),
        ("Communication", units.share(head["communication"])),
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
    return "".join(
        (
            (
                '<div style="font-family:system-ui,sans-serif;line-height:1.4;max-width:760px;'
                'border:1px solid #8888;border-radius:8px;padding:10px 14px">'
            ),
            (
                f'<div style="opacity:.75"><bdi>{_safe(result.name)}</bdi> on '
                f"{_safe(head['cluster'])}, predicted</div>"
            ),
            f'<div style="font-size:17px;font-weight:650">{_safe(head["verdict"])}</div>',
            '<div style="display:flex;flex-wrap:wrap;gap:6px 22px;margin:6px 0">',
            *(
                f'<div><small style="opacity:.75">{_safe(name)}</small><br>'
                f"<b>{_safe(value)}</b></div>"
                for name, value in tiles
            ),
            "</div>",
            f"<div>{_safe(head['limit'])}</div>",
            f"<div>{_safe(head['worth'])}</div>",
            f"<div>Searched: {_safe(', '.join(spaces))}.</div>" if len(spaces) > 1 else "",
            f'<div style="margin-top:6px">{"".join(rows)}</div>',
            (
                '<div style="opacity:.75;margin-top:6px">The whole page: '
                "<code>.report(&quot;report.html&quot;)</code></div></div>"
            ),
        )
    )


def _row(name: str, share: float, text: str) -> str:
    return (
        '<div style="display:grid;grid-template-columns:150px 1fr 190px;gap:10px">'
        f"<span>{_safe(name)}</span><span><span style="
        f'"display:inline-block;height:9px;background:#0072b2;width:{100 * share:.1f}%"></span>'
        f"</span><span>{_safe(text)}</span></div>"
    )


def _safe(text: str) -> str:
    """A text without markup, unseen characters or more than `MOST_LETTERS`."""
    seen = "".join(letter if letter.isprintable() else "\ufffd" for letter in text)
    short = seen if len(seen) <= MOST_LETTERS else f"{seen[:MOST_LETTERS]}…"
    return html.escape(short, quote=True)
