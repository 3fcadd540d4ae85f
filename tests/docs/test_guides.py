"""What the guides name is there."""

import os
import pathlib
import re

import pytest

import iris_triton
from iris_core import Iris, errors
from iris_core.ccl.api import Collectives
from iris_core.heap.heap import SymmetricHeap
from iris_core.ops.api import Operations
from iris_core.settings import IrisSettings
from iris_triton.context import DeviceContext
from iris_triton.settings import TritonSettings

from .excerpts import shown

DOCS = pathlib.Path(__file__).parents[2] / "docs"
PAGES = [DOCS / name for name in ("tutorial.md", "programming_model.md", "debugging.md", "porting.md", "tracing.md")]
HOLDERS = {"ctx.ccl": Collectives, "ctx.ops": Operations, "ctx.heap": SymmetricHeap}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_methods_and_links(page):
    text = page.read_text()
    for holder, name in re.findall(r"`(ctx(?:\.ccl|\.ops|\.heap)?)\.(\w+)\(", text):
        holders = [HOLDERS[holder]] if holder in HOLDERS else [Iris, DeviceContext]  # both are called ctx
        assert any(hasattr(each, name) for each in holders), f"{holder}.{name}"
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
    from iris_core.device.context_words import STATUS_WAIT_TIMEOUT, STATUS_WORDS, Status
    from iris_core.device.reports import Meaning, Report, timeout_text

    words = [0] * STATUS_WORDS
    values = {"CODE": STATUS_WAIT_TIMEOUT, "RANK": 2, "PROGRAM": 5, "ADDRESS": 0x7F3C12000400, "EXPECTED": 3, "LAST": 2}
    for name, value in values.items():
        words[Status[name]] = value
    words[Status.COMPARISON] = 3
    message = timeout_text(Report(2, Status.CODE, words, 0), Meaning((2,)))
    shown = re.search(r"DeviceTimeoutError: (.*?) \.\.\.", (DOCS / "debugging.md").read_text(), re.DOTALL).group(1)
    assert message.startswith(" ".join(shown.split()))


def test_the_tutorial_shows_the_examples(run_program, tmp_path):
    text = (DOCS / "tutorial.md").read_text()
    blocks = list(shown(text))
    assert len(blocks) == 3
    for marker, in_page, in_file in blocks:
        assert in_page == in_file, marker
    snippet = tmp_path / "snippet.py"
    snippet.write_text(re.search(r"not writing it yourself\n\n```python\n(.*?)```", text, re.DOTALL | re.I).group(1))
    run_program(snippet)


def test_the_mistake_of_the_tutorial_is_found(run_program, tmp_path):
    example = (DOCS.parent / "examples" / "02_store.py").read_text()
    assert "`inbox + i + 1000`" in (DOCS / "tutorial.md").read_text()
    mistaken = tmp_path / "mistaken.py"
    assert "iris_core.run(main, 4)" in example  # two are enough to see it
    text = example.replace("iris_core.run(main, 4)", "iris_core.run(main, 2)")
    mistaken.write_text(text.replace("ctx.store(inbox + i,", "ctx.store(inbox + i + 1000,"))
    with pytest.raises(
        errors.IrisError, match=r"OutOfBoundsError: kernel 'send', program \(\d, 0, 0\), lane \d+: store"
    ):
        run_program(mistaken)


def test_the_pages_can_be_found():
    """From the README or another page, and in the site's index."""
    readme = (DOCS.parent / "README.md").read_text()
    index = re.findall(r"^(?:[^<>\n]+<)?([\w/]+)>?$", (DOCS / "index.md").read_text(), re.MULTILINE)
    for page in sorted(DOCS.glob("*.md")):
        if page.stem == "index":
            continue
        assert page.stem in index, f"{page.name} is not in docs/index.md"
        borrowed = "stands here" in page.read_text()  # a file of the root, which the README links to
        reachable = (
            borrowed
            or f"docs/{page.name}" in readme
            or any(f"({page.name})" in other.read_text() for other in DOCS.glob("*.md") if other != page)
        )
        assert reachable, f"{page.name} is linked from nowhere ({os.fspath(page)})"
