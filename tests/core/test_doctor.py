"""`iris doctor`: the report as a whole, the survey's process, and the machine."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys

import pytest

from iris_core import cli
from iris_core.cli.doctor import TIMEOUT_S, host, installation, process, selftest, survey, tables
from iris_core.cli.doctor.process import Recorder, read_records, run_module
from iris_core.diagnosis import Finding, Verdict
from iris_core.registry import reset_default_registry

from .conftest import eventually


@pytest.fixture(autouse=True)
def fresh_registry():
    """Other tests of this process may have created plugins."""
    reset_default_registry()
    yield
    reset_default_registry()


@pytest.fixture
def here(monkeypatch):
    """The survey in this process, where it sees what a test has changed."""

    def take(timeout_s):
        records = []
        survey.collect(lambda **fields: records.append(json.loads(json.dumps(fields, default=str))))
        taken, unfinished = survey.read_survey(records)
        assert not unfinished
        return taken

    monkeypatch.setattr(survey, "take_survey", take)


def report(capsys, *arguments):
    """Status, the JSON document, and verdict and text by subject."""
    status = cli.main(["doctor", "--json", *arguments])
    document = json.loads(capsys.readouterr().out)
    assert document["ok"] == (status == 0)
    return status, document, {each["subject"]: (each["verdict"], each["text"]) for each in document["findings"]}


# -- the report -------------------------------------------------------------------------------------------------------
def test_the_whole_report_on_a_healthy_machine(capsys, clean_environment):
    import torch

    from iris_triton._compat import TESTED, version

    status, document, found = report(capsys)
    assert status == 0, [text for verdict, text in found.values() if verdict == "broken"]
    assert list(document) == ["ok", "findings", "versions", "gpus", "pairs", "self_tests"]
    assert found["torch"][1].startswith(torch.__version__)
    assert document["versions"]["torch"] == torch.__version__
    assert document["versions"]["distributions"]["iris-core"]
    assert found["triton"][0] == ("ok" if version() in TESTED else "note")
    assert found["allocator host"] == ("ok", "iris-allocators 0.2.0: loaded")
    assert "backend triton@iris-triton" in found["choice"][1]
    for subject in ("python", "platform", "CPUs", "memory", "memfd", "descriptors", "packages", "settings"):
        assert found[subject][0] == "ok", subject
    if not document["gpus"]:
        (test,) = (each for each in document["self_tests"] if each["backend"] == "triton")
        assert (test["allocator"], test["device"], test["state"]) == ("host", "cpu", "passed")
        assert {(each["rank"], each["peer"]) for each in test["checks"]} >= {(0, 1), (1, 0)}
        assert {each["op"] for each in test["checks"]} == {"write", "read", "atomic_add", "signal"}
        assert 0 < test["seconds"] < test["total_seconds"]


def test_as_text(capsys, here, clean_environment):
    assert cli.main(["doctor", "--no-self-test"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("SUBJECT")
    assert out.endswith("\nnothing is broken\n")
    assert max(map(len, out.splitlines())) <= tables.WIDTH
    assert "left out as asked" in out


def test_a_broken_plugin_a_wrong_setting_and_a_choice_that_fails(capsys, here, site, monkeypatch):
    site.provider("bad", source="raise RuntimeError('boom')")
    monkeypatch.setenv("IRIS_BACKEND", "tritn")
    monkeypatch.setenv("IRIS_TRITON__CPU_TIMEOUT", "soon")
    status, _, found = report(capsys, "--no-self-test")
    assert status == 1
    assert found["allocator bad"][0] == "broken"
    assert "boom" in found["allocator bad"][1]
    assert found["settings"][0] == "broken"
    assert "IRIS_TRITON__CPU_TIMEOUT='soon'" in found["settings"][1]
    assert found["choice"][0] == "broken"
    assert "did you mean 'triton'" in found["choice"][1]


def test_it_goes_on_where_a_core_setting_is_wrong(capsys, here, clean_environment, monkeypatch):
    monkeypatch.setenv("IRIS_HEAP_SIZE", "big")
    status, _, found = report(capsys, "--no-self-test")
    assert status == 1
    assert "IRIS_HEAP_SIZE='big'" in found["settings"][1]
    assert found["backend triton"][0] == "ok"
    assert "choice" not in found


@pytest.mark.parametrize("timeout", ["soon", "0", "-1", "nan"])
def test_a_bound_that_is_none_is_wrong_usage(capsys, timeout):
    assert cli.main(["doctor", "--timeout", timeout]) == 2
    assert "--timeout" in capsys.readouterr().err


def test_the_bound_reaches_the_survey_and_every_self_test(monkeypatch):
    bounds = []
    taken = survey.Survey(torch=True)
    monkeypatch.setattr(survey, "take_survey", lambda timeout_s: bounds.append(timeout_s) or taken)
    monkeypatch.setattr(selftest, "run_job", lambda job, timeout_s: bounds.append(timeout_s) or selftest.Outcome(job))
    assert cli.main(["doctor", "--timeout", "7.5"]) == 0
    assert set(bounds) == {7.5}
    assert len(bounds) >= 2
    assert TIMEOUT_S != 7.5


# -- what plugins bring -----------------------------------------------------------------------------------------------
def diagnosing(name, body, **info):
    """Source of a provider that diagnoses."""
    from iris_core.testing.dist_info import provider_source

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


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("raise OSError('no such wire')", "iris_plugin_diagnose raised OSError: no such wire"),
        ("return ['text']", "must return a list of Finding, not ['text']"),
        ("return None", "must return a list of Finding, not None"),
    ],
)
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
    assert "never called on plugins of kind observer" in record.reason


def test_an_untested_triton_is_noted(monkeypatch):
    from iris_triton import _compat
    from iris_triton._plugin import plugin

    monkeypatch.setattr(_compat, "TESTED", ((1, 0),))
    (finding,) = plugin.iris_plugin_diagnose()
    assert (finding.subject, finding.verdict) == ("triton", Verdict.NOTE)
    assert "tested with (1.0)" in finding.text


# -- processes of their own -------------------------------------------------------------------------------------------
CHILDREN = {
    "good": "",
    "raises": "raise RuntimeError('no heap')",
    "crashes": "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
    "hangs": "import time; time.sleep(600)",
    "forks": "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']);"
    "import time; time.sleep(600)",
}


@pytest.fixture
def child(site, tmp_path):
    """Runs one of CHILDREN, which records that it has begun."""

    def run(name, timeout_s=60.0):
        source = "import sys; from iris_core.cli.doctor.process import Recorder\n"
        source += f"Recorder(sys.argv[1] + '/records').write(begin='here', argument=sys.argv[2])\n{CHILDREN[name]}\n"
        (site.folder / f"child_{name}.py").write_text(source)
        environment = {**process.environment_without_world(), "PYTHONPATH": str(site.folder)}
        ending = run_module(f"child_{name}", {"x": 1}, tmp_path, timeout_s, environment)
        return ending, read_records(tmp_path / "records")

    return run


@pytest.mark.parametrize(
    ("name", "problem", "stderr"),
    [
        ("good", "", ""),
        ("raises", "ended with status 1", "RuntimeError: no heap"),
        ("crashes", "was killed by signal 11 (SIGSEGV)", ""),
    ],
)
def test_how_a_child_ends(child, name, problem, stderr):
    ending, records = child(name)
    assert ending.problem == problem
    assert ending.stderr.endswith(stderr)
    assert records == [{"begin": "here", "argument": '{"x": 1}'}]


@pytest.mark.parametrize("name", ["hangs", "forks"])
def test_a_child_that_hangs_is_ended_with_all_that_it_has_started(child, name):
    ending, records = child(name, timeout_s=1.5)
    assert ending.problem == "did not end within 1.5 s"
    assert [each["begin"] for each in records] == ["here"]


def test_ending_reaches_the_childs_children(site, tmp_path):
    source = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open(sys.argv[1] + "/pid", "w").write(str(child.pid))
time.sleep(600)
"""
    (site.folder / "parent.py").write_text(source)
    run_module("parent", {}, tmp_path, 2.0, {**os.environ, "PYTHONPATH": str(site.folder)})
    pid = int((tmp_path / "pid").read_text())
    assert eventually(lambda: not _runs(pid), 60)


def _runs(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_records_that_were_cut_off(tmp_path):
    recorder = Recorder(tmp_path / "records")
    recorder.write(a=1)
    with open(tmp_path / "records", "a") as file:
        file.write('{"b": ')
    assert read_records(tmp_path / "records") == [{"a": 1}]
    assert read_records(tmp_path / "nothing") == []


def test_a_survey_that_crashes_keeps_what_it_had(monkeypatch, site):
    body = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
    site.provider("mine", source=diagnosing("mine", body))
    monkeypatch.setenv("PYTHONPATH", str(site.folder))
    taken = survey.take_survey(60)
    assert taken.torch
    assert "torch" in [finding.subject for finding in taken.findings]
    last = taken.findings[-1]
    assert (last.subject, last.verdict) == ("plugins", Verdict.BROKEN)
    assert last.text.startswith("examining plugins was killed by signal 11 (SIGSEGV)")
    assert signal.SIGSEGV == 11


def test_a_survey_that_hangs_is_ended(monkeypatch, site, over_when):
    body = "import pathlib, time; pathlib.Path(__file__).with_name('hangs').touch(); time.sleep(600)"
    site.provider("mine", source=diagnosing("mine", body))
    monkeypatch.setenv("PYTHONPATH", str(site.folder))
    over_when(site.folder / "hangs")
    taken = survey.take_survey(60)
    assert taken.findings[-1].text.startswith("examining plugins did not end within 60 s")


def test_without_torch_there_is_no_self_test(capsys, monkeypatch, here, clean_environment):
    monkeypatch.setitem(sys.modules, "torch", None)
    status, document, found = report(capsys)
    assert status == 1
    assert found["torch"][0] == "broken"
    assert "pip install 'torch>=2.11'" in found["torch"][1]
    assert document["self_tests"] == []


def test_a_step_that_raises_does_not_stop_the_others(monkeypatch):
    def fail(survey):
        raise ZeroDivisionError("oh")

    monkeypatch.setattr(survey, "_gpus", fail)
    records = []
    survey.collect(lambda **fields: records.append(fields))
    assert [each["begin"] for each in records if "begin" in each] == ["torch", "GPUs", "GPU links", "plugins", "choice"]
    assert records[3]["findings"][0]["text"] == "examining it raised ZeroDivisionError: oh"


# -- the machine ------------------------------------------------------------------------------------------------------
def by_subject(findings):
    return {finding.subject: finding for finding in findings}


@pytest.mark.parametrize(
    ("file", "content", "kind"),
    [
        (".dockerenv", "", "docker"),
        ("run/.containerenv", "", "podman"),
        (".singularity.d/env", "", "apptainer"),
        ("proc/1/cgroup", "0::/kubepods/pod1/abc", "kubernetes"),
        ("proc/1/cgroup", "1:name=systemd:/docker/abc", "docker"),
        ("proc/1/cgroup", "0::/init.scope", ""),
        ("other", "", ""),
    ],
)
def test_containers(tmp_path, file, content, kind):
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text(content)
    assert host.container_kind(tmp_path) == kind
    found = by_subject(host.examine_host(tmp_path))
    assert ("container" in found) == bool(kind)
    if kind:
        assert found["container"].verdict is Verdict.NOTE
        assert "--ipc=host" in found["container"].text


def test_a_small_shm_and_strict_overcommit_are_noted(tmp_path, monkeypatch):
    (tmp_path / "dev/shm").mkdir(parents=True)
    (tmp_path / "proc/sys/vm").mkdir(parents=True)
    (tmp_path / "proc/sys/vm/overcommit_memory").write_text("2\n")
    monkeypatch.setattr(host, "SMALL_SHM_NBYTES", 1 << 62)
    found = by_subject(host.examine_host(tmp_path))
    assert found["/dev/shm"].verdict is Verdict.NOTE
    assert "--shm-size" in found["/dev/shm"].text
    assert found["overcommit"].verdict is Verdict.NOTE


def test_limits_of_the_shell_are_noted(monkeypatch):
    limits = {resource.RLIMIT_NOFILE: (256, 4096), resource.RLIMIT_AS: (1 << 30, 1 << 30)}
    monkeypatch.setattr(resource, "getrlimit", limits.__getitem__)
    found = by_subject(host.examine_host())
    assert found["open files"].verdict is Verdict.NOTE
    assert "ulimit -n 4096" in found["open files"].text
    assert "1.0 GiB" in found["addresses"].text


def test_descriptors_that_cannot_be_sent_are_broken(monkeypatch):
    def refuse(*args):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("socket.send_fds", refuse)
    finding = by_subject(host.examine_host())["descriptors"]
    assert finding.verdict is Verdict.BROKEN
    assert "Operation not permitted" in finding.text


def test_memory_files_that_are_forbidden_are_broken(monkeypatch):
    def refuse(*args):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", refuse)
    finding = by_subject(host.examine_host())["memfd"]
    assert finding.verdict is Verdict.BROKEN
    assert "seccomp" in finding.text


def test_versions_are_those_that_matter():
    found = installation.versions()
    assert {"iris-core", "iris-allocators", "iris-triton", "torch"} <= set(found)
    assert "pytest" not in found


def test_long_texts_are_wrapped_into_the_width():
    finding = Finding("a subject", Verdict.NOTE, "word " * 60 + "\nsecond line\n  " + "indented " * 30)
    rows = tables.rows([finding, Finding("b", Verdict.OK, "")])
    assert [row[0] for row in rows if row[0]] == ["a subject", "b"]
    assert max(len(subject) + len(verdict) + len(text) for subject, verdict, text in rows) <= tables.WIDTH
    assert " ".join(row[2].strip() for row in rows).split() == finding.text.split()
