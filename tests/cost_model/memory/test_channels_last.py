"""Which tensors of a step have channels that lie last in memory."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import nn

import partitioner
from helpers.modules.sized_models import ChannelsLast, Loss, normalised_convolutions
from partitioner.cost_model.evaluate import observed_schedule
from partitioner.cost_model.memory.channels_last import channels_last


def ordered(net: nn.Module, devices: int = 1, **options: Any) -> dict[int, set[str]]:
    """Nodes that write tensors with channels last, by device."""
    torch.manual_seed(0)
    more = {"cluster": f"{devices}xcpu", "training": True, "optimizer": "sgd", **options}
    program = partitioner.compile(Loss(net), (torch.randn(4, 3, 16, 16),), **more)
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


def test_what_another_device_sends_lies_in_order() -> None:
    net = ChannelsLast(normalised_convolutions(8))
    names = ordered(net, 2, parallel="pp", micro_batches=2)
    assert any("convolution" in name for name in names[0])
    assert not names[1]
