"""`python -m ktransformers`: the same as the `ktransformers` command."""

import sys

from ktransformers.cli import main

if __name__ == "__main__":
    sys.exit(main())
