"""docs/examples/mnist.py on ranks of a gloo group: jobs of test_docs.py."""

import argparse
import importlib.util
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from torch import nn

import partitioner
from jobs.processes.torch_ranks import Job, main

STEPS = 25


def example() -> ModuleType:
    """The script as a module."""
    path = Path(__file__).parents[3] / "docs/examples/mnist.py"
    spec = importlib.util.spec_from_file_location("mnist", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


mnist = example()


def curve(parallel: str | None, rank: int) -> list[float]:
    """Losses of a run of the script."""
    options = {"parallel": parallel, "data": None, "batch": 64, "steps": STEPS, "every": 1000}
    losses: list[float] = mnist.train(argparse.Namespace(**options, rank=rank))
    return losses


@cache
def alone() -> list[float]:
    """Losses of one process."""
    return curve(None, rank=-1)


def trains_as_one_process(parallel: str) -> Callable[[int], None]:
    def run(_: int) -> None:
        losses = curve(parallel, rank=-1)  # prints nothing but the program
        assert losses == pytest.approx(alone(), abs=1e-4)
        assert losses[-1] < 0.75 * losses[0]

    return run


def placed(rank: int) -> None:
    """Each rank holds and trains its own layers; all know the loss."""
    images, labels = torch.rand(16, 28, 28), torch.arange(16) % 10
    torch.manual_seed(0)
    whole = mnist.MLP()
    program = partitioner.compile(whole, (images, labels), training=True, **mnist.SPLITS["model"])
    module = program.module()
    layers = ("fc2",) if rank else ("fc1", "fc3")
    names = [f"{layer}.{parameter}" for layer in layers for parameter in ("weight", "bias")]
    assert sorted(dict(module.named_parameters())) == sorted(names)
    dist.broadcast(images, 0)
    has_same_gradients(module, whole, images, labels)


def has_same_gradients(
    module: torch.nn.Module, whole: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor
) -> None:
    """Loss and gradients of a rank's own layers are those of the whole model."""
    loss, expected = module(images, labels), whole(images, labels)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(loss.detach(), expected.detach())
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad.full_tensor(), whole.get_parameter(name).grad)


def columns(rank: int) -> None:
    """Layers 0 -> 1 -> 0 down the columns, data over the rows: each column trains its layers."""
    trains_as_one_process("columns")(rank)
    images, labels = torch.rand(16, 28, 28), torch.arange(16) % 10
    dist.broadcast(images, 0)
    torch.manual_seed(0)
    whole = mnist.MLP()
    program = partitioner.compile(whole, (images, labels), training=True, **mnist.SPLITS["columns"])
    assert [group.devices for group in program.plan.groups] == [(0, 1), (2, 3), (0, 1)]
    assert all(group.names == ("dp",) for group in program.plan.groups)
    module = program.module()
    layers = ("fc1", "fc3") if rank < 2 else ("fc2",)
    names = [f"{layer}.{parameter}" for layer in layers for parameter in ("weight", "bias")]
    assert sorted(dict(module.named_parameters())) == sorted(names)
    has_same_gradients(module, whole, images, labels)


def own_parts(rank: int) -> None:
    """With a process's own part of the batch, loss and norm of the gradients are the whole's."""
    torch.manual_seed(0)
    whole = mnist.MLP()
    images, labels = torch.rand(16, 28, 28), torch.arange(16) % 10
    program = partitioner.compile(
        whole, (images, labels), devices=2, training=True, parallel="zero3"
    )
    module = program.module(inputs="local")
    loss = module(images.chunk(2)[rank], labels.chunk(2)[rank])
    expected = whole(images, labels)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(loss.detach(), expected.detach())
    norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.1) for m in (module, whole)]
    assert float(norms[1]) > 0.1
    torch.testing.assert_close(norms[0].full_tensor(), norms[1])
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(parameter.grad.full_tensor(), whole.get_parameter(name).grad)


@cache
def warm() -> None:
    """Import what the ranks would import each for itself."""
    example = torch.rand(4, 28, 28), torch.arange(4)
    partitioner.compile(mnist.MLP(), example, training=True, **mnist.SPLITS["model"])


JOBS = {
    "data_parallel": Job(2, trains_as_one_process("dp"), [alone, warm], sweep=True),
    "model_parallel": Job(2, trains_as_one_process("model"), [alone, warm], sweep=True),
    "dual_parallel": Job(4, trains_as_one_process("dual"), [alone, warm], slow=True),
    "columns": Job(4, columns, [alone, warm], slow=True),
    "each_its_layers": Job(2, placed, [warm]),
    "each_its_part": Job(2, own_parts, [warm]),
}

if __name__ == "__main__":
    main(JOBS)
