"""`python -m tests.chaos`: a run of any length, told on stdout.

Owns the command line, the seed and the exit status: 0 after a good run, 1 after one
that shows a fault of shmlane's.
"""

from __future__ import annotations

import argparse
import secrets
import sys

from tests.chaos.conductor import run, say
from tests.chaos.handle import ChaosFailure


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", default=secrets.token_hex(4))
    options = parser.parse_args()
    say(f"chaos for {options.seconds:g} s; to repeat it: --seed {options.seed}")
    try:
        done = run(seconds=options.seconds, seed=options.seed)
    except ChaosFailure as failure:
        say(f"FAILED with seed {options.seed}: {failure}")
        return 1
    say(str(done))
    complaints = done.complaints()
    for complaint in complaints:
        say(f"FAILED with seed {options.seed}: {complaint}")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
