"""Cut an order of positions into contiguous stages, each on one of several options.

>>> import numpy as np
>>> from partitioner.solver.stages import Pool, StageOption, StageProblem, cut_stages
>>> work = np.array([0.0, 4.0, 5.0, 8.0])  # of the positions before each: 4, 1 and 3 seconds
>>> load = (work[None, :] - work[:, None]).clip(0)[None]
>>> one = StageOption("one", 1, load, load, 0 * load)
>>> two = StageOption("two", 2, load / 2, load / 2, 0 * load)
>>> cut = cut_stages(StageProblem((one, two), (Pool(devices=3),)))
>>> [(s.start, s.stop, s.option) for s in cut.stages], cut.load_s, cut.bound_s, cut.status
([(0, 2, 1), (2, 3, 0)], 3.0, 3.0, 'optimal')
"""

from partitioner.solver.stages.cut import cut_stages, find_cut
from partitioner.solver.stages.graph import StageGraph
from partitioner.solver.stages.graph_search import StagePlan, plan_stages
from partitioner.solver.stages.knapsack import Ways, pack
from partitioner.solver.stages.model import (
    Cut,
    CutOutcome,
    Pool,
    Stage,
    StageOption,
    StageProblem,
    evaluate_cut,
    flights,
)

__all__ = [
    "Cut",
    "CutOutcome",
    "Pool",
    "Stage",
    "StageGraph",
    "StageOption",
    "StagePlan",
    "StageProblem",
    "Ways",
    "cut_stages",
    "evaluate_cut",
    "find_cut",
    "flights",
    "pack",
    "plan_stages",
]
