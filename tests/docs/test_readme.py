"""What the README shows is what happens, and what the changelog is made of."""

import re

from tables import table

from iris_core import cli

from .excerpts import ROOT, fenced

README = (ROOT / "README.md").read_text()


def test_the_program_is_the_example_and_prints_what_is_shown(run_program, tmp_path):
    name, code = re.search(r"<!-- example: (\S+) -->\n```python\n(.*?)```", README, re.DOTALL).groups()
    assert code == (ROOT / name).read_text()
    shown = re.search(r"<!-- output -->\n```text\n(.*?)```", README, re.DOTALL).group(1)
    assert run_program(ROOT / name) == shown
    (snippet,) = fenced(README, "## On the host\n\n")
    (tmp_path / "snippet.py").write_text(snippet)
    assert run_program(tmp_path / "snippet.py").startswith("0 ")


@table(("page", "printed"), [
    ("docs/cpu_execution.md", "[0.0, 2.0, 4.0, 6.0, 8.0]"), ("iris_allocators/README.md", "host [0.0, 0.0, 0.0, 0.0]"),
    ("iris_triton/README.md", "[1.0, 0.0]"), ("iris_gluon/README.md", "[0.0, 1.0, 2.0, 3.0]"),
])  # fmt: skip
def test_the_program_of_another_page_prints_what_it_should(run_program, tmp_path, page, printed):
    """That of the core runs in tests/packaging."""
    (program,) = fenced((ROOT / page).read_text())
    (tmp_path / "program.py").write_text(program)
    assert run_program(tmp_path / "program.py").strip() == printed


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
