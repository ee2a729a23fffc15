"""Device meshes."""

import pytest

from partitioner.ir.errors import IRError
from partitioner.ir.mesh import DeviceMesh

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
    assert DeviceMesh.of({"dp": 1, "tp": 4}) == DeviceMesh.line(4)
    assert DeviceMesh.line(1) == DeviceMesh.single(0)
    assert list(DeviceMesh.single(3).coords()) == [(3, {})]


def test_meshes_print_their_axes_and_devices() -> None:
    assert str(DeviceMesh.of({"dp": 2, "tp": 2})) == "dp=2 tp=2 on 0,1,2,3"
    assert str(DeviceMesh.single(3)) == "device 3"
    assert str(DeviceMesh.line(64)) == "tp=64 on 0-63"
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
