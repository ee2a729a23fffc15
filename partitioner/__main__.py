"""`python -m partitioner` is the `partition` command."""

import sys

from partitioner.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
