"""A token of a decoder whose caches stay on their ranks: sessions, and ONNX Runtime alone.

    OMP_NUM_THREADS=1 PYTHONPATH=tests python tests/benchmarks/generation.py [--rounds 60]
        [--style written] [--length 256] [--width 256] [--heads 8] [--layers 4] [--ranks 2]

`alone` is ONNX Runtime in this process, whose results are bound as the inputs of the next call;
of grown caches it has the last places, copied, as a rank does. `one` is a session of a plan for one
device, which is another process; `cut` one of `--ranks` ranks with the heads cut over them, and
`through` the same plan whose caches go through this process. All have one thread a rank. Modes take
turns, a token each, and make the same tokens, which is checked. Printed are the median milliseconds
of a token, and the median over rounds of the ratio to `alone`, with the least and the largest one;
then what a call of `one` takes beyond one of `alone`.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack

import numpy as np
import onnx
import onnxruntime
from side_by_side import print_table, with_numbers

import partitioner
from helpers.onnx_files import gpt

Arrays = Mapping[str, np.ndarray]


class Alone:
    """The whole model in ONNX Runtime, whose caches never become arrays of NumPy."""

    def __init__(self, model: onnx.ModelProto, length: int) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = onnxruntime.InferenceSession(model.SerializeToString(), options)
        self.length = length
        shapes = {value.name: value.shape for value in self.session.get_inputs()}
        self.held = {
            name: onnxruntime.OrtValue.ortvalue_from_numpy(
                np.zeros([d if isinstance(d, int) else length for d in shapes[name]], np.float32)
            )
            for name in gpt.held_names(shapes)
        }

    def __call__(self, inputs: Arrays) -> np.ndarray:
        binding = self.session.io_binding()
        for name, array in inputs.items():
            binding.bind_cpu_input(name, array)
        for name, value in self.held.items():
            binding.bind_ortvalue_input(name, value)
        names = [value.name for value in self.session.get_outputs()]
        for name in names:
            binding.bind_output(name)
        self.session.run_with_iobinding(binding)
        results = dict(zip(names, binding.get_outputs(), strict=True))
        for name in self.held:
            value = results[name.replace("past_key_values", "present")]
            if value.shape()[2] > self.length:
                last = np.ascontiguousarray(value.numpy()[:, :, -self.length :])
                value = onnxruntime.OrtValue.ortvalue_from_numpy(last)
            self.held[name] = value
        logits: np.ndarray = results["logits"].numpy()
        return logits


class Through:
    """A session whose caches this process takes and passes back."""

    def __init__(self, run: Callable[[Arrays], dict[str, np.ndarray]], alone: Alone) -> None:
        self.run, self.length = run, alone.length
        self.held = {name: value.numpy() for name, value in alone.held.items()}

    def __call__(self, inputs: Arrays) -> np.ndarray:
        results = self.run({**inputs, **self.held})
        for name in self.held:
            value = results[name.replace("past_key_values", "present")]
            self.held[name] = value[:, :, -self.length :]
        return results["logits"]


def run(args: argparse.Namespace) -> None:
    sizes = {"layers": args.layers, "heads": args.heads, "width": args.width}
    model = gpt.gpt(args.style, args.length, **sizes)
    asked = {
        "feed": gpt.FEED,
        "dims": {"past": args.length} if args.style == "grown" else {},
        "time_limit_s": 10,
    }
    one = partitioner.compile(model, devices=1, **asked)
    cut = partitioner.compile(model, devices=args.ranks, parallel="tp", **asked)
    alone = Alone(model, args.length)
    with ExitStack() as stack:
        sessions = {"one": one.session(), "cut": cut.session(), "through": cut.session({})}
        for session in sessions.values():
            stack.enter_context(session)
        modes: dict[str, Callable[[Arrays], np.ndarray]] = {
            "alone": alone,
            "one": lambda inputs: sessions["one"].run(inputs)["logits"],
            "cut": lambda inputs: sessions["cut"].run(inputs)["logits"],
            "through": Through(sessions["through"].run, alone),
        }
        seconds: dict[str, list[float]] = {name: [] for name in modes}
        tokens = [1]
        for given, _ in zip(gpt.calls(args.style, args.length), range(args.rounds), strict=False):
            inputs = {"input_ids": np.array([tokens[-1:]]), **given}
            likeliest = set()
            for name, mode in modes.items():
                start = time.perf_counter()
                logits = mode(inputs)
                seconds[name].append(time.perf_counter() - start)
                likeliest.add(int(logits[0, -1].argmax()))
            assert len(likeliest) == 1, likeliest
            tokens += likeliest
    print_table(seconds, 8, lambda _: "alone")
    beyond = [a - b for a, b in zip(seconds["one"][1:], seconds["alone"][1:], strict=True)]
    print(f"a call of one takes {1e6 * statistics.median(beyond):.0f} µs more than one of alone")


def main() -> None:
    parser = with_numbers(__doc__, rounds=60, length=256, width=256, heads=8, layers=4, ranks=2)
    parser.add_argument("--style", choices=["written", "grown"], default="written")
    run(parser.parse_args())


if __name__ == "__main__":
    main()
