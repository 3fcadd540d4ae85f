"""What the guides, the pages on writing plugins and the README say is there, and what they show is what happens."""

import re

from tables import table

from iris_core import cli

from .excerpts import ROOT, fenced, shown

DOCS = ROOT / "docs"


def test_the_tutorial_shows_the_examples(run_program, tmp_path):
    text = (DOCS / "tutorial.md").read_text()
    blocks = list(shown(text))
    assert len(blocks) == 3
    for marker, in_page, in_file in blocks:
        assert in_page == in_file, marker
    (snippet,) = fenced(text, r"(?i:not writing it yourself)\n\n")
    (tmp_path / "snippet.py").write_text(snippet)
    run_program(tmp_path / "snippet.py")


OF_PLUGINS = ("write_an_allocator", "write_a_backend", "write_a_collective")


@table("page", OF_PLUGINS)
def test_code_blocks_are_the_files(page):
    text = (DOCS / f"{page}.md").read_text()
    blocks = list(shown(text))
    assert len(blocks) == len(re.findall(r"^```\w+$", text, re.MULTILINE)), "every block has a marker"
    for marker, there, file in blocks:
        assert there == file, f"{marker}: write the pages again with python tests/docs/excerpts.py docs/{page}.md"


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


def test_each_claim_of_the_comparison_has_its_source():
    """A page of ours for Iris, and for the others one of theirs."""
    header, _, *rows = re.search(r"## Beside others\n\n((?:\|.*\n)+)", README).group(1).splitlines()
    sources, used = dict(re.findall(r"^(\[\d+\]): (https://\S+)$", README, re.MULTILINE)), set()
    for row in rows:
        name, *claims = (cell.strip() for cell in row.strip("|").split("|"))
        assert len(claims) == header.count("|") - 2, name
        for claim in claims:
            found = re.fullmatch(r"\[[\w ,]+\](?:\((\S+)\)|(\[\d+\]))", claim)
            assert found, f"{name}: {claim} has no source"
            link, number = found.groups()
            assert (link or sources[number]).startswith("docs/" if name == "Iris" else "https://"), f"{name}: {claim}"
            used.add(number)
    assert used - {None} == set(sources)


def test_targets_of_make_and_commands_exist(capsys):
    targets, commands = (re.findall(rf"^{program} (\w+)", README, re.MULTILINE) for program in ("make", "iris"))
    assert targets
    assert commands
    for target in targets:
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), target
    for command in commands:
        assert cli.main([command, "--help"]) == 0
        assert f"iris {command}" in capsys.readouterr().out
