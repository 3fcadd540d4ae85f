"""Every litmus test under many seeds: which outcomes are seen, and with which seed first.

    python tests/checker/count_litmus.py [--seeds 2000]

Status 1 if a forbidden outcome was seen, or less than 95 % of the allowed ones.
"""

import argparse
import sys

from litmus_programs import Program, Runner
from litmus_ptx import PTX

from iris_core import Iris


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=2000)
    args = parser.parse_args()
    with Iris("1MiB", device="cpu", check="schedules") as ctx:
        runner = Runner(ctx)
        found = {}
        for test in PTX:
            found[test] = runner.first_seed(Program(test), range(args.seeds))
            kind = "allowed" if test.allowed else "forbidden"
            print(f"{test.name}: {kind}, {'not seen' if found[test] is None else f'seen with seed {found[test]}'}")
    wrong = [test.name for test, seed in found.items() if seed is not None and not test.allowed]
    allowed = [test for test in PTX if test.allowed]
    missed = [test.name for test in allowed if found[test] is None]
    print(f"{len(PTX)} tests, {args.seeds} seeds each: forbidden and seen: {', '.join(wrong) or 'none'}")
    print(f"{len(allowed) - len(missed)} of {len(allowed)} allowed ones seen; not: {', '.join(missed) or 'none'}")
    return int(bool(wrong) or len(missed) > 0.05 * len(allowed))


if __name__ == "__main__":
    sys.exit(main())
