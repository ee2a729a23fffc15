"""Solve abstract placement and sharding problems, with a bound on every answer.

>>> from partitioner.solver.joint.solve import solve
>>> from partitioner.solver.problem import Choice, Edge, Item, Problem
>>> on = tuple(Choice(load_s=(3.0 * (d == 0), 3.0 * (d == 1)), group=d) for d in (0, 1))
>>> send = Item(load_s=(1.0, 1.0), bytes=(0.0, 0.0), first=0, last=1)
>>> edge = Edge(0, 1, (0, 1), (0, 1), {(0, 1): (0,), (1, 0): (0,)})
>>> problem = Problem(2, (float("inf"),) * 2, (on, on), ("a", "b"), (edge,), (), (send,))
>>> solution = solve(problem)
>>> solution.cost, solution.status
(4.0, 'optimal')
"""
