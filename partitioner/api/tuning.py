"""`tune`: the best plans of a search are run on this machine, and the measured best is kept.

A plan is written as rank files, and each round starts its ranks anew: two starts of the same
processes differ by more than two steps of one start do, so a median over rounds counts both.
"""

from __future__ import annotations

import math
import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from partitioner.api.compiled.base import Compiled, Ranks
from partitioner.api.options import processes
from partitioner.backends.launch import LocalJob, LocalRun
from partitioner.cost_model.cluster.resolve import cpu_fingerprint
from partitioner.cost_model.cluster.topology import Cluster
from partitioner.ir.errors import OptionError
from partitioner.ir.plan import Trial
from partitioner.search.outcome import Candidate, Outcome, best_of
from partitioner.search.request import Request, Say

#: Rounds in which each plan is run once, after one that tells how many requests a run takes. They
#: end after the fewest once each run of one plan was faster than all runs of the others.
LEAST_ROUNDS, ROUNDS = 3, 5
#: Fewest and most requests or steps of a run, and the seconds that it should take at least.
_LEAST, _MOST, _ENOUGH_S = 4, 200, 1.0

#: Makes a candidate's program.
Compile = Callable[[Candidate], Compiled]


def check_tunable(cluster: Cluster, *, is_module: bool) -> None:
    """Refuse a cluster whose plans cannot be run by processes of this machine."""
    if processes() > 1:
        raise OptionError("tune starts processes of its own: compile in one process, without it")
    profiles = {spec.profile for spec in cluster.devices}
    if all(one is not None and one.device == cpu_fingerprint() for one in profiles):
        cores = len(os.sched_getaffinity(0))
        if len(cluster) <= cores:
            return
        raise OptionError(
            f"tune runs plans here: cluster {cluster.name!r} has {len(cluster)} devices, this "
            f"machine {cores} cores"
        )
    if cluster.name != "local":
        raise OptionError(
            f"tune runs plans on this machine, and cluster {cluster.name!r} is not known to be it: "
            "give cluster local"
        )
    if is_module:
        raise OptionError(
            "tune runs PyTorch modules on processors only, and cluster 'local' is this machine's "
            "GPUs: leave tune out"
        )
    from partitioner.backends.onnx.rank import has_gpus

    if not has_gpus(len(cluster)):
        raise OptionError(
            "tune runs plans on this machine, and its ONNX Runtime does not run on GPUs, of which "
            "cluster 'local' is: install onnxruntime-gpu, or leave tune out"
        )


def tuned(
    outcome: Outcome, compiled: Compile, request: Request, cluster: Cluster, say: Say
) -> Outcome:
    """The outcome with the plan, of as many as the request's `tune`, that runs fastest here."""
    candidates = worth_a_run(outcome, request, len(cluster))
    in_flight = 1 if request.objective == "latency" else _LEAST
    with tempfile.TemporaryDirectory(prefix="partitioner-tune-") as name:
        runs: list[Callable[[int], LocalRun]] = []
        for index, candidate in enumerate(candidates):
            say(f"writing plan {index + 1} of {len(candidates)}: {candidate.space}")
            folder, ranks = Path(name) / str(index), compiled(candidate).ranks
            folder.mkdir()
            ranks.write(folder)
            runs.append(partial(_run, ranks, folder))
        rounds = _rounds(runs, in_flight, say)
    quartiles = [statistics.quantiles(seconds, n=4) for seconds in rounds]
    medians = [statistics.median(seconds) for seconds in rounds]
    best = medians.index(min(medians))
    trials = tuple(
        Trial(
            f"{candidate.plan.kind} plan of {candidate.space}",
            candidate.cost(request.objective),
            median,
            (high - low) / 2 / median if median else 0.0,  # half the distance of the quartiles
            index == best,
        )
        for index, (candidate, median, (low, _, high)) in enumerate(
            zip(candidates, medians, quartiles, strict=True)
        )
    )
    return kept(outcome, candidates[best], trials, request.gap)


def _run(ranks: Ranks, folder: Path, count: int) -> LocalRun:
    return ranks.run_written(folder, LocalJob(requests=count))


def _rounds(
    runs: Sequence[Callable[[int], LocalRun]], in_flight: int, say: Say
) -> Sequence[Sequence[float]]:
    """Seconds of a request or step of each plan in each round, in which every plan is run once.

    A run has at least `in_flight` requests; with 1 each run has one.
    """
    counts = []
    say(f"running {len(runs)} plans, to warm up")
    for run in runs:
        one_s = run(in_flight).seconds / in_flight
        enough = math.ceil(_ENOUGH_S / one_s) if one_s else _MOST
        counts.append(in_flight if in_flight == 1 else min(_MOST, max(_LEAST, enough)))
    seconds: list[list[float]] = [[] for _ in runs]
    for number in range(1, ROUNDS + 1):
        say(f"running {len(runs)} plans, round {number} of {ROUNDS}")
        for of_plan, run, count in zip(seconds, runs, counts, strict=True):
            of_plan.append(run(count).seconds / count)
        best, *others = sorted(seconds, key=statistics.median)
        if number >= LEAST_ROUNDS and all(max(best) < min(other) for other in others):
            break
    return seconds


def worth_a_run(outcome: Outcome, request: Request, devices: int) -> tuple[Candidate, ...]:
    """The best different plans of a search, at most `Request.tune`, the chosen one first.

    The best of each space go before second ones of a space.
    """
    left = list(outcome.candidates)
    ranked: list[Candidate] = []
    while left:
        best = best_of(left, request.objective, devices)
        left.remove(best)
        ranked.append(best)
    ranked.sort(key=lambda candidate: candidate.plan.digest != outcome.plan.digest)
    firsts: dict[str, Candidate] = {}
    different: dict[str, Candidate] = {}
    for candidate in ranked:
        different.setdefault(candidate.plan.digest, candidate)
    for candidate in different.values():
        firsts.setdefault(str(candidate.space), candidate)
    seconds = [one for one in different.values() if one not in firsts.values()]
    return (*firsts.values(), *seconds)[: request.tune]


def kept(outcome: Outcome, candidate: Candidate, trials: Sequence[Trial], gap: float) -> Outcome:
    """The outcome with the plan that was kept by measurement.

    Its certificate has the cost of that plan by the model, and the bound of the search: nothing
    more is proven of the plan than before it was run. Within the relative `gap` it is optimal.
    """
    certificate = outcome.plan.certificate
    assert certificate is not None
    if candidate.plan.digest == outcome.plan.digest:
        tried = replace(certificate, trials=tuple(trials))
        return replace(outcome, plan=replace(outcome.plan, certificate=tried))
    cost = candidate.cost(certificate.objective)
    bound = min(cost, certificate.bound)
    if not candidate.bounds_space:
        bound = min(bound, candidate.solution.bound)
    is_proven = cost - bound <= gap * cost
    ended = "optimal" if is_proven else "feasible"
    certificate = replace(
        certificate,
        cost=cost,
        bound=bound,
        status="time_limit" if certificate.status == "time_limit" and not is_proven else ended,
        strategy=candidate.plan.kind,
        solver=candidate.solution.solver,
        trials=tuple(trials),
    )
    return replace(
        outcome,
        graph=candidate.graph,
        plan=replace(candidate.plan, certificate=certificate),
        evaluation=candidate.evaluation,
        notes=candidate.notes,
    )
