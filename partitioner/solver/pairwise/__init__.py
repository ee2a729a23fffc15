"""The intra-operator problem at scale: pairwise costs, live intervals, one memory limit.

>>> import numpy as np
>>> from partitioner.solver.pairwise.problem import Pairwise, evaluate
>>> from partitioner.solver.pairwise.solve import solve
>>> whole = lambda *values: np.array(values, dtype=np.int64)
>>> problem = Pairwise(
...     offsets=whole(0, 2, 4), costs=whole(5, 1, 6, 1), usages=whole(1, 3, 1, 3),
...     intervals=whole(0, 2, 1, 3).reshape(2, 2), edges=whole(0, 1).reshape(1, 2),
...     edge_offsets=whole(0, 4), edge_costs=whole(0, 2, 2, 0), limit=4)
>>> solution = solve(problem)
>>> solution.chosen, solution.cost, solution.bound, solution.status
((0, 1), 8, 8, 'optimal')
"""
