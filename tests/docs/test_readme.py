"""What the README shows is what happens."""

import re

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
    (double,) = fenced((ROOT / "docs" / "cpu_execution.md").read_text())
    (tmp_path / "double.py").write_text(double)
    assert run_program(tmp_path / "double.py").strip() == "[0.0, 2.0, 4.0, 6.0, 8.0]"


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
