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


def kept(monkeypatch, file, *rows):
    """As if these results were kept: (benchmark, provider, time_us, params, further fields)."""
    common = {"timer": "graph", "num_ranks": 4, "verified": True}
    names = ("benchmark", "provider", "time_us", "params")
    results = [common | dict(zip(names, row[:4], strict=True)) | dict(*row[4:]) for row in rows]
    monkeypatch.setattr(figures, "files", lambda kind: [file] if rows else [])
    monkeypatch.setattr(figures, "results", lambda file: {"results": results})


EAGER, WRONG = {"timer": "events"}, {"verified": False}


def test_peers_of_the_same_launch_and_point_are_compared(monkeypatch):
    """The best of them, without what was not verified and without halves of the ranks."""
    name, heap = "ccl.all_gather", {"nbytes": 1024}
    half, ordinary = heap | {"group": "half"}, heap | {"place": "ordinary"}
    kept(
        monkeypatch, "ccl-4", (name, "iris", 2.0, heap), (name, "nccl", 6.0, heap), (name, "iris-triton", 0.5, heap),
        (name, "nccl-windows", 1.0, heap, WRONG), (name, "iris eager", 8.0, heap, EAGER),
        (name, "nccl eager", 4.0, heap, EAGER), (name, "iris", 1.0, half), (name, "nccl", 9.0, half),
        (name, "iris", 5.0, ordinary), (name, "nccl", 6.0, ordinary),
    )  # fmt: skip
    found = [(each.launched, each.place, each.num_ranks, each.ratio) for each in figures.points("ccl")]
    assert found == [("graph", "heap", 4, 3.0), ("eager", "heap", 4, 0.5), ("graph", "ordinary", 4, 1.2)]


def test_the_table_of_models(monkeypatch):
    """Beside attention and a sum where there is one, else NCCL, eagerly where it has no graph; no heap tensors."""
    experts, decode, place = {"tokens": 8, "what": "turn"}, {"batch": 1}, {"tokens": 8, "place": "heap"}
    kept(
        monkeypatch, "models-4", ("models.experts", "iris", 2.0, experts), ("models.ulysses", "iris", 9.0, place),
        ("models.experts", "iris eager", 4.0, experts, EAGER), ("models.experts", "nccl", 8.0, experts, EAGER),
        *(("models.decode", name, us, decode) for name, us in (("iris", 2.0), ("alone+ccl", 3.0))),
        *(("models.decode", f"{name} eager", us, decode, EAGER) for name, us in (("iris", 5.0), ("alone+ccl", 4.0))),
    )  # fmt: skip
    monkeypatch.setattr(figures, "source", lambda *names, page="docs": "")
    assert figures.models().splitlines()[0:3:2] == [
        "| us | beside | 4 GPUs, graph | 4 GPUs, eager |",
        "| experts, 8, turn | nccl | 2.0 (4.00) | 4.0 (2.00) |",
    ]
    assert "| decode, 1 | alone+ccl | 2.0 (1.50) | 5.0 (0.80) |" in figures.models()


def test_tables_of_the_backend_of_torch(monkeypatch):
    """Beside NCCL at the same point and launch; heap tensors only, and nothing that is wrong."""
    kept(monkeypatch, "none")
    assert figures.torch_all_reduce() == figures.torch_steps() == "No run on GPUs is kept yet."
    reduce, parallel = "torch_backend.all_reduce", "torch_backend.tensor_parallel"
    heap, step = {"nbytes": 1024, "place": "heap"}, {"batch": 8, "tokens": 500}
    kept(
        monkeypatch, "torch_backend-2", (reduce, "iris", 3.0, heap | {"place": "ordinary"}),
        *((reduce, *each, heap) for each in (("iris", 2.0), ("ctx.ccl", 1.9), ("nccl", 6.0))),
        *((reduce, f"{name} eager", us, heap, EAGER) for name, us in (("iris", 8.0), ("ctx.ccl", 7.0), ("nccl", 16.0))),
        (parallel, "nccl", 4000.0, step), (parallel, "iris fused", 2000.0, step),
        (parallel, "nccl async-tp", 100.0, step, WRONG), ("torch_backend.fsdp2", "nccl", 4000.0, step, EAGER),
    )  # fmt: skip
    monkeypatch.setattr(figures, "source", lambda *names, page="docs": "")
    assert "| 4 | 1 KiB | 8.0 (2.00) | 7.0 | 2.0 (3.00) | 1.9 |" in figures.torch_all_reduce()
    assert figures.torch_steps().splitlines()[:5] == [
        "| step | by | 4 GPUs, graph | 4 GPUs, eager |",
        "| --- | --- | --- | --- |",
        "| tensor parallel | nccl | 1,000 (1.00) |",
        "| tensor parallel | iris fused | 2,000 (2.00) |",
        "| FSDP2 | nccl |  | 4,000 (1.00) |",
    ]
