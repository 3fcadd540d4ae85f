"""How much text there is, and how it is worded: pages, docstrings, tests."""

import ast
import re

import pytest

from .test_rooms import ROOT, lines, modules, parsed, without

PAGES = sorted((ROOT / "docs").rglob("*.md"))
WORDS = {"docs": 25_000, "README.md": 900}

# Words of our own for what the field has a term for, in docstrings: as many as there are, and never more.
OURS = {
    r"\bfor ever\b": 0, r"\brank alone\b": 0, r"\b(told|tells)\b": 0, r"\b(meet|meets|met|meetings?)\b": 2,
    r"\b(nobody|everybody|somebody)\b": 2, r"\bbehind\b": 3, r"\bkinds? of calls?\b": 0, r"\bso (many|much)\b": 3,
    r"\b(no|have|find|finds) room\b": 1, r"(?:^|[.;] )(What|Who|Whoever|Whose) [a-z]+": 13,
}  # fmt: skip

TESTS = 24_000
"""Lines of tests, at most, but for those of features."""
TESTS_OF_FEATURES = {  # as `FEATURES` of test_rooms.py: lines, and the folders and files
    "PyTorch": (1860, ("torch_backend",)),
    "several nodes": (
        1900,
        (
            "nodes", "ccl/test_torch_distributed.py", "allocators/test_nccl.py", "compile/test_nccl.py",
            "multigpu/test_nccl.py",
        ),
    ),
    "experts, attention, norms, products of few rows, launches from C": (
        1320,
        (
            "ops/test_experts.py", "ops/test_attention.py", "ops/test_norm.py", "ops/jobs_norm.py",
            "triton/test_launcher.py",
        ),
    ),
    "checker": (2590, ("checker",)),
}  # fmt: skip


@pytest.mark.parametrize("name", WORDS)
def test_pages_are_short(name):
    pages = PAGES if name == "docs" else [ROOT / name]
    assert sum(len(page.read_text().split()) for page in pages) <= WORDS[name]


def test_docstrings_are_in_words_of_the_field():
    has_text = ast.Module, ast.ClassDef, ast.FunctionDef
    nodes = [node for path in modules().values() for node in ast.walk(parsed(path)) if isinstance(node, has_text)]
    texts = [ast.get_docstring(node) or "" for node in nodes]
    assert len(texts) > 3000
    found = {pattern: sum(len(re.findall(pattern, text)) for text in texts) for pattern in OURS}
    assert {pattern: count for pattern, count in found.items() if count > OURS[pattern]} == {}


def test_tests_keep_to_their_budgets():
    folder = ROOT / "tests"
    found = {path.relative_to(folder).as_posix(): lines(path) for path in folder.rglob("*.py")}
    assert sum(without(TESTS_OF_FEATURES, found, "/").values()) <= TESTS
