"""Every example runs as it is run by a reader."""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("[0-9]*.py"))

EXPECTED = {
    "01_remote_store.py": "rank 3 of 4 on cpu got 2",
    "02_message_passing.py": "rank 1 received 8 messages of 1024 numbers",
    "03_histogram.py": "[",
    "04_memory.py": "[4096, 8192, 4096, 0]",
}


def run(*command, **environ):
    variables = {k: v for k, v in os.environ.items() if not k.startswith("IRIS_")}
    variables |= {"CUDA_VISIBLE_DEVICES": "", **environ}
    done = subprocess.run(command, capture_output=True, text=True, env=variables, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_example_is_listed():
    assert [path.name for path in EXAMPLES] == sorted(EXPECTED)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_example(path):
    assert EXPECTED[path.name] in run(sys.executable, str(path))


def test_message_passing_under_torchrun():
    out = run(
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        str(ROOT / "examples" / "02_message_passing.py"),
    )  # fmt: skip
    assert "rank 1 received 8 messages of 1024 numbers" in out
