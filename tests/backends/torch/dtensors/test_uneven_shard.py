"""Placements in parts of any sizes."""

import pickle

from torch.distributed.tensor import Shard

from partitioner.backends.torch.dtensors.uneven_shard import UnevenShard, shard_of
from partitioner.ir.layout import DimLayout


def test_one_of_other_sizes_or_of_pytorch_is_another_placement() -> None:
    one = UnevenShard(0, (19, 8))
    assert one == UnevenShard(0, [19, 8])
    assert one not in (UnevenShard(0, (8, 19)), UnevenShard(1, (19, 8)), Shard(0))
    assert Shard(0) != one
    assert len({one, UnevenShard(0, (19, 8)), UnevenShard(0, (8, 19)), Shard(0)}) == 3
    assert pickle.loads(pickle.dumps(one)) == one


def test_ranks_have_parts_of_these_sizes_one_after_the_other() -> None:
    one = shard_of(1, DimLayout.cut(("tp",), [(19, 8, 3)]))
    assert one == UnevenShard(1, (19, 8, 3))
    assert one.is_shard(1)
    own = [one._local_shard_size_and_offset(30, 3, rank) for rank in range(3)]
    assert own == [(19, 0), (8, 19), (3, 27)]
    assert type(shard_of(1, DimLayout.cut(("tp",), [(10, 10, 10)]))) is Shard
