"""What PuLP's interface to HiGHS costs beside arrays, by the linear and integer programs of plans.

    OMP_NUM_THREADS=1 python tests/benchmarks/programs.py [--only WORD]

Each program is solved both ways, three times, with the garbage collector off as in a search; the
results must be equal. Seconds are of one processor, the least of the three; planning includes the
reading of the model and one of these solutions a program.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1]))

import plan_digests

from partitioner.foundations.no_gc import no_collection
from partitioner.solver.milp import engines, formulation, highs
from partitioner.solver.milp.program import MilpResult

T = TypeVar("T")
_2X2: Mapping[str, Any] = {"devices": 4, "mesh": {"dp": 2, "tp": 2}}
_TIGHT: Mapping[str, Any] = {"devices": 2, "memory": 900_000, "training": True}
#: Name, model, and the options of `compile`.
REQUESTS: tuple[plan_digests.Request, ...] = (
    ("ResNet-50, 2", plan_digests._onnx("resnet50"), {"devices": 2}),
    ("ResNet-50, 2, tight", plan_digests._onnx("resnet50"), {"devices": 2, "memory": "60MiB"}),
    ("ShuffleNet, 4, inter", plan_digests._onnx("shufflenet"), {"devices": 4, "strategy": "inter"}),
    ("Llama, dp=2 tp=2", plan_digests._onnx("llama"), _2X2),
    ("Llama, 4, inter", plan_digests._onnx("llama"), {"devices": 4, "strategy": "inter"}),
    ("BERT, 2", plan_digests._named("bert"), {"devices": 2}),
    ("T5, 2", plan_digests._named("t5"), {"devices": 2}),
    ("GPT trains, dp=2 tp=2", plan_digests._gpt(2), {**_2X2, "training": True}),
    ("GPT trains, 2, tight", plan_digests._gpt(2), _TIGHT),
)  # fmt: skip


def timed(work: Callable[[], T]) -> tuple[float, T]:
    start = time.process_time()
    result = work()
    return time.process_time() - start, result


class Clock:
    """Seconds of a request's programs, by what they are spent on."""

    def __init__(self) -> None:
        self.formulation_s = self.pulp_s = self.arrays_s = self.extra_s = 0.0
        self.sizes: list[int] = []

    def formulate(self, *arguments: Any) -> formulation.Formulation:
        seconds, form = timed(lambda: formulate(*arguments))
        self.formulation_s += seconds
        return form

    def solve(self, milp: Any, *arguments: Any) -> MilpResult:
        runs: dict[int, list[tuple[float, MilpResult]]] = {len(milp.cost): [], -1: []}
        with no_collection():
            for most in [*runs] * 3:
                with mock.patch.object(highs, "MOST_PULP_COLUMNS", most):
                    runs[most].append(timed(lambda: highs.solve_with_highs(milp, *arguments)))
        pulp, arrays = runs.values()
        assert {repr(result) for _, result in pulp} == {repr(result) for _, result in arrays}
        least_s = [min(seconds for seconds, _ in each) for each in (pulp, arrays)]
        self.pulp_s += least_s[0]
        self.arrays_s += least_s[1]
        self.extra_s += sum(seconds for seconds, _ in (*pulp, *arrays)) - least_s[0]
        self.sizes.append(len(milp.cost))
        return pulp[0][1]


formulate = formulation._formulated


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="requests whose name has this word")
    only = parser.parse_args().only
    head = ("request", "programs", "variables", "formulation", "PuLP", "arrays", "planning")
    print("| " + " | ".join(head) + " |\n|" + "---|" * len(head))
    for request in REQUESTS:
        if only not in request[0]:
            continue
        clock = Clock()
        with (
            mock.patch.object(engines, "solve_with_highs", clock.solve),
            mock.patch.object(formulation, "_formulated", clock.formulate),
        ):
            seconds, record = timed(lambda request=request: plan_digests.planned(request))  # type: ignore[misc]
        assert "digest" in record, record
        row = (clock.formulation_s, clock.pulp_s, clock.arrays_s, seconds - clock.extra_s)
        cells = (request[0], f"{len(clock.sizes)}", f"{max(clock.sizes, default=0):,}")
        print("| " + " | ".join((*cells, *(f"{s:.3f}" for s in row))) + " |", flush=True)


if __name__ == "__main__":
    main()
