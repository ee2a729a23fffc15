"""Tensors that can be written to without others."""

import torch

from partitioner.backends.torch.state.buffers import apart


def test_only_what_shares_memory_is_copied() -> None:
    """Parts of one bucket stay where they lie; what lies over another, or in it, does not."""
    bucket, other = torch.arange(24.0), torch.ones(())
    tensors = {
        "late": bucket[12:].view(3, 4),
        "early": bucket[:12].view(3, 4),
        "turned": bucket[12:].view(3, 4).t(),
        "within": bucket[2:4],
        "expanded": torch.ones(1).expand(3),
        "given": other,
        "empty": bucket[:0],
        "all": bucket,
    }
    result = apart(tensors, [other])
    assert [*result] == [*tensors]
    torch.testing.assert_close(result, tensors)
    kept = {name for name, tensor in result.items() if tensor is tensors[name]}
    assert kept == {"late", "early", "expanded", "empty"}
    assert [*apart({"": other})] == [""]
