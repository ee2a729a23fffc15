"""What a compilation says of itself: the facts as data (``--json``) and as a few lines of text."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import TYPE_CHECKING, Any

from partitioner import units
from partitioner.cost_model.evaluate import Evaluation
from partitioner.ir.plan import Certificate
from partitioner.report import split

if TYPE_CHECKING:
    from partitioner.search.outcome import Outcome


#: Gap below which a proven plan is called optimal, whatever gap was asked for.
OPTIMAL_GAP = 1e-4
#: Most peaks that the summary prints one by one.
MAX_PEAKS = 8


def facts(
    outcome: Outcome, single: Evaluation, devices: int, notes: tuple[str, ...], *, pinned: bool
) -> dict[str, Any]:
    """The facts of a plan, each figure beside one device's.

    Args:
        outcome: What the search gave.
        single: The whole model on one device.
        devices: Number of devices of the cluster.
        notes: What else a user should be told.
        pinned: Whether constraints were given.

    Seconds, bytes and FLOP shares are predictions of the cost model; infinite throughput (a free
    cluster) is given as null, since JSON has no infinity.
    """
    plan, got = outcome.plan, outcome.evaluation
    cert = plan.certificate
    assert cert is not None
    fewer = _fewer(outcome, single)
    return {
        "objective": cert.objective,
        "cost": cert.cost,
        "bound": cert.bound,
        "gap": cert.gap,
        "status": cert.status,
        "strategy": cert.strategy,
        "searched": cert.space,
        "solver": cert.solver,
        "seed": cert.seed,
        "folded": cert.folded,
        "latency_s": got.latency_s,
        "latency_s_one_device": single.latency_s,
        "throughput_per_s": units.finite(got.throughput_per_s),
        "throughput_per_s_one_device": units.finite(single.throughput_per_s),
        "devices": devices,
        "devices_used": got.devices_used,
        "sharded_flops_share": got.sharded_flops_share,
        **split.facts(plan),
        "pinned": pinned,
        "load_s": _by_device(got.load_s, devices),
        "peak_bytes": [got.held_bytes.get(device, 0) for device in range(devices)],
        "peak_bytes_one_device": max(peak.bytes for peak in single.peak.values()),
        "fewer_devices": fewer,
        "not_searched": {str(family): str(error) for family, error in outcome.failed},
        "notes": list(notes),
    }


def _by_device(values: Mapping[int, float], devices: int) -> list[float]:
    return [values.get(device, 0.0) for device in range(devices)]


def _fewer(outcome: Outcome, single: Evaluation) -> dict[str, Any] | None:
    """The best plan seen on fewer devices, if it beats the chosen one by the objective."""
    cert = outcome.plan.certificate
    assert cert is not None
    used = outcome.evaluation.devices_used
    rivals = [
        (plan.cost(cert.objective), plan.evaluation.devices_used) for plan in outcome.candidates
    ]
    if cert.status != "infeasible" and single.fits:
        rivals.append((single.cost(cert.objective), 1))
    better = [rival for rival in rivals if rival[1] < used and rival[0] < cert.cost]
    if not better:
        return None
    cost, count = min(better)
    return {"devices": count, "cost": cost, "cost_here": cert.cost}


def text(found: Mapping[str, Any], search_s: float | None = None) -> str:
    """The summary in lines for people.

    Args:
        found: The facts.
        search_s: Seconds of the search, if they are known.
    """
    lines = [
        _verdict(found),
        f"  latency     {_beside(found, 'latency_s', units.seconds)}",
        f"  throughput  {_beside(found, 'throughput_per_s', units.per_second)}",
        f"  peak memory {_peaks(found)}",
        f"  split       {split.sentence(found)}",
        f"  search      {found['solver']}, {_searched(found['seed'], found['folded'], search_s)}",
    ]
    fewer, kind = found["fewer_devices"], found["objective"]
    if fewer:
        lines.append(
            f"  note: {_devices(fewer['devices'])} would do better by {kind}: "
            f"{units.cost(kind, fewer['cost'])} against {units.cost(kind, fewer['cost_here'])} here"
        )
    lines += [f"  note: {note}" for note in _without(found["not_searched"])]
    lines += [f"  note: {note}" for note in found["notes"]]
    return "\n".join(lines)


def _without(failed: Mapping[str, str]) -> list[str]:
    """Families without a plan, one line a reason."""
    by_reason: dict[str, list[str]] = {}
    for family, why in failed.items():
        by_reason.setdefault(why.removesuffix(f" in {family}"), []).append(family)
    return [f"no plan in {', '.join(some)}: {why}" for why, some in by_reason.items()]


def _devices(count: int) -> str:
    return f"{count} devices" if count > 1 else "one device"


def _verdict(found: Mapping[str, Any]) -> str:
    kind = found["objective"]
    return (
        f"{found['strategy']} plan on {found['devices_used']} of {found['devices']} devices: "
        f"{kind} cost {units.cost(kind, found['cost'])}, bound {units.cost(kind, found['bound'])}, "
        f"gap {units.share(found['gap'])}, {_status(found['status'], found['gap'])}"
    )


def _status(status: str, gap: float) -> str:
    """The status in words; "optimal" alone only where the bound is met."""
    if status == "optimal" and gap > OPTIMAL_GAP:
        return "within the gap asked for"
    return "stopped by the time limit" if status == "time_limit" else status


def _beside(found: Mapping[str, Any], key: str, show: Any) -> str:
    return f"{show(found[key])} (one device: {show(found[key + '_one_device'])})"


def _peaks(found: Mapping[str, Any]) -> str:
    """The peaks in order of device, equal neighbours counted; their range where that is long."""
    sizes = list(map(units.size, found["peak_bytes"]))
    runs = [(size, len(list(same))) for size, same in groupby(sizes)]
    if len(runs) > MAX_PEAKS:
        least, most = (units.size(end(found["peak_bytes"])) for end in (min, max))
        peaks = f"{least} to {most} on {len(sizes)} devices"
    else:
        peaks = ", ".join(f"{count} x {size}" if count > 1 else size for size, count in runs)
    return f"{peaks} (one device: {units.size(found['peak_bytes_one_device'])})"


def _searched(seed: int, folded: str, search_s: float | None) -> str:
    spent = "" if search_s is None else f", {units.seconds(search_s)}"
    return f"seed {seed}{spent}" + (f", folded: {folded}" if folded else "")


def certificate_line(cert: Certificate, search_s: float | None = None) -> str:
    """A stored certificate in one line.

    Args:
        cert: The certificate.
        search_s: Seconds of the search, if they are known.
    """
    return (
        f"{cert.strategy} plan by {cert.solver}: "
        f"{cert.objective} cost {units.cost(cert.objective, cert.cost)}, "
        f"bound {units.cost(cert.objective, cert.bound)}, gap {units.share(cert.gap)}, "
        f"{_status(cert.status, cert.gap)}, {_searched(cert.seed, cert.folded, search_s)}"
    )
