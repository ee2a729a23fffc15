"""Mixed-integer linear programs: the formulation of a problem, and the solvers."""
