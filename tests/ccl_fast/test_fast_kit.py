"""The conformance kit passes on algorithms of packets, which a process of its own finds as installed plugins."""

import pathlib

import fast_plugins
import kit_runner
import pytest

HERE = pathlib.Path(__file__).parent


NAMES = [name for name, each in vars(fast_plugins).items() if hasattr(each, "algorithm")]


@pytest.mark.exhaustive  # tests/gluon has one, and tests/kit right ones of every operation
@pytest.mark.parametrize("name", NAMES)
def test_kit(name, tmp_path):
    passed = kit_runner.passed(tmp_path, fast_plugins, name, HERE / "suite_fast.py")
    # a rank alone is served by the core, and the kit leaves the tests out in which it is refused
    wanted = {each for each in kit_runner.MUST_PASS if name != "split" or "results" not in each}
    assert wanted <= passed
