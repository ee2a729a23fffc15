"""The exported models that other tests use agree with the torch models they come from."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from helpers.onnx_files import models


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name == "gpt2" else pytest.mark.slow)
        for name in sorted(models.SOURCES)
    ],
)
def test_an_export_agrees_with_torch(name: str, exported: Callable[[str], Path]) -> None:
    path = exported(name)
    onnx.checker.check_model(str(path), full_check=True)
    feeds = models.inputs(name, seed=1)
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (result,) = session.run(None, feeds)
    expected = models.expected(name, feeds)
    assert expected.std() > 0.01
    np.testing.assert_allclose(result, expected, atol=1e-4 * np.abs(expected).max())
