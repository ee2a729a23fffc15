"""Rows of convolutions, pools and sampling."""

import random
from dataclasses import replace

import numpy as np
import pytest

from helpers.op_rows.rows import (
    Case,
    Draw,
    case,
    check_opaque,
    check_row,
    f32,
    ints,
    make_trial,
    scalar,
    vec,
)
from helpers.plans.whole_plans import build
from partitioner.ir.graph import Node
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.ops import rule_of
from partitioner.ir.rule import Rule


def u8(*shape: int) -> Draw:
    """Quantised contents or zero points."""
    return ints(*shape, low=0, high=60, dtype="uint8")


def steps(*shape: int) -> Draw:
    """Quantisation steps."""
    return f32(*shape, low=0.01, high=0.1)


CONV_CASES = (
    case(
        "Conv", f32(3, 5, 6, 6), f32(4, 5, 3, 3), f32(4), attrs={"pads": (1, 1, 1, 1)}, min_cuts=3
    ),
    case("Conv", f32(3, 4, 7), f32(5, 4, 3), attrs={"strides": (2,)}, opset=9, min_cuts=3),
    case("Conv", f32(2, 3, 4, 5, 4), f32(4, 3, 2, 2, 2), f32(4), opset=11, min_cuts=3),
    case("Conv", f32(2, 12, 5, 5), f32(9, 4, 3, 3), f32(9), attrs={"group": 3}, min_cuts=4),
    case("Conv", f32(2, 6, 5, 5), f32(6, 1, 3, 3), f32(6), attrs={"group": 6}, min_cuts=2),
    case("Conv", f32(2, 3, 5, 5), f32(12, 1, 3, 3), attrs={"group": 3}, opset=22, min_cuts=3),
    case(
        "Conv",
        f32(2, 4, 7, 6),
        f32(4, 2, 3, 3),
        None,
        attrs={"group": 2, "auto_pad": "SAME_UPPER", "strides": (2, 2), "kernel_shape": (3, 3)},
        min_cuts=4,
    ),
    case("Conv", f32(1, 3, 7, 7), f32(2, 3, 2, 2), attrs={"dilations": (2, 2)}, min_cuts=2),
    case("ConvTranspose", f32(2, 5, 4, 4), f32(5, 4, 3, 3), f32(4), min_cuts=3),
    case(
        "ConvTranspose",
        f32(2, 8, 4, 4),
        f32(8, 3, 3, 3),
        f32(6),
        attrs={"group": 2, "strides": (2, 2), "output_padding": (1, 1), "pads": (1, 1, 1, 1)},
        opset=11,
        min_cuts=4,
    ),
    case("ConvTranspose", f32(2, 4, 5), f32(4, 1, 3), attrs={"group": 4}, min_cuts=2),
    case("ConvInteger", u8(2, 4, 5, 5), u8(3, 4, 3, 3), opset=10, min_cuts=3),
    case(
        "ConvInteger",
        u8(2, 4, 5, 5),
        u8(4, 2, 3, 3),
        scalar(7, "uint8"),
        scalar(9, "uint8"),
        attrs={"pads": (1, 1, 1, 1), "group": 2},
        opset=10,
        min_cuts=4,
    ),
    case(
        "QLinearConv",
        *(u8(2, 4, 5, 5), steps(), u8()),
        *(u8(3, 4, 3, 3), steps(3), scalar(3, "uint8")),
        *(f32(low=0.5, high=1), u8(), ints(3, dtype="int32")),
        opset=10,
        min_cuts=2,
    ),
    case("LRN", f32(2, 5, 3, 3), attrs={"size": 3}, opset=9, min_cuts=3),
)
KERNEL = {"kernel_shape": (3, 3)}
POOL_CASES = (
    case("MaxPool", f32(3, 5, 6, 6), attrs={**KERNEL, "strides": (2, 2)}, opset=8, min_cuts=2),
    case("MaxPool", f32(3, 5, 7), attrs={"kernel_shape": (2,)}, min_cuts=2, outputs=("out", "")),
    case(
        "MaxPool", f32(3, 5, 6, 6), attrs={**KERNEL, "ceil_mode": 1, "strides": (2, 2)}, min_cuts=2
    ),
    case(
        "AveragePool", f32(3, 5, 6, 6), attrs={**KERNEL, "pads": (1, 1, 1, 1)}, opset=7, min_cuts=2
    ),
    case(
        "AveragePool",
        f32(3, 5, 6, 6),
        attrs={**KERNEL, "auto_pad": "SAME_LOWER", "count_include_pad": 1},
        min_cuts=2,
    ),
    case("LpPool", f32(3, 5, 6, 6), attrs={**KERNEL, "p": 3}, opset=11, min_cuts=2),
    case("LpPool", f32(3, 5, 6, 6), attrs=KERNEL, opset=18, min_cuts=2),
    case("GlobalAveragePool", f32(2, 5, 3, 7), min_cuts=4, opset=9),
    case("GlobalAveragePool", f32(2, 5, 7), min_cuts=3, opset=22),
    case("GlobalMaxPool", f32(2, 5, 3, 7), min_cuts=4),
    case("GlobalLpPool", f32(2, 5, 3, 7), min_cuts=2),
    case(
        "RoiAlign",
        f32(2, 3, 6, 6),
        f32(5, 4, low=0, high=5),
        ints(5, low=0, high=1),
        attrs={"output_height": 2, "output_width": 2},
        opset=16,
        min_cuts=2,
    ),
    case(
        "MaxRoiPool",
        f32(1, 3, 6, 6),
        np.array([[0, 0, 0, 3, 3], [0, 1, 1, 5, 5], [0, 0, 2, 4, 5]], np.float32),
        attrs={"pooled_shape": (2, 2)},
        min_cuts=2,
    ),
)
NO_ROI = np.zeros(0, np.float32)
NO_SCALES = np.zeros(0, np.float32)
TWICE = vec(1, 1, 2, 2, dtype="float32")


def resize(*inputs: Draw | np.ndarray | None, opset: int = 19, **attrs: object) -> Case:
    """A Resize whose settings are constants."""
    settings = tuple(i for i, x in enumerate(inputs) if i and x is not None)
    return case("Resize", *inputs, attrs=attrs, constants=settings, opset=opset, min_cuts=2)


SAMPLING_CASES = (
    case("Upsample", f32(3, 5, 2, 2), attrs={"scales": (1.0, 1.0, 2.0, 3.0)}, opset=7, min_cuts=2),
    case("Upsample", f32(3, 5, 2, 2), TWICE, constants=(1,), opset=9, min_cuts=2),
    resize(f32(3, 5, 2, 2), TWICE, opset=10),
    resize(f32(3, 5, 2, 4), NO_ROI, TWICE, opset=11, mode="linear"),
    resize(f32(3, 5, 2, 4), NO_ROI, NO_SCALES, vec(3, 5, 4, 7), opset=11),
    resize(f32(3, 5, 2, 4), None, None, vec(3, 5, 5, 3), opset=13, mode="linear"),
    resize(f32(3, 5, 4, 4), None, TWICE, mode="cubic"),
    resize(f32(3, 5, 2, 4), None, None, vec(5, 8), axes=(2, -1)),
    resize(f32(3, 5, 2, 4), None, None, vec(3, 5, 6, 4)),
    resize(f32(3, 5, 2, 4), None, vec(3, 2, dtype="float32"), axes=(2, 3)),
    resize(
        f32(3, 5, 2, 4), None, None, vec(4, 12), axes=(2, 3), keep_aspect_ratio_policy="not_larger"
    ),
    resize(
        f32(3, 5, 3, 4), None, None, vec(3, 6), axes=(2, 3), keep_aspect_ratio_policy="not_smaller"
    ),
    case("GridSample", f32(2, 3, 4, 5), f32(2, 3, 5, 2, low=-1, high=1), opset=16, min_cuts=4),
    case(
        "GridSample",
        f32(2, 3, 3, 4, 5),
        f32(2, 3, 2, 5, 3, low=-1, high=1),
        attrs={"mode": "nearest"},
        opset=20,
        min_cuts=5,
    ),
)
CASES = (*CONV_CASES, *POOL_CASES, *SAMPLING_CASES)


def line(op: str, size: int, kernel: int, **attrs: object) -> Case:
    """A window over a line of one channel; a pool has no weights."""
    if "Pool" in op:
        return case(op, f32(1, 1, size), attrs={"kernel_shape": (kernel,), **attrs}, opset=19)
    return case(op, f32(1, 1, size), f32(1, 1, kernel), attrs=attrs)


SLID = (
    *(
        line(op, 13, kernel, strides=(stride,), dilations=(dilation,), pads=pads)
        for op in ("Conv", "ConvTranspose", "MaxPool", "AveragePool")
        for kernel, stride, dilation, pads in (
            (1, 2, 1, (0, 0)),
            (2, 1, 1, (0, 1)),
            (3, 1, 1, (1, 1)),
            (3, 2, 1, (1, 0)),
            (3, 1, 2, (2, 1)),
            (4, 3, 1, (1, 2)),
            (5, 2, 1, (2, 2)),
            (7, 2, 1, (3, 3)),
        )
    ),
    *(
        line("AveragePool", 12, 3, strides=(stride,), pads=(1, 1), count_include_pad=include)
        for stride in (1, 2)
        for include in (0, 1)
    ),
    *(
        line(op, size, 3, strides=(2,), pads=(0, 1), ceil_mode=1)
        for op in ("MaxPool", "AveragePool")
        for size in (12, 13)
    ),
    *(
        line(op, 13, kernel, strides=(2,), auto_pad=auto)
        for op in ("Conv", "ConvTranspose", "MaxPool")
        for kernel in (3, 4)
        for auto in ("SAME_UPPER", "SAME_LOWER", "VALID")
    ),
    *(
        line("Conv", size, kernel, strides=(stride,), auto_pad=auto)  # one element is left over
        for size, kernel, stride in ((12, 1, 2), (15, 2, 4))
        for auto in ("SAME_UPPER", "SAME_LOWER")
    ),
    *(  # as padded for windows without dilation
        line(op, size, kernel, strides=(stride,), dilations=(dilation,), auto_pad=auto)
        for op in ("MaxPool", "AveragePool", "LpPool")
        for size, kernel, stride, dilation in ((13, 3, 1, 2), (12, 2, 2, 3), (14, 4, 2, 2))
        for auto in ("SAME_UPPER", "SAME_LOWER")
    ),
    line("ConvTranspose", 12, 3, strides=(2,), output_shape=(24,)),
    line("ConvTranspose", 12, 4, strides=(3,), output_padding=(1,), pads=(2, 0)),
    line("LpPool", 13, 3, strides=(2,), pads=(1, 1)),
)
WIDE = tuple(
    DeviceMesh.of(axes) for axes in ({"tp": 2}, {"tp": 3}, {"tp": 4}, {"tp": 5}, {"dp": 2, "tp": 3})
)


@pytest.mark.parametrize("case", SLID, ids=str)
def test_space_is_cut_with_a_halo(case: Case) -> None:
    check_row(case, WIDE)


@pytest.mark.parametrize("op", ["Conv", "LpPool"])
@pytest.mark.parametrize("auto", ["SAME_UPPER", "SAME_LOWER"])
@pytest.mark.parametrize(("size", "kernel", "stride"), [(6, 1, 3), (10, 2, 5)])
def test_automatic_padding_of_fewer_elements_than_none_is_opaque(
    op: str, auto: str, size: int, kernel: int, stride: int
) -> None:
    """ONNX Runtime and ONNX's reference leave out different elements; so each is asked whole."""
    node = line(op, size, kernel, strides=(stride,), auto_pad=auto)
    assert f"auto_pad {auto} leaves out elements" in check_opaque(node)


@pytest.mark.parametrize("op", ["MaxPool", "AveragePool", "LpPool"])
def test_a_dilated_pool_that_reaches_what_automatic_padding_leaves_out_is_opaque(op: str) -> None:
    attrs = {"strides": (3,), "dilations": (2,), "ceil_mode": 1, "auto_pad": "SAME_UPPER"}
    assert "auto_pad SAME_UPPER leaves out elements" in check_opaque(line(op, 9, 2, **attrs))


def test_a_pool_of_another_size_than_onnx_runtime_computes_is_opaque() -> None:
    node = Node("y", "MaxPool", ("x",), ("y",), {"kernel_shape": (2,), "strides": (2,)})
    graph = build([node], {"x": (1, 1, 5), "y": (1, 1, 3)}, ["x"], ["y"])
    reason = rule_of(graph, node)
    assert isinstance(reason, str)
    assert "ONNX Runtime pools to (2,), and not to (3,)" in reason


def drawn_window(rng: random.Random) -> Case:
    """A window with any attributes that its operator has in some operator set."""
    op = rng.choice(("MaxPool", "AveragePool", "LpPool", "Conv", "ConvTranspose"))
    opset = rng.choice(OPSETS[op])
    size, kernel = rng.choice((5, 8, 9, 12, 13)), rng.randint(1, 4)
    attrs: dict[str, object] = {"strides": (rng.randint(1, 4),)}
    if "Conv" in op or opset >= DILATED[op]:
        attrs["dilations"] = (rng.randint(1, 3),)
    if "Pool" in op:
        attrs["kernel_shape"] = (kernel,)
        if opset >= CEIL[op] and rng.random() < 0.5:
            attrs["ceil_mode"] = 1
    if op == "AveragePool":
        attrs["count_include_pad"] = rng.randint(0, 1)
    if rng.random() < 0.5:
        attrs["auto_pad"] = rng.choice(("SAME_UPPER", "SAME_LOWER", "VALID"))
    else:
        attrs["pads"] = (rng.randint(0, 3), rng.randint(0, 3))
    weights = () if "Pool" in op else (f32(1, 1, kernel),)
    return case(op, f32(1, 1, size), *weights, attrs=attrs, opset=opset, min_cuts=0)


OPSETS = {
    "MaxPool": (8, 12, 22),
    "AveragePool": (7, 11, 19, 22),
    "LpPool": (11, 18, 22),
    "Conv": (11, 22),
    "ConvTranspose": (11, 22),
}
#: First operator sets with dilations, and with ceil_mode.
DILATED = {"MaxPool": 10, "AveragePool": 19, "LpPool": 18}
CEIL = {"MaxPool": 10, "AveragePool": 10, "LpPool": 18}


@pytest.mark.slow
def test_drawn_windows_are_cut_as_the_whole() -> None:
    rng, cut = random.Random(0), 0
    for _ in range(1500):
        case = drawn_window(rng)
        try:
            trial = make_trial(case)
        except Exception:  # noqa: BLE001 - ONNX Runtime refuses the window
            continue
        if isinstance(rule_of(trial.graph, trial.node), Rule):
            check_row(case, WIDE[:4])
            cut += 1
    assert cut > 750


@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
@pytest.mark.parametrize("how", ["half_pixel", "asymmetric", "pytorch_half_pixel"])
def test_resized_images_are_cut(mode: str, how: str) -> None:
    attrs: dict[str, object] = {"mode": mode, "coordinate_transformation_mode": how}
    if mode == "nearest" and how == "asymmetric":
        attrs["nearest_mode"] = "floor"
    factor = vec(3, 2, dtype="float32") if mode == "nearest" else vec(4, 2, dtype="float32")
    check_row(replace(resize(f32(1, 1, 7, 6), None, factor, axes=(2, 3), **attrs), min_cuts=2))
    sizes = vec(1, 1, 14, 6)
    check_row(replace(resize(f32(1, 1, 7, 6), None, None, sizes, **attrs), min_cuts=2))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_row(case: Case) -> None:
    check_row(case)


def test_places_of_maxima_are_opaque() -> None:
    node = case("MaxPool", f32(2, 3, 4, 4), attrs={"kernel_shape": (2, 2)}, outputs=2)
    assert "counts through the whole tensor" in check_opaque(node)


def test_a_resize_that_crops_is_opaque() -> None:
    crop = vec(0, 0, 0, 0, 1, 1, 1, 1, dtype="float32")
    mode = "tf_crop_and_resize"
    node = resize(f32(1, 2, 4, 4), crop, TWICE, mode="linear", coordinate_transformation_mode=mode)
    assert mode in check_opaque(node)


def test_a_resize_of_computed_sizes_is_opaque() -> None:
    node = case("Resize", f32(1, 2, 4, 4), None, None, vec(1, 2, 8, 8))
    assert "not a constant" in check_opaque(node)


@pytest.mark.parametrize(("samples", "windows"), [(3, 9), (0, 4)])
def test_a_region_takes_its_samples_for_each_element_of_the_result(
    samples: int, windows: int
) -> None:
    """As many in each of two dims; of a number that sizes of regions decide four are taken."""
    attrs = {"output_height": 3, "output_width": 2, "sampling_ratio": samples}
    boxes, images = np.array([[0, 0, 3, 3], [1, 1, 4, 4]], np.float32), np.array([0, 1])
    trial = make_trial(case("RoiAlign", f32(2, 5, 6, 6), boxes, images, attrs=attrs, opset=16))
    rule = rule_of(trial.graph, trial.node)
    assert isinstance(rule, Rule)
    assert rule.flops == 8 * windows * 2 * 5 * 3 * 2
