"""What is public, read from the sources, and what the reference shows; imports neither Iris nor Sphinx.

The tests compare the two, and so does the build (conf.py), against what Sphinx has really written.

Public are
  - the names in every `__all__` under the four `src` folders,
  - the names without underscore of the modules in OPEN, which have no `__all__`,
  - the classes in OBJECTS, which users get from others and never import,
  - methods and properties of all these classes, and classes of ours in their annotations.
"""

from __future__ import annotations

import ast
import functools
import pathlib
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parents[1]
REFERENCE = ROOT / "docs" / "reference"
PACKAGES = ("iris_core", "iris_allocators", "iris_triton", "iris_gluon")

OPEN = (
    "iris_core.errors",
    "iris_core.hooks",
    "iris_core.protocols",
    "iris_core.types",
    "iris_core.settings",
    "iris_core.diagnosis",
    "iris_core.device.context_words",
    "iris_allocators.settings",
    "iris_triton.settings",
    "iris_triton.launcher",
    "iris_triton.rocm_iris.hip",
    "iris_triton.rocm_iris.x",
    "iris_gluon.settings",
    "iris_gluon.bulk",
)

OBJECTS = (
    "iris_core.ccl.api.Collectives",
    "iris_core.heap.regions.Region",
    "iris_core.dispatch.team.Team",
    "iris_core.heap.heap.SymmetricHeap",
    "iris_core.ops.api.Operations",
    "iris_core.dispatch.team.Host",
    "iris_core.tracing.recorder.Tracing",
    "iris_triton.rocm_iris.collectives.PortedCollectives",
    "iris_triton.rocm_iris.configs.Config",
    "iris_triton.rocm_iris.configs.FusedConfig",
    "iris_triton.rocm_iris.ported_context.Tracing",
    "iris_triton.language.trace.DeviceTracing",
)


class Source:
    """One module as text: names defined at its top, and where imported names come from."""

    def __init__(self, name: str, path: pathlib.Path) -> None:
        self.name = name
        self.tree = ast.parse(path.read_text())
        self.defined: dict[str, ast.stmt] = {}
        self.imported: dict[str, str] = {}
        self.all: list[str] | None = None
        self.star = ""  # the module whose names are all here
        for node in _statements(self.tree.body):
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
                self.defined[node.name] = node
            elif isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
                self.star = str(node.module)
            elif isinstance(node, ast.ImportFrom) and node.module:
                self.imported |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
            elif isinstance(node, (ast.Assign, ast.AnnAssign)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for target in targets:
                    if isinstance(target, ast.Name):
                        self.defined[target.id] = node
                        if target.id == "__all__":
                            self.all = ast.literal_eval(node.value)

    @property
    def public(self) -> list[str]:
        if self.all is not None:
            return [name for name in self.all if not name.startswith("__")]
        if self.star:
            return sources()[self.star].public
        kinds = (ast.ClassDef, ast.FunctionDef)
        return [name for name, node in self.defined.items() if name[0] != "_" and isinstance(node, kinds)]


def _statements(body):
    """Statements at the top, also those under `if TYPE_CHECKING:`."""
    for node in body:
        if isinstance(node, ast.If):
            yield from _statements(node.body)
        else:
            yield node


@functools.cache
def sources() -> dict[str, Source]:
    """Every module of the four distributions by its dotted name."""
    found = {}
    for package in PACKAGES:
        folder = ROOT / package / "src"
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = Source(name, path)
    return found


def public_modules() -> list[str]:
    """Modules whose names are public."""
    private = re.compile(r"(^|\.)_")
    listed = [name for name, each in sources().items() if each.all or each.star]
    return [name for name in sources() if name in OPEN or (name in listed and not private.search(name))]


def home(name: str) -> str:
    """Where what is imported as `name` is defined; the module's name, if it is a module."""
    module, _, last = name.rpartition(".")
    while module in sources() and last not in sources()[module].defined:
        source = sources()[module]
        if last not in source.imported and not source.star:
            break
        module, _, last = source.imported.get(last, f"{source.star}.{last}").rpartition(".")
    return f"{module}.{last}"


def public_names() -> dict[str, str]:
    """Every public name, and the name that it has where it is defined."""
    names = [f"{module}.{name}" for module in public_modules() for name in sources()[module].public]
    return {name: home(name) for name in (*names, *OBJECTS)}


def definition(name: str) -> ast.stmt:
    """The statement that defines a name given by its home."""
    module, _, last = name.rpartition(".")
    return sources()[module].defined[last]


def members(name: str) -> dict[str, ast.FunctionDef]:
    """Public methods and properties that a class itself defines; empty for what is no class."""
    node = definition(name)
    body = node.body if isinstance(node, ast.ClassDef) else []
    return {each.name: each for each in body if isinstance(each, ast.FunctionDef) and each.name[0] != "_"}


def attributes(name: str) -> set[str]:
    """Everything that a class of ours has by name, with what it inherits from such classes."""
    found: set[str] = set()
    for node in getattr(definition(name), "body", []) if is_defined(name) else []:
        if isinstance(node, ast.FunctionDef):
            found |= {node.name, *(each.attr for each in ast.walk(node) if _is_of_self(each))}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
        elif isinstance(node, ast.Assign):
            found |= {each.id for each in node.targets if isinstance(each, ast.Name)}
    return found.union(*(attributes(base) for base in bases(name)))


def _is_of_self(node: ast.AST) -> bool:
    is_stored = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    return is_stored and isinstance(node.value, ast.Name) and node.value.id == "self"


def bases(name: str) -> list[str]:
    """Our own classes from which a class inherits, by their homes."""
    node, (module, _, _) = definition(name), name.rpartition(".")
    own = [each.id for each in getattr(node, "bases", []) if isinstance(each, ast.Name)]
    found = [home(f"{module}.{each}") for each in own]
    return [each for each in found if is_defined(each)]


def is_for_kernels(name: str) -> bool:
    """Whether a home is an aggregate, into which Triton copies the methods that it inherits."""
    marks = getattr(definition(name), "decorator_list", ()) if is_defined(name) else ()
    return any(isinstance(each, ast.Name) and each.id == "aggregate" for each in marks)


def map_of(distribution: str) -> list[tuple[str, str]]:
    """The modules and packages directly in a distribution, each with the first sentence of its docstring."""
    direct = {name: source for name, source in sources().items() if name.rpartition(".")[0] == distribution}
    abouts = ((name.partition(".")[2], ast.get_docstring(source.tree) or "") for name, source in direct.items())
    return [(name, " ".join(about.partition("\n\n")[0].split())) for name, about in abouts if name != "__main__"]


def is_defined(name: str) -> bool:
    """Whether a home is a name at the top of one of our modules."""
    module, _, last = name.rpartition(".")
    return module in sources() and last in sources()[module].defined


def errors() -> list[str]:
    """Every class of an error or warning that can leave a package: its module and itself have no underscore."""
    names = [f"{module}.{name}" for module, source in sources().items() for name in source.defined]
    kind = re.compile(r"^(\w+\.)+[A-Z]\w*(Error|Warning)$")
    return [name for name in names if kind.match(name) and not re.search(r"\._", name)]


def annotated() -> set[str]:
    """Homes of our classes that stand in the annotations of what the reference shows."""
    found = set()
    for shown_name in shown():
        name = home(shown_name)
        module = name.rpartition(".")[0]
        for annotation in _annotations(name) if is_defined(name) else ():
            if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
                annotation = ast.parse(annotation.value, mode="eval").body
            for each in ast.walk(annotation):
                origin = home(f"{module}.{each.id}") if isinstance(each, ast.Name) else ""
                if is_defined(origin) and isinstance(definition(origin), ast.ClassDef) and "._" not in origin:
                    found.add(origin)
    return found


def _annotations(name: str) -> Iterator[ast.expr]:
    """Of the parameters and results of a function, of the members of a class."""
    node = definition(name)
    functions = [node] if isinstance(node, ast.FunctionDef) else list(members(name).values())
    for function in functions:
        parameters = (*function.args.args, *function.args.kwonlyargs)
        yield from filter(None, (function.returns, *(each.annotation for each in parameters)))
    for each in getattr(node, "body", ()) if isinstance(node, ast.ClassDef) else ():
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name) and each.target.id[0] != "_":
            yield each.annotation


# -- what the pages show -------------------------------------------------------------------------------------------

_DIRECTIVE = re.compile(
    r"^\.\. (auto\w+|iris-aliases|iris-settings|sphinx_argparse_cli)::[ ]*(\S*)((?:\n   .*)*)", re.M
)


def pages() -> str:
    """The text of all pages of the reference."""
    return "\n".join(path.read_text() for path in sorted(REFERENCE.glob("*.md")))


def directives() -> list[tuple[str, str, str]]:
    """Directives on the pages of the reference: (directive, argument, options as text)."""
    return [match.groups() for match in _DIRECTIVE.finditer(pages())]


@functools.cache
def shown() -> frozenset[str]:
    """Names that have a place of their own."""
    names: set[str] = set()
    for kind, argument, options in directives():
        if kind == "automodule" and ":members:" in options:
            names |= {f"{argument}.{name}" for name in sources()[argument].public}
        elif kind.startswith("auto") and kind != "automodule":
            names.add(argument)
    return frozenset(names)


def objects() -> set[str]:
    """What Sphinx will find for the directives: names, and members of classes that have a docstring."""
    found = set(shown())
    for kind, argument, options in directives():
        if not kind.startswith("auto") or ":members:" not in options:
            continue
        names = [f"{argument}.{name}" for name in sources()[argument].public] if kind == "automodule" else [argument]
        for name in names:
            inherits = ":inherited-members:" in options or is_for_kernels(home(name))
            origins = [home(name), *(bases(home(name)) if inherits else ())]
            for each in origins if is_defined(home(name)) else ():
                found |= {f"{name}.{member}" for member, node in members(each).items() if ast.get_docstring(node)}
    return found


def lacking(found: set[str]) -> list[str]:
    """What is public and not among the objects of the reference.

    A name may be documented under another one, if its module's page lists it (`iris-aliases`); a method may be
    documented with the class that it is inherited from; names of other libraries need to be named only.
    """
    text, listed = pages(), {argument for kind, argument, _ in directives() if kind == "iris-aliases"}
    missing = []
    for module in public_modules():
        other = aliases(module) if module in listed else {}
        for name in (f"{module}.{each}" for each in sources()[module].public):
            named = not is_defined(home(name)) and f"`{name}`" in text  # a module, or of another library
            if not (named or name in found or other.get(name) in found):
                missing.append(name)
    missing += [name for name in (*OBJECTS, *errors(), *annotated()) if not _known(name) & found]
    for name in shown():
        for origin in (home(name), *bases(home(name))) if is_defined(home(name)) else ():
            for member in members(origin):
                if not {f"{each}.{member}" for each in (name, *_known(origin))} & found:
                    missing.append(f"{name}.{member}")
    return sorted(set(missing))


def _known(name: str) -> set[str]:
    """The names under which the reference shows what is defined as `name`."""
    return _names_of_homes().get(name, set()) | {name}


@functools.cache
def _names_of_homes() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for name in shown():
        found.setdefault(home(name), set()).add(name)
    return found


@functools.cache
def places() -> dict[str, str]:
    """The name under which the reference shows what is defined under another one, or the same."""
    return {home(name): name for name in sorted(shown(), key=len, reverse=True)}  # the shortest name wins


def aliases(module: str) -> dict[str, str]:
    """Public names of a module that the pages show under another name, and that name."""
    by_home, found = places(), {}
    for name in sources()[module].public:
        full = f"{module}.{name}"
        if full not in shown() and home(full) in by_home:
            found[full] = by_home[home(full)]
    return found
