"""The table of names: its modules, and what `import iris_triton.as_iris` does with them."""

import re

import forked
from tables import table

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
assert not hasattr(iris.ccl, "no_such") and Config().block_size_m == 32 and count_devices() >= 0
import iris_triton.context
assert iris.DeviceContext is iris_triton.context.DeviceContext
import iris.bench as bench
import iris_triton.rocm_iris.bench
assert bench.main is iris_triton.rocm_iris.bench.main
try:
    import iris.memory
except ModuleNotFoundError:
    print(iris.ERROR)
"""


@table(("text", "files", "out", "error"), [
    (EVERYTHING, None, "40\n", ""), ("import iris_triton.as_iris, iris; print(iris.ERROR)", [], "40\n", ""),
    *((f"{first}import iris_triton.as_iris", ["__init__.py"], "", "ImportError: ")
      for first in ("", "import iris;")),
])  # fmt: skip
def test_one_line_is_enough(tmp_path, text, files, out, error):
    """A folder `iris` does not matter, and another package of that name is not hidden."""
    if files is not None:
        (tmp_path / "iris").mkdir()
    for name in files or ():
        (tmp_path / "iris" / name).write_text("")
    environ = {"PATH": "/usr/bin:/bin", "IRIS_DEVICE": "cpu", "PYTHONPATH": str(tmp_path)}
    done = forked.fresh(text, environ=environ)
    assert done.stdout == out, done.stderr
    assert re.search(f"{error}.*{tmp_path}" if error else "", done.stderr)
