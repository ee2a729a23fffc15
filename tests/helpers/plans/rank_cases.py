"""All hand-made cases by name, and how to compare."""

from collections.abc import Callable

import numpy as np

from helpers.plans import rank_programs as hand

CASES: dict[str, Callable[[], hand.Case]] = {
    "tensor_parallel": hand.tensor_parallel,
    "tensor_parallel max": lambda: hand.tensor_parallel("max"),
    "tensor_parallel prod": lambda: hand.tensor_parallel("prod"),
    "all_gather uneven": hand.all_gather,
    "all_gather even of three": lambda: hand.all_gather(sizes=(2, 2, 2)),
    "all_gather bool": lambda: hand.all_gather("bool"),
    "all_gather int64": lambda: hand.all_gather("int64", (1, 1)),
    "broadcast": hand.broadcast,
    "broadcast float16": lambda: hand.broadcast("float16"),
    "scatter": hand.scatter,
    "gather": hand.gather,
    "gather int16, one rank idle": lambda: hand.gather("int16", ranks=3),
    "all_to_all": hand.all_to_all,
    "all_to_all float16": lambda: hand.all_to_all("float16"),
    "reduce_scatter": hand.reduce_scatter,
    "reduce_scatter min of three": lambda: hand.reduce_scatter(reduce="min", ranks=3),
    "reduce_scatter prod int32": lambda: hand.reduce_scatter("int32", "prod"),
    "all_reduce int16": hand.all_reduce,
    "all_reduce bool": lambda: hand.all_reduce("bool", "max"),
    "all_reduce float16 of three": lambda: hand.all_reduce("float16", ranks=3),
    "all_to_all bfloat16": lambda: hand.all_to_all("bfloat16"),
    "empty share": hand.empty_share,
    "pipeline": hand.pipeline,
    "pipeline float16": lambda: hand.pipeline("float16"),
}


def check(case: hand.Case, outputs: dict[str, np.ndarray]) -> None:
    assert list(outputs) == list(case.expected)
    for name, expected in case.expected.items():
        assert outputs[name].dtype == expected.dtype
        if expected.dtype.kind == "f":
            np.testing.assert_allclose(outputs[name], expected, rtol=case.rtol, atol=1e-5)
        else:
            np.testing.assert_array_equal(outputs[name], expected)
