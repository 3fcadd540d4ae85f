"""Rank job of the routes: which files of the product a call goes through on the host."""

import sys
from collections.abc import Callable

PRODUCT = ("iris_core/", "iris_allocators/", "iris_triton/", "iris_gluon/")
DEVICE = ("/iris_triton/interpreter/", "/iris_gluon/interpreter/")
"""What runs kernels on CPU ranks stands for a device, and so does what it calls."""


def files_of(call: Callable[[], object]) -> set[str]:
    """The files of the product with a function that a call runs; what imports run does not count."""
    files: set[str] = set()

    def look(frame, event, _):
        name = frame.f_code.co_filename
        if event == "call" and "/src/iris_" in name and name not in files and _is_of_the_host(frame):
            files.add(name)

    sys.setprofile(look)
    try:
        call()
    finally:
        sys.setprofile(None)
    found = {name.split("/src/")[1] for name in files}
    return {name for name in found if name.startswith(PRODUCT)}


def _is_of_the_host(frame) -> bool:
    """Whether a function is neither run by an import nor by a kernel."""
    while frame is not None:
        name = frame.f_code.co_filename
        if frame.f_code.co_name == "<module>" and frame.f_back is not None:
            return False
        if name.startswith("<frozen importlib") or any(each in name for each in DEVICE):
            return False
        frame = frame.f_back
    return True


def routes() -> dict[str, set[str]]:
    """The files of each call, in a process that calls it for the first time."""
    from iris_core import Iris

    found, made = {}, []
    found["Iris"] = files_of(lambda: made.append(Iris("1MiB", device="cpu")))
    ctx = made[0]
    found["zeros"] = files_of(lambda: made.append(ctx.zeros(64)))
    found["barrier"] = files_of(ctx.barrier)
    found["all_reduce"] = files_of(lambda: ctx.ccl.all_reduce(made[1], made[1]))
    found["repeated all_reduce"] = files_of(lambda: ctx.ccl.all_reduce(made[1], made[1]))
    ctx.close()
    return found
