"""What the guides name is there."""

import os
import pathlib
import re

import pytest

import iris_triton
from iris_core import Iris, errors
from iris_core.ccl.api import Collectives
from iris_core.heap import SymmetricHeap
from iris_core.ops.api import Operations
from iris_core.settings import IrisSettings
from iris_triton.context import DeviceContext
from iris_triton.settings import TritonSettings

DOCS = pathlib.Path(__file__).parents[2] / "docs"
PAGES = [DOCS / name for name in ("debugging.md", "porting.md", "tracing.md")]
HOLDERS = {"ctx.ccl": Collectives, "ctx.ops": Operations, "ctx.heap": SymmetricHeap}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_methods_and_links(page):
    text = page.read_text()
    for holder, name in re.findall(r"`(ctx(?:\.ccl|\.ops|\.heap)?)\.(\w+)\(", text):
        assert hasattr(HOLDERS.get(holder, Iris), name), f"{holder}.{name}"
    for link in re.findall(r"\]\((\w[^)#]*\.md)\)", text):
        assert (DOCS / link).exists(), link


def test_errors_and_variables():
    text = (DOCS / "debugging.md").read_text()
    named = set(re.findall(r"`?(\w+Error)\b", text)) - {"IndexError"}
    assert len(named) >= 5
    for name in named:
        assert hasattr(errors, name), name
    known = {f"IRIS_{name.upper()}" for name in IrisSettings.model_fields}
    known |= {f"IRIS_TRITON__{name.upper()}" for name in TritonSettings.model_fields}
    for variable in set(re.findall(r"IRIS_\w+", text)):
        assert variable in known, variable


def test_ours_in_the_tables():
    """The second column's words for kernels are device functions."""
    text = (DOCS / "porting.md").read_text()
    functions = {name for name in vars(DeviceContext) if not name.startswith("_")}
    rows = re.findall(r"^\| `?nvshmem\w*.*?\| (.*?) \|$", text, re.MULTILINE)
    assert len(rows) >= 10
    for name in re.findall(r"`(\w+)`(?:, `(\w+)`)? of `DeviceContext`", "\n".join(rows)):
        for each in filter(None, name):
            assert each in functions | set(iris_triton.__all__) | {"rank", "world_size"}, each


def test_the_message_is_the_real_one():
    from iris_core.device_context import STATUS_WAIT_TIMEOUT, STATUS_WORDS, Status, status_error

    words = [0] * STATUS_WORDS
    values = {"CODE": STATUS_WAIT_TIMEOUT, "RANK": 2, "PROGRAM": 5, "ADDRESS": 0x7F3C12000400, "EXPECTED": 3, "LAST": 2}
    for name, value in values.items():
        words[Status[name]] = value
    words[Status.COMPARISON] = 3
    message = str(status_error(words))
    shown = re.search(r"DeviceTimeoutError: (.*?) \.\.\.", (DOCS / "debugging.md").read_text(), re.DOTALL).group(1)
    assert message.startswith(" ".join(shown.split()))


def test_the_pages_can_be_found():
    readme = (DOCS.parent / "README.md").read_text()
    for page in DOCS.glob("*.md"):
        reachable = f"docs/{page.name}" in readme or any(
            f"({page.name})" in other.read_text() for other in DOCS.glob("*.md") if other != page
        )
        assert reachable, f"{page.name} is linked from nowhere ({os.fspath(page)})"
