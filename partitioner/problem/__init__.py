"""From candidates of each node to the solver's problem, and from its solution to a plan."""
