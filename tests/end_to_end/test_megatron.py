"""The Megatron pattern is what the search finds for a Llama block of Llama-3-8B's size.

Shoeybi et al. 2019: the first matrix product of attention and of the MLP is cut by columns, the
second by rows, and one all-reduce ends each. The weights are a sparse file: planning reads none.
"""

from math import prod
from pathlib import Path

import onnx
import pytest

import partitioner
from partitioner.api.compiled.base import Compiled
from partitioner.examples import builder, llama
from partitioner.ir.plan import resolve
from partitioner.ir.program import CommKind


def _weightless(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    largest = 0

    def weight(self: builder.Builder, name: str, *shape: int, **_: object) -> str:
        nonlocal largest
        size = 4 * prod(shape)
        largest = max(largest, size)
        tensor = onnx.TensorProto(name=name, dims=shape, data_type=1, data_location=1)
        for key, value in (("location", "w.bin"), ("offset", "0"), ("length", str(size))):
            tensor.external_data.add(key=key, value=value)
        self._weights.setdefault(name, tensor)
        return name

    monkeypatch.setattr(builder.Builder, "weight", weight)
    model = llama.build(
        layers=1, hidden=4096, heads=32, kv_heads=8, intermediate=14336, vocab=32000, seq=16
    )
    with (folder / "w.bin").open("wb") as file:
        file.truncate(largest)
    onnx.save(model, folder / "block.onnx")
    return folder / "block.onnx"


@pytest.fixture
def block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compiled:
    return partitioner.compile(
        _weightless(tmp_path, monkeypatch), devices=4, cluster="4xh100", strategy="intra"
    )


@pytest.mark.slow
def test_columns_then_rows_then_one_all_reduce(block: Compiled) -> None:
    placed = {p.node.name: p for p in resolve(block.graph, block.plan)}
    prefix = "model.layers.0."
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate", "mlp.up")
    for name in columns:
        assert set(placed[prefix + name].layouts) == {"n"}, name
    for name in ("self_attn.out", "mlp.out"):
        assert set(placed[prefix + name].layouts) == {"k"}, name
    comms = [task.comm for task in block.schedule.tasks if task.comm is not None]
    inside = [comm for comm in comms if comm.source.startswith(prefix)]
    assert [comm.kind for comm in inside] == [CommKind.ALL_REDUCE] * 2
    assert [comm.source for comm in inside] == [prefix + "self_attn.out", prefix + "mlp.out"]
    assert block.evaluation.step_s < 0.6 * block.one_device.latency_s
