"""Cut an order of positions into contiguous stages, each on one of several options.

>>> import numpy as np
>>> from partitioner.solver.stages.cut import cut_stages
>>> from partitioner.solver.stages.model import Pool, StageOption, StageProblem
>>> work = np.array([0.0, 4.0, 5.0, 8.0])  # of the positions before each: 4, 1 and 3 seconds
>>> load = (work[None, :] - work[:, None]).clip(0)[None]
>>> one = StageOption(1, load, load, 0 * load)
>>> two = StageOption(2, load / 2, load / 2, 0 * load)
>>> cut = cut_stages(StageProblem((one, two), (Pool(devices=3),)))
>>> [(s.start, s.stop, s.option) for s in cut.stages], cut.load_s, cut.bound_s, cut.status
([(0, 2, 1), (2, 3, 0)], 3.0, 3.0, 'optimal')
"""
