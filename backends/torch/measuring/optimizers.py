"""The optimizers whose state a plan counts, for measured steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

#: By the names that `compile` knows. Their rate is 0: an update costs the same, and the steps that
#: are timed do not depend on the ones before.
OPTIMIZERS: Mapping[str, Callable[[Sequence[Tensor]], torch.optim.Optimizer]] = {
    "adamw": partial(torch.optim.AdamW, lr=0.0),
    "adam": partial(torch.optim.Adam, lr=0.0),
    "sgd": partial(torch.optim.SGD, lr=0.0),
    "momentum": partial(torch.optim.SGD, lr=0.0, momentum=0.9),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.0),
    "adagrad": partial(torch.optim.Adagrad, lr=0.0),
}
