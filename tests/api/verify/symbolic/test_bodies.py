"""Branches are followed as programs of their own, whole and on cut operands."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from torch import Tensor, nn

import partitioner
from partitioner.api.verify.symbolic.ir_programs import programs_of
from partitioner.api.verify.symbolic.onnx_files import read_programs
from partitioner.api.verify.symbolic.proof import Proof
from partitioner.api.verify.symbolic.prove import prove
from partitioner.backends.onnx.files.emit import emit_models
from partitioner.ir.graph import Graph, Node
from partitioner.ir.ops.aten.branches import COND
from partitioner.ir.program import Comm, Compute, Programs, RankProgram

Branch = Callable[[nn.Module, Tensor], Tensor]


class Branches(nn.Module):
    """A layer, one of two branches, and another layer."""

    def __init__(self, yes: Branch, no: Branch) -> None:
        super().__init__()
        self.first, self.inner, self.last = (nn.Linear(8, 8) for _ in range(3))
        self.yes, self.no = yes, no

    def forward(self, x: Tensor, flag: Tensor) -> Tensor:
        x = self.first(x)
        x = torch.cond(flag, lambda y: self.yes(self, y), lambda y: self.no(self, y), (x,))
        return self.last(x).square().mean()


def layers(module: Any, x: Tensor) -> Tensor:
    return module.inner(x).relu()


def nested(module: Any, x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, module.inner.forward, lambda y: y * 2, (x,))


def pointwise(_: Any, x: Tensor) -> Tensor:
    return x.exp() + 1


def rows(_: Any, x: Tensor) -> Tensor:
    return x - x.mean(1, keepdim=True)


def columns(_: Any, x: Tensor) -> Tensor:
    return x - x.mean(0, keepdim=True)


def planned(yes: Branch, no: Branch, **options: Any) -> Any:
    options = {"parallel": "dp", "training": True, **options}
    return partitioner.compile(
        Branches(yes, no),
        (torch.randn(4, 8), torch.tensor(True)),
        devices=2,
        cluster="2xideal",
        time_limit_s=5,
        **options,
    )


@pytest.mark.parametrize(
    ("yes", "options"), [(layers, {}), (nested, {"parallel": "tp", "training": False})]
)
def test_branches_are_proven_from_programs_and_from_files(
    yes: Branch, options: dict[str, Any], tmp_path: Path
) -> None:
    compiled = planned(yes, pointwise, **options)
    proof = compiled.verify(symbolic=True)
    assert proof, str(proof)
    compiled.save(tmp_path / "out")
    proof = compiled.prove_written(tmp_path / "out")
    assert proof, str(proof)


def changed(programs: Programs, change: Callable[[Node], Node]) -> Programs:
    """Programs with another first branch in each node of branches."""

    def of_step(step: Compute | Comm) -> Compute | Comm:
        if not isinstance(step, Compute) or step.node.op != COND:
            return step
        graph = step.node.attrs["true"]
        assert isinstance(graph, Graph)
        body = replace(graph, nodes=tuple(map(change, graph.nodes)))
        return replace(step, node=replace(step.node, attrs={**step.node.attrs, "true": body}))

    def of_rank(program: RankProgram) -> RankProgram:
        return replace(program, steps=tuple(map(of_step, program.steps)))

    return replace(programs, ranks=tuple(map(of_rank, programs.ranks)))


def test_another_branch_is_refused_with_the_step_of_its_body() -> None:
    compiled = planned(layers, pointwise, training=False)

    def other(node: Node) -> Node:
        return replace(node, op="aten::neg") if node.op == "aten::relu" else node

    programs = changed(compiled.programs, other)
    proof = prove(compiled.graph, programs_of(programs, compiled.graph))
    assert proof.verdict == "not proven"
    assert "(higher_order::cond): its body 'true': node '/relu' (aten::neg)" in str(proof)


def cut(compiled: Any) -> Proof:
    """The proof of programs in which each rank runs the branches on its own rows.

    The communication that brings rows together before them is left out, and so is the slice behind.
    """
    programs, graph = compiled.programs, compiled.graph
    (cond,) = (node for node in graph.nodes if node.op == COND)

    def of_rank(program: RankProgram) -> RankProgram:
        node = next(s.node for s in program.steps if isinstance(s, Compute) and s.node.op == COND)
        gather = next(s for s in program.steps if isinstance(s, Comm) and s.target in node.inputs)
        result, own = node.outputs[0], program.types[gather.source]
        cuts = {s.target for s in program.steps if isinstance(s, Comm) and s.source == result}
        renamed = {gather.target: gather.source, **dict.fromkeys(cuts, result)}
        whole = graph.types[cond.inputs[1]].shape

        def local(of: Graph) -> Graph:
            types = {
                name: type_.with_shape((own.shape[0], *type_.shape[1:]))
                if type_.shape[:1] == whole[:1]
                else type_
                for name, type_ in of.types.items()
            }
            return replace(of, types=types)

        def read(one: Node) -> Node:
            attrs = {k: local(v) if isinstance(v, Graph) else v for k, v in one.attrs.items()}
            inputs = tuple(renamed.get(name, name) for name in one.inputs)
            return replace(one, inputs=inputs, attrs=attrs)

        return replace(
            program,
            types={**program.types, result: own},
            steps=tuple(
                replace(step, node=read(step.node)) if isinstance(step, Compute) else step
                for step in program.steps
                if step is not gather and not (isinstance(step, Comm) and step.target in cuts)
            ),
        )

    spoilt = replace(programs, ranks=tuple(map(of_rank, programs.ranks)))
    return prove(graph, programs_of(spoilt, graph))


def test_branches_on_cut_operands_are_followed_by_their_own_steps() -> None:
    assert cut(planned(pointwise, rows, training=False))


def test_a_branch_that_needs_all_of_a_cut_operand_is_refused() -> None:
    proof = cut(planned(pointwise, columns, training=False))
    assert not proof
    assert "(higher_order::cond): its body 'false': " in str(proof)


def branch(op: str) -> onnx.GraphProto:
    result = helper.make_tensor_value_info("r", TensorProto.FLOAT, [4, 8])
    return helper.make_graph([helper.make_node(op, ["a"], ["r"])], op, [], [result])


def with_if() -> onnx.ModelProto:
    """Two products, and an `If` whose bodies read what the first one gives."""
    weights = [
        helper.make_tensor(name, TensorProto.FLOAT, [8, 8], np.arange(64.0)) for name in ("v", "w")
    ]
    bodies = {"then_branch": branch("Relu"), "else_branch": branch("Neg")}
    nodes = [
        helper.make_node("MatMul", ["x", "v"], ["a"], name="first"),
        helper.make_node("If", ["flag"], ["c"], name="if", **bodies),
        helper.make_node("MatMul", ["c", "w"], ["y"], name="last"),
    ]
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [4, 8]) for name in "xy")
    flag = helper.make_tensor_value_info("flag", TensorProto.BOOL, [])
    graph = helper.make_graph(nodes, "if", [x, flag], [y], weights)
    opsets = [helper.make_opsetid("", 18)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


def test_the_bodies_of_an_onnx_model_are_those_of_the_model() -> None:
    compiled: Any = partitioner.compile(
        with_if(), devices=2, strategy="intra", cluster="2xideal", time_limit_s=5
    )
    assert compiled.verify(symbolic=True)
    models = emit_models(compiled.programs, compiled.graph)
    node = next(n for model in models for n in model.graph.node if n.op_type == "If")
    body = next(a.g for a in node.attribute if a.name == "else_branch")
    body.node[0].op_type = "Abs"
    proof = prove(compiled.graph, read_programs(models))
    assert proof.verdict == "not proven"
    assert ", node 'if' (If): " in str(proof)
