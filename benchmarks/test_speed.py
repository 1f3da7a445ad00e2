"""`ktransformers bench speed` under the name that users' scripts know: prefill and decode of a running server.

python benchmarks/test_speed.py --concurrent 4 --prompt_lens 1024
"""

from __future__ import annotations

import sys

from ktransformers.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "speed", *sys.argv[1:]]))
