"""The self-tests of `iris doctor`: third parties' backends that are wrong, crash, hang or say nothing, on CPU ranks."""

from __future__ import annotations

import subprocess
import sys
import tempfile

import pytest

from iris_core import cli
from iris_core.cli.doctor import selftest, tables
from iris_core.cli.doctor.process import Ending
from iris_core.cli.doctor.selftest import Job, Outcome, judge, plan_jobs, run_job
from iris_core.diagnosis import PairCheck, Verdict
from iris_core.registry import reset_default_registry

from .conftest import eventually

BACKEND = """
from iris_core.hooks import hookimpl
from iris_core.settings import PluginSettings
from iris_core.types import *

class Settings(PluginSettings):
    "No settings."

class Plugin:
    @hookimpl
    def iris_plugin_info(self):
        needed = frozenset({Capability.REMOTE_LOAD_STORE, Capability.REMOTE_ATOMICS})
        return PluginInfo("theirs", PluginKind.BACKEND, "a test", devices=frozenset({DeviceType.CPU}), requires=needed)

    @hookimpl
    def iris_plugin_settings(self):
        return Settings

    @hookimpl
    def iris_plugin_probe(self):
        return Availability.yes()

    @hookimpl
    def iris_plugin_create(self, request):
        from theirs_backend import Backend
        return Backend(request)

plugin = Plugin()
"""

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
def theirs(site, monkeypatch):
    """Runs the self-test of a third party's backend on CPU ranks; the source is that of its `self_test`."""

    def run(source, ranks=2, timeout_s=60.0, prologue=""):
        body = prologue + BODY + "".join(f"    {line}\n" for line in source.strip().splitlines())
        site.install(
            "iris-theirs",
            entry_points={"iris.backends": {"theirs": "theirs_plugin:plugin"}},
            modules={"theirs_plugin": BACKEND, "theirs_backend": body},
        )
        monkeypatch.setenv("PYTHONPATH", str(site.folder))
        return run_job(Job("theirs", "host", "cpu", ranks), timeout_s)

    return run


def lines(outcome):
    return outcome.finding().text.splitlines()


# -- what a backend brings --------------------------------------------------------------------------------------------
GOOD = """
def self_test(self, context, begin):
    for distance in range(1, context.num_ranks):
        peer = (context.cur_rank + distance) % context.num_ranks
        begin("touch", peer)
        yield PairCheck("touch", context.cur_rank, peer)
"""


def test_a_third_party_brings_its_own(theirs):
    outcome = theirs(GOOD, ranks=3)
    assert outcome.ok, outcome.problems
    assert len(outcome.checks) == 6
    assert outcome.devices == ["cpu"] * 3
    assert outcome.finding().verdict is Verdict.OK
    assert lines(outcome)[0].startswith("3 ranks on cpu: touch are right between all pairs")
    document = outcome.to_json()
    assert list(document) == [
        "backend", "allocator", "device", "ranks", "devices", "state", "problems", "seconds", "total_seconds", "checks",
    ]  # fmt: skip
    assert document["state"] == "passed"
    assert {"op": "touch", "rank": 0, "peer": 1, "ok": True, "problem": ""} in document["checks"]


def test_the_callers_environment_plays_no_part(theirs, monkeypatch):
    monkeypatch.setenv("IRIS_HEAP_SIZE", "big")
    monkeypatch.setenv("IRIS_ALLOCATOR", "nope")
    monkeypatch.setenv("WORLD_SIZE", "7")
    assert theirs("def self_test(self, context, begin):\n    yield PairCheck('touch', 0, 0)", ranks=1).ok


def test_a_rank_that_raises(theirs):
    outcome = theirs("""
def self_test(self, context, begin):
    begin("touch", 1 - context.cur_rank)
    if context.cur_rank == 1:
        raise ValueError("no way there")
    begin("barrier", None)
    context.barrier()
    yield PairCheck("touch", 0, 1)
""")  # fmt: skip
    assert outcome.problems == ["rank 1 in touch with rank 0: ValueError: no way there"]
    assert outcome.failures == [PairCheck("touch", 1, 0, "failed")]


def test_a_rank_that_crashes(theirs):
    outcome = theirs("""
def self_test(self, context, begin):
    import os, signal
    begin("touch", 1 - context.cur_rank)
    if context.cur_rank == 0:
        os.kill(os.getpid(), signal.SIGSEGV)
    begin("barrier", None)
    context.barrier()
    yield PairCheck("touch", 1, 0)
""")  # fmt: skip
    (problem,) = outcome.problems
    assert problem.startswith("rank 0 in touch with rank 1: rank 0 ended with exit code -11")
    assert outcome.failures == [PairCheck("touch", 0, 1, "failed")]
    assert outcome.to_json()["state"] == "failed"


@pytest.fixture
def temporary(monkeypatch, tmp_path):
    """The folder of temporary files of this process and those that it starts."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)  # what was found out before
    return folder


def test_a_rank_that_hangs_is_ended_and_named(theirs, site, temporary, over_when):
    over_when(*(site.folder / f"hangs-{rank}" for rank in range(2)))
    outcome = theirs("""
def self_test(self, context, begin):
    import pathlib, time
    yield PairCheck("before", context.cur_rank, 1 - context.cur_rank)
    begin("touch", 1 - context.cur_rank)
    if context.cur_rank == 0:
        begin("barrier", None)
    pathlib.Path(__file__).with_name(f"hangs-{context.cur_rank}").touch()
    time.sleep(600)
""")  # fmt: skip
    assert outcome.problems[0].startswith("the self-test did not end within 60 s")
    assert outcome.problems[1:] == ["rank 1 did not come back from touch with rank 0"]
    assert outcome.failures == [PairCheck("touch", 1, 0, "did not come back")]
    assert PairCheck("before", 0, 1) in outcome.checks
    assert list(temporary.iterdir()) == []


def test_whoever_ends_the_doctor_ends_the_ranks(theirs, site, temporary):
    outcome = theirs("""
def self_test(self, context, begin):
    import os, pathlib, time
    pathlib.Path(__file__).with_name(f"pid-{context.cur_rank}").write_text(str(os.getpid()))
    time.sleep(float(pathlib.Path(__file__).with_name("seconds").read_text()))
    yield from ()
""", timeout_s=0.01)  # fmt: skip
    assert outcome.problems[0] == "the self-test did not end within 0.01 s"
    assert list(temporary.iterdir()) == []
    (site.folder / "seconds").write_text("600")
    program = "from iris_core.cli.doctor.selftest import *; run_job(Job('theirs', 'host', 'cpu', 2), 600)"
    doctor = subprocess.Popen([sys.executable, "-c", program])
    files = [site.folder / f"pid-{rank}" for rank in range(2)]
    assert eventually(lambda: all(file.exists() and file.read_text() for file in files), 60)
    doctor.kill()
    doctor.wait()
    assert eventually(lambda: not any(runs(int(file.read_text())) for file in files), 60)


def runs(pid):
    """Whether a process is there and has not ended."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_backend_that_cannot_open(theirs):
    outcome = theirs("""
def attach(self, memory):
    raise RuntimeError("no such thing")
""", ranks=1)  # fmt: skip
    (problem,) = outcome.problems
    assert "in open: RuntimeError: no such thing" in problem
    assert outcome.checks == []
    assert tables.self_test_matrix(outcome) == ""
    assert outcome.finding().verdict is Verdict.BROKEN


def test_a_self_test_that_yields_something_else_is_broken(theirs):
    outcome = theirs("def self_test(self, context, begin):\n    yield 'ok'", ranks=1)
    assert "TypeError: the backend's self-test gave 'ok', not a PairCheck" in outcome.problems[0]


def test_a_backend_without_one_is_noted(theirs):
    outcome = theirs("self_test = None", ranks=1)
    assert outcome.finding().verdict is Verdict.NOTE
    assert lines(outcome) == ["backend 'theirs' brings no self-test"]
    assert outcome.to_json()["state"] == "skipped"


# -- the Triton backend's, with one operation that is wrong ------------------------------------------------------------
PROLOGUE = """
import triton, triton.language as tl
from iris_triton.testing import selftest
from iris_triton.context import DeviceContext

@triton.jit
def short_write(source, target, numel, context, world_size: tl.constexpr, peer, BLOCK: tl.constexpr):
    ctx = DeviceContext.from_tensor(context, world_size)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < numel
    if ctx.rank == 1:
        mask = i < numel - (peer == 0) * 3
    ctx.store(target + i, tl.load(source + i, mask=mask), peer, mask=mask)

@triton.jit
def wrong_read(source, target, numel, context, world_size: tl.constexpr, peer, BLOCK: tl.constexpr):
    ctx = DeviceContext.from_tensor(context, world_size)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if ctx.rank == 0:
        peer = ctx.rank
    tl.store(target + i, ctx.load(source + i, peer, mask=i < numel), mask=i < numel)

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
    monkeypatch.setattr(selftest, "DEVICE_TIMEOUT_S", 1.0)
    kernels = {"write": "short_write", "read": "wrong_read", "add": "lossy_add", "hand_over": "bad_hand_over"}
    expected = [
        "rank 0 -> rank 1: read returned wrong values: 8192 of 8192 words, the first is word 0: ",
        "rank 0 -> rank 1: signal did not arrive in time",
        "rank 1 -> rank 0: atomic_add lost 3 of 1000 additions",
        "rank 1 -> rank 0: signal came before its data: 256 of 256 words, the first is word 0: -1 instead of ",
        "rank 1 -> rank 0: write arrived wrong: 3 of 8192 words, the first is word 8189: -1 instead of ",
    ]
    replaced = "".join(f"selftest.{name} = {kernel}\n" for name, kernel in kernels.items())
    outcome = theirs("pass", prologue=f"{PROLOGUE}\n{replaced}")
    assert outcome.problems == []
    found = sorted(map(str, outcome.failures))
    assert [line[: len(text)] for line, text in zip(found, expected, strict=True)] == expected


def test_the_same_without_a_mistake(theirs):
    outcome = theirs("pass", prologue=PROLOGUE, ranks=1)
    assert outcome.ok, lines(outcome)
    assert {(each.op, each.rank, each.peer) for each in outcome.checks} == {
        (op, 0, 0) for op in ("write", "read", "atomic_add", "signal")
    }


# -- eight ranks, from records ----------------------------------------------------------------------------------------
def records(ranks=8, ops=("write", "read"), bad=()):
    """Records of ranks whose every pair was tested."""
    return [
        [
            {"begin": "open", "peer": None},
            {"device": f"cuda:{rank}"},
            *(
                {"check": {"op": op, "rank": rank, "peer": peer, "problem": "is wrong" if (rank, peer) in bad else ""}}
                for op in ops
                for peer in range(ranks)
                if peer != rank
            ),
            {"seconds": 0.5 + rank / 10},
            {"done": True},
        ]
        for rank in range(ranks)
    ]


JOB = Job("triton", "torch", "cuda", 8)
WELL = Ending("", "", 9.0)


def test_what_was_found_wrong_names_pair_and_operation():
    told = records(3, ops=("atomic_add",))
    told[2][-3]["check"]["problem"] = "lost 3 of 1000 additions"
    outcome = judge(Job("theirs", "host", "cpu", 3), told, [], WELL)
    assert outcome.finding().verdict is Verdict.BROKEN
    assert lines(outcome)[1:] == ["rank 2 -> rank 1: atomic_add lost 3 of 1000 additions"]
    assert [line.split() for line in tables.self_test_matrix(outcome).splitlines()[1:]] == [
        ["rank", "0", "1", "2"],
        ["0", "-", "ok", "ok"],
        ["1", "ok", "-", "ok"],
        ["2", "ok", "FAILED", "-"],
    ]
    (bad,) = (each for each in outcome.to_json()["checks"] if not each["ok"])
    assert (bad["op"], bad["rank"], bad["peer"]) == ("atomic_add", 2, 1)


def test_eight_ranks_fit_into_the_width():
    outcome = judge(JOB, records(bad={(2, 5)}), [], WELL)
    assert (outcome.seconds, outcome.total_seconds) == (1.2, 9.0)
    assert lines(outcome)[1:] == ["rank 2 -> rank 5: write is wrong", "rank 2 -> rank 5: read is wrong"]
    matrix = tables.self_test_matrix(outcome)
    assert max(map(len, matrix.splitlines())) <= tables.WIDTH
    assert matrix.splitlines()[4].split() == ["2", "ok", "ok", "-", "ok", "ok", "FAILED", "ok", "ok"]
    assert judge(JOB, records(), [], WELL).ok


def test_a_self_test_that_says_too_little_is_broken():
    silent = [[{"seconds": 0.1}, {"done": True}] for _ in range(8)]
    assert judge(JOB, silent, [], WELL).problems == ["the self-test of backend 'triton' reported nothing"]
    told = records()
    told[6] = silent[6]
    outcome = judge(JOB, told, [], WELL)
    assert PairCheck("read", 6, 1, "was not reported") in outcome.failures
    assert {each.rank for each in outcome.failures} == {6}


def test_many_failures_are_not_all_lines_but_all_in_json():
    bad = {(rank, peer) for rank in range(8) for peer in range(8) if rank != peer}
    outcome = judge(JOB, records(bad=bad), [], WELL)
    assert lines(outcome)[-1] == "and 100 more; --json lists all"
    assert len(lines(outcome)) == 14
    assert sum(not each["ok"] for each in outcome.to_json()["checks"]) == 112


def test_ranks_that_wait_are_not_blamed():
    told = [[{"begin": "read", "peer": (rank + 1) % 4}, {"begin": "barrier", "peer": None}] for rank in range(4)]
    told[3] = told[3][:1]
    job = Job("triton", "vmem", "cuda", 4)
    outcome = judge(job, told, [], Ending("did not end within 120 s", "", 120.0))
    assert outcome.problems == [
        "the self-test did not end within 120 s",
        "rank 3 did not come back from read with rank 0",
    ]
    assert outcome.failures == [PairCheck("read", 3, 0, "did not come back")]
    told[3] = [{"begin": "barrier", "peer": None}]
    outcome = judge(job, told, [], Ending("did not end within 120 s", "", 120.0))
    assert len(outcome.problems) == 5  # all of them wait, nobody knows for whom


def test_a_run_that_ends_before_any_rank_begins():
    ending = Ending("ended with status 1", "ModuleNotFoundError: No module named 'torch'", 0.1)
    outcome = judge(JOB, [[] for _ in range(8)], [], ending)
    assert lines(outcome)[1:] == ["the self-test ended with status 1", ending.stderr]
    lost = [{"rank": None, "error": "the store cannot be made"}]
    assert judge(JOB, [[] for _ in range(8)], lost, ending).problems == ["the store cannot be made"]


# -- which ones there are ---------------------------------------------------------------------------------------------
@pytest.fixture
def registry(site):
    """Pretended plugins: two backends, allocators for CPUs and GPUs, and one that fits nothing."""
    everywhere = "devices=frozenset(DeviceType), requires=frozenset({Capability.REMOTE_LOAD_STORE})"
    gpus = "devices=frozenset({DeviceType.CUDA, DeviceType.HIP}), provides=frozenset({Capability.REMOTE_LOAD_STORE})"
    site.provider("language", "BACKEND", info=everywhere + ", priority=10")
    site.provider("another", "BACKEND", info=everywhere)
    site.provider("pages")
    site.provider("pool", info=gpus + ", priority=10")
    site.provider("virtual", info=gpus)
    site.provider("mute", info="devices=frozenset(DeviceType)")
    site.provider("absent", info=gpus, probe="return Availability.no('no driver')")
    site.provider("bad", source="raise RuntimeError('boom')")
    site.provider("stopped", info=gpus)
    return site.registry(block=["stopped"])


@pytest.mark.parametrize("hip", [False, True])
def test_jobs_with_many_gpus(registry, hip):
    assert plan_jobs(registry, 8, hip) == [
        Job("language", "pool", "cuda", 8),
        Job("language", "virtual", "cuda", 8),
        Job("another", "pool", "cuda", 8),
    ]


@pytest.mark.parametrize(("cores", "ranks"), [(2, 2), (3, 2), (4, 4), (64, 4)])
def test_jobs_with_one_gpu_or_none(registry, monkeypatch, cores, ranks):
    monkeypatch.setattr(selftest.os, "sched_getaffinity", lambda pid: range(cores))
    on_cpu = [Job("language", "pages", "cpu", ranks), Job("another", "pages", "cpu", ranks)]
    assert plan_jobs(registry, 0, False) == on_cpu
    on_gpu = [("language", "pool"), ("language", "virtual"), ("another", "pool")]
    assert plan_jobs(registry, 1, False) == [*(Job(*names, "cuda", 1) for names in on_gpu), *on_cpu]


def test_a_name_that_two_offer_is_told_apart(site):
    site.provider("language", "BACKEND", distribution="iris-one")
    site.provider("language", "BACKEND", distribution="iris-two")
    site.provider("pages")
    jobs = plan_jobs(site.registry(), 0, False)
    assert [job.backend for job in jobs] == ["language@iris-one", "language@iris-two"]


def test_nothing_to_test_is_noted(monkeypatch, capsys):
    from iris_core.cli.doctor import survey

    reset_default_registry()
    monkeypatch.setattr(survey, "take_survey", lambda timeout_s: survey.Survey(torch=True))
    monkeypatch.setattr(selftest, "plan_jobs", lambda *args: [])
    assert cli.main(["doctor"]) == 0
    assert "no backend and allocator can be used together here" in capsys.readouterr().out


def test_a_failed_self_test_is_status_1_and_named_at_the_end(monkeypatch, capsys):
    from iris_core.cli.doctor import survey

    reset_default_registry()
    monkeypatch.setattr(survey, "take_survey", lambda timeout_s: survey.Survey(torch=True))
    monkeypatch.setattr(selftest, "plan_jobs", lambda *args: [JOB])
    bad = Outcome(JOB, [PairCheck("read", 2, 5, "returned wrong values")])
    monkeypatch.setattr(selftest, "run_job", lambda job, timeout_s: bad)
    assert cli.main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "rank 2 -> rank 5: read returned wrong values" in out
    assert out.endswith("1 broken: self-test triton on torch\n")
