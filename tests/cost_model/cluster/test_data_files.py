"""Data files of presets and published measurements: each figure has a source, read when needed."""

import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from partitioner.api.option_table import GridOptions
from partitioner.cost_model.cluster import presets, published
from partitioner.cost_model.cluster.launches import launches
from partitioner.cost_model.cluster.published import data_file
from partitioner.cost_model.cluster.resolve import resolve_cluster

FOLDER = Path(published.__file__).with_name("data")
#: Tables that join or name others and have no figure of somebody else's.
JOINING = ("aliases", "links of published.toml")


def entries(name: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for title, table in data_file(name).items():
        if "source" in table:
            yield title, table
        elif title not in JOINING and f"{title} of {name}" not in JOINING:
            yield from ((f"{title}.{key}", entry) for key, entry in table.items())


@pytest.mark.parametrize("name", ["presets.toml", "published.toml"])
def test_every_entry_has_a_source(name: str) -> None:
    sources = {title: entry.get("source", "") for title, entry in entries(name)}
    assert len(sources) > 10
    assert [title for title, source in sources.items() if len(source) < 20] == []


def test_every_table_of_a_preset_is_published() -> None:
    tables = {row.table for row in presets.accelerators().values()} - {None}
    assert tables == {*published.kernel_names()}
    assert {*published.link_names()} == {f"{t}{end}" for t in tables for end in ("", "-network")}
    assert {presets.full_name(name) for name in presets.names()} == {
        *presets.accelerators(), "cpu", "ideal",
    }  # fmt: skip


def test_the_more_pytorch_does_the_later_a_kernel_follows() -> None:
    times = [launches()[name].kernel_s for name in ("graphs", "native", "eager", "autograd")]
    assert times == sorted(times)
    assert presets.device("h100").launch_s == launches()["native"].kernel_s


def test_only_graphs_of_kernels_take_seconds_of_their_own() -> None:
    assert [name for name, by in launches().items() if by.in_graphs] == ["graphs"]
    row = data_file("presets.toml")["launches"]["graphs"]
    assert row["graph_us"] > 0
    assert row["graph_source"].startswith("https://")


def test_an_overlap_of_its_own_has_a_source() -> None:
    own = {name: row for name, row in presets.accelerators().items() if row.overlap is not None}
    assert [*own] == ["mi300x"]
    for name, row in own.items():
        assert row.overlap_source.startswith("https://")
        assert {level.overlap for level in presets.levels(name, 2, 8)} == {row.overlap}
    assert {level.overlap for level in presets.levels("h100", 2, 8)} == {0.6}


def test_the_option_takes_every_name() -> None:
    choices = get_args(get_type_hints(GridOptions, localns={})["launches"])
    assert {*get_args(choices[0])} == {*launches()}


@pytest.mark.parametrize("name", ["cpu", "ideal"])
def test_presets_that_are_cluster_files_are_those_of_users(name: str) -> None:
    cluster = resolve_cluster(FOLDER / f"{name}.toml")
    assert cluster.devices == (presets.device(name),) * len(cluster)
    assert cluster.levels == presets.levels(name, 2, len(cluster) // 2)


def test_importing_the_presets_reads_no_file() -> None:
    code = """
from partitioner.cost_model.cluster import presets, resolve
from partitioner.cost_model.cluster.published import data_file
print(data_file.cache_info().currsize)
resolve.resolve_cluster("2xcpu")
print(data_file.cache_info().currsize)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    first, then = map(int, done.stdout.split())
    assert first == 0
    assert then > 0
