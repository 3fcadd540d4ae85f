"""Draws the pictures of the documentation: `python docs/pictures/draw.py` writes them beside this file.

Each picture brings its own background and follows the reader's preference for light or dark, to be read on any page.
"""

from __future__ import annotations

import pathlib
import sys
import textwrap
from xml.sax.saxutils import escape

HERE = pathlib.Path(__file__).parent

STYLE = """
  .panel { fill: #ffffff; stroke: #d0d7de; }
  text { font: 14px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2328; }
  .title { font-weight: 600; }
  .small { font-size: 12px; }
  .muted { fill: #57606a; }
  .code { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; font-size: 12.5px; }
  .middle { text-anchor: middle; }
  .end { text-anchor: end; }
  .box { stroke: #8c959f; fill: #f6f8fa; }
  .dashed { stroke: #8c959f; fill: none; stroke-dasharray: 5 4; }
  .blue { fill: #ddeafc; stroke: #5b8fd6; }
  .green { fill: #dff3e0; stroke: #57a463; }
  .amber { fill: #fdeccb; stroke: #c9962f; }
  .violet { fill: #eee0f7; stroke: #9a6bc2; }
  .line { stroke: #57606a; stroke-width: 1.5; fill: none; }
  .strong { stroke: #b3402a; stroke-width: 2; fill: none; }
  .head { fill: #57606a; }
  .stronghead { fill: #b3402a; }
  @media (prefers-color-scheme: dark) {
    .panel { fill: #15181c; stroke: #3b424a; }
    text { fill: #e6edf3; }
    .muted { fill: #a3adb8; }
    .box { stroke: #6b7480; fill: #22272e; }
    .dashed { stroke: #7d8793; }
    .blue { fill: #1d3a5f; stroke: #6ea8f0; }
    .green { fill: #1f4027; stroke: #6fbf7b; }
    .amber { fill: #4a3813; stroke: #d9a944; }
    .violet { fill: #3d2a4d; stroke: #b98fdc; }
    .line { stroke: #a3adb8; }
    .strong { stroke: #ff8f73; }
    .head { fill: #a3adb8; }
    .stronghead { fill: #ff8f73; }
  }
"""


class Picture:
    """An SVG of a size; coordinates in pixels from the upper left corner."""

    def __init__(self, height: int, title: str, description: str, width: int = 840) -> None:
        self._head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            f'role="img" aria-labelledby="title description">\n<title id="title">{escape(title)}</title>\n'
            f'<desc id="description">{escape(description)}</desc>\n<style>{STYLE}</style>\n'
            '<defs>\n<marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="8" markerHeight="8" '
            'orient="auto-start-reverse"><path class="head" d="M0 0 10 5 0 10z"/></marker>\n'
            '<marker id="stronghead" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
            'orient="auto-start-reverse"><path class="stronghead" d="M0 0 10 5 0 10z"/></marker>\n</defs>\n'
            f'<rect class="panel" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8"/>\n'
        )
        self._body: list[str] = []

    def box(
        self, x: float, y: float, width: float, height: float, text: str = "", kind: str = "box", style: str = ""
    ) -> None:
        """A rectangle with lines of text in its middle."""
        self._body.append(f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="5"/>')
        lines = text.split("\n") if text else []
        for number, line in enumerate(lines):
            self.text(x + width / 2, y + height / 2 + 5 - 9 * (len(lines) - 1) + 18 * number, line, f"middle {style}")

    def room(self, x: float, y: float, width: float, height: float, name: str, kind: str = "box") -> None:
        """A rectangle with its name at the top."""
        self.box(x, y, width, height, "", kind)
        self.text(x + width / 2, y + 21, name, "middle title")

    def text(self, x: float, y: float, text: str, style: str = "") -> None:
        """One line of text, beginning at x unless the style says "middle" or "end"."""
        self._body.append(f'<text class="{style.strip()}" x="{x}" y="{y}">{escape(text)}</text>')

    def note(self, y: float, text: str, x: float = 30, columns: int = 118) -> None:
        """Lines of small text."""
        for number, line in enumerate(textwrap.wrap(text, columns)):
            self.text(x, y + 18 * number, line, "small")

    def arrow(self, *points: tuple[float, float], strong: bool = False, both: bool = False) -> None:
        """A line through points, with a head at its end."""
        kind, end = ("strong", "stronghead") if strong else ("line", "head")
        begin = f' marker-start="url(#{end})"' if both else ""
        path = " ".join(f"{x} {y}" for x, y in points)
        self._body.append(f'<polyline class="{kind}" points="{path}"{begin} marker-end="url(#{end})"/>')

    def line(self, *points: tuple[float, float]) -> None:
        """A line through points."""
        self._body.append(f'<polyline class="line" points="{" ".join(f"{x} {y}" for x, y in points)}"/>')

    def svg(self) -> str:
        """The file."""
        return self._head + "\n".join(self._body) + "\n</svg>\n"


RANKS = ("blue", "green", "amber")
SUM = "violet"


def architecture() -> Picture:
    """Distributions and what they stand on."""
    p = Picture(
        452,
        "How Iris is built",
        "A program's host code uses iris-core, its kernels use iris-triton or iris-gluon; iris-core finds backends, "
        "allocators and collectives as plugins; kernels run on GPUs or in the CPU executor, on memory that an "
        "allocator made.",
    )
    p.room(20, 20, 800, 58, "your program")
    p.text(220, 64, "host: Iris(), ctx.zeros, ctx.ccl, ctx.ops", "middle code")
    p.text(620, 64, "kernels: ctx.load, put, signal, wait", "middle code")
    p.arrow((220, 80), (220, 110))
    p.arrow((620, 80), (620, 110))
    p.room(20, 112, 400, 186, "iris-core", "blue")
    rooms = (
        ("Iris, heap", "symmetric tensors that are really freed"),
        ("ctx.ccl", "collectives, chosen by measured tables"),
        ("ctx.ops, nn", "products fused with communication"),
        ("ctx.tracing", "events of kernels on one time axis"),
        ("torch_backend", "torch.distributed's backend"),
        ("registry", "plugins by entry points, a kit for them"),
        ("iris", "check, doctor, tune, bench, config"),
    )
    for number, (name, what) in enumerate(rooms):
        p.text(36, 158 + 20 * number, name, "code")
        p.text(140, 158 + 20 * number, what, "small")
    triton = ("device functions", "DeviceContext, tiles", "collectives, fused ops", "CPU executor")
    gluon = ("IrisDeviceCtx, layouts", "bulk copies (TMA)", "GEMM core for Hopper", "executor for Gluon")
    for x, name, lines in ((440, "iris-triton", triton), (635, "iris-gluon", gluon)):
        p.room(x, 112, 185, 118, name, "green")
        for number, line in enumerate(lines):
            p.text(x + 92, 156 + 19 * number, line, "middle small")
    p.room(440, 240, 380, 58, "iris-allocators", "amber")
    p.text(630, 284, "host (CPUs) · torch (IPC) · vmem (grows) · nccl (nodes)", "middle small")
    p.box(20, 316, 800, 46, "", "dashed")
    p.text(420, 335, "plugins of others: backends, allocators, collectives, observers", "middle")
    p.text(420, 353, "the same entry points and hooks; checked by the same conformance kit", "middle small muted")
    p.box(20, 380, 256, 54, "CPU ranks: processes of one host\nrun, and checked while they run", style="small")
    p.box(292, 380, 256, 54, "NVIDIA GPUs\nrun on H100 and H200", style="small")
    p.box(564, 380, 256, 54, "AMD GPUs\ncompiled, not run", style="small")
    return p


def heap() -> Picture:
    """Symmetric heap and pointer translation."""
    p = Picture(
        380,
        "Symmetric heap and pointer translation",
        "Three ranks have heaps of one size. A tensor x lies at the same offset in each. In the process of rank 0 all "
        "three heaps are mapped; a pointer into rank 0's heap minus rank 0's base plus rank 2's base is the place of x "
        "on rank 2.",
    )
    for rank in range(3):
        x = 30 + 270 * rank
        p.room(x, 20, 240, 84, f"memory of rank {rank}")
        p.box(x + 16, 50, 208, 34, "", RANKS[rank])
        p.box(x + 84, 50, 60, 34, "x", "panel", "code")
        p.text(x + 16, 99, "0", "small muted")
        p.text(x + 84, 99, "offset", "small muted")
        p.arrow((x + 150, 106), (x + 150, 184))
    p.box(30, 128, 780, 30, "", "panel")
    p.text(420, 148, "mapped into the process of rank 0 once, when the context is opened", "middle small")
    p.line((30, 214), (810, 214))
    for rank in range(3):
        x = 46 + 270 * rank
        p.box(x, 190, 208, 44, "", RANKS[rank])
        p.box(x + 68, 190, 60, 44, "x", "panel", "code")
        p.text(x, 182, f"heap_bases[{rank}]", "code")
    p.text(144, 254, "p", "middle code")
    p.text(684, 254, "p - heap_bases[0] + heap_bases[2]", "middle code")
    p.arrow((144, 262), (144, 296), (684, 296), (684, 264), strong=True)
    p.text(414, 288, "ctx.store(p, value, 2)", "middle code")
    p.note(
        324,
        "Bases are multiples of 4096 bytes and never change: a translated pointer is as aligned as the original, and a "
        "captured graph keeps its addresses. Offsets are equal because every rank allocates and frees alike; barriers "
        "compare the histories. Own memory needs no translation: plain tl.load and tl.store.",
    )
    return p


def signals() -> Picture:
    """Put, signal and wait on two ranks."""
    p = Picture(
        348,
        "Handing data over",
        "Rank 0 puts data into rank 1's inbox and then signals with release. Rank 1 waits with acquire until the flag "
        "is set, and then loads the data from its own memory. When it has read it, it signals back, and rank 0 may "
        "overwrite the inbox.",
    )
    for y, rank in ((40, 0), (262, 1)):
        p.text(30, y, f"rank {rank}", "title")
        p.text(30, y + 18, "a program", "small muted")
        p.line((130, y + 6), (812, y + 6))
    p.text(30, 142, "memory", "title")
    p.text(30, 160, "of rank 1", "title")
    p.box(140, 26, 184, 40, "ctx.put(x, inbox, 1)", "blue", "code")
    p.box(340, 26, 190, 40, "ctx.signal(full, 1, 1)", "blue", "code")
    p.box(646, 26, 160, 40, "ctx.wait(empty, 1)", "blue", "code")
    p.box(172, 132, 110, 36, "inbox", "green")
    p.box(380, 132, 110, 36, "full: 0 → 1", "green")
    p.box(646, 88, 160, 32, "empty: 0 → 1", "blue")
    p.text(726, 138, "in the memory of rank 0", "middle small muted")
    p.box(330, 248, 140, 40, "ctx.wait(full, 1)", "green", "code")
    p.box(480, 248, 126, 40, "tl.load(inbox)", "green", "code")
    p.box(616, 248, 194, 40, "ctx.signal(empty, 1, 0)", "green", "code")
    p.arrow((227, 68), (227, 130))
    p.arrow((435, 68), (435, 130), strong=True)
    p.arrow((435, 170), (435, 246), strong=True)
    p.arrow((284, 160), (530, 246))
    p.arrow((726, 246), (726, 148), strong=True)
    p.arrow((726, 88), (726, 68), strong=True)
    p.text(444, 104, "release", "small")
    p.text(444, 192, "acquire", "small")
    p.text(734, 204, "release", "small")
    p.note(
        314,
        "Red: flags. A release covers what the program has stored before it. Who has seen the flag by an acquire sees "
        "those stores, too.",
    )
    return p


def ordering() -> Picture:
    """Scopes, and what sem orders."""
    p = Picture(
        356,
        "sem and scope",
        "Scopes are nested: cta is one program, gpu all programs of a device, sys all devices and the host. A release "
        "keeps earlier accesses before it, an acquire keeps later accesses behind it, relaxed keeps nothing.",
    )
    p.text(30, 36, "scope: who is promised to see it", "title")
    p.box(30, 50, 370, 226)
    p.text(46, 72, 'scope="sys": all devices and the host', "small")
    p.box(46, 84, 210, 176, "", "blue")
    p.text(58, 106, 'scope="gpu": one device', "small")
    p.box(60, 118, 182, 56, 'scope="cta"\none program', "panel", "small")
    p.box(60, 190, 182, 56, "another program", "panel", "small")
    p.box(272, 84, 112, 176, "a peer's\ndevice", "green", "small")
    p.text(430, 36, "sem: what may not pass it", "title")
    for x, name, above, below, held in (
        (430, "release", "earlier", "later", "above"),
        (562, "acquire", "earlier", "later", "below"),
        (694, "relaxed", "earlier", "later", ""),
    ):
        middle = x + 58
        p.box(x, 128, 116, 40, name, "amber" if held else "box", "code")
        p.text(middle, 70, above, "middle small")
        p.text(middle, 86, "accesses", "middle small")
        p.text(middle, 226, below, "middle small")
        p.text(middle, 242, "accesses", "middle small")
        p.arrow((middle, 92), (middle, 118 if held == "above" else 126))
        p.arrow((middle, 210), (middle, 178 if held == "below" else 170))
        if held:
            y = 122 if held == "above" else 174
            p.line((middle - 16, y), (middle + 16, y))
    p.note(
        264,
        'A bar: they stay there. No bar: they may move past it. "acq_rel" has both; it is the default of atomics.',
        430,
        60,
    )
    p.note(
        312,
        "signal is a release and wait an acquire, both with scope sys, unless told otherwise. Plain load, store, get "
        "and put are ordered by nothing else. x86 keeps more order than a GPU does: a missing release does not show on "
        "CPU ranks.",
    )
    return p


def collectives() -> Picture:
    """What four collectives do with three ranks' blocks."""
    p = Picture(
        320,
        "Four collectives",
        "Three ranks. all_gather: every rank has all blocks. reduce_scatter: rank r has the sum of all ranks' block r. "
        "all_reduce: every rank has the sums of all blocks. all_to_all: rank r has block r of every rank.",
    )
    for panel, name in enumerate(("all_gather", "reduce_scatter", "all_reduce", "all_to_all")):
        left = 24 + 204 * panel
        p.text(left, 36, name, "title code")
        for side, top in (("before", 60), ("after", 170)):
            p.text(left, top + 4, side, "small muted")
            for rank in range(3):
                y = top + 12 + 28 * rank
                p.text(left, y + 18, f"rank {rank}", "small")
                for block in range(3):
                    kind, text = _block(name, side, rank, block)
                    if kind:
                        p.box(left + 52 + 40 * block, y, 38, 24, text, kind, "small")
    p.note(
        288,
        "Colour: whose data. Σ: the sum over all ranks. Number: the block's place in what its rank gave. A "
        "reduce_scatter and then an all_gather make an all_reduce.",
        24,
    )
    return p


def _block(name: str, side: str, rank: int, block: int) -> tuple[str, str]:
    """Colour and text of a rank's block; empty where there is none."""
    if side == "before":
        if name == "all_gather":
            return (RANKS[rank], "0") if block == 0 else ("", "")
        return RANKS[rank], str(block)
    if name == "all_gather":
        return RANKS[block], "0"
    if name == "reduce_scatter":
        return (SUM, f"Σ {rank}") if block == 0 else ("", "")
    if name == "all_reduce":
        return SUM, f"Σ {block}"
    return RANKS[block], str(rank)


def tiles() -> Picture:
    """Bulk-synchronous and tile by tile."""
    p = Picture(
        330,
        "Communication by tiles",
        "Above: one kernel computes all tiles, a barrier, then a collective moves them. Below: each tile goes to its "
        "collective as soon as it is computed, while the next one is being computed, and the whole ends earlier.",
    )
    p.text(30, 36, "one after the other", "title")
    p.text(30, 166, "tile by tile, in one kernel", "title")
    for tile in range(6):
        p.box(30 + 70 * tile, 50, 66, 34, f"tile {tile}", "blue", "small")
        p.box(494 + 52 * tile, 92, 48, 34, f"{tile}", "amber", "small")
        p.box(30 + 70 * tile, 180, 66, 34, f"tile {tile}", "blue", "small")
        p.box(100 + 70 * tile, 222, 48, 34, f"{tile}", "amber", "small")
        p.arrow((92 + 70 * tile, 215), (106 + 70 * tile, 221))
    p.box(454, 50, 34, 76, "bar-\nrier", style="small")
    p.text(30, 114, "compute, then communicate", "small muted")
    p.line((518, 176), (518, 262))
    p.text(526, 196, "done", "small")
    p.text(540, 228, "tile = Tile(m, n, M, N, acc)", "code")
    p.text(540, 246, "ctx.all_reduce_two_shot(tile, ...)", "code")
    p.arrow((30, 280), (810, 280))
    p.text(810, 298, "time", "end small muted")
    p.note(312, "Blue: the device computes. Amber: the links are busy. The widths are not measurements.")
    return p


def cpu_ranks() -> Picture:
    """Where CPU ranks run."""
    p = Picture(
        356,
        "CPU ranks",
        "Each rank is a process. In it the executor runs the programs of a launch one at a time on numpy arrays and "
        "hands over when one waits. The heaps are shared memory that every process maps, so stores and atomics are "
        "those of the machine.",
    )
    for rank in range(3):
        x = 30 + 268 * rank
        p.room(x, 24, 244, 176, f"process of rank {rank}")
        p.box(x + 16, 54, 212, 32, "kernel[grid](x, ...)", "panel", "code")
        p.box(x + 16, 104, 212, 80, "", RANKS[rank])
        p.text(x + 122, 122, "executor", "middle title")
        for program in range(4):
            p.box(x + 28 + 48 * program, 132, 42, 24, f"{program}", SUM if program == rank else "panel", "small")
        p.text(x + 122, 174, "one program at a time", "middle small")
        p.arrow((x + 122, 88), (x + 122, 102))
        p.arrow((x + 122, 202), (x + 122, 232), both=True)
    p.box(30, 234, 780, 54)
    for rank in range(3):
        p.box(46 + 258 * rank, 244, 232, 34, f"heap of rank {rank} (memfd)", RANKS[rank], "small")
    p.note(
        310,
        "The heaps are shared memory that every process maps: remote stores and atomics are the machine's own. Every "
        "access is checked against the blocks of the heap and the arguments of the launch. A program that polls in "
        "vain lets another one run; when all wait, that is an error.",
    )
    return p


PICTURES = {
    "architecture": architecture,
    "heap": heap,
    "signals": signals,
    "ordering": ordering,
    "collectives": collectives,
    "tiles": tiles,
    "cpu_ranks": cpu_ranks,
}


def main() -> int:
    """Write all pictures."""
    for name, draw in PICTURES.items():
        (HERE / f"{name}.svg").write_text(draw().svg())
    return 0


if __name__ == "__main__":
    sys.exit(main())
