"""The kit passes on the right backend and in docs/conformance_kit.md, whose example runs as it stands."""

import os
import pathlib
import re

import forked

from iris_core.testing import BackendConformance

PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "conformance_kit.md").read_text()


class TestTritonBackend(BackendConformance):
    """Of the allocator, and of both together, the example is about."""

    name = "triton"
    case_step = 15


def test_the_example_passes(tmp_path, request):
    example = re.search(r"## An example\n.*?```python\n(.*?)```", PAGE, re.DOTALL).group(1)
    (tmp_path / "test_conformance.py").write_text(example)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    variables = os.environ | {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    # test_mutants runs all device functions of the same stack, and the class above compiles the same cases
    elsewhere = ("device_functions", "device_methods", "compile_cases_compile")
    chosen = "test" if request.config.getoption("exhaustive") else f"not ({' or '.join(elsewhere)})"
    options = ["-rs", "-k", chosen, "test_conformance.py"]
    done = forked.run(forked.pytest_main, options, cwd=tmp_path, environ=variables)
    assert done.returncode == 0, done.stdout
    passed, skipped = re.search(r"(\d+) passed, (\d+) skipped", done.stdout).groups()
    assert int(passed) > 25
    reasons = re.findall(r"^SKIPPED \[(\d+)\] \S+ (.*)$", done.stdout, re.MULTILINE)
    assert sum(int(count) for count, _ in reasons) == int(skipped)
    without = ("implement iris_plugin_diagnose", "provide growth", "provide import-tensor")
    expected = {f"'host' does not {each}" for each in without}
    expected |= {f"allocator 'host' does not work on {each}" for each in ("cuda", "hip")}
    assert {reason for _, reason in reasons} <= expected
