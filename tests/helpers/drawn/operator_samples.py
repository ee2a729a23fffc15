"""PyTorch's own samples of its operators (`op_db`)."""

from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.testing._internal import common_utils
from torch.testing._internal.opinfo import core


def operator_samples(info: Any, requires_grad: bool = False) -> Iterator[Any]:
    """The samples of an operator on the CPU, each drawn from PyTorch's seed.

    PyTorch looks on the stack for a `unittest` case, twice an operator, with the source file of
    each frame: that was a third of the time of these tests. There is none here to be found.
    """

    def no_case() -> None:
        return None

    with (
        mock.patch.object(common_utils, "extract_test_fn", no_case),
        mock.patch.object(core, "extract_test_fn", no_case),
    ):
        samples = info.sample_inputs("cpu", torch.float32, requires_grad=requires_grad)
    return iter(samples)
