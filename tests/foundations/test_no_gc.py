import gc
import weakref

from partitioner.foundations.no_gc import only_new_objects_collected


class Knot:
    def __init__(self) -> None:
        self.itself = self


def test_new_objects_are_collected_and_old_ones_afterwards() -> None:
    thawed = gc.get_freeze_count()
    old = weakref.ref(Knot())
    with only_new_objects_collected():
        new = weakref.ref(Knot())
        gc.collect()
        assert new() is None
        assert old() is not None
    gc.collect()
    assert old() is None
    assert gc.get_freeze_count() == thawed
