"""`partition profile` as a process of torchrun: communications of one size."""

import sys

from partitioner.cli.main import main
from partitioner.profiling import gloo

gloo.SIZES = (1024, 2**18)
gloo._TURNS = 3
raise SystemExit(main(["profile", *sys.argv[1:], "--quiet"]))
