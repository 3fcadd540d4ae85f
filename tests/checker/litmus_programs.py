"""Litmus tests as small texts, and the kernels that are made of them.

A test is its threads, separated by "||", each with operations separated by ";":

    st x 1              a weak store; st.rlx.sys, st.rel.gpu: one that is not
    ld x 1              a weak load that is to see 1; ld.rlx.sys, ld.acq.gpu; "ld x" may see anything
    add.acq_rel.sys x 1 0    a read-modify-write by 1 that is to see 0; xchg likewise; cas.rlx.gpu x 0 1 0: from 0 to 1
    fence.sc.sys        also acq_rel, acquire and release
    ld x r; st y r      a value that is stored on
    if r1 == 0: st x 1  where the second load of the test has seen 0

The outcome is that all loads see what they are to see, and that memory, which begins as "x=1 -|" before the threads
says, ends as "|- x=1 y=2" behind them says.
Threads run on the GPUs in `gpus`, one each: programs of one launch that stand for ranks.
"""
# mypy: ignore-errors

import linecache
import re
from typing import NamedTuple

import torch

from iris_core.world import group

_SEMS = {"rlx": "relaxed", "acq": "acquire", "rel": "release", "acq_rel": "acq_rel"}
_HEADER = """
import triton
import triton.language as tl
from iris_triton.language.flags import poll, set_flag

@triton.jit
def litmus(words, out):
    pid = tl.program_id(0)
"""


class Litmus(NamedTuple):
    """A test: its name, where it is from, whether its outcome is allowed, the GPU of each thread, the text."""

    name: str
    source: str
    allowed: bool
    gpus: tuple
    text: str

    @property
    def threads(self):
        text = self.text.partition("|-")[0].rpartition("-|")[2]
        return [[op.strip() for op in thread.split(";")] for thread in text.split("||")]

    @property
    def initial(self):
        """What memory holds at the beginning, where that is not 0."""
        return {name: int(value) for name, value in re.findall(r"(\w+)=(-?\d+)", self.text.rpartition("-|")[0])}

    @property
    def final(self):
        """What memory holds at the end, by word."""
        return {name: int(value) for name, value in re.findall(r"(\w+)=(-?\d+)", self.text.partition("|-")[2])}


class Program:
    """The kernel of a test, the words that it has, and what its loads are to see."""

    def __init__(self, test):
        self.test, self.words, self.expected = test, {}, []
        source = _HEADER
        for pid, thread in enumerate(test.threads):
            source += f"    {'el' if pid else ''}if pid == {pid}:\n"
            kept = []
            for op in thread:
                source += f"        {self._line(op, kept)}\n"
            for name, index in kept:
                source += f"        tl.store(out + {index}, {name})\n"
        name = f"<litmus {test.name}>"
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        scope = {"__name__": "litmus"}
        exec(compile(source, name, "exec"), scope)
        self.kernel = scope["litmus"]

    def _line(self, op, kept):
        if op.startswith("if "):
            condition, _, op = op.partition(": ")
            return f"{condition}: {self._line(op, kept)}"
        code, *rest = op.split()
        name, *how = code.split(".")
        if name == "fence":
            text = f"{code}; mov.u32 $0, 0;"
            return f'tl.inline_asm_elementwise("{text}", "=r", [], dtype=tl.int32, is_pure=False, pack=1)'
        sem, scope = (f'"{_SEMS[how[0]]}"', f'"{how[1]}"') if how else (None, None)
        place = f"words + {self.words.setdefault(rest[0], len(self.words))}"
        if name == "st":
            return f"set_flag({place}, {rest[1]}, {sem}, {scope})" if sem else f"tl.store({place}, {rest[1]})"
        target = f"r{len(self.expected)}"
        seen = rest[-1] if len(rest) > {"ld": 1, "cas": 3}.get(name, 2) else ""
        if seen.isalpha():
            target = seen
        kept.append((target, len(self.expected)))
        self.expected.append(int(seen) if seen.lstrip("-").isdigit() else None)
        call = {
            "ld": f"poll({place}, {sem}, {scope})" if sem else f"tl.load({place})",
            "add": f"tl.atomic_add({place}, {rest[1:2]}, sem={sem}, scope={scope})",
            "xchg": f"tl.atomic_xchg({place}, {rest[1:2]}, sem={sem}, scope={scope})",
            "cas": f"tl.atomic_cas({place}, {', '.join(rest[1:3])}, sem={sem}, scope={scope})",
        }[name]
        return f"{target} = {call.replace(str(rest[1:2]), ''.join(rest[1:2]))}"


class Runner:
    """Runs tests in one context whose `check` is "schedules", and that has one rank."""

    def __init__(self, ctx):
        self._words, self._out = ctx.zeros(32, dtype=torch.int32), ctx.zeros(64, dtype=torch.int32)
        self.explorer = group.watcher

    def outcome(self, program, seed):
        """Run a program under a seed; returns what loads have seen, and memory."""
        values = [program.test.initial.get(word, 0) for word in program.words]
        self._words[: len(values)] = torch.tensor(values, dtype=torch.int32)
        self.explorer.begin_again(seed, program.test.gpus)
        program.kernel[(len(program.test.threads),)](self._words, self._out)
        seen = self._out[: len(program.expected)].tolist()
        return seen, dict(zip(program.words, self._words.tolist(), strict=False))

    def first_seed(self, program, seeds):
        """The first seed with the test's outcome, None if there is none."""
        for seed in seeds:
            seen, memory = self.outcome(program, seed)
            same = all(want is None or want == found for want, found in zip(program.expected, seen, strict=True))
            if same and all(memory.get(word, 0) == value for word, value in program.test.final.items()):
                return seed
        return None
