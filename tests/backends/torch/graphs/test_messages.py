"""Messages of several parts, packed and taken apart again."""

import pytest
import torch
from torch import Tensor, fx

from partitioner.backends.torch.graphs.comms import Message, carried
from partitioner.ir.exchange import Transfer
from partitioner.ir.program import Comm, CommKind

PARTS: dict[str, tuple[str, ...]] = {
    "alone": ("float32",),
    "alike": ("float32", "float32", "float32"),
    "unlike": ("bool", "float32", "int64", "bfloat16", "float64"),
    "bytes": ("bool", "bool"),
    "complex": ("complex64", "int64", "bool"),
}


def comms(dtypes: tuple[str, ...]) -> list[Comm]:
    """Sends of 3, 4, ... elements from rank 0 in phase 1 to rank 1 in phase 2."""
    sends = []
    for seq, dtype in enumerate(dtypes):
        part = (((0, 3 + seq),),)
        transfer = Transfer(0, 1, part, part)
        names = f"v{seq}", f"v{seq}"
        sends.append(
            Comm(seq, CommKind.SEND, (0, 1), *names, dtype, (transfer,), phase=1, target_phase=2)
        )
    return sends


def graph_of(message: Message, parts: dict[int, Tensor], *, packs: bool) -> fx.GraphModule:
    graph = fx.Graph()
    if packs:
        nodes = {number: graph.placeholder(f"v{number}") for number in parts}
        graph.output(message.packed(graph, nodes))
    else:
        taken = message.unpacked(graph, graph.placeholder("message"))
        graph.output(tuple(taken[number] for number in parts))
    return fx.GraphModule(torch.nn.Module(), graph)


@pytest.mark.parametrize("kind", PARTS)
def test_parts_come_out_as_they_went_in(kind: str) -> None:
    sends = comms(PARTS[kind])
    message = Message.of(sends, 0, 1)
    parts = {}
    for comm in sends:
        dtype, width = carried(comm.dtype)
        parts[comm.seq] = torch.arange(1, 1 + width * (3 + comm.seq)).to(dtype)
    packed = graph_of(message, parts, packs=True)(*parts.values())
    assert (packed.numel(), packed.dtype, packed.dim()) == (message.numel, message.dtype, 1)
    assert packed.nbytes % max(part.itemsize for part in parts.values()) == 0
    taken = graph_of(message, parts, packs=False)(packed)
    for one, other in zip(taken, parts.values(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_both_sides_make_the_same_message_whatever_the_order_of_their_steps() -> None:
    sends = comms(PARTS["unlike"])
    message = Message.of(sends, 0, 1)
    assert message == Message.of(sends[::-1], 0, 1)
    assert message.dtype == torch.uint8
    widths = [part.dtype.itemsize for part in message.parts]
    assert widths == sorted(widths, reverse=True)
    assert message.name == "message of 1 on 0 for 2 on 1"
