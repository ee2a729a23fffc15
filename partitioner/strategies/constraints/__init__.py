"""Constraints of a user on the search: a TOML file of pins, or a plan (whole, or in part).

    [[pin]]
    nodes = ["/layer1/*"]     # node names, * and ? match; or op = "Conv"
    device = 1                # or a group: devices = [0, 1]

    [[pin]]
    tensor = "fc.weight"
    dim = 0                   # cut on this dim; axis = "tp" names the mesh axis if there are two

    [[pin]]
    tensor = "logits"
    replicate = true          # axis = "tp": not cut over that axis

    [[pin]]
    tensor = "embed.weight"
    cut = true                # on any dim; axis = "dp" names the mesh axis

    [dims]                    # by name: "PATTERN.DIM" of tensors, nodes, modules or operators
    batch = "x.0, y.0"
    hidden = ["*.mlp.up.weight.0"]

    [layout]                  # the mesh axes that they are cut over; "" for none
    batch = "dp"
    hidden = "tp"

    [loads]                   # tokens that each expert of a layer gets, in any one unit
    "*.mlp.experts" = [510, 90, 120, 304]

A pin leaves only the strategies that honour it, and so does a layout of every operator that has a
loop which is the dim; the rest is solved. A plan pins each node that it
lists to the decision it has there. Loads bind nothing: plans are priced by them.
"""

from partitioner.strategies.constraints.constraints import Constraints
from partitioner.strategies.constraints.values import Along, ConstraintError, NamedDims, Pin

__all__ = ["Along", "ConstraintError", "Constraints", "NamedDims", "Pin"]
