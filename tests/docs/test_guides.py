"""What the guides name is there."""

import re

import pytest
from tables import table

import iris_triton
from iris_core import Iris, errors
from iris_core.ccl.api import Collectives
from iris_core.device.context_words import STATUS_WAIT_TIMEOUT, STATUS_WORDS, Status
from iris_core.device.reports import Meaning, Report, timeout_text
from iris_core.heap.heap import SymmetricHeap
from iris_core.ops.api import Operations
from iris_core.settings import IrisSettings
from iris_triton.context import DeviceContext
from iris_triton.settings import TritonSettings

from .excerpts import ROOT, fenced, shown

DOCS = ROOT / "docs"
PAGES = [DOCS / f"{name}.md" for name in ("tutorial", "programming_model", "debugging", "porting", "tracing")]
HOLDERS = {"ctx.ccl": Collectives, "ctx.ops": Operations, "ctx.heap": SymmetricHeap}


@table("page", PAGES)
def test_methods(page):
    for holder, name in re.findall(r"`(ctx(?:\.ccl|\.ops|\.heap)?)\.(\w+)\(", page.read_text()):
        holders = [HOLDERS[holder]] if holder in HOLDERS else [Iris, DeviceContext]  # both are called ctx
        assert any(hasattr(each, name) for each in holders), f"{holder}.{name}"


def test_errors_and_variables():
    text = (DOCS / "debugging.md").read_text()
    named = set(re.findall(r"`?(\w+Error)\b", text)) - {"IndexError"}
    assert len(named) >= 5
    for name in named:
        assert hasattr(errors, name), name
    prefixes = {"IRIS_": IrisSettings, "IRIS_TRITON__": TritonSettings}
    known = {f"{prefix}{name.upper()}" for prefix, settings in prefixes.items() for name in settings.model_fields}
    assert set(re.findall(r"IRIS_\w+", text)) <= known


def test_ours_in_the_tables():
    """The second column's words for kernels are device functions."""
    text = (DOCS / "porting.md").read_text()
    functions = {*(name for name in vars(DeviceContext) if not name.startswith("_")), *iris_triton.__all__}
    rows = re.findall(r"^\| `?nvshmem\w*.*?\| (.*?) \|$", text, re.MULTILINE)
    assert len(rows) >= 10
    for name in re.findall(r"`(\w+)`(?:, `(\w+)`)? of `DeviceContext`", "\n".join(rows)):
        assert {*filter(None, name)} <= functions | {"rank", "world_size"}


def test_the_message_is_the_real_one():
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
    (snippet,) = fenced(text, r"(?i:not writing it yourself)\n\n")
    (tmp_path / "snippet.py").write_text(snippet)
    run_program(tmp_path / "snippet.py")


def test_the_mistake_of_the_tutorial_is_found(run_program, tmp_path):
    example = (DOCS.parent / "examples" / "02_store.py").read_text()
    assert "`inbox + i + 1000`" in (DOCS / "tutorial.md").read_text()
    mistaken = tmp_path / "mistaken.py"
    assert "iris_core.run(main, 4)" in example  # two are enough to see it
    text = example.replace("iris_core.run(main, 4)", "iris_core.run(main, 2)")
    mistaken.write_text(text.replace("ctx.store(inbox + i,", "ctx.store(inbox + i + 1000,"))
    words = r"OutOfBoundsError: kernel 'send', program \(\d, 0, 0\), lane \d+: store"
    with pytest.raises(errors.IrisError, match=words):
        run_program(mistaken)


def test_the_pages_can_be_found():
    """From the README or another page, and in the site's index."""
    index = re.findall(r"^(?:[^<>\n]+<)?([\w/]+)>?$", (DOCS / "index.md").read_text(), re.MULTILINE)
    texts = {page: page.read_text() for page in sorted(DOCS.glob("*.md")) if page.stem != "index"}
    for page, text in texts.items():
        assert page.stem in index, f"{page.name} is not in docs/index.md"
        linked = f"docs/{page.name}" in (ROOT / "README.md").read_text()
        linked |= any(f"({page.name})" in other for name, other in texts.items() if name != page)
        assert linked or "stands here" in text, f"{page.name} is linked from nowhere"  # or it is a file of the root
