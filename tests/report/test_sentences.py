"""What the sentences say, on plans whose answer is known."""

import pytest

import partitioner
from partitioner import examples
from partitioner.report.data import headline
from partitioner.result import Compiled


def _compiled(devices: int, **options: object) -> Compiled:
    sizes = {key: options.pop(key) for key in ("layers", "hidden", "batch") if key in options}
    model = examples.build("mlp", **sizes)  # type: ignore[arg-type]
    return partitioner.compile(model, devices, time_limit_s=5, **options)  # type: ignore[arg-type]


def test_small_kernels_are_bound_by_launches() -> None:
    head = headline(_compiled(2, layers=4, hidden=16, strategy="inter"))
    assert head["limit"].startswith(("Kernel launches: device", "Communication: device"))


def test_one_device() -> None:
    head = headline(_compiled(1, layers=2, hidden=16))
    assert head["worth"] == "The plan uses one device: nothing is split."
    assert head["speedup"] == pytest.approx(1.0)


def test_large_layers_are_bound_by_memory_bandwidth() -> None:
    head = headline(_compiled(1, layers=2, hidden=2048, batch=1, cluster="1xcpu"))
    assert head["limit"].startswith("Memory bandwidth: device 0")


def test_a_free_cluster() -> None:
    head = headline(_compiled(2, layers=2, hidden=16, cluster="2xideal"))
    assert head["limit"]
    assert head["worth"]


def test_a_split_that_memory_forces() -> None:
    head = headline(_compiled(4, layers=8, hidden=256, memory="1MiB"))
    assert head["worth"].startswith("The split is needed: the whole model takes")
    assert head["speedup"] is None
    assert head["step_s_one"] is None


def test_a_split_that_does_not_pay() -> None:
    head = headline(_compiled(2, layers=1, hidden=16, objective="latency", strategy="intra"))
    assert head["worth"].startswith("Splitting is not worth it here: 2 devices take")


def test_the_memory_objective_speaks_of_bytes() -> None:
    head = headline(_compiled(2, layers=4, hidden=64, objective="memory"))
    assert head["limit"].startswith("Memory: device ")
    assert head["worth"].startswith("The fullest of 2 devices holds ")
