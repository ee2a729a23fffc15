"""Checksums of values that several ranks must have alike."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from partitioner.backends.torch.agreeing.sums import checksum, differing_within


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6).reshape(2, 3).T,
        torch.arange(6.0)[::2],
        torch.tensor(3.0),
        torch.ones(1).expand(4),
        torch.ones(2, dtype=torch.bfloat16),
        torch.tensor([1 + 2j]).conj(),
        torch.tensor([1 + 2j]).conj().imag,
        torch.tensor([True]),
        torch.ones(3, requires_grad=True),
        torch.ones(2).to(torch.float8_e4m3fn),
    ],
)
def test_a_checksum_is_of_the_elements(tensor: Tensor) -> None:
    same = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    assert checksum(tensor) == checksum(same)
    other = same.clone()
    other.view(-1)[0] = 0
    assert checksum(other) != checksum(same) or not same.view(-1)[0]


def test_a_tensor_without_elements_has_a_checksum() -> None:
    assert checksum(torch.ones(0, 3)) == checksum(torch.ones(0))


def test_values_that_a_rank_does_not_know_differ_from_none() -> None:
    tables = [{"mul": 1, "add": 2}, {"mul": 1}, {"mul": 3, "sub": 4}, {"sub": 5}]
    assert differing_within({(0, ""): [1]}, tables) == {}
    assert differing_within({(0, ""): [1, 2]}, tables) == {(0, "mul"): [2]}
    assert differing_within({(0, ""): [2, 3]}, tables) == {(0, "mul"): [2], (2, "sub"): [3]}
