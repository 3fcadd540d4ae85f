"""`iris doctor`: the report, what plugins add to it, GPUs that are stand-ins of torch's, the machine, self-tests."""

import glob
import inspect
import json
import os
import pathlib
import re
import sys
import types
from unittest.mock import Mock

import pytest
import torch
from dist_info import provider_source
from tables import table

from iris_core import cli
from iris_core.cli import doctor
from iris_core.cli.doctor import SelfTest
from iris_core.diagnosis import Verdict
from iris_triton import _compat
from iris_triton.testing import selftest

pytestmark = pytest.mark.usefixtures("fresh_registry")


@pytest.fixture
def here(monkeypatch):
    """The survey in this process, where it sees what a test has changed."""
    monkeypatch.setattr(doctor, "apart", lambda job, ranks, timeout_s, *args: ([job(*args)], ""))


def report(capsys, *arguments):
    status = cli.main(["doctor", "--json", *arguments])
    document = json.loads(capsys.readouterr().out)
    assert document["ok"] == (status == 0)
    return status, document, {each["subject"]: (each["verdict"], each["text"]) for each in document["findings"]}


def test_the_whole_report_on_a_healthy_machine(capsys, clean_environment, forked_ranks, monkeypatch):
    monkeypatch.setenv("IRIS_BLOCK", "gluon,nccl")
    status, document, found = report(capsys)
    assert status == 0, [text for verdict, text in found.values() if verdict == "broken"]
    assert list(document) == ["ok", "findings", "versions", "gpus", "pairs", "self_tests"]
    assert found["torch"][1].startswith(torch.__version__)
    assert {"iris-core", "iris-allocators", "iris-triton", "torch"} <= set(document["versions"]["distributions"])
    assert "pytest" not in document["versions"]["distributions"]
    assert found["triton"][0] == ("ok" if _compat.version() in _compat.TESTED else "note")
    assert found["allocator host"] == ("ok", "iris-allocators 0.2.0: loaded")
    assert found["backend gluon"][0] == "note"
    assert "backend triton@iris-triton" in found["choice"][1]
    for subject in ("python", "platform", "CPUs", "memory", "memfd", "packages", "settings"):
        assert found[subject][0] == "ok", subject
    if not document["gpus"]:
        test = next(each for each in document["self_tests"] if each["allocator"] == "host")
        chosen = [test[key] for key in ("backend", "allocator", "device", "state", "problems")]
        assert chosen == ["triton", "host", "cpu", "passed", []]
        assert {(each["rank"], each["peer"], each["op"]) for each in test["checks"]} >= {
            (1, 0, "read"),
            (0, 1, "signal"),
        }


def diagnosing(name, body):
    hook = f"""
    @hookimpl
    def iris_plugin_diagnose(self, targets):
        {body}

plugin = Plugin()"""
    return provider_source(name).replace("\nplugin = Plugin()", hook)


def test_a_broken_plugin_wrong_settings_and_a_choice_that_fails(capsys, here, site, monkeypatch):
    site.provider("bad", source="raise RuntimeError('boom')")
    site.provider("fails", source=diagnosing("fails", "raise OSError('no such wire')"))
    site.provider("wordy", source=diagnosing("wordy", "return ['text']"))
    (site.install("iris-gone") / "METADATA").write_bytes(b"\xff")
    monkeypatch.setenv("IRIS_BACKEND", "tritn")
    monkeypatch.setenv("IRIS_TRITON__CPU_TIMEOUT", "soon")
    monkeypatch.setenv("IRIS_HEEP_SIZE", "1GiB")
    status, document, _ = report(capsys, "--no-self-test")
    assert status == 1
    findings = {(each["subject"], each["verdict"]): each["text"] for each in document["findings"]}
    for subject, verdict, words in (
        ("allocator bad", "broken", "boom"), ("packages", "broken", "iris_gone-1.0.dist-info"),
        ("settings", "broken", "IRIS_TRITON__CPU_TIMEOUT='soon'"), ("settings", "note", "IRIS_HEEP_SIZE"),
        ("choice", "broken", "did you mean 'triton'"), ("allocator fails", "ok", "iris-fails 1.0: loaded"),
        ("diagnosis of fails", "broken", "iris_plugin_diagnose raised OSError: no such wire"),
        ("diagnosis of wordy", "broken", "must return a list of Finding, not ['text']"),
    ):  # fmt: skip
        assert words in findings[subject, verdict]
    assert cli.main(["doctor", "--no-self-test"]) == 1
    out = capsys.readouterr().out
    assert out.startswith("SUBJECT")
    assert re.search(r"\n6 broken: packages, settings, allocator bad, .*choice\n$", out)
    assert max(map(len, out.splitlines())) <= 120
    assert "left out as asked" in out


def test_it_goes_on_where_a_core_setting_is_wrong_or_torch_is_not_there(capsys, here, clean_environment, monkeypatch):
    monkeypatch.setenv("IRIS_HEAP_SIZE", "big")
    status, _, found = report(capsys, "--no-self-test")
    assert (status, "choice" in found, found["backend triton"][0]) == (1, False, "ok")
    assert "IRIS_HEAP_SIZE='big'" in found["settings"][1]
    monkeypatch.delenv("IRIS_HEAP_SIZE")
    monkeypatch.setitem(sys.modules, "torch", None)
    status, document, found = report(capsys)
    assert (status, found["torch"][0], document["self_tests"]) == (1, "broken", [])
    assert "pip install 'torch>=2.11'" in found["torch"][1]
    assert "no backend and allocator can be used together here" in found["self-test"][1]


def test_what_hangs_is_ended(capsys, clean_environment):
    status, _, found = report(capsys, "--no-self-test", "--timeout", "0.01")
    assert status == 1
    assert found["GPUs"] == found["plugins"] == ("broken", "examining them: did not end within 0.01 s")


@pytest.fixture
def gpus(monkeypatch):
    """Lets torch have H200s that are none; returns the findings of the steps that ask it, and the facts."""

    def look(count, access=lambda one, other: True, *, cuda="13.0", hip=None, init=None):
        properties = types.SimpleNamespace(
            name="H200", total_memory=140 << 30, major=9, minor=0, multi_processor_count=132,
            gcnArchName="gfx942:sramecc+", warp_size=64,
        )  # fmt: skip
        monkeypatch.setattr(torch, "version", types.SimpleNamespace(cuda=None if hip else cuda, hip=hip))
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
        monkeypatch.setattr(torch.cuda, "can_device_access_peer", access)
        monkeypatch.setattr(torch.cuda, "init", Mock(side_effect=init))
        facts, found = doctor.survey_gpus({})
        return {finding.subject: finding for finding in found}, facts

    return look


@table(("hip", "way"), [(None, "CUDA_VISIBLE_DEVICES"), ("7.0", "HIP_VISIBLE_DEVICES")])
def test_gpus_that_do_not_reach_each_other_are_broken(gpus, hip, way):
    found, facts = gpus(4, lambda one, other: {one, other} == {2, 3}, hip=hip)
    assert found["peer access"].verdict is Verdict.BROKEN
    assert "0->1, 0->2, 0->3, 1->0, 1->2, 1->3, 2->0, 2->1, 3->0, 3->1. No heap" in found["peer access"].text
    assert way in found["peer access"].text
    assert facts["gpus"][0]["arch"] == ("gfx942" if hip else "sm_90")
    assert gpus(4, hip=hip)[0]["peer access"].verdict is Verdict.OK


@table(("cuda", "present", "hidden", "init", "verdict", "text"), [
    (None, [], None, None, Verdict.OK, "built for CPUs only"),
    (None, ["/dev/nvidia0"], None, None, Verdict.NOTE, "install a torch for them"),
    ("13.0", [], None, None, Verdict.NOTE, "sees no GPU"),
    ("13.0", ["/dev/nvidia0"], "", None, Verdict.NOTE, "CUDA_VISIBLE_DEVICES='' hides them"),
    ("13.0", ["/dev/nvidia0"], None, RuntimeError("no driver"), Verdict.BROKEN, "no driver"),
    ("13.0", ["/dev/nvidia0"], None, RuntimeError("Error 802: not ready"), Verdict.BROKEN, "nvidia-fabricmanager"),
])  # fmt: skip
def test_no_gpu(gpus, monkeypatch, cuda, present, hidden, init, verdict, text):
    monkeypatch.setattr(glob, "glob", lambda pattern: present if "nvidia" in pattern else [])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if hidden is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    found, facts = gpus(0, cuda=cuda, init=init)
    assert found["GPUs"].verdict is verdict
    assert text in found["GPUs"].text
    assert facts["gpus"] == facts["pairs"] == []


refuse = Mock(side_effect=PermissionError(1, "Operation not permitted"))


@table(("what", "stand_in", "subject", "verdict", "text"), [
    ("resource.getrlimit", lambda which: (256, 4096), "open files", Verdict.NOTE, "ulimit -n 4096"),
    ("os.memfd_create", refuse, "memfd", Verdict.BROKEN, "Operation not permitted; a seccomp profile"),
    ("socket.send_fds", refuse, "descriptors", Verdict.BROKEN, "Operation not permitted; a seccomp profile"),
    ("socket.send_fds", lambda to, buffers, fds: to.send(buffers[0]), "descriptors", Verdict.BROKEN, "did not arrive"),
    ("platform.system", lambda: "Darwin", "platform", Verdict.BROKEN, ""),
])  # fmt: skip
def test_what_the_machine_lacks_is_told(monkeypatch, what, stand_in, subject, verdict, text):
    monkeypatch.setattr(what, stand_in)
    found = {finding.subject: finding for finding in doctor.examine_host()}
    assert found[subject].verdict is verdict
    assert text in found[subject].text
    assert (list(found) == ["python", "platform"]) == (subject == "platform")


@pytest.fixture
def registry(site):
    """Pretended plugins: two backends, allocators for CPUs and GPUs, and two that cannot be used."""
    everywhere = "devices=frozenset(DeviceType), requires=frozenset({Capability.REMOTE_LOAD_STORE})"
    gpus = "devices=frozenset({DeviceType.CUDA, DeviceType.HIP}), provides=frozenset({Capability.REMOTE_LOAD_STORE})"
    site.provider("language", "BACKEND", info=everywhere + ", priority=10")
    site.provider("another", "BACKEND", info=everywhere)
    site.provider("pages")
    site.provider("pool", info=gpus + ", priority=10")
    site.provider("virtual", info=gpus)
    site.provider("absent", info=gpus, probe="return Availability.no('no driver')")
    site.provider("stopped", info=gpus)
    return site.registry(block=["stopped"])


@table(("gpus", "hip", "cores", "cpu_ranks"), [
    (8, False, 4, None), (8, True, 4, None), (1, False, 3, 2), (0, False, 2, 2), (0, False, 4, 4),
])  # fmt: skip
def test_self_tests_are_on_all_gpus_and_on_the_cpu_where_there_are_fewer_than_two(
    registry, monkeypatch, gpus, hip, cores, cpu_ranks
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(cores))
    on_gpus, on_cpus = {("language", "pool"), ("language", "virtual"), ("another", "pool")}, {"language", "another"}
    expected = {(*names, "cuda", gpus) for names in on_gpus if gpus}
    expected |= {(backend, "pages", "cpu", cpu_ranks) for backend in on_cpus if cpu_ranks}
    plan = doctor.plan(registry, gpus, hip)
    assert {(test.backend, test.allocator, test.device, test.ranks) for test in plan} == expected


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


def install(site, source, prologue=""):
    """Install a third party's backend; the source is that of its `self_test`."""
    body = prologue + BODY + "".join(f"    {line}\n" for line in source.strip().splitlines())
    site.install("theirs-module", modules={"theirs_backend": body})
    site.provider("theirs", "BACKEND", create="from theirs_backend import Backend; return Backend(request)")


DEFINED = "def self_test(self, context, begin):\n    "
PASSED, FAILED, SKIPPED = ("passed", Verdict.OK), ("failed", Verdict.BROKEN), ("skipped", Verdict.NOTE)


@table(("source", "verdict", "problems", "line"), [
    (f"{DEFINED}yield PairCheck('touch', 0, 0)", PASSED, [], "1 rank on cpu: touch are right between all pairs"),
    ("self_test = None", SKIPPED, [], "backend 'theirs' brings no self-test"),
    ("def attach(self, memory):\n    raise RuntimeError('no such thing')", FAILED,
     ["rank 0: RuntimeError: no such thing", "rank 0 was in open"], None),
    (f"{DEFINED}begin('touch', 0)\n    yield 1 / 0", FAILED,
     ["rank 0: ZeroDivisionError: division by zero", "rank 0 was in touch with rank 0"], None),
    (f"{DEFINED}yield 'ok'", FAILED,
     ["rank 0: TypeError: the backend's self-test gave 'ok', not a PairCheck", "rank 0 was in close"], None),
    (f"{DEFINED}yield from ()", FAILED, ["the self-test of backend 'theirs' reported nothing"], None),
])  # fmt: skip
def test_a_third_partys_own_on_a_rank_alone(site, forked_ranks, source, verdict, problems, line):
    install(site, source)
    test = SelfTest("theirs", "host", "cpu", 1)
    test.run(60)
    assert (test.state, test.finding().verdict, test.problems) == (*verdict, problems)
    assert line is None or test.finding().text == line


@table(("of_rank_0", "ending", "problems"), [
    ("os.kill(os.getpid(), signal.SIGSEGV)", "rank 0 ended with exit code -11", ["rank 0 was in touch with rank 1"]),
    ("begin('barrier', None)", "", ["rank 0 was in barrier", "rank 1 was in touch with rank 0"]),
])  # fmt: skip
def test_a_rank_that_crashes_or_hangs_is_ended_and_named(site, monkeypatch, forked_ranks, of_rank_0, ending, problems):
    source = f"""
def self_test(self, context, begin):
    import faulthandler, os, pathlib, signal, time
    begin("touch", 1 - context.cur_rank)
    if context.cur_rank == 0:
        {of_rank_0}
    context.barrier()
    pathlib.Path(__file__).with_name(f"hangs-{{context.cur_rank}}").write_text(str(os.getpid()))
    faulthandler.dump_traceback_later(1, exit=True)  # sooner than the doctor has asked for
    time.sleep(600)
"""
    install(site, source)
    for name, value in {"IRIS_HEAP_SIZE": "big", "IRIS_ALLOCATOR": "nope", "WORLD_SIZE": "7"}.items():
        monkeypatch.setenv(name, value)  # the caller's environment plays no part
    test = SelfTest("theirs", "host", "cpu", 2)
    test.run(500)
    assert test.state == "failed"
    assert test.problems[0].startswith(ending)
    assert test.problems[1 : 1 + len(problems)] == problems
    for started in site.folder.glob("hangs-*"):
        assert not pathlib.Path("/proc", started.read_text()).exists()
    assert ending or len(list(site.folder.glob("hangs-*"))) == 2


ODD = "3 * ((ctx.rank == 1) & (peer == 0))"
WRONG = {
    "ctx.load(source + i, peer, ": "ctx.load(source + i, tl.where(ctx.rank == 0, 0, peer), ",
    "mask=i < numel), peer, mask=i < numel": f"mask=i < numel), peer, mask=i < numel - {ODD}",
    "mask=i < additions": f"mask=i < additions - {ODD}",
    '"set", message, ': '"set", message if ctx.cur_rank in (peer, 0) else inbox * 0 - 1, ',
    "flag, epoch, epoch": "flag, epoch if ctx.cur_rank in (peer, 1) else 0, epoch",
}


def test_a_kernel_that_is_wrong_is_found(site, monkeypatch, forked_ranks):
    monkeypatch.setattr(doctor, "DEVICE_TIMEOUT_S", 1.0)
    text = inspect.getsource(selftest)
    for right, wrong in WRONG.items():
        assert right in text
        text = text.replace(right, wrong)
    (site.folder / "wrong_selftest.py").write_text(text)
    install(site, f"{DEFINED}yield from wrong_selftest.self_test(context, begin)", "import wrong_selftest\n")
    expected = [
        "rank 0 -> rank 1: read returned wrong values: 8192 of 8192 words, the first is word 0: ",
        "rank 0 -> rank 1: signal did not arrive in time",
        "rank 1 -> rank 0: atomic_add lost 3 of 1000 additions",
        "rank 1 -> rank 0: signal came before its data: 256 of 256 words, the first is word 0: -1 instead of ",
        "rank 1 -> rank 0: write arrived wrong: 3 of 8192 words, the first is word 8189: -1 instead of ",
    ]
    test = SelfTest("theirs", "host", "cpu", 2)
    test.run(500)
    assert test.problems == []
    found = sorted(str(check) for check in test.checks if not check.ok)
    assert [line[: len(text)] for line, text in zip(found, expected, strict=True)] == expected
