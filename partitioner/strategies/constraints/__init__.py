"""Constraints of a user on the search: a TOML file, or a plan (whole, or in part).

For the tables of the file see docs/how-to/constraints.md. A pin leaves only the strategies that
honour it, and so does a layout of every operator that has a loop which is the dim; the rest is
solved. A plan pins each node that it lists to the decision it has there. Loads bind nothing: plans
are priced by them.
"""

from partitioner.strategies.constraints.constraints import Constraints
from partitioner.strategies.constraints.values import (
    Along,
    ConstraintError,
    NamedDims,
    Pin,
    possible,
)

__all__ = ["Along", "ConstraintError", "Constraints", "NamedDims", "Pin", "possible"]
