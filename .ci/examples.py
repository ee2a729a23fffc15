"""The README's examples, in the folder that this is run in and with the versions installed.

Commands and snippets come from the README itself. All that `--json` prints must be JSON, whatever
the libraries print. Usage: python examples.py README.md (see `floors` and `newest`).
"""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

#: Commands besides: views of the plan, and all that have `--json`.
VIEWS = (
    "partition show llama.partition",
    "partition explain llama.partition",
    "partition draw llama.partition --graph llama.png",
)
JSON = (
    "partition llama.onnx --devices 4 --force --json",
    "partition llama.onnx --devices 2 --strategy inter --solver cbc -o cbc.partition --json",
    "partition examples_module:build --devices 2 --training --parallel tp --json",
    "partition sweep llama.onnx --devices 1,2 --json",
    "partition diff llama.partition cbc.partition --json",
    "partition llama.onnx --devices 2 --strategy intra --dump-problem p.json --quiet",
    "partition solve p.json --json",
)
MODULE = """
import torch


class Loss(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(64, 64)

    def forward(self, x):
        return self.net(x).square().mean()


def build():
    return Loss(), (torch.randn(16, 64),)
"""


def main(readme: Path) -> None:
    text = readme.read_text(encoding="utf-8")
    os.environ["XDG_CACHE_HOME"] = str(Path.cwd() / "cache")  # measurements of the machine
    Path("examples_module.py").write_text(MODULE, encoding="utf-8")
    for command in (*commands(text), *VIEWS):
        run(command)
    for command in JSON:
        out = run(command)
        if "--json" in command and not isinstance(json.loads(out), dict):
            raise SystemExit(f"{command}: no JSON object")
    for snippet in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        step("a snippet of the README")
        exec(compile(snippet, readme.name, "exec"), {})
    train()


def commands(text: str) -> Iterator[str]:
    """Commands of the README's consoles that run the package, without their comments."""
    for console in re.findall(r"```console\n(.*?)```", text, re.DOTALL):
        for line in console.splitlines():
            for part in line.partition(" #")[0].split("&&"):
                if (command := part.strip()).startswith(("partition ", "python -m partitioner.")):
                    yield command


def run(command: str) -> str:
    """Run a command; returns what it prints on stdout."""
    step(command)
    done = subprocess.run(command.split(), stdout=subprocess.PIPE, text=True, check=False)
    print("\n".join(done.stdout.splitlines()[:6]), flush=True)
    if done.returncode:
        raise SystemExit(f"{command}: exit code {done.returncode}")
    return done.stdout


def train() -> None:
    """Gradients of a module in parts are those of the module, with both solvers."""
    import torch
    from examples_module import build

    import partitioner

    model, (x,) = build()
    for solver in ("highs", "cbc"):
        step(f"training, planned by {solver}")
        program = partitioner.compile(
            model, x, devices=2, training=True, solver=solver, parallel="dp"
        )
        print(program.verify())
        _, gradients = program.gradients(x)
        expected = torch.autograd.grad(model(x), list(model.parameters()))
        for (name, found), wanted in zip(
            sorted(gradients.items(), reverse=True), expected, strict=True
        ):
            torch.testing.assert_close(found, wanted, msg=name)


def step(title: str) -> None:
    print(f"\n== {title} ({time.monotonic() - BEGIN:.0f} s)", flush=True)


BEGIN = time.monotonic()

if __name__ == "__main__":
    sys.path.insert(0, str(Path.cwd()))
    main(Path(sys.argv[1]))
