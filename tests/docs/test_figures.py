"""Figures of README and docs come from benchmarks/results, and none is typed; pictures are what the script draws."""

import re

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


def test_pictures_are_what_is_drawn_and_each_is_shown():
    folder, pictures = ROOT / "docs" / "pictures", script("pictures/draw.py").PICTURES
    assert {path.stem for path in folder.glob("*.svg")} == set(pictures)
    for name, picture in pictures.items():
        assert (folder / f"{name}.svg").read_text() == picture().svg(), "python docs/pictures/draw.py writes them"
    pages = "".join(page.read_text() for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
    assert set(re.findall(r"!\[[^\]]+\]\((?:docs/)?pictures/(\w+)\.svg\)", pages)) == set(pictures)
