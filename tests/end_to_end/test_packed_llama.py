"""A Llama with 4-bit weights: its products count, and are cut."""

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import partitioner
from helpers.onnx_files.rank_files import assert_rank_files_run
from partitioner import examples
from partitioner.api.compiled.onnx_model import OnnxRanks
from partitioner.report.summary import split_sentence

BLOCK = 16


def packed_llama(operator: str = "com.microsoft::MatMulNBits") -> onnx.ModelProto:
    """The example Llama with each of its 15 weights packed to 4 bits, in blocks of 16."""
    model = examples.build("llama")
    rng = np.random.default_rng(0)
    weights = {tensor.name: tensor for tensor in model.graph.initializer}
    domain, _, name = operator.partition("::")
    for node in model.graph.node:
        weight = weights.get(node.input[1]) if node.op_type == "MatMul" else None
        if weight is None:
            continue
        depth, columns = weight.dims
        blocks = depth // BLOCK
        bytes_ = rng.integers(0, 255, (columns, blocks, BLOCK // 2)).astype(np.uint8)
        scales = rng.uniform(0.001, 0.01, (columns, blocks)).astype(np.float32)
        model.graph.initializer.remove(weight)
        for part, array in (("packed", bytes_), ("scales", scales)):
            model.graph.initializer.append(numpy_helper.from_array(array, f"{weight.name}.{part}"))
        node.op_type, node.domain = name, domain
        node.input[1:] = [f"{weight.name}.packed", f"{weight.name}.scales"]
        for key, value in {"K": depth, "N": columns, "bits": 4, "block_size": BLOCK}.items():
            node.attribute.append(helper.make_attribute(key, value))
    model.opset_import.append(helper.make_opsetid(domain, 1))
    return model


@pytest.mark.parametrize(
    ("devices", "strategy"),
    [
        *((2, "intra"), (3, "auto")),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((2, "auto"), (3, "intra"))),
    ],
)
def test_it_is_cut_and_computes_the_same(strategy: str, devices: int) -> None:
    compiled = partitioner.compile(
        packed_llama(),
        devices=devices,
        strategy=strategy,
        cluster=f"{devices}xideal",
        time_limit_s=10,
    )
    assert compiled.summary["sharded_flops_share"] > 0.9
    assert compiled.summary["kept_whole"] == {}
    assert isinstance(compiled.ranks, OnnxRanks)
    assert_rank_files_run(compiled.ranks.folder)
    found = compiled.verify()
    assert found.equal, str(found)


def test_the_same_products_by_an_unknown_operator_count_and_are_named() -> None:
    """Nothing is known of the operator but its name and attributes."""
    model = packed_llama("acme::MatMul4")
    shapes = {node.output[0]: node for node in model.graph.node if node.domain == "acme"}
    whole = onnx.shape_inference.infer_shapes(examples.build("llama"))
    for info in whole.graph.value_info:
        if info.name in shapes:
            model.graph.value_info.append(info)
    compiled = partitioner.compile(model, devices=2, cluster="2xideal", strategy="intra")
    summary = compiled.summary
    assert summary["sharded_flops_share"] < 0.2
    assert summary["kept_whole"] == {"acme::MatMul4": 15}
    assert summary["kept_whole_flops_share"] > 0.8
    line = "15 x acme::MatMul4 cannot be cut for want of a rule: "
    assert line in split_sentence(summary)
    assert line in str(compiled)
    known = partitioner.compile(packed_llama(), devices=1, cluster="1xideal").summary
    assert summary["one_device"]["latency_s"] == pytest.approx(known["latency_s"], rel=0.05)
