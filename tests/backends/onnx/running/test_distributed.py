"""Receives are posted before they are needed, in the order in which the other ranks send."""

from typing import Any

import pytest
import torch

from helpers.plans import rank_programs as hand
from partitioner.backends.onnx.files.emit import emit_models
from partitioner.backends.onnx.files.load import load_rank
from partitioner.backends.onnx.files.steps import Cut
from partitioner.backends.onnx.running import distributed
from partitioner.backends.onnx.running.distributed import DistributedCommunicator, rank_sets
from partitioner.backends.onnx.running.turns import Turns
from partitioner.backends.process_group import Groups


class Arrived:
    """Data that is there at once."""

    def wait(self) -> None:
        """Nothing to wait for."""


@pytest.fixture
def posted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sources of the receives that have been posted, in order."""
    sources: list[int] = []

    def irecv(_buffer: torch.Tensor, source: int, **_group: Any) -> Arrived:
        sources.append(source)
        return Arrived()

    monkeypatch.setattr(distributed.dist, "irecv", irecv)
    return sources


def second_rank(device: str = "cpu") -> tuple[DistributedCommunicator, list[Cut]]:
    """Rank 1 of a pipeline, which gets three values of a request from rank 0, and its cuts.

    Rank 0 sends two of them in a request's first round and the third two rounds later.
    """
    case = hand.pipeline()
    model = load_rank(emit_models(case.programs, case.graph)[1])
    assert rank_sets(model) == []
    groups = Groups(None, None, None, {})
    cuts = [step for step in model.steps if isinstance(step, Cut) and step.target is not None]
    return DistributedCommunicator(model, groups, torch.device(device)), cuts


def receive(communicator: DistributedCommunicator, cut: Cut, request: int) -> torch.Tensor:
    assert cut.target is not None
    return communicator.receive(cut, request, torch.empty(cut.target.shape))


def test_what_is_sent_in_a_round_is_expected_from_its_start(posted: list[int]) -> None:
    communicator, (there, _, _) = second_rank()
    communicator.begin(Turns(3))
    assert posted == [0, 0]  # both values of request 0
    receive(communicator, there, 0)  # in round 1: what is sent meanwhile is expected
    assert posted == [0] * 4
    receive(communicator, there, 1)  # in round 2: of request 2, and the third of request 0
    assert posted == [0] * 7


def test_a_single_request_expects_one_message_at_a_time(posted: list[int]) -> None:
    communicator, cuts = second_rank()
    communicator.begin(Turns(1))
    for count, cut in enumerate(cuts, start=1):
        assert len(posted) == count
        receive(communicator, cut, 0)
    assert len(posted) == 3


def test_data_arrives_at_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """No copy is made of a value that one message fills."""
    arrived: list[int] = []

    def irecv(buffer: torch.Tensor, _source: int, **_group: Any) -> Arrived:
        buffer.fill_(len(arrived))
        arrived.append(buffer.data_ptr())
        return Arrived()

    monkeypatch.setattr(distributed.dist, "irecv", irecv)
    communicator, (there, _, _) = second_rank()
    communicator.begin(Turns(3))
    values = [receive(communicator, there, request) for request in range(2)]
    assert [value.data_ptr() for value in values] == [arrived[0], arrived[2]]
    assert there.target is not None
    assert [value.shape for value in values] == [there.target.shape] * 2
    assert values[0].view(torch.uint8).unique().tolist() == [0]
    assert values[1].view(torch.uint8).unique().tolist() == [2]


def test_gpus_expect_a_message_when_it_is_needed(posted: list[int]) -> None:
    communicator, (there, skip, _) = second_rank("meta")
    communicator.begin(Turns(3))
    assert posted == []
    receive_on_meta = torch.empty(skip.target.shape, device="meta")  # type: ignore[union-attr]
    communicator.receive(there, 0, receive_on_meta)
    assert posted == [0]
