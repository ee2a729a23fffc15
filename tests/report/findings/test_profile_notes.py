"""Notes say what a profile lacks for a plan, and the command that measures it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest

from partitioner.cost_model.cluster.resolve import cpu_fingerprint, local_cluster, resolve_cluster
from partitioner.cost_model.cluster.topology import Cluster
from partitioner.cost_model.errors import CostError
from partitioner.cost_model.profiles.database import over, read_contents, write_entries
from partitioner.cost_model.profiles.entries import Entry, LinkEntry
from partitioner.report.findings.notes import border_notes, profile_notes

NOW = "2026-01-01T00:00:00+00:00"


def entry(form: str, backend: str = "runtime 2.0") -> Entry:
    return Entry(form, "MatMul", "float32", 8.0, 8, 1e-3, 0.01, 9, backend, NOW)


def local(file: Path) -> Cluster:
    try:
        return resolve_cluster("1xlocal", profile=file)
    except CostError as error:
        pytest.skip(str(error))


def threads(cluster: Cluster) -> int:
    profile = cluster.devices[0].profile
    assert profile is not None
    return profile.threads


def notes(cluster: Cluster, *, training: bool = False) -> tuple[str, ...]:
    return profile_notes(cluster, lambda: "runtime 2.0", training=training)


def test_a_preset_has_no_notes() -> None:
    assert notes(resolve_cluster("4xh100")) == ()


def test_without_measurements_the_command_is_named(tmp_path: Path) -> None:
    file = tmp_path / "none.sqlite"
    (note,) = notes(local(file), training=True)
    assert f"no operator is measured in profile {file}" in note
    assert note.endswith(f"partition profile MODEL --devices 1 --training --profile {file}")
    assert not file.exists()


def test_measurements_of_this_machine_need_no_note(tmp_path: Path) -> None:
    file = tmp_path / "here.sqlite"
    write_entries(file, cpu_fingerprint(), threads(local(file)), [entry("a")])
    assert notes(local(file)) == ()


def test_another_version_is_said(tmp_path: Path) -> None:
    file = tmp_path / "old.sqlite"
    write_entries(file, cpu_fingerprint(), threads(local(file)), [entry("a", "runtime 1.0")])
    (note,) = notes(local(file))
    assert "by runtime 1.0, none by runtime 2.0, which runs this model" in note
    assert "partition profile MODEL --devices 1" in note


def test_another_machine_and_other_threads_are_said(tmp_path: Path) -> None:
    file = tmp_path / "other.sqlite"
    write_entries(file, "Other CPU, 4 cores", 1, [entry("a"), entry("b")])
    write_entries(file, cpu_fingerprint(), 99, [entry("a")])
    write_entries(file, "Third CPU, 4 cores", 1, [entry("a")])
    (note,) = notes(local(file))
    assert "2 forms of runtime 2.0 on Other CPU, 4 cores, 1 process x 1 thread; 1 form of" in note
    assert "and 1 more" in note
    assert f"nothing of {cpu_fingerprint()}" in note
    assert len(read_contents(file)) == 3


def test_a_cluster_file_of_another_machine_says_so(tmp_path: Path) -> None:
    file, path = tmp_path / "lab.sqlite", tmp_path / "lab.toml"
    write_entries(file, "Lab CPU, 8 cores", 2, [entry("a")])
    fields = f'file = "{file}", device = "Lab CPU, 8 cores", threads = 2, processes = 1'
    profile = f"profile = {{ {fields} }}"
    path.write_text(
        f'[[devices]]\npreset = "cpu"\ncount = 2\n{profile}\n'
        '[[levels]]\nname = "net"\nbandwidth_bytes_per_s = 1e9\nlatency_s = 1e-5\n'
    )
    cluster = resolve_cluster(path)
    assert notes(cluster) == (
        f"profile {file} is of Lab CPU, 8 cores; this machine is {cpu_fingerprint()}",
    )
    unknown = dataclasses.replace(
        cluster,
        devices=tuple(
            dataclasses.replace(spec, profile=dataclasses.replace(spec.profile, known={}))
            for spec in cluster.devices
        ),
    )
    assert "--cluster FILE" in notes(unknown)[-1]


def test_levels_without_communications_are_named(tmp_path: Path) -> None:
    """Of a level between machines: the entries of the inner one are none of its own."""
    file, path = tmp_path / "lab.sqlite", tmp_path / "lab.toml"
    named = f'profile = {{ file = "{file}", device = "core", threads = 1 }}\n'
    rates = "bandwidth_bytes_per_s = 1e9\nlatency_s = 1e-6\n"
    path.write_text(
        '[[devices]]\ncount = 4\npreset = "cpu"\n'
        f'[[levels]]\nname = "machine"\nsize = 2\n{rates}{named}'
        f'[[levels]]\nname = "lan"\n{rates}{named}'
    )
    near = LinkEntry("send", 2, 1000, 1e-3, 0.01, 7, "gloo", NOW)
    write_entries(file, "core", 1, [near])
    (note,) = notes(resolve_cluster(path))
    assert f"profile {file} has no communications over level 'lan': they cost the level's" in note
    write_entries(file, "core", 1, [dataclasses.replace(near, kind=over("send", "lan"))])
    assert notes(resolve_cluster(path)) == ()


def test_a_border_that_the_file_gives_is_not_missed(tmp_path: Path) -> None:
    file = tmp_path / "profile.sqlite"
    write_entries(
        file, cpu_fingerprint(), 1, [LinkEntry("send", 2, 1000, 1e-3, 0.01, 7, "gloo", NOW)]
    )
    profile = f'profile = {{ file = "{file}", device = "{cpu_fingerprint()}", threads = 1 }}'
    level = f'[[levels]]\nname = "ram"\nbandwidth_bytes_per_s = 1e9\nlatency_s = 1e-4\n{profile}\n'
    path = tmp_path / "lab.toml"
    for border, missed in (("", 1), ("border_s = 2e-4\n", 0)):
        path.write_text(f'[[devices]]\ncount = 2\npreset = "cpu"\n{border}{profile}\n{level}')
        assert len(border_notes(resolve_cluster(path))) == missed


def test_a_backend_that_is_not_measured_on_gpus_is_not_to_be_measured_there() -> None:
    gpus = SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: 1,
        get_device_properties=lambda _: SimpleNamespace(name="NVIDIA H200", total_memory=2**37),
    )
    cluster = local_cluster(1, gpus, Path("none.sqlite"))
    (note,) = notes(cluster)[-1:]
    assert "no operator is measured in profile none.sqlite" in note
    assert profile_notes(cluster, lambda: "runtime 2.0", measures_gpus=False) == ()
