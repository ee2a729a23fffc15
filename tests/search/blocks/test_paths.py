"""The search for runs of nodes in blocks."""

from partitioner.search.blocks.paths import MOST_PATHS, Path, undominated


def test_few_of_many_paths_are_followed_with_the_cheapest_and_the_lightest() -> None:
    """A front of all subsets of constants had grown until the search did not end."""
    paths = [Path[object](float(i), 10_000 - i, ()) for i in range(5_000)]
    kept = undominated(paths)
    assert len(kept) == MOST_PATHS
    assert kept[0] == paths[0]
    assert kept[-1] == paths[-1]
    assert [path.seconds for path in kept] == sorted({path.seconds for path in kept})
    assert list(undominated(paths[:MOST_PATHS])) == paths[:MOST_PATHS]
