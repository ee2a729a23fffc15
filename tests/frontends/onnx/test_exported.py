"""Models as torch.onnx.export writes them, static and dynamic."""

import logging
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers.onnx_files import models
from helpers.onnx_files import onnx_models as om
from partitioner.frontends.inputs import random_inputs
from partitioner.frontends.onnx.load import load_onnx


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(models.SOURCES))
def test_an_export_loads_static_and_computes_the_same(
    name: str, exported: Callable[[str], Path]
) -> None:
    traced = load_onnx(exported(name))
    assert not {node.op for node in traced.graph.nodes} & {"Shape", "Constant", "Identity"}
    feeds = random_inputs(traced.graph, 0)
    (whole,) = om.assert_same(traced, feeds, tolerance=1e-5)
    assert np.isfinite(whole).all()
    if name == "gpt2":
        modules = traced.graph.modules
        assert {"model.transformer.h.0.attn", "model.transformer.h.1.mlp"} & set(modules.values())
        assert len(modules) > 0.8 * len(traced.graph.nodes)


@pytest.mark.slow
def test_a_dynamic_export_is_closed_by_two_flags(tmp_path: Path) -> None:
    feeds = models.inputs("gpt2")
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            models.module("gpt2"),
            tuple(map(torch.from_numpy, feeds.values())),
            input_names=list(feeds),
            dynamic_shapes=(({0: "batch", 1: "sequence"},),),
            dynamo=True,
            verbose=False,
        )
    assert program is not None
    path = tmp_path / "gpt2.onnx"
    program.save(path, external_data=True)
    with pytest.raises(ValueError, match="pass --dim batch=N --dim sequence=N"):
        load_onnx(path)
    traced = load_onnx(path, dims={"batch": 3}, shapes={"input_ids": (3, 7)})
    assert traced.graph.types["input_ids"].shape == (3, 7)
    assert not {node.op for node in traced.graph.nodes} & {"Shape", "Constant", "Range"}
    om.assert_same(traced, random_inputs(traced.graph, 0), tolerance=1e-5)
