"""Ready models to try: `python -m partitioner.examples NAME OUT.onnx`.

>>> from partitioner import examples
>>> examples.build("mlp", layers=2, hidden=64, batch=4).graph.name
'mlp'
"""

from collections.abc import Callable
from functools import partial
from inspect import signature

import onnx

from partitioner.examples import llama, zoo
from partitioner.examples.builder import Builder, ExampleError, floats

__all__ = ["NAMES", "ExampleError", "build", "options_of"]


def _mlp(*, layers: int = 4, hidden: int = 256, batch: int = 8, seed: int = 0) -> onnx.ModelProto:
    """`x` (batch, hidden) -> layers of Gemm (hidden, hidden) with Relu between -> `y`."""
    b = Builder(seed)
    x = "x"
    for layer in range(layers):
        last = layer == layers - 1
        weight = b.weight(f"layer{layer}.weight", hidden, hidden, gain=1.0 if last else 2**0.5)
        bias = b.near(f"layer{layer}.bias", hidden, centre=0.0)
        x = b.op("Gemm", x, weight, bias, name="y" if last else f"layer{layer}.out")
        if not last:
            x = b.op("Relu", x, name=f"layer{layer}.relu")
    return b.model("mlp", [floats("x", batch, hidden)], [floats("y", batch, hidden)])


def _tiny(
    *, size: int = 16, channels: int = 8, batch: int = 2, classes: int = 10, seed: int = 0
) -> onnx.ModelProto:
    """A CNN with a residual block: `image` (batch, 3, size, size) -> `scores` (batch, classes).

    Every convolution has `channels` channels.
    """
    b = Builder(seed)
    stem = _convolution(b, "image", "stem", 3, channels)
    x = b.op("Relu", stem, name="stem.relu")
    pool = {"kernel_shape": [2, 2], "strides": [2, 2], "ceil_mode": 1}
    x = b.op("MaxPool", x, name="stem.pool", **pool)
    inner = b.op("Relu", _convolution(b, x, "block.a", channels, channels), name="block.relu")
    branch = _convolution(b, inner, "block.b", channels, channels)
    x = b.op("Relu", b.op("Add", x, branch, name="block.sum"), name="block.out")
    mean = b.op("GlobalAveragePool", x, name="head.mean")
    flat = b.op("Flatten", mean, name="head.flat", axis=1)
    weight = b.weight("head.weight", channels, classes)
    logits = b.op("Gemm", flat, weight, b.near("head.bias", classes, centre=0.0), name="logits")
    b.op("Softmax", logits, name="scores", axis=-1)
    image, scores = floats("image", batch, 3, size, size), floats("scores", batch, classes)
    return b.model("tiny", [image], [scores])


def _convolution(b: Builder, x: str, prefix: str, channels_in: int, channels_out: int) -> str:
    """3 x 3 convolution of the same size, then BatchNormalization."""
    kernel = b.weight(
        f"{prefix}.kernel", channels_out, channels_in, 3, 3, gain=2**0.5, fan_in=9 * channels_in
    )
    x = b.op("Conv", x, kernel, name=f"{prefix}.conv", pads=[1, 1, 1, 1])
    statistics = [
        b.near(f"{prefix}.scale", channels_out, centre=1.0),
        b.near(f"{prefix}.bias", channels_out, centre=0.0),
        b.near(f"{prefix}.mean", channels_out, centre=0.0),
        b.near(f"{prefix}.variance", channels_out, centre=1.0),
    ]
    return b.op("BatchNormalization", x, *statistics, name=f"{prefix}.norm")


_BUILDERS: dict[str, Callable[..., onnx.ModelProto]] = {
    **{name: partial(zoo.build, name) for name in zoo.FILES},
    "llama": llama.build,
    "mlp": _mlp,
    "tiny": _tiny,
}

NAMES: tuple[str, ...] = tuple(sorted(_BUILDERS))


def build(name: str, **options: int) -> onnx.ModelProto:
    """An example model with random weights, the same for the same options.

    Shapes are static, the IR version is 10, and weights are initializers.

    Args:
        name: One of `NAMES`.
        **options: Sizes and `seed`; `options_of(name)` lists them with their defaults.

    Raises:
        ExampleError: Unknown name or option, or a size that is impossible.
    """
    known = options_of(name)
    for option, value in options.items():
        if option not in known:
            raise ExampleError(f"{name} has no option {option!r}; it has {', '.join(known)}")
        if value < (0 if option == "seed" else 1):
            raise ExampleError(f"{option} of {name} is {value}, but must be at least 1")
    return _BUILDERS[name](**options)


def options_of(name: str) -> dict[str, int]:
    """The options of an example and their defaults.

    Raises:
        ExampleError: `name` is not one of `NAMES`.
    """
    if name not in _BUILDERS:
        raise ExampleError(f"unknown example {name!r}; there are {', '.join(NAMES)}")
    return {
        key: value.default
        for key, value in signature(_BUILDERS[name]).parameters.items()
        if value.kind is value.KEYWORD_ONLY
    }
