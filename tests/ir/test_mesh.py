"""Device meshes."""

import os
import subprocess
import sys

import pytest

from partitioner.ir.errors import IRError
from partitioner.ir.mesh import Copies, DeviceMesh, copies_on

GRID = DeviceMesh.of({"dp": 2, "tp": 3}, (5, 4, 3, 2, 1, 0))


def test_coordinates_are_row_major() -> None:
    points = [(device, point["dp"], point["tp"]) for device, point in GRID.coords()]
    assert points == [(5, 0, 0), (4, 0, 1), (3, 0, 2), (2, 1, 0), (1, 1, 1), (0, 1, 2)]
    assert all(GRID.coord(device) == point for device, point in GRID.coords())


def test_an_index_over_some_axes_is_row_major_too() -> None:
    point = {"dp": 1, "tp": 2}
    assert GRID.linear((), point) == 0
    assert GRID.linear(("tp",), point) == 2
    assert GRID.linear(("dp", "tp"), point) == 5


def test_sizes_are_over_all_axes_or_some() -> None:
    assert GRID.size() == 6
    assert GRID.size(("tp",)) == 3
    assert GRID.size(()) == 1


def test_axes_of_size_one_vanish() -> None:
    assert DeviceMesh.of({"dp": 1, "tp": 4}) == DeviceMesh.line(4, "tp")
    assert DeviceMesh.line(1, "tp") == DeviceMesh.single(0)
    assert list(DeviceMesh.single(3).coords()) == [(3, {})]


def test_a_searched_mesh_has_axes_that_say_nothing_of_what_is_cut() -> None:
    assert DeviceMesh.grid((2, 3, 4)).axes == (("x", 2), ("y", 3), ("z", 4))
    assert DeviceMesh.grid((2, 2), (4, 5, 6, 7)) == DeviceMesh.of({"x": 2, "y": 2}, (4, 5, 6, 7))
    assert DeviceMesh.grid((4,)) == DeviceMesh.line(4)
    assert DeviceMesh.grid((1,), (3,)) == DeviceMesh.single(3)


def test_a_mesh_takes_the_axes_of_another_one_of_its_shape() -> None:
    other = DeviceMesh.of({"dp": 2, "tp": 4})
    assert DeviceMesh.grid((2, 4)).named_as([DeviceMesh.line(8, "tp"), other]) == other
    for unlike in (DeviceMesh.grid((4, 2)), DeviceMesh.grid((2, 4), tuple(range(8, 16)))):
        assert unlike.named_as([other]) is unlike


def test_meshes_print_their_axes_and_devices() -> None:
    assert str(DeviceMesh.of({"dp": 2, "tp": 2})) == "dp=2 tp=2 on 0,1,2,3"
    assert str(DeviceMesh.single(3)) == "device 3"
    assert str(DeviceMesh.line(64, "tp")) == "tp=64 on 0-63"
    assert str(DeviceMesh.of({"tp": 6}, (9, 0, 1, 2, 3, 4))) == "tp=6 on 9,0-4"
    assert str(DeviceMesh.of({"tp": 4}, (3, 2, 1, 0))) == "tp=4 on 3,2,1,0"


@pytest.mark.parametrize(
    ("axes", "devices", "message"),
    [
        ((("dp", 2), ("tp", 2)), (0, 1, 2), r"mesh dp\(2\) \* tp\(2\) != 3 devices"),
        ((), (0, 1), "mesh 1 != 2 devices"),
        ((("tp", 2), ("tp", 2)), (0, 1, 2, 3), r"mesh axes \['tp', 'tp'\] are not distinct"),
        ((("tp", 1),), (0,), "has an axis of size 1; leave it out"),
        ((("tp", 2),), (1, 1), "mesh tp=2 on 1,1 names a device twice"),
    ],
)
def test_meshes_that_do_not_fit(
    axes: tuple[tuple[str, int], ...], devices: tuple[int, ...], message: str
) -> None:
    with pytest.raises(IRError, match=message):
        DeviceMesh(axes, devices)


def test_a_device_outside_has_no_coordinate() -> None:
    with pytest.raises(IRError, match="device 9 is not in mesh dp=2 tp=3"):
        GRID.coord(9)


def test_copies_take_requests_when_they_are_free() -> None:
    copies = Copies(((0, 1), (2, 3), (4, 5)), (1.0, 4.0, 1.0))
    assert copies.serving(9) == [0, 1, 2, 0, 2, 0, 2, 0, 2]  # first each has one
    assert copies.of_rank(3, 9) == [1]
    assert copies.of_rank(4, 9) == [2, 4, 6, 8]
    assert copies.of_rank(6, 9) == []
    assert copies.step_s == pytest.approx(1 / (1 + 0.25 + 1))
    served = copies.serving(900)
    assert [served.count(copy) for copy in range(3)] == pytest.approx([400, 100, 400], abs=1)


def test_copies_that_take_no_time_take_turns() -> None:
    copies = Copies(((0,), (1,)), (0.0, 0.0))
    assert copies.serving(4) == [0, 1, 0, 1]
    assert copies.step_s == 0


def test_copies_are_the_places_along_their_axis() -> None:
    meshes = (
        DeviceMesh.of({"copies": 2, "tp": 2}, (0, 1, 4, 5)),
        DeviceMesh.of({"copies": 2}, (2, 6)),
    )
    assert copies_on(meshes) == ((0, 1, 2), (4, 5, 6))
    assert copies_on([GRID]) == ()


def test_a_pickled_placement_is_found_in_a_process_with_other_hashes() -> None:
    """Strings have another hash in each process, unless it is told which."""
    script = (
        "import pickle, sys; from partitioner.ir.layout import DimLayout, Placement, Sharding; "
        "from partitioner.ir.mesh import DeviceMesh; mesh = DeviceMesh.of({'tp': 2}, (0, 1)); "
        "dim = DimLayout.cut(('tp',), [(1, 1)]); place = Placement(mesh, Sharding((dim,))); "
        "known = (mesh, dim, place.sharding, place); "
        "out = sys.argv[1] == 'dump' and sys.stdout.buffer.write(pickle.dumps(known)); "
        "out or sys.exit(not set(known) == set(pickle.load(sys.stdin.buffer)))"
    )

    def run(what: str, seed: str, given: bytes = b"") -> bytes:
        return subprocess.run(
            [sys.executable, "-c", script, what],
            input=given,
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
        ).stdout

    run("load", "2", run("dump", "1"))
