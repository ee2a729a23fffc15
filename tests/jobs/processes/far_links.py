"""`partition profile` as a process of torchrun: communications of one size."""

import sys

from partitioner.api.profiling import links
from partitioner.cli.main import main

links.SIZES = (1024, 2**18)
links._TURNS = 3
raise SystemExit(main(["profile", *sys.argv[1:], "--quiet"]))
