"""The table of names: its modules, and what `import iris_triton.as_iris` does with them."""

import importlib
import subprocess
import sys

import pytest
from tables import table

import iris_triton
from iris_triton.rocm_iris.names import NAMED, WHOLE

NAMES = [(path, name) for path, names in NAMED.items() for name in names]


@table(("path", "name"), NAMES)
def test_a_name_of_the_table(path, name):
    """Also below iris_triton, but for the modules that are there anyway."""
    home, ours = NAMED[path][name]
    module = importlib.import_module(path.replace("iris", "iris_triton", 1))
    assert getattr(module, name) is getattr(importlib.import_module(home), ours)


@table("path", WHOLE)
def test_a_whole_module(path):
    module, ours = importlib.import_module(path.replace("iris", "iris_triton", 1)), importlib.import_module(WHOLE[path])
    public = [name for name in getattr(ours, "__all__", dir(ours)) if not name.startswith("_")]
    assert public
    assert all(getattr(module, name) is getattr(ours, name) for name in public)
    assert set(public) <= set(module.__all__)


def test_a_name_that_is_not_there():
    with pytest.raises(AttributeError, match=r"iris\.ccl.*no_such.*porting\.md"):
        _ = iris_triton.ccl.no_such
    with pytest.raises(ModuleNotFoundError, match="no_such"):
        importlib.import_module("iris_triton.ccl.no_such")


def python(text, *paths):
    environ = {"PATH": "/usr/bin:/bin", "IRIS_DEVICE": "cpu", "PYTHONPATH": ":".join(map(str, paths))}
    return subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, env=environ, timeout=300, check=False
    )


EVERYTHING = """
import sys
import iris_triton.as_iris
assert "torch" not in sys.modules
import iris, logging
assert iris.logger.level == logging.INFO
from iris_triton.rocm_iris.names import NAMED
for path, names in NAMED.items():
    exec(f"import {path}")
    for name in names:
        exec(f"from {path} import {name}")
from iris.ccl import *
from iris.hip import *
assert Config().block_size_m == 32 and count_devices() >= 0
import iris_triton.context
assert iris.DeviceContext is iris_triton.context.DeviceContext
import iris.bench as bench
import iris_triton.rocm_iris.bench
assert bench is iris_triton.rocm_iris.bench
try:
    import iris.memory
except ModuleNotFoundError:
    print("as it should be")
"""


def test_one_line_is_enough():
    done = python(EVERYTHING)
    assert done.stdout == "as it should be\n", done.stderr


@pytest.mark.parametrize("first", ["", "import iris;"])
def test_another_package_of_that_name_is_not_hidden(tmp_path, first):
    (tmp_path / "iris").mkdir()
    (tmp_path / "iris" / "__init__.py").write_text("")
    done = python(f"{first}import iris_triton.as_iris", tmp_path)
    assert f"ImportError: there is a package `iris` already, at {tmp_path}" in done.stderr


def test_a_folder_of_that_name_does_not_matter(tmp_path):
    (tmp_path / "iris").mkdir()
    done = python("import iris_triton.as_iris, iris; print(iris.ERROR)", tmp_path)
    assert done.stdout == "40\n", done.stderr
