"""`partitioner.functional` on ranks of a gloo group."""

from dataclasses import replace

import pytest
import torch

import partitioner
from helpers.processes.torch_jobs import ROOT, RunJob, job_parameters
from jobs.by_hand.functional_jobs import JOBS
from partitioner import functional as comm
from partitioner.backends.errors import BackendError
from partitioner.backends.torch.by_hand import wire
from partitioner.backends.torch.by_hand.labels import DTYPES, LABEL_BYTES, Label, label_of


@pytest.mark.parametrize("job", job_parameters(JOBS))
def test_values_gradients_and_errors_on_ranks(run_job: RunJob, job: str) -> None:
    run_job("by_hand/functional_jobs.py", job)


def test_public_names_are_sorted_and_documented() -> None:
    assert comm.__all__ == sorted(comm.__all__)
    page = (ROOT / "docs/reference/functional.md").read_text(encoding="utf-8")
    for name in comm.__all__:
        function = getattr(comm, name)
        assert f"::: {function.__module__}.{name}\n" in page


@pytest.mark.parametrize("name", comm.__all__)
def test_without_a_process_group_every_function_says_what_to_call(name: str) -> None:
    rooted = name in ("bcast", "gather", "scatter", "send")
    arguments = (0,) if name == "recv" else (torch.ones(1), 0) if rooted else (torch.ones(1),)
    with pytest.raises(BackendError, match=f"^{name}: no process group; call torch.distributed"):
        getattr(comm, name)(*arguments)
    assert issubclass(BackendError, partitioner.PartitionerError)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (2, 3), (1,) * 64], ids=len)
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_a_label_survives_the_way(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = torch.zeros(shape, dtype=dtype)
    label = label_of([x, x], name="alltoall", number=2**40, backward=True, root=3, reduction="max")
    packed = label.pack()
    assert len(packed) == LABEL_BYTES
    assert Label.unpack(packed) == label
    assert (label.shape, label.element_type, label.count) == (shape, dtype, 2)
    wide = replace(label, shape=(2**63 - 1,) * 64, number=2**63 - 1)
    assert len(wide.pack()) == LABEL_BYTES


@pytest.mark.parametrize("other", [b"", bytes(LABEL_BYTES), b"\xff", b"3", b"{}"])
def test_bytes_that_are_no_label(other: bytes) -> None:
    with pytest.raises(BackendError, match=r"^what arrived was not sent by partitioner.functional"):
        Label.unpack(other.ljust(LABEL_BYTES))


@pytest.mark.parametrize(
    ("backends", "near", "device"),
    [
        ("cpu:gloo,cuda:gloo", True, "cpu"),
        ("cuda:nccl", True, "cuda"),
        ("cuda:nccl", False, "cuda"),
        ("cpu:gloo,cuda:nccl", True, "cuda"),
        ("cpu:gloo,cuda:nccl", False, "cpu"),
    ],
)
def test_where_data_lies_while_it_travels(
    backends: str, near: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire.dist, "get_backend_config", lambda _: backends)
    on_gpu = replace(label_of([torch.ones(1)], name="send", number=1), near=True)
    assert wire.carrier(None, [on_gpu, replace(on_gpu, near=near)]).type == device
