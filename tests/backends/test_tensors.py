"""Tensors to and from NumPy."""

import numpy as np
import torch

from partitioner.backends.tensors import to_numpy


def test_one_element_of_any_stride() -> None:
    column = torch.arange(6.0).view(2, 3)[1:, 1]
    assert column.stride() == (3,)
    np.testing.assert_array_equal(to_numpy(column, "float32"), [4.0])


def test_elements_that_are_strided() -> None:
    columns = torch.arange(6.0).view(2, 3).t()
    np.testing.assert_array_equal(to_numpy(columns, "float32"), [[0, 3], [1, 4], [2, 5]])
