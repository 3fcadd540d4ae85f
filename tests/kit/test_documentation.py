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
    variables = {k: v for k, v in os.environ.items() if not k.startswith(("IRIS_", "PYTEST_"))}
    variables["CUDA_VISIBLE_DEVICES"] = variables["HIP_VISIBLE_DEVICES"] = ""
    variables["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # to import them takes seconds
    # test_mutants runs all device functions of the same stack, and the class above compiles the same cases
    elsewhere = ("device_functions", "device_methods", "compile_cases_compile")
    chosen = "test" if request.config.getoption("exhaustive") else f"not ({' or '.join(elsewhere)})"
    options = ["-rs", "-p", "no:cacheprovider", "-k", chosen, "test_conformance.py"]
    done = forked.run(forked.pytest_main, options, cwd=tmp_path, environ=variables)
    assert done.returncode == 0, done.stdout
    passed, skipped = re.search(r"(\d+) passed, (\d+) skipped", done.stdout).groups()
    assert int(passed) > 25
    reasons = re.findall(r"^SKIPPED \[(\d+)\] \S+ (.*)$", done.stdout, re.MULTILINE)
    assert sum(int(count) for count, _ in reasons) == int(skipped)
    assert {reason for _, reason in reasons} <= {
        "'host' does not implement iris_plugin_diagnose",
        "'host' does not provide growth",
        "'host' does not provide import-tensor",
        "allocator 'host' does not work on cuda",
        "allocator 'host' does not work on hip",
    }
