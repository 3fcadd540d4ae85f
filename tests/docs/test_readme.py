"""What the README shows is what happens."""

import pathlib
import re

import pytest

from iris_core import cli

ROOT = pathlib.Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_the_program_is_the_example_and_prints_what_is_shown(run_program):
    name, code = re.search(r"<!-- example: (\S+) -->\n```python\n(.*?)```", README, re.DOTALL).groups()
    assert code == (ROOT / name).read_text()
    shown = re.search(r"<!-- output -->\n```text\n(.*?)```", README, re.DOTALL).group(1)
    assert run_program(ROOT / name) == shown


def test_the_host_snippet_runs(run_program, tmp_path):
    (snippet,) = re.findall(r"## On the host\n\n```python\n(.*?)```", README, re.DOTALL)
    script = tmp_path / "snippet.py"
    script.write_text(snippet)
    assert run_program(script).startswith("0 ")


@pytest.mark.parametrize("target", re.findall(r"^make (\w+)", README, re.MULTILINE))
def test_make_targets_exist(target):
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_links_point_to_files():
    prose = re.sub(r"```.*?```", "", README, flags=re.DOTALL)
    links = re.findall(r"\]\(([^)#]+)\)", prose)
    assert links
    for link in links:
        assert (ROOT / link).exists(), link


def test_every_command_of_the_command_line_is_there(capsys):
    commands = re.findall(r"^iris (\w+)", README, re.MULTILINE)
    assert commands
    for command in commands:
        assert cli.main([command, "--help"]) == 0
        assert f"iris {command}" in capsys.readouterr().out


def test_the_example_of_cpu_execution_runs(run_program, tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "cpu_execution.md").read_text(), re.DOTALL)
    script = tmp_path / "double.py"
    script.write_text(code)
    assert run_program(script).strip() == "[0.0, 2.0, 4.0, 6.0, 8.0]"


def test_the_readme_is_short():
    assert len(README.splitlines()) < 220
    assert README.index("make demo") < README.index("## ")


SUMMARY = {  # rows of the README, and the rows of docs/compatibility.md that they sum up, by their beginnings
    "heap, device functions": ("device functions of", "device functions and", "`ctx.device_barrier()`"),
    "`ctx.ccl`: portable": ("`ctx.ccl`, portable", "`ctx.ccl`, variants of AMD"),
    "`ctx.ccl`: algorithms in Gluon": ("`ctx.ccl`, algorithms in Gluon",),
    "`ctx.ccl`: packets": ("`ctx.ccl`, algorithms of packets",),
    "`ctx.ops`, layers": ("`ctx.ops`, algorithms in plain", "collectives on tiles", "device tracing"),
    "Hopper": ("GEMM core and bulk",),
    "several hosts": ("ranks on several hosts",),
}


def rows(text):
    lines = [
        line.strip("|").split("|") for line in text.splitlines() if line.startswith("| ") and not line.startswith("| |")
    ]
    return [[cell.strip() for cell in line] for line in lines if len(line) == 4]


def status(cell):
    return re.match(r"run|not run yet|compiled, not run|not offered", cell).group()


@pytest.mark.parametrize("begin", SUMMARY)
def test_what_runs_where_is_what_the_page_says(begin):
    table = rows(README.partition("## What runs where")[2].partition("## ")[0])
    page = rows((ROOT / "docs" / "compatibility.md").read_text().partition("## Who fits")[0])
    assert len(table) == len(SUMMARY)
    (short,) = [row for row in table if row[0].startswith(begin)]
    for each in SUMMARY[begin]:
        (whole,) = [row for row in page if row[0].startswith(each)]
        assert [status(cell) for cell in short[1:]] == [status(cell) for cell in whole[1:]], whole[0]
