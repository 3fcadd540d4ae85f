"""Figures of README and docs come from benchmarks/results, and none is typed."""

import re

import pytest
from tables import table

from .excerpts import ROOT, script

figures = script("figures.py")
PAGES = [*figures.pages(), ROOT / "CHANGELOG.md"]

FIGURE = re.compile(
    r"""
    \d\ ?(?:us|µs|ms|ns|[kKMGT]?i?B/s|[kMGT]?FLOP/?s|microseconds|milliseconds|%|percent)(?!\w)  # times, speeds, shares
    | \d\ (?:times|x)\ (?:as|the|faster|slower|longer|shorter)\b                                # ratios
    | \d\.\d+(?:\ to|\ and|\ instead\ of)\ \d+\.\d+(?!\.|\ (?:on|are)|\w)                       # ranges of decimals
    | \|\ *\d+\.\d+\ *(?:\(\d[\d.]*\)\ *)?(?=\|)                                                # cells of decimals
    | \|\ *\d+\ *\|\ *\d+\ *(?=\|)                                                              # cells of numbers
    """,
    re.VERBOSE,
)
"""What is a figure: a measured time, speed, share or ratio.  Sizes, limits in seconds and versions are none."""

VERSION = re.compile(r"\b(?:CUDA|NCCL|NVSHMEM|numpy|Python|ROCm|torch|Triton) \d[\d.]*(?:(?: to|,) \d[\d.]*)*")

SETTINGS = {
    "docs/compatibility.md": ["| cuda-bindings | the one that torch brings | 13.0 |"],
    "docs/tracing.md": ["1 ns on NVIDIA and CPUs, 10 ns on AMD"],
}
"""What looks like a figure and was not measured, by page: versions, the units of clocks."""


def typed(text):
    """Figures of a page outside of generated regions, code, and the targets of links."""
    text = VERSION.sub("", text)
    text = re.sub(figures.REGION.pattern + r"|```.*?```|`[^`\n]*`|\]\([^)]*\)", "", text, flags=re.DOTALL)
    return [match.group() for match in FIGURE.finditer(text)]


@table("page", PAGES)
def test_no_figure_is_typed(page):
    text = page.read_text()
    for setting in SETTINGS.get(str(page.relative_to(ROOT)), ()):
        assert setting in text
        text = text.replace(setting, "")
    assert typed(text) == [], "a figure comes from benchmarks/results, by docs/figures.py"


@table("text", [
    "a call costs 8.4 us", "5 to 14 microseconds", "370GB/s", "807 TFLOP/s", "12 % longer", "3.2 to 7.3 times as fast",
    "1.5 x faster", "took 0.4 and 0.65", "1.4 instead of 1.3", "| 1 KiB | 1.6 (3.9) | 1.5 |", "| warps | 56 | 69 |",
    "that is all it costs (60 ns).",
])  # fmt: skip
def test_a_typed_figure_is_found_and_sizes_limits_and_versions_are_none(text):
    assert typed(f"Some words, {text}, and more.\n")
    region = f"<!-- figures: x, by docs/figures.py -->\n{text}\n<!-- end of figures -->\n"
    assert not typed(f"{region}`{text}`\n```\n{text}\n```\n")
    assert typed(f"{region}{text}\n{region}")
    assert not typed("64 MiB, up to 1024 programs, Triton 3.6 to 3.9 are tested, at most 0.1 s, 8 x H200")


def test_the_figures_are_those_of_the_results():
    seen = set()
    for page in figures.pages():
        text = page.read_text()
        assert figures.written(text) == text, f"{page}: python docs/figures.py writes them"
        names = [match["name"] for match in figures.REGION.finditer(text)]
        assert len(names) == text.count("<!-- figures:") == text.count("<!-- end of figures -->")
        seen |= set(names)
        for link in re.findall(r"\]\(([^)]*benchmarks/results/[^)]*)\)", text):
            assert (page.parent / link).exists(), link
    assert seen == set(figures.REGIONS)


def test_a_figure_that_was_not_verified_is_refused(monkeypatch):
    figure = figures.FIGURES[0]
    found = figures.find(figure, figure.provider)
    assert found["verified"]
    monkeypatch.setattr(figures, "results", lambda file: {"results": [found | {"verified": False}]})
    with pytest.raises(LookupError, match=r"rma-4xtorch.json has 1 results"):
        figures.find(figure, figure.provider)
