"""Decisions have the same four headings, and are in the index."""

import re

from .excerpts import ROOT

FOLDER = ROOT / "docs" / "decisions"
HEADINGS = ["Context", "Decision", "What it costs", "What would change it"]


def test_every_decision_says_why_what_it_costs_and_what_would_change_it():
    pages = sorted(path for path in FOLDER.glob("*.md") if path.name != "index.md")
    assert re.findall(r"^(\d\d-[\w-]+)$", (FOLDER / "index.md").read_text(), re.M) == [page.stem for page in pages]
    for number, page in enumerate(pages, 1):
        text = page.read_text()
        assert text.startswith(f"# {number}. "), page.name
        assert re.findall(r"^## (.*)$", text, re.M) == HEADINGS, page.name
        assert all(part.strip() for part in re.split(r"^## .*$", text, flags=re.M)), page.name
        assert len(text.splitlines()) <= 40, page.name


def test_fragments_of_the_changelog_are_lines_of_it():
    for path in (ROOT / "changes").glob("*.md"):
        if path.name != "README.md":
            assert re.fullmatch(r"(- \S.*\n(  \S.*\n)*){1,3}", path.read_text()), path.name
