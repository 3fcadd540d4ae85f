"""What the product makes of bytes: who may run code, or make objects of any kind, and where the bytes come from."""

from __future__ import annotations

import ast
import pathlib

ROOT = pathlib.Path(__file__).resolve().parents[2]

# Every use of what can make any object of bytes, or run text, and why that is not for others to choose.
EXPLAINED = {
    # a pipe that the launcher has made for its own child process, in both directions
    ("world/launch.py", "serve", "pipe.recv"),
    ("world/launch.py", "serve", "pickle.loads"),
    ("world/launch.py", "_collect", "each.pipe.recv"),
    ("world/launch.py", "_collect", "pickle.loads"),
    # text that this module makes itself, in a process that it has forked; the launcher's child evaluates the same
    ("world/launch.py", "_main", "eval"),
    ("world/launch.py", "__reduce__", "eval"),
    # `ctx.broadcast`: within a host, of ranks that the kernel and a token have proved; between nodes `_Plain`
    ("world/group.py", "broadcast_object", "pickle.loads"),
    ("world/group.py", "", "pickle.Unpickler"),
    # a fixture of that name, which compiles kernels
    ("conformance/backend.py", "test_compile_cases_compile", "compile"),
    # the user's own kernel, rewritten; its source is this program's
    ("interpreter/rewrite.py", "rewrite", "compile"),
}
ANYTHING = {"eval", "exec", "compile", "__import__"}
MODULES = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "yaml", "runpy", "jsonpickle"}
LOADERS = {"load", "loads", "Unpickler", "run_path", "run_module", "unsafe_load", "open"}


def name_of(node: ast.expr) -> str:
    """The dotted name of what is called; empty if it has none."""
    if isinstance(node, ast.Name):
        return node.id
    return f"{name_of(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else ""


def suspicious(name: str) -> bool:
    """Whether a function can run what it is given, or make any object of it."""
    head, _, last = name.rpartition(".")
    if name in ANYTHING or (head in MODULES and last in LOADERS):
        return True
    return name in ("torch.load", "torch.jit.load", "np.load", "numpy.load") or (last == "recv" and "pipe" in head)


def uses():
    """Every use of such a function in the product: file, function and name."""
    for path in sorted(ROOT.glob("iris_*/src/**/*.py")):
        tree = ast.parse(path.read_text())
        inside: dict[ast.AST, str] = {}
        for function in ast.walk(tree):  # outer functions first, so that the innermost one stays
            if isinstance(function, ast.FunctionDef):
                inside |= dict.fromkeys(ast.walk(function), function.name)
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute | ast.Name) and suspicious(name := name_of(node)):
                yield "/".join(path.parts[-2:]), inside.get(node, ""), name


def test_every_use_of_what_could_run_what_others_wrote_is_explained():
    """And modules that load objects are imported there alone; tests/core has damaged files of every kind refused."""
    assert set(uses()) == EXPLAINED
    found = set()
    for path in ROOT.glob("iris_*/src/**/*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found |= {("/".join(path.parts[-2:]), name) for name in names if name.partition(".")[0] in MODULES}
    assert found == {("world/launch.py", "pickle"), ("world/group.py", "pickle")}
