"""Two models small enough for quick tests: a perceptron and a CNN."""

import onnx

from partitioner.examples.builder import Builder, floats


def build_mlp(
    *, layers: int = 4, hidden: int = 256, batch: int = 8, seed: int = 0
) -> onnx.ModelProto:
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


def build_tiny(
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
