"""A third party's distribution, from its source to the conformance kit: built, installed, found, chosen, used.

Everything runs in an environment of wheels, outside the checkout.
"""

import importlib.metadata
import json
import re
import shutil

import pytest

from .installation import EXAMPLE
from .workspace import FOLDERS, ROOT, project, pyproject

pytestmark = pytest.mark.slow

PACKAGE = "iris_example_backend"


def test_every_package_comes_from_a_wheel(with_example):
    program = "import importlib as i, sys; print(sys.path); [print(i.import_module(n).__file__) for n in sys.argv[1:]]"
    path, *files = with_example.output("python", "-c", program, *FOLDERS, PACKAGE).splitlines()
    assert len(files) == len(FOLDERS) + 1
    assert all(file.startswith(f"{with_example.site_packages}/") for file in files)
    assert not any(str(ROOT) in each for each in (path, *files))


def test_the_plugins_and_their_settings_are_listed(with_example):
    listed = json.loads(with_example.output("iris", "plugins", "--json"))
    ours = {(each["kind"], each["name"]): each for each in listed if each["distribution"] == "iris-example-backend"}
    declared = pyproject(EXAMPLE.relative_to(ROOT))["project"]["entry-points"]
    names = {(group, name) for group, points in declared.items() for name in points}
    assert {(f"iris.{kind}s", name) for kind, name in ours} == names
    assert {each["state"] for each in ours.values()} == {"loaded"}
    assert not any(each["reason"] for each in ours.values())
    assert not any(each["state"] in ("broken", "conflicting", "incompatible") for each in listed)
    assert {"host", "torch", "vmem", "triton", "gluon"} <= {each["name"] for each in listed}
    rows = json.loads(with_example.output("iris", "config", "--json"))["settings"]
    shown = {row["variable"] for row in rows}
    assert {"IRIS_EXAMPLE__DIRECTORY", "IRIS_EXAMPLE_TWO_SHOT__MAX_NBYTES"} <= shown


CHOOSE = """
import torch
from iris_core import Iris

def main():
    with Iris("1MiB", allocator="example", backend="example", device="cpu") as ctx:
        x = ctx.full((3,), ctx.cur_rank)
        ctx.barrier()
        from iris_example_backend import language as ex
        there = torch.zeros(3)
        ex.kernel(lambda x, y, *ranks: ex.get(x + [0, 1, 2], y + [0, 1, 2], *ranks))[(1,)](
            x, there, ctx.cur_rank, (ctx.cur_rank + 1) % ctx.num_ranks, ctx.get_heap_bases()
        )
        ctx.barrier()
        return ctx.plugin_names, there.tolist()

if __name__ == "__main__":
    print(main())
    with Iris("1MiB", device="cpu") as ctx:
        print(ctx.plugin_names)
"""


def test_it_is_chosen_by_name_and_by_nothing_else(with_example):
    example = {"allocator": "example", "backend": "example"}
    chosen, automatic = with_example.output(CHOOSE).splitlines()
    assert chosen == str((example, [0.0] * 3))
    assert automatic == str({"allocator": "host", "backend": "triton"})


@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_its_demonstration_is_right(with_example, ranks):
    choice = ("--backend", "example", "--allocator", "example", "--ranks", ranks)
    (row,) = json.loads(with_example.output("iris", "demo", "--json", *choice))["rows"]
    assert (row["name"], row["ranks"], row["allocator"]) == ("ring-gemm", ranks, "example")
    assert row["ok"]
    assert row["error"] <= row["tolerance"]


def test_the_doctor_tests_it(with_example):
    report = json.loads(with_example.output("iris", "doctor", "--json", IRIS_BLOCK="triton,gluon,host,nccl"))
    (test,) = report["self_tests"]
    assert (test["backend"], test["allocator"], test["state"]) == ("example", "example", "passed")
    assert {check["op"] for check in test["checks"]} == {"write", "read", "atomic_add", "signal"}
    assert report["ok"]
    for about in map(project, FOLDERS):
        assert report["versions"]["distributions"][about["name"]] == about["version"]
    assert report["versions"]["torch"] == importlib.metadata.version("torch")


def test_its_readme_runs(with_example):
    (program,) = re.findall(r"```python\n(.*?)```", (EXAMPLE / "README.md").read_text(), re.DOTALL)
    assert with_example.output(program) == "rank 0 got 1.0\n"


def test_it_passes_the_kit_and_its_own_tests(with_example):
    tests = with_example.folder / "tests"
    shutil.copytree(EXAMPLE / "tests", tests, ignore=shutil.ignore_patterns("__pycache__"))
    options = ("-rs", "-p", "no:cacheprovider", "--strict-config")
    done = with_example.output("python", "-m", "pytest", *options, tests)
    passed = int(re.search(r"(\d+) passed", done).group(1))
    assert passed > 110
    skipped = re.findall(r"^SKIPPED \[(\d+)\] \S+ (.*)$", done, re.MULTILINE)
    reasons = {re.sub(r"'example[\w-]*'", "...", reason) for _, reason in skipped}
    assert reasons <= {
        "... does not implement iris_plugin_diagnose",
        *(f"... does not provide {capability}" for capability in ("decommit", "growth", "import-tensor")),
        *(f"{kind} ... does not work on {gpu}" for kind in ("allocator", "collective") for gpu in ("cuda", "hip")),
        "backend ... has no compare_clocks",
        "the backend has no checker",
        "the backend has no set_trace",
        "the backend has none of compile_only",
        "the backend has none of collectives, tables",
        "the backend has none of operations, operation_tables",
        "the backend has none of ticks_per_second, set_trace, compare_clocks",
        "all_reduce sum float32 [1003] heap: it works on the whole world and not on a group of ranks",
        "no `compile_only` and no fixture `compile`: this backend compiles nothing without a GPU",
    }
