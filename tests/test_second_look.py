"""What the safe memory formula refuses is looked at again with exact liveness."""

import pytest

from partitioner.constraints import Constraints, Pin
from partitioner.cost_model.cluster import resolve_cluster
from partitioner.cost_model.memory import with_headroom
from partitioner.ir.graph import Graph, Node
from partitioner.ir.types import TensorType
from partitioner.search import Outcome, Request, search
from partitioner.solver import Infeasible

SIZE = 1 << 20


def _there_and_back() -> Graph:
    """a, on device 0, goes to 1 for b and is read again by z on 0: the copy dies early."""
    sizes = {"x": SIZE, "a": SIZE, "b": SIZE, "c": SIZE, "d": 1, "z": 1}
    types = {name: TensorType.of("float32", (size,)) for name, size in sizes.items()}
    reads = {"a": ("x",), "b": ("a",), "c": ("b",), "d": ("c",), "z": ("d", "a")}
    nodes = tuple(Node(f"n_{out}", "custom::Op", ins, (out,)) for out, ins in reads.items())
    return Graph("back", ("x",), ("z",), nodes, types, {}, {"": 17, "custom": 1})


PINS = Constraints(
    (
        Pin("ends", nodes=("n_a", "n_z"), device=0),
        Pin("middle", nodes=("n_b", "n_c", "n_d"), device=1),
    )
)


def _search(tensors: int) -> Outcome:
    cluster = resolve_cluster("2xh100").with_memory(with_headroom(tensors * 4 * SIZE) + 1024)
    request = Request(strategy="inter", constraints=PINS, time_limit_s=5)
    return search(_there_and_back(), cluster, request)


def test_between_the_exact_and_the_safe_peak() -> None:
    assert _search(3).evaluation.fits
    tight = _search(2)
    assert not tight.evaluation.fits
    assert tight.evaluation.fits_exactly
    certificate = tight.plan.certificate
    assert certificate is not None
    assert certificate.bound <= certificate.cost


def test_the_refusal_stands_where_exact_liveness_does_not_fit_either() -> None:
    with pytest.raises(Infeasible, match="short on device"):
        _search(1)
