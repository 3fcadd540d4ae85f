"""Rank jobs of test_soak."""

import os
import pathlib
import threading

import jobs_examples


def load():
    """The benchmark, as a module."""
    return jobs_examples.load(pathlib.Path(__file__).parents[2] / "benchmarks" / "soak.py")


def part(name, *how):
    """Do the turns of a part."""
    module = load()
    return module.soak(getattr(module, name), *how)


def leaking(leaks):
    """Soak something that keeps a little of each kind in each turn, if there are leaks."""
    kept, opened = [], []
    end = threading.Event()

    def turns(chance, open_one):
        with open_one():
            while True:
                if leaks:
                    opened.append(os.open("/dev/null", os.O_RDONLY))
                    threading.Thread(target=end.wait, daemon=True).start()
                    kept.append(os.urandom(1_000_000))
                yield

    try:
        return load().soak(turns, 12, 1e9, 1, "cpu")
    finally:
        end.set()
        for each in opened:
            os.close(each)
