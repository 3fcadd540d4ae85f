"""What the guides, the pages on writing plugins and the README say is there, and what they show is what happens."""

import inspect
import re

import pytest
from tables import table

import iris_triton
from iris_core import Iris, cli, errors, hooks, protocols
from iris_core.ccl.api import Collectives
from iris_core.cli import doctor
from iris_core.device.context_words import STATUS_WAIT_TIMEOUT, STATUS_WORDS, Status
from iris_core.device.reports import Meaning, Report, timeout_text
from iris_core.diagnosis import PairCheck
from iris_core.heap.heap import SymmetricHeap
from iris_core.ops.api import Operations
from iris_core.testing.conformance.backend import FUNCTIONS
from iris_triton.context import DeviceContext

from .excerpts import ROOT, fenced, shown

DOCS = ROOT / "docs"
PAGES = [DOCS / f"{name}.md" for name in ("tutorial", "programming_model", "debugging", "porting", "tracing")]
HOLDERS = {"ctx.ccl": Collectives, "ctx.ops": Operations, "ctx.heap": SymmetricHeap}


@table("page", PAGES)
def test_methods(page):
    for holder, name in re.findall(r"`(ctx(?:\.ccl|\.ops|\.heap)?)\.(\w+)\(", page.read_text()):
        holders = [HOLDERS[holder]] if holder in HOLDERS else [Iris, DeviceContext]  # both are called ctx
        assert any(hasattr(each, name) for each in holders), f"{holder}.{name}"


def test_errors():
    text = (DOCS / "debugging.md").read_text()
    named = set(re.findall(r"`?(\w+Error)\b", text)) - {"IndexError"}
    assert len(named) >= 5
    for name in named:
        assert hasattr(errors, name), name


def test_ours_in_the_tables():
    """The second column's words for kernels are device functions."""
    text = (DOCS / "porting.md").read_text()
    functions = {*(name for name in vars(DeviceContext) if not name.startswith("_")), *iris_triton.__all__}
    rows = re.findall(r"^\| `?nvshmem\w*.*?\| (.*?) \|$", text, re.MULTILINE)
    assert len(rows) >= 10
    for name in re.findall(r"`(\w+)`(?:, `(\w+)`)? of `DeviceContext`", "\n".join(rows)):
        assert {*filter(None, name)} <= functions | {"rank", "world_size"}


def test_the_message_is_the_real_one():
    words = [0] * STATUS_WORDS
    values = {"CODE": STATUS_WAIT_TIMEOUT, "RANK": 2, "PROGRAM": 5, "ADDRESS": 0x7F3C12000400, "EXPECTED": 3, "LAST": 2}
    for name, value in values.items():
        words[Status[name]] = value
    words[Status.COMPARISON] = 3
    message = timeout_text(Report(2, Status.CODE, words, 0), Meaning((2,)))
    shown = re.search(r"DeviceTimeoutError: (.*?) \.\.\.", (DOCS / "debugging.md").read_text(), re.DOTALL).group(1)
    assert message.startswith(" ".join(shown.split()))


def test_the_tutorial_shows_the_examples(run_program, tmp_path):
    text = (DOCS / "tutorial.md").read_text()
    blocks = list(shown(text))
    assert len(blocks) == 3
    for marker, in_page, in_file in blocks:
        assert in_page == in_file, marker
    (snippet,) = fenced(text, r"(?i:not writing it yourself)\n\n")
    (tmp_path / "snippet.py").write_text(snippet)
    run_program(tmp_path / "snippet.py")


def test_the_mistake_of_the_tutorial_is_found(run_program, tmp_path):
    example = (DOCS.parent / "examples" / "02_store.py").read_text()
    assert "`inbox + i + 1000`" in (DOCS / "tutorial.md").read_text()
    mistaken = tmp_path / "mistaken.py"
    assert "iris_core.run(main, 4)" in example  # two are enough to see it
    text = example.replace("iris_core.run(main, 4)", "iris_core.run(main, 2)")
    mistaken.write_text(text.replace("ctx.store(inbox + i,", "ctx.store(inbox + i + 1000,"))
    words = r"OutOfBoundsError: kernel 'send', program \(\d, 0, 0\), lane \d+: store"
    with pytest.raises(errors.IrisError, match=words):
        run_program(mistaken)


# -- docs/doctor.md: every line and every key of the report -----------------------------------------------------------
DOCTOR = (DOCS / "doctor.md").read_text()
PLUGINS = [f"{name}/src/{name}/_plugin.py" for name in ("iris_allocators", "iris_triton")]
SOURCES = ["iris_core/src/iris_core/cli/doctor.py", *PLUGINS]


def test_every_line_is_on_the_page():
    source = "".join((ROOT / path).read_text() for path in SOURCES)
    subjects = set(re.findall(r'(?:Finding|diagnose)\(\s*"([^"{}]+)"', source))
    assert len(subjects) > 14
    rows = DOCTOR.partition("## The lines")[2].partition("## ")[0].splitlines()
    listed = {name.strip() for row in rows if row.startswith("|") for name in row.split("|")[1].split(",")}
    assert subjects <= listed | {"plugins", "self-test"}  # the two, in the place of lines that could not be made


def test_the_keys_of_a_report_are_on_the_page(monkeypatch):
    monkeypatch.setattr(doctor, "apart", lambda *args: ([], "failed"))
    document = doctor.examine(self_test=False)
    test = doctor.SelfTest("a", "b", "cpu", 1, checks=[PairCheck("write", 0, 0)]).to_json()
    keys = {*document, *document["findings"][0], *test, *test["checks"][0]}
    keys |= set(re.findall(r'"([a-z_]+)"[]:]', inspect.getsource(doctor.survey_gpus)))
    assert keys >= {"arch", "access", "cuda_of_torch", "gpus"}
    assert [key for key in sorted(keys) if f"`{key}`" not in DOCTOR] == []


# -- the pages on writing plugins: what is in the example's files, and every member of the protocols ------------------
OF_PLUGINS = ("write_an_allocator", "write_a_backend", "write_a_collective")
TEXT_OF_PLUGINS = {name: (ROOT / "docs" / f"{name}.md").read_text() for name in OF_PLUGINS}
PROSE = {name: re.sub(r"```.*?```", "", text, flags=re.DOTALL) for name, text in TEXT_OF_PLUGINS.items()}

REQUIRED = {
    "write_an_allocator": "Allocator SupportsGrowth SupportsDecommit SupportsImportTensor",
    "write_a_backend": "DeviceBackend MemoryMap SupportsDemos SupportsDeviceBarrier SupportsSelfTest",
    "write_a_collective": "Collective Work",
}


@table("page", OF_PLUGINS)
def test_code_blocks_are_the_files(page):
    blocks = list(shown(TEXT_OF_PLUGINS[page]))
    assert len(blocks) == len(re.findall(r"^```\w+$", TEXT_OF_PLUGINS[page], re.MULTILINE)), "every block has a marker"
    for marker, there, file in blocks:
        assert there == file, f"{marker}: write the pages again with python tests/docs/excerpts.py docs/{page}.md"


@table("page", OF_PLUGINS)
def test_every_member_of_the_protocols_is_named(page):
    known = {"info", "rank", "version", "nbytes"}  # of the plugin, and of any memory
    for protocol in REQUIRED[page].split():
        for name, value in inspect.getmembers_static(getattr(protocols, protocol)):
            named = name.startswith("_") or name in known or re.search(rf"\b{name}\b", PROSE[page])
            assert named or not (inspect.isroutine(value) or isinstance(value, property)), f"{protocol}.{name}"


def test_every_hook_and_every_device_function_is_named():
    for hook in (*hooks.PROVIDER_HOOKS, *hooks.OPTIONAL_PROVIDER_HOOKS):
        assert f"| `{hook}` |" in PROSE["write_an_allocator"]
    assert [name for name in FUNCTIONS if f"`{name}`" not in PROSE["write_a_backend"]] == []


# -- the README, and what the changelog is made of --------------------------------------------------------------------
README = (ROOT / "README.md").read_text()


def test_the_program_is_the_example_and_prints_what_is_shown(run_program, tmp_path):
    name, code = re.search(r"<!-- example: (\S+) -->\n```python\n(.*?)```", README, re.DOTALL).groups()
    assert code == (ROOT / name).read_text()
    shown = re.search(r"<!-- output -->\n```text\n(.*?)```", README, re.DOTALL).group(1)
    assert run_program(ROOT / name) == shown.splitlines()
    (snippet,) = fenced(README, "## On the host\n\n")
    (tmp_path / "snippet.py").write_text(snippet)
    assert run_program(tmp_path / "snippet.py")[0].startswith("0 ")


@table(("page", "printed"), [
    ("docs/cpu_execution.md", "[0.0, 2.0, 4.0, 6.0, 8.0]"), ("iris_allocators/README.md", "host [0.0, 0.0, 0.0, 0.0]"),
    ("iris_triton/README.md", "[1.0, 0.0]"), ("iris_gluon/README.md", "[0.0, 1.0, 2.0, 3.0]"),
])  # fmt: skip
def test_the_program_of_another_page_prints_what_it_should(run_program, tmp_path, page, printed):
    """That of the core runs in tests/packaging."""
    (program,) = fenced((ROOT / page).read_text())
    (tmp_path / "program.py").write_text(program)
    assert run_program(tmp_path / "program.py") == [printed]


def test_targets_of_make_and_commands_exist(capsys):
    targets, commands = (re.findall(rf"^{program} (\w+)", README, re.MULTILINE) for program in ("make", "iris"))
    assert targets
    assert commands
    for target in targets:
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), target
    for command in commands:
        assert cli.main([command, "--help"]) == 0
        assert f"iris {command}" in capsys.readouterr().out


def test_the_readme_is_short():
    assert len(README.splitlines()) < 220
    assert len(README.split()) <= 900
    assert README.index("make demo") < README.index("## ")


def test_fragments_of_the_changelog_are_lines_of_it():
    for path in (ROOT / "changes").glob("*.md"):
        if path.name != "README.md":
            assert re.fullmatch(r"(- \S.*\n(  \S.*\n)*){1,3}", path.read_text()), path.name
