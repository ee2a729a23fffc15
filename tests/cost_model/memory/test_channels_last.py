"""Which tensors of a step have channels that lie last in memory."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import partitioner
from helpers.modules.sized_models import ChannelsLast, Loss, normalised_convolutions
from partitioner.api.compiled.folder import GraphFile
from partitioner.cost_model.evaluate import observed_schedule
from partitioner.cost_model.memory.channels_last import channels_last
from partitioner.ir.errors import PartitionerError

IMAGES = torch.zeros(4, 3, 16, 16)
LAST = IMAGES.to(memory_format=torch.channels_last)


def ordered(
    net: nn.Module, devices: int = 1, images: torch.Tensor = IMAGES, **options: Any
) -> dict[int, set[str]]:
    """Nodes that write tensors with channels last, by device."""
    torch.manual_seed(0)
    more = {"cluster": f"{devices}xcpu", "training": True, "optimizer": "sgd", **options}
    program = partitioner.compile(Loss(net), (images,), **more)
    schedule, _ = observed_schedule(
        program.graph, program.placed, program.cluster, program.plan.pipeline
    )
    last, by_device = channels_last(program.graph, schedule), defaultdict[int, set[str]](set)
    for task in schedule.tasks:
        for device, key, _ in task.writes:
            if (device, key) in last:
                by_device[device].add(task.name)
    return by_device


def test_layers_keep_the_order_of_what_they_read() -> None:
    (names,) = ordered(ChannelsLast(normalised_convolutions(8))).values()
    layers = ("0/convolution", "1/batch_norm_apply", "2/relu", "3/max_pool2d_with_indices")
    assert {f"/module/net/{layer}" for layer in layers} <= names
    assert "/module/net/2/threshold_backward" in names
    assert "/module/net/4/convolution_grad_weight" in names


def test_gradients_of_images_lie_in_order() -> None:
    (names,) = ordered(ChannelsLast(normalised_convolutions(8))).values()
    assert not [name for name in names if name.endswith("convolution_grad_input")]


def test_images_that_nothing_turns_lie_in_order() -> None:
    assert not ordered(normalised_convolutions(8))


def test_images_lie_as_those_of_the_example() -> None:
    """Micro-batches of them, too, but not the parts that ranks have of each."""
    net = normalised_convolutions(8)
    whole, staged = ordered(net, 1, LAST), ordered(net, 2, LAST, parallel="pp", micro_batches=2)
    assert "/module/0/convolution" in whole[0] & staged[0]
    assert not staged[1]
    assert not ordered(net, 2, LAST, parallel="dp")


def test_a_folder_keeps_how_inputs_lie(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3))
    program = partitioner.compile(net, (LAST,), cluster="1xcpu")
    folder = tmp_path / "plan"
    program.save(folder)
    digest, last = program.graph.digest, {program.graph.inputs[0]}
    assert GraphFile.read(folder, digest).graph.channels_last == last
    path = folder / "graph.json"
    data = json.loads(path.read_text())
    path.write_text(json.dumps({**data, "channels_last": ["nothing"]}))
    with pytest.raises(PartitionerError, match="is not of the graph"):
        GraphFile.read(folder, digest)
    del data["channels_last"]  # as older folders
    path.write_text(json.dumps(data))
    assert not GraphFile.read(folder, digest).graph.channels_last


def test_what_another_device_sends_lies_in_order() -> None:
    net = ChannelsLast(normalised_convolutions(8))
    names = ordered(net, 2, parallel="pp", micro_batches=2)
    assert any("convolution" in name for name in names[0])
    assert not names[1]
