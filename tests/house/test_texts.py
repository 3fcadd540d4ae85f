"""How much text there is, and how it is worded: pages, docstrings, tests."""

import ast
import re

import pytest
from tables import WORDING

from .test_rooms import ROOT, lines, modules, name_of, parsed, without

PAGES = sorted((ROOT / "docs").rglob("*.md"))
WORDS = {"docs": 25_000, "README.md": 900}

# Words of our own for what the field has a term for, in docstrings: as many as there are, and never more.
OURS = {
    r"\bfor ever\b": 0, r"\brank alone\b": 0, r"\b(told|tells)\b": 0, r"\b(meet|meets|met|meetings?)\b": 2,
    r"\b(nobody|everybody|somebody)\b": 2, r"\bbehind\b": 3, r"\bkinds? of calls?\b": 0, r"\bso (many|much)\b": 3,
    r"\b(no|have|find|finds) room\b": 1, r"(?:^|[.;] )(What|Who|Whoever|Whose) [a-z]+": 13,
}  # fmt: skip

# What errors of Python, of torch, of Triton and of the tests themselves say: tests may match that where it is raised.
OF_OTHERS = {
    "'int' object has no attribute 'to'", "Bad address", "Bad file", "^0$", "^launched$", "a peer is lost",
    "deliberate, on 0", "deliberate, on 1, without torch", "elsewhere", "gfx1", "is lost", "mine", "no memory",
    "on purpose", "second", "the last one fails",
}  # fmt: skip
SENTENCE = re.compile(r"f?['\"].* .*['\"] (not )?in str\((caught|error|info|raised)\b")
KEYS = {key.lower() for key in WORDING}
PHRASE = re.compile(r"[a-z]+(?: [a-z]+){2,}")
# What is in errors too, but is a field of a result, a name or a text of others where tests have it.
ALSO_ELSEWHERE = {
    "a and b", "an assertion of the check failed", "as it is", "b by columns", "but torch sees no gpu here",
    "does not work on", "in a kernel", "no such file", "on the host", "p bra again", "the cheapest by its model",
    "the data is wrong", "torch sees no gpu here", "wait for mbarrier",
}  # fmt: skip
OF_COMMANDS = {"test_cli.py", "test_doctor.py"}  # what these print is what they are for

TESTS = 24_000
"""Lines of tests and of what errors say, at most, but for those of features; 24,000 were planned."""
TESTS_OF_FEATURES = {  # as `FEATURES` of test_rooms.py: lines, and the folders and files
    "PyTorch": (1953, ("torch_backend",)),
    "several nodes": (
        2052,
        (
            "nodes", "ccl/test_torch_distributed.py", "allocators/test_nccl.py", "compile/test_nccl.py",
            "multigpu/test_nccl.py",
        ),
    ),
    "experts, attention, norms, products of few rows, launches from C": (
        1343,
        (
            "ops/test_experts.py", "ops/test_attention.py", "ops/test_norm.py", "ops/jobs_norm.py",
            "triton/test_launcher.py",
        ),
    ),
    "checker": (2585, ("checker",)),
}  # fmt: skip


@pytest.mark.parametrize("name", WORDS)
def test_pages_are_short(name):
    pages = PAGES if name == "docs" else [ROOT / name]
    assert sum(len(page.read_text().split()) for page in pages) <= WORDS[name]


def test_docstrings_are_in_words_of_the_field():
    has_text = ast.Module, ast.ClassDef, ast.FunctionDef
    nodes = [node for path in modules().values() for node in ast.walk(parsed(path)) if isinstance(node, has_text)]
    texts = [ast.get_docstring(node) or "" for node in nodes]
    assert len(texts) > 3000
    found = {pattern: sum(len(re.findall(pattern, text)) for text in texts) for pattern in OURS}
    assert {pattern: count for pattern, count in found.items() if count > OURS[pattern]} == {}


def test_sentences_of_errors_stand_in_one_file():
    """Tests give keys of wording.toml to `raises` and `says`, and use all of them; `match=` is for errors of others."""
    areas, found, used = {key.partition(".")[0] for key in WORDING}, set(), set()
    for path in set((ROOT / "tests").rglob("*.py")) - {ROOT / "tests" / "support" / "tables.py"}:
        nodes = [*ast.walk(parsed(path))]
        texts = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
        used |= texts | {text.partition(": ")[2] for text in texts}
        used |= {f"{text}{key}" for text in texts if text.partition(".")[0] in areas for key in texts}
        said = [node.value for node in nodes if isinstance(node, ast.keyword) and node.arg == "match"]
        said += [node.left for node in nodes if isinstance(node, ast.Compare) and SENTENCE.match(ast.unparse(node))]
        found |= {ast.unparse(each) for each in said if name_of(getattr(each, "func", each)) != "says"}
    assert found == {repr(text) for text in OF_OTHERS}
    assert WORDING.keys() - used == set()


def phrases(tree):
    """Three words and more in a row, in strings that are no docstrings and no keys."""
    passed_over = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    constants = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and node not in passed_over)
    texts = (str(node.value).lower() for node in constants)
    return {each for text in texts if text.rpartition(": ")[2] not in KEYS for each in PHRASE.findall(text)}


def refuses(node):
    """Whether a node has the text of an error, of a warning or of a reason."""
    last = name_of(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else ""
    return isinstance(node, ast.Raise | ast.Return) or last.endswith(("Error", "Warning")) or last in ("no", "warn")


def test_phrases_of_errors_stand_in_one_file():
    """No string of a test has three words in a row of an error, whatever it is compared with."""
    nodes = (node for path in modules().values() if "cli" not in path.parts for node in ast.walk(parsed(path)))
    ours = "\n".join(each for node in nodes if refuses(node) for each in phrases(node))
    paths = (path for path in (ROOT / "tests").rglob("*.py") if path.name not in OF_COMMANDS)
    found = {each: path.name for path in paths for each in phrases(parsed(path)) if each in ours}
    assert found.keys() == ALSO_ELSEWHERE, found


def test_tests_keep_to_their_budgets():
    folder = ROOT / "tests"
    counted = [path for kind in ("py", "toml") for path in folder.rglob(f"*.{kind}")]
    found = {path.relative_to(folder).as_posix(): lines(path) for path in counted}
    assert sum(without(TESTS_OF_FEATURES, found, "/").values()) <= TESTS
