"""What new users do wrong: each is one line that says so, before torch is imported, and no traceback."""

import json
import os
import re
import subprocess
import sys

import forked
from tables import table

MISTAKES = {
    "demo --ranks 0": "--ranks must be at least 1", "demo --ranks x": "int value: 'x'; iris demo --help says more",
    "demo --device gpu": "--device gpu: say cpu, cuda or cuda:1", "demo --backend nope": "installed are gluon, triton",
    "demo --allocator nope@nobody": "no allocator named 'nope@nobody'", "demo --allocator vmm": "did you mean 'vmem'?",
    "demo --nodes 2x": "IRIS_NODES='2x' must be like", "demo --nodes 2x2 --ranks 3": "has 4 ranks, --ranks says 3",
    "tune --ranks 1": "--ranks 2 or more", "tune --limit nan": "seconds above 0", "tune --limit 0": "seconds above 0",
    "tune --max many": "bytes or text such as 64MiB", "tune --min 2MiB --max 1MiB": "2MiB is more than --max 1MiB",
    "tune --shape 1x1x1": "give --ops, too", "tune --ops --shape 1x0x1": "three numbers such as",
    "tune --ops --max 1MiB": "--max: fused operations have shapes", "tune --backend=": "no backend named ''",
    "tune --device tpu": "(choose from 'cpu', 'cuda'); iris tune --help says more",  # cpu is no better guess than cuda
    "trace": "invalid choice: 'trace'", "plugin": "did you mean plugins?", "docter": "did you mean doctor?",
    "plugins --nope": "unrecognized arguments: --nope; iris --help says more", "plugins nope": "arguments: nope",
    "doctor --timeout soon": "seconds value", "doctor --timeout 0": "0: a bound", "doctor --timeout=-1": "-1: a bound",
    "doctor --timeout nan": "nan: a bound", "bench": "required: ACTION", "bench run": "'compare', 'model'",
    "bench compare a": "required: new", "bench compare /absent/a b": "/absent/a is not a report of benchmarks",
    "bench compare a b --tolerance nan": "--tolerance nan must be a number", "check nothing.py": "nothing.py",
    "bench model --gpus 0": "--gpus must be a number above 0", "bench model --rail-us nan": "--rail-us must be",
    "bench model --rail-us=-1": "--rail-us must be", "config heepsize": "'heepsize'; did you mean IRIS_HEAP_SIZE?",
}  # fmt: skip
RUN = "import sys; from iris_core.cli import main; sys.exit(main(sys.argv[1:]))"
RUN_ALL = """
import contextlib, io, json, sys
from iris_core.cli import main
for line in json.loads(sys.argv[1]):
    with contextlib.redirect_stderr(io.StringIO()) as said:
        status = main(line.split())
    print(json.dumps([status, said.getvalue(), "torch" in sys.modules]))
"""
HIDE = """
import importlib.util, sys
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == {name!r} else found(name, package)
sys.modules[{name!r}] = None  # an import raises ModuleNotFoundError
"""
OLD = """
import importlib.metadata
found = importlib.metadata.version
importlib.metadata.version = lambda name: "3.5.1" if name == "triton" else found(name)
"""


def variables(**more):
    """Variables of a process that has no settings of Iris but these."""
    return {name: value for name, value in os.environ.items() if not name.startswith("IRIS_")} | more


def test_wrong_arguments_are_one_line():
    command = [sys.executable, "-c", RUN_ALL, json.dumps(list(MISTAKES))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True, env=variables())
    assert "Traceback" not in done.stdout + done.stderr
    results = dict(zip(MISTAKES, map(json.loads, done.stdout.splitlines()), strict=True))
    for line, (status, said, torch_is_there) in results.items():
        assert (status in (1, 2), said.count("\n"), torch_is_there) == (True, 1, False), (line, said)
        assert said.startswith("iris")
        assert MISTAKES[line] in said
        assert ("did you mean" in said) == ("did you mean" in MISTAKES[line]), line


@table(("before", "device", "words"), [
    ("", "cuda", "torch sees no GPU"), (HIDE.format(name="torch"), "cpu", "torch is not installed for.*install"),
    (HIDE.format(name="triton"), "cpu", "Triton is not installed.*install"),
    (OLD, "cpu", "triton 3.5.1 is too old.*install"),
])  # fmt: skip
def test_an_environment_that_is_not_complete_is_named_with_what_to_install(before, device, words):
    done = forked.python(before + RUN, "demo", "--device", device, environ=variables(CUDA_VISIBLE_DEVICES=""))
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert re.search(words, line)
