"""Operators that write to lists of tensors."""

import torch

from partitioner.backends.torch.dtensors.lists import reads_what_another_writes


def test_tensors_apart_in_one_memory_are_written_at_once() -> None:
    line = torch.arange(12.0)
    parts = [line[9:12], line[0:4], line[4:9]]
    assert not reads_what_another_writes((parts, 2.0), {})
    assert not reads_what_another_writes((parts, torch.ones(())), {})
    assert not reads_what_another_writes((parts, parts, [*map(torch.clone, parts)]), {})
    assert not reads_what_another_writes((line.reshape(3, 4).unbind(),), {})


def test_memory_that_another_tensor_has_is_written_in_turn() -> None:
    line = torch.arange(12.0)
    first, last, other = line[:6], line[6:], torch.ones(6)
    assert reads_what_another_writes(([first, last], [last, first]), {})
    assert reads_what_another_writes(([first, last], [other, line[3:9]]), {})
    assert reads_what_another_writes(([first, last], [first, other], [other, line[0:1]]), {})
    assert reads_what_another_writes(([first, last], line[8]), {})
    assert reads_what_another_writes(([first, other], [other, other]), {"weights": [last, first]})
    assert reads_what_another_writes(([first, first], 2.0), {})
    assert reads_what_another_writes((line.reshape(6, 2).unbind(1), 2.0), {})


def test_one_tensor_is_written_at_once() -> None:
    line = torch.arange(12.0)
    assert not reads_what_another_writes(([line], [line], line[0]), {})


def test_parts_without_elements_are_where_other_ranks_have_theirs() -> None:
    empty, other = torch.ones(0), torch.ones(0)
    assert reads_what_another_writes(([empty, other], [other, empty]), {})
    assert reads_what_another_writes(([empty, other], [other[0:], empty]), {})
    assert not reads_what_another_writes(([empty, other], [empty, other]), {})
