"""Train a classifier of digits on one process or several: the same model, one flag.

    python mnist.py
    torchrun --nproc-per-node 4 mnist.py --parallel dp
    torchrun --nproc-per-node 2 mnist.py --parallel model
    torchrun --nproc-per-node 4 mnist.py --parallel dual
    torchrun --nproc-per-node 4 mnist.py --parallel columns

dp      data parallel: each process takes its part of every batch
model   the first and the last layer on process 0, the second on process 1
dual    both at once, 2 x 2: batches cut in two, and matrices cut in two
columns model and dp at once, 2 x 2: the first and the last layer on processes 0 and 1, the second
        on 2 and 3, and each pair shares the batch

The digits are scikit-learn's 1,797 images (`pip install scikit-learn`), enlarged to the 28 x 28 of
MNIST, or MNIST itself with `--data FOLDER`: train-images-idx3-ubyte and train-labels-idx1-ubyte.
"""

import argparse
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import partitioner
from partitioner import Constraints

SPLITS: dict[str, dict[str, Any]] = {
    "dp": {"parallel": "dp"},
    "model": {
        "devices": 2,
        "strategy": "inter",
        "constraints": Constraints.placed({"fc1": 0, "fc2": 1, "fc3": 0}),
    },
    "dual": {"parallel": "dp+tp", "mesh": {"dp": 2, "tp": 2}},
    "columns": {
        "parallel": "pp+dp",
        "mesh": {"pp": 2, "dp": 2},
        "micro_batches": 2,
        "constraints": Constraints.placed({"fc1": [0, 1], "fc2": [2, 3], "fc3": [0, 1]}),
    },
}


class MLP(nn.Module):
    """Three layers; knows nothing of processes. Returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(28 * 28, 128)
        self.fc2 = nn.Linear(128, 64)
        self.fc3 = nn.Linear(64, 10)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = torch.relu(self.fc1(images.flatten(1)))
        x = torch.relu(self.fc2(x))
        return nn.functional.cross_entropy(self.fc3(x), labels)


def digits(folder: Path | None) -> tuple[Tensor, Tensor]:
    """Images of 28 x 28 from 0 to 1, and the digits that they show."""
    if folder is not None:
        images = (folder / "train-images-idx3-ubyte").read_bytes()[16:]
        labels = (folder / "train-labels-idx1-ubyte").read_bytes()[8:]
        pixels = torch.frombuffer(bytearray(images), dtype=torch.uint8).view(-1, 28, 28)
        return pixels / 255, torch.frombuffer(bytearray(labels), dtype=torch.uint8).long()
    from sklearn.datasets import load_digits

    found = load_digits()
    small = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1) / 16
    large = nn.functional.interpolate(small, size=(28, 28), mode="bilinear").squeeze(1)
    return large, torch.tensor(found.target, dtype=torch.long)


def batches(images: Tensor, labels: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Shuffled batches without end, the same on every process."""
    generator = torch.Generator().manual_seed(1)
    while True:
        order = torch.randperm(len(labels), generator=generator)
        for part in order.split(size):
            if len(part) == size:
                yield images[part], labels[part]


def train(args: argparse.Namespace) -> list[float]:
    """The loss of each step."""
    images, labels = digits(args.data)
    torch.manual_seed(0)
    model: nn.Module = MLP()
    if args.parallel:
        example = images[: args.batch], labels[: args.batch]
        program = partitioner.compile(
            model, example, training=True, optimizer="momentum", **SPLITS[args.parallel]
        )
        model = program.module()
        if args.rank == 0:
            print(program)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step, batch in zip(range(args.steps), batches(images, labels, args.batch), strict=False):
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if args.rank == 0 and (step + 1) % args.every == 0:
            print(f"step {step + 1}: loss {losses[-1]:.4f}", flush=True)
    return losses


def main() -> None:
    """Read the flags, train, write the curve."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parallel", choices=SPLITS, help="default: one process")
    parser.add_argument("--data", type=Path, metavar="FOLDER", help="of MNIST's files")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=20, help="print every so many steps")
    parser.add_argument("--curve", type=Path, metavar="FILE", help="write a loss a line")
    args = parser.parse_args()
    args.rank = int(os.environ.get("RANK", "0"))
    if args.parallel:
        dist.init_process_group("gloo")
    losses = train(args)
    if args.curve and args.rank == 0:
        args.curve.write_text("".join(f"{loss!r}\n" for loss in losses))
    if args.parallel:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
