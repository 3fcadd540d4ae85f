"""`iris doctor`: the report, what plugins add to it, GPUs that are stand-ins of torch's, and the machine."""

import glob
import json
import os
import sys
import types

import pytest
import torch
from dist_info import provider_source
from tables import table

from iris_core import cli
from iris_core.cli import doctor
from iris_core.diagnosis import Verdict
from iris_triton import _compat
from iris_triton._plugin import plugin

pytestmark = pytest.mark.usefixtures("fresh_registry")


@pytest.fixture
def here(monkeypatch):
    """The survey in this process, where it sees what a test has changed."""
    monkeypatch.setattr(doctor, "apart", lambda job, ranks, timeout_s, *args: ([job(*args)], ""))


def report(capsys, *arguments):
    """Status, the JSON document, and verdict and text by subject."""
    status = cli.main(["doctor", "--json", *arguments])
    document = json.loads(capsys.readouterr().out)
    assert document["ok"] == (status == 0)
    return status, document, {each["subject"]: (each["verdict"], each["text"]) for each in document["findings"]}


# -- the report -------------------------------------------------------------------------------------------------------
def test_the_whole_report_on_a_healthy_machine(capsys, clean_environment, forked_ranks, monkeypatch):
    monkeypatch.setenv("IRIS_BLOCK", "gluon,nccl")
    status, document, found = report(capsys)
    assert status == 0, [text for verdict, text in found.values() if verdict == "broken"]
    assert list(document) == ["ok", "findings", "versions", "gpus", "pairs", "self_tests"]
    assert found["torch"][1].startswith(torch.__version__)
    assert document["versions"]["torch"] == torch.__version__
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
        assert {(each["rank"], each["peer"]) for each in test["checks"]} >= {(0, 1), (1, 0)}
        assert {each["op"] for each in test["checks"]} == {"write", "read", "atomic_add", "signal"}
        assert found["self-test triton on host"][0] == "ok"


def test_as_text(capsys, here, clean_environment):
    assert cli.main(["doctor", "--no-self-test"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("SUBJECT")
    assert out.endswith("\nnothing is broken\n")
    assert max(map(len, out.splitlines())) <= 120
    assert "left out as asked" in out


def test_a_broken_plugin_wrong_settings_and_a_choice_that_fails(capsys, here, site, monkeypatch):
    site.provider("bad", source="raise RuntimeError('boom')")
    monkeypatch.setenv("IRIS_BACKEND", "tritn")
    monkeypatch.setenv("IRIS_TRITON__CPU_TIMEOUT", "soon")
    monkeypatch.setenv("IRIS_HEEP_SIZE", "1GiB")
    status, document, found = report(capsys, "--no-self-test")
    assert status == 1
    assert found["allocator bad"][0] == "broken"
    assert "boom" in found["allocator bad"][1]
    settings = {each["verdict"]: each["text"] for each in document["findings"] if each["subject"] == "settings"}
    assert "IRIS_TRITON__CPU_TIMEOUT='soon'" in settings["broken"]
    assert "IRIS_HEEP_SIZE" in settings["note"]
    assert found["choice"][0] == "broken"
    assert "did you mean 'triton'" in found["choice"][1]


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


# -- what plugins bring -----------------------------------------------------------------------------------------------
def diagnosing(name, body, **info):
    """Source of a provider that diagnoses."""
    hook = f"""
    @hookimpl
    def iris_plugin_diagnose(self, targets):
        from iris_core.diagnosis import Finding, Verdict
        {body}

plugin = Plugin()"""
    return provider_source(name, **info).replace("\nplugin = Plugin()", hook)


def test_a_plugin_brings_its_own_findings_about_its_own_devices(capsys, here, site):
    body = "return [Finding('wires', Verdict.BROKEN, 'loose', {'devices': [t.torch_device for t in targets]})]"
    site.provider("mine", source=diagnosing("mine", body))
    elsewhere = "devices=frozenset({DeviceType.HIP}), provides=frozenset()"
    site.provider("other", source=diagnosing("other", "assert not targets; return []", info=elsewhere))
    status, document, found = report(capsys, "--no-self-test")
    assert status == 1
    assert found["wires"] == ("broken", "loose")
    (finding,) = (each for each in document["findings"] if each["subject"] == "wires")
    assert finding["data"] == {"devices": ["cpu"]}
    assert found["allocator other"][0] == "ok" or "unavailable" in found["allocator other"][1]


@table(("body", "text"), [
    ("raise OSError('no such wire')", "iris_plugin_diagnose raised OSError: no such wire"),
    ("return ['text']", "must return a list of Finding, not ['text']"),
    ("return None", "must return a list of Finding, not None"),
])  # fmt: skip
def test_a_diagnosis_that_fails_is_a_finding(capsys, here, site, body, text):
    site.provider("mine", source=diagnosing("mine", body))
    status, document, found = report(capsys, "--no-self-test")
    assert status == 1
    assert [text in each["text"] for each in document["findings"] if each["verdict"] == "broken"] == [True]
    assert found["allocator mine"] == ("ok", "iris-mine 1.0: loaded")


def test_a_diagnosis_is_no_hook_of_observers(site):
    source = diagnosing("mine", "return []").replace("PluginKind.ALLOCATOR", "PluginKind.OBSERVER")
    site.install("iris-mine", entry_points={"iris.plugins": {"mine": "mine:plugin"}}, modules={"mine": source})
    (record,) = site.registry().load_all()
    assert "no hook of the kind observer" in record.reason


def test_a_plugin_that_crashes_is_not_the_end(capsys, forked_ranks, site):
    body = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
    site.provider("mine", source=diagnosing("mine", body))
    status, document, found = report(capsys, "--no-self-test")
    assert status == 1
    assert found["torch"][0] == "ok"
    assert document["versions"]["torch"] == torch.__version__
    assert found["plugins"][0] == "broken"
    assert "exit code -11" in found["plugins"][1]


def test_what_hangs_is_ended(capsys, clean_environment):
    status, _, found = report(capsys, "--no-self-test", "--timeout", "0.01")
    assert status == 1
    assert found["GPUs"] == found["plugins"] == ("broken", "examining them: did not end within 0.01 s")


# -- GPUs -------------------------------------------------------------------------------------------------------------
@pytest.fixture
def gpus(monkeypatch):
    """Lets torch have H200s that are none; returns the findings of the steps that ask it, and the facts."""

    def look(count, access=lambda one, other: True, *, cuda="13.0", hip=None, init=None):
        def start():
            if init is not None:
                raise init

        properties = types.SimpleNamespace(
            name="H200", total_memory=140 << 30, major=9, minor=0, multi_processor_count=132,
            gcnArchName="gfx942:sramecc+", warp_size=64,
        )  # fmt: skip
        monkeypatch.setattr(torch, "version", types.SimpleNamespace(cuda=None if hip else cuda, hip=hip))
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
        monkeypatch.setattr(torch.cuda, "can_device_access_peer", access)
        monkeypatch.setattr(torch.cuda, "init", start)
        facts, found = doctor.survey_gpus({})
        return {finding.subject: finding for finding in found}, facts

    return look


def test_eight_gpus(gpus):
    found, facts = gpus(8)
    assert {each.verdict for each in found.values()} == {Verdict.OK}
    assert found["GPU 7"].text == "H200, 140.0 GiB, sm_90"
    described = {"name": "H200", "memory_bytes": 140 << 30, "arch": "sm_90", "compute_units": 132}
    assert facts["gpus"][3] == {"index": 3, **described}
    assert len(facts["pairs"]) == 56
    assert facts["pairs"][0] == {"from": 0, "to": 1, "access": True}
    assert "all 56 ordered pairs" in found["peer access"].text


@table(("hip", "way"), [(None, "CUDA_VISIBLE_DEVICES"), ("7.0", "HIP_VISIBLE_DEVICES")])
def test_gpus_that_do_not_reach_each_other_are_broken(gpus, hip, way):
    found, facts = gpus(4, lambda one, other: {one, other} == {2, 3}, hip=hip)
    assert found["peer access"].verdict is Verdict.BROKEN
    assert "0->1, 0->2, 0->3, 1->0, 1->2, 1->3, 2->0, 2->1, 3->0, 3->1. No heap" in found["peer access"].text
    assert way in found["peer access"].text
    assert facts["gpus"][0]["arch"] == ("gfx942" if hip else "sm_90")


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


def test_an_untested_triton_is_noted(monkeypatch):
    monkeypatch.setattr(_compat, "TESTED", ((1, 0),))
    monkeypatch.setattr(_compat, "KNOWN", "1.0")
    (finding,) = plugin.iris_plugin_diagnose()
    assert (finding.subject, finding.verdict) == ("triton", Verdict.NOTE)
    assert "tested with (1.0)" in finding.text


# -- the machine ------------------------------------------------------------------------------------------------------
def refuse(*args):
    raise PermissionError(1, "Operation not permitted")


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


# -- which self-tests there are ---------------------------------------------------------------------------------------
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


ON_GPUS = {("language", "pool"), ("language", "virtual"), ("another", "pool")}
ON_CPUS = {("language", "pages"), ("another", "pages")}


@table(("gpus", "hip", "cores", "cpu_ranks"), [
    (8, False, 4, None), (8, True, 4, None), (1, False, 3, 2), (0, False, 2, 2), (0, False, 3, 2), (0, False, 4, 4),
    (0, False, 64, 4),
])  # fmt: skip
def test_self_tests_are_on_all_gpus_and_on_the_cpu_where_there_are_fewer_than_two(
    registry, monkeypatch, gpus, hip, cores, cpu_ranks
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(cores))
    expected = {(*names, "cuda", gpus) for names in ON_GPUS if gpus}
    expected |= {(*names, "cpu", cpu_ranks) for names in ON_CPUS if cpu_ranks}
    assert {
        (test.backend, test.allocator, test.device, test.ranks) for test in doctor.plan(registry, gpus, hip)
    } == expected


def test_names_that_two_offer_are_told_apart(site):
    site.provider("language", "BACKEND", distribution="iris-one")
    site.provider("language", "BACKEND", distribution="iris-two")
    site.provider("pages")
    tests = doctor.plan(site.registry(), 0, False)
    assert [test.backend for test in tests] == ["language@iris-one", "language@iris-two"]
