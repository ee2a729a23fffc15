"""Optimizers by name keep as many tensors for a parameter as PyTorch's do."""

from functools import partial
from typing import Any

import pytest
import torch

import partitioner
from partitioner.frontends.torch.options import OF_MATRICES, OPTIMIZERS
from partitioner.ir.errors import OptionError

MAKERS: dict[str, Any] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
    "momentum": partial(torch.optim.SGD, momentum=0.9),
    "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,
    "muon": torch.optim.AdamW,  # of what is no matrix
}
OF_ALL = {name: ((3, 2, 1), MAKERS[name], kept) for name, kept in OPTIMIZERS.items()}
OF_A_MATRIX = {
    f"{name} of a matrix": ((3, 2), torch.optim.Muon, kept)
    for name, (kept, _) in OF_MATRICES.items()
}


@pytest.mark.parametrize(("shape", "make", "count"), {**OF_ALL, **OF_A_MATRIX}.values(), ids=str)
def test_a_step_keeps_so_many_tensors_of_the_parameters_shape(
    shape: tuple[int, ...], make: Any, count: int
) -> None:
    parameter = torch.nn.Parameter(torch.ones(shape))
    optimizer = make([parameter])
    parameter.grad = torch.ones(shape)
    optimizer.step()
    state = optimizer.state[parameter].values()
    kept = [
        value
        for value in state
        if isinstance(value, torch.Tensor) and value.shape == parameter.shape
    ]
    assert len(kept) == count


def compiled(optimizer: str, **options: Any) -> partitioner.ModuleProgram:
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
    example = {"training": True, "loss": torch.nn.MSELoss(), "target": torch.ones(8, 4)}
    return partitioner.compile(
        *(layers, torch.ones(8, 8), 2), optimizer=optimizer, cluster="ideal", **example, **options
    )


@pytest.mark.parametrize("options", [{}, {"parallel": "dp"}, {"parallel": "pp"}], ids=str)
def test_plans_keep_the_matrices_of_muon_whole(options: dict[str, Any]) -> None:
    program, other = compiled("muon", **options), compiled("adamw", **options)
    assert program.verify()
    for name in ("0.weight", "2.weight"):
        node = program.graph.producers[program.model.module.traced.stored[name]]
        assert not any(cut.axes for cut in program.plan.nodes[node.name].cuts.values())
    seconds = program.evaluation.step_s - other.evaluation.step_s
    assert seconds > 4e-8
    if options == {"parallel": "dp"}:
        # three products in each of five iterations, at a TFLOP/s
        assert seconds == pytest.approx(5e-12 * (36 * 8 * 32 + 17 * 4 * 32))
        spared = 4 * (8 * 32 + 4 * 32)  # one tensor of state less for each matrix
        had, has = (one.evaluation.executor_peak[0].resident_bytes for one in (other, program))
        assert had - has == spared


@pytest.mark.parametrize("parallel", ["tp", "zero1", "zero2", "zero3", "zero3+tp"])
def test_kinds_that_store_parts_of_matrices_are_refused(parallel: str) -> None:
    sentence = "optimizer 'muon' looks at whole matrices, and parallel"
    with pytest.raises(OptionError, match=sentence):
        compiled("muon", parallel=parallel)
