"""The self-tests of `iris doctor`: third parties' backends that are wrong, crash, hang or say nothing, on CPU ranks."""

import json
import pathlib

import pytest

from iris_core.cli import doctor
from iris_core.cli.doctor import SelfTest
from iris_core.diagnosis import PairCheck, Verdict

BODY = """
from iris_core.diagnosis import PairCheck
from iris_triton.settings import TritonSettings
from iris_triton.backend import TritonBackend

class Backend(TritonBackend):
    def __init__(self, request):
        import dataclasses
        super().__init__(dataclasses.replace(request, settings=TritonSettings()))

"""
"""Everything but the self-test is the Triton backend's."""


@pytest.fixture
def theirs(site, forked_ranks):
    """Installs a third party's backend; the source is that of its `self_test`."""

    def install(source, prologue=""):
        body = prologue + BODY + "".join(f"    {line}\n" for line in source.strip().splitlines())
        site.install("theirs-module", modules={"theirs_backend": body})
        create = "from theirs_backend import Backend; return Backend(request)"
        site.provider("theirs", "BACKEND", create=create)

    return install


def made(ranks=2):
    return SelfTest("theirs", "host", "cpu", ranks)


def lines(test):
    return test.finding().text.splitlines()


# -- one rank ---------------------------------------------------------------------------------------------------------
DEFINED = "def self_test(self, context, begin):\n    "
PASSED, FAILED, SKIPPED = ("passed", Verdict.OK), ("failed", Verdict.BROKEN), ("skipped", Verdict.NOTE)


@pytest.mark.parametrize(("source", "verdict", "problems", "line"), [
    (f"{DEFINED}yield PairCheck('touch', 0, 0)", PASSED, [], "1 rank on cpu: touch are right between all pairs"),
    ("self_test = None", SKIPPED, None, "backend 'theirs' brings no self-test"),
    ("def attach(self, memory):\n    raise RuntimeError('no such thing')", FAILED,
     ["rank 0: RuntimeError: no such thing", "rank 0 was in open"], None),
    (f"{DEFINED}begin('touch', 0)\n    yield 1 / 0", FAILED,
     ["rank 0: ZeroDivisionError: division by zero", "rank 0 was in touch with rank 0"], None),
    (f"{DEFINED}yield 'ok'", FAILED,
     ["rank 0: TypeError: the backend's self-test gave 'ok', not a PairCheck", "rank 0 was in close"], None),
    (f"{DEFINED}yield from ()", FAILED, ["the self-test of backend 'theirs' reported nothing"], None),
])  # fmt: skip
def test_a_third_partys_own_on_a_rank_alone(theirs, source, verdict, problems, line):
    theirs(source)
    test = made(1)
    test.run(60)
    assert (test.state, test.finding().verdict) == verdict
    assert problems is None or test.problems == problems
    assert line is None or lines(test) == [line]
    document = json.loads(json.dumps(test.to_json()))
    assert list(document) == ["backend", "allocator", "device", "ranks", "state", "problems", "checks"]
    if verdict == PASSED:
        assert document["checks"] == [{"op": "touch", "rank": 0, "peer": 0, "problem": "", "ok": True}]


# -- two ranks, in processes of their own -----------------------------------------------------------------------------
def test_a_rank_that_crashes(theirs, monkeypatch):
    theirs("""
def self_test(self, context, begin):
    import os, signal
    begin("touch", 1 - context.cur_rank)
    if context.cur_rank == 0:
        os.kill(os.getpid(), signal.SIGSEGV)
    begin("barrier", None)
    context.barrier()
    yield PairCheck("touch", 1, 0)
""")
    for name, value in {"IRIS_HEAP_SIZE": "big", "IRIS_ALLOCATOR": "nope", "WORLD_SIZE": "7"}.items():
        monkeypatch.setenv(name, value)  # the caller's environment plays no part
    test = made()
    test.run(60)
    problem, *at = test.problems
    assert problem.startswith("rank 0 ended with exit code -11")
    assert at[0] == "rank 0 was in touch with rank 1"
    assert test.state == "failed"


def test_a_rank_that_hangs_is_ended_and_named(theirs, site):
    theirs("""
def self_test(self, context, begin):
    import faulthandler, os, pathlib, time
    begin("touch", 1 - context.cur_rank)
    if context.cur_rank == 0:
        begin("barrier", None)
    context.barrier()
    pathlib.Path(__file__).with_name(f"hangs-{context.cur_rank}").write_text(str(os.getpid()))
    faulthandler.dump_traceback_later(1, exit=True)  # sooner than the doctor has asked for
    time.sleep(600)
""")
    test = made()
    test.run(500)
    assert test.problems[1:] == ["rank 0 was in barrier", "rank 1 was in touch with rank 0"]
    assert test.state == "failed"
    for rank in range(2):
        assert not pathlib.Path("/proc", (site.folder / f"hangs-{rank}").read_text()).exists()


# -- the Triton backend's, with kernels that are wrong -----------------------------------------------------------------
PROLOGUE = """
import triton, triton.language as tl
from iris_triton.testing import selftest
from iris_triton.context import DeviceContext

@triton.jit
def wrong_move(source, target, numel, context, world_size: tl.constexpr, peer, reads: tl.constexpr,
               BLOCK: tl.constexpr):
    ctx = DeviceContext.from_tensor(context, world_size)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < numel
    if reads:
        if ctx.rank == 0:
            peer = ctx.rank
        tl.store(target + i, ctx.load(source + i, peer, mask=mask), mask=mask)
    else:
        if ctx.rank == 1:
            mask = i < numel - (peer == 0) * 3
        ctx.store(target + i, tl.load(source + i, mask=mask), peer, mask=mask)

@triton.jit
def lossy_add(own, shared, additions, context, world_size: tl.constexpr, BLOCK: tl.constexpr):
    ctx = DeviceContext.from_tensor(context, world_size)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    same = tl.zeros((BLOCK,), tl.int32)
    peer = tl.program_id(1)
    if ctx.rank == 1:
        additions = additions - (peer == 0) * 3
    ctx.atomic_add(own + ctx.rank + same, 1, peer, mask=i < additions)
    ctx.atomic_add(shared + same, 1, peer, mask=i < additions)

@triton.jit
def bad_hand_over(source, inbox, received, flag, context, world_size: tl.constexpr, peer, epoch, BLOCK: tl.constexpr):
    ctx = DeviceContext.from_tensor(context, world_size)
    i = tl.arange(0, BLOCK)
    if (ctx.rank == peer) | (ctx.rank == 0):
        ctx.store(inbox + i, tl.load(source + i), peer)
    if (ctx.rank == peer) | (ctx.rank == 1):
        ctx.signal(flag, epoch, peer)
    ctx.wait(flag, epoch, cmp="ge")
    tl.store(received + i, tl.load(inbox + i))
"""


def test_a_kernel_that_is_wrong_is_found(theirs, monkeypatch):
    monkeypatch.setattr(doctor, "DEVICE_TIMEOUT_S", 1.0)
    kernels = {"move": "wrong_move", "add": "lossy_add", "hand_over": "bad_hand_over"}
    expected = [
        "rank 0 -> rank 1: read returned wrong values: 8192 of 8192 words, the first is word 0: ",
        "rank 0 -> rank 1: signal did not arrive in time",
        "rank 1 -> rank 0: atomic_add lost 3 of 1000 additions",
        "rank 1 -> rank 0: signal came before its data: 256 of 256 words, the first is word 0: -1 instead of ",
        "rank 1 -> rank 0: write arrived wrong: 3 of 8192 words, the first is word 8189: -1 instead of ",
    ]
    replaced = "".join(f"selftest.{name} = {kernel}\n" for name, kernel in kernels.items())
    theirs("pass", prologue=f"{PROLOGUE}\n{replaced}")
    test = made()
    test.run(60)
    assert test.problems == []
    found = sorted(str(check) for check in test.checks if not check.ok)
    assert [line[: len(text)] for line, text in zip(found, expected, strict=True)] == expected


# -- more ranks --------------------------------------------------------------------------------------------------------
def judged(ranks, problem="", idle=()):
    """A test whose ranks have checked two operations with all others, but for idle ranks."""
    test = made(ranks)
    peers = [[peer for peer in range(ranks) if peer != rank] for rank in range(ranks)]
    answers = [
        [PairCheck(op, rank, p, problem) for op in ("write", "read") for p in peers[rank]] for rank in range(ranks)
    ]
    test.judge([[] if rank in idle else checks for rank, checks in enumerate(answers)])
    return test


def test_many_failures_are_not_all_lines_but_all_in_json():
    assert judged(8).finding().verdict is Verdict.OK
    test = judged(8, problem="is wrong")
    assert lines(test)[:2] == ["8 ranks on cpu:", "rank 0 -> rank 1: write is wrong"]
    assert lines(test)[-1] == "and 101 more; --json lists all"
    assert sum(not each["ok"] for each in test.to_json()["checks"]) == 112


def test_a_rank_that_reports_nothing_is_broken():
    test = judged(8, idle=[6])
    assert test.problems == ["the self-test of backend 'theirs' reported nothing"]
    assert test.state == "failed"
