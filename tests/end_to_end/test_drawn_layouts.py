"""Random modules with random named dims: equal on all ranks, or refused in one line."""

import random

import pytest

import partitioner
from helpers.drawn.drawn_modules import Drawn, batch
from partitioner.frontends.model import open_model
from partitioner.ir.errors import PartitionerError

MESHES = ({"a": 2}, {"a": 3}, {"a": 5}, {"a": 2, "b": 2}, {"a": 2, "b": 3})


def check(seed: int) -> bool:
    """Lay one module out; whether that was not refused."""
    draw = random.Random(seed)
    module = Drawn(draw).double()
    whole = batch(draw, draw.randint(2, 6))
    training = draw.random() < 0.5
    graph = open_model(module, whole, training=training).graph
    values = [v for v in graph.types if v and max(graph.types[v].shape, default=1) > 1]
    mesh = draw.choice(MESHES)
    dims, layout = {}, {}
    for name in ("first", "second")[: draw.randint(1, 2)]:
        value = draw.choice(values)
        dims[name] = f"{value}.{draw.randrange(graph.types[value].rank)}"
        layout[name] = draw.choice([*([axis] for axis in mesh), [], list(mesh)])
    devices = 1
    for size in mesh.values():
        devices *= size
    try:
        program = partitioner.compile(
            module,
            whole,
            devices=devices,
            mesh=mesh,
            training=training,
            constraints={"dims": dims, "layout": layout},
            time_limit_s=3,
        )
    except PartitionerError as error:
        refusal = str(error)
    else:
        refusal = ""
    assert "\n" not in refusal, seed
    if refusal:
        return False
    assert program.verify(), (seed, dims, layout, mesh)
    return True


@pytest.mark.slow
def test_random_layouts_are_equal_or_refused() -> None:
    assert sum(check(seed) for seed in range(6)) >= 1
