"""What the reference needs of Sphinx beyond its own extensions.

- Functions of Triton and Gluon are shown like functions of Python: the compiled objects are replaced by what they wrap.
- Docstrings are written for readers of the source; a few habits are turned into reStructuredText.
- `iris-aliases` lists names of a module that are documented under another name.
- `iris-settings` makes a table of a settings class, `iris-names` one of the names of AMD's Iris, `iris-modules`,
  `iris-algorithms` and `iris-programs` lists from the first lines of files.
- README, CONTRIBUTING and other files of the root become pages; links to folders of the repository become text.
- A build ends with an error when something public is missing.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import pathlib
import re
from textwrap import indent
from typing import TYPE_CHECKING, Any

import inventory
import settings_tables
from docutils import nodes
from sphinx import addnodes
from sphinx.errors import ExtensionError
from sphinx.util.docutils import SphinxDirective

if TYPE_CHECKING:
    from collections.abc import Callable

    from sphinx.application import Sphinx


# -- kernels ---------------------------------------------------------------------------------------------------------
def _plain(value: Any) -> Any:
    """The Python function inside a compiled one; anything else unchanged."""
    function = getattr(value, "fn", None)
    if not inspect.isfunction(function) or isinstance(value, type):
        return value
    if getattr(value, "__triton_builtin__", False):  # the compiler fills in the first parameter
        signature = inspect.signature(function)
        function.__signature__ = signature.replace(parameters=list(signature.parameters.values())[1:])
    return function


def show_plain_functions() -> None:
    """Replace compiled functions in public modules and in classes for kernels by the functions that they wrap."""
    for name, home in inventory.public_names().items():
        for full in (name, home):
            module, _, last = full.rpartition(".")
            holder = importlib.import_module(module)
            value = getattr(holder, last)
            setattr(holder, last, _plain(value))
            if isinstance(value, type) and getattr(value, "__triton_aggregate__", False):
                for member, each in list(vars(value).items()):
                    if _plain(each) is not each:
                        function = _plain(each)
                        static = "self" not in inspect.signature(function).parameters
                        type.__setattr__(value, member, staticmethod(function) if static else function)


def skip(app: Sphinx, what: str, name: str, obj: Any, skipped: bool, options: Any) -> bool | None:
    """Leave out what Triton adds to classes for kernels, and pydantic to classes of settings."""
    return True if name in ("hash_attrs", "type", "model_config", "model_post_init") else None


def signature(app: Sphinx, what: str, name: str, obj: Any, options: Any, given: str, returned: str) -> Any:
    """Show how users make a class: nothing for settings and protocols, and what Triton hides of classes for kernels."""
    if what != "class":
        return None
    if getattr(obj, "__triton_aggregate__", False):
        body = inventory.definition(inventory.home(name)).body
        made = {each.name: each for each in body if isinstance(each, ast.FunctionDef)}
        if "initialize" in made:  # the contexts are not made by their constructors
            return "", returned
        if "__init__" not in made:  # its constructor takes the fields
            fields = [ast.unparse(each.target) for each in body if isinstance(each, ast.AnnAssign)]
            return f"({', '.join(fields)})", returned
        arguments = made["__init__"].args
        arguments.args = [each for each in arguments.args if each.arg != "self"]
        return f"({ast.unparse(arguments)})", returned
    return ("", returned) if any(getattr(obj, mark, False) for mark in ("model_fields", "_is_protocol")) else None


# -- docstrings ------------------------------------------------------------------------------------------------------
_PREFIX = re.compile(r"(?<![`\w])[A-Z][A-Z_<>]*_(?!\w)")


def tidy(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Write a docstring as reStructuredText wants it: literal blocks, tables, names that end with an underscore."""
    if what == "module" and name != "iris_triton.language":  # the pages introduce modules themselves
        lines.clear()
        return
    if what in ("attribute", "data", "property"):
        lines[:0] = ["..", ""]  # napoleon takes what stands before a colon in the first line for a type
    lines[:] = [_PREFIX.sub(lambda match: match.group().replace("_", "\\_"), line) for line in lines]
    _literal_blocks(lines)
    _tables(lines)


def _literal_blocks(lines: list[str]) -> None:
    """Examples without prompts, and blocks behind a colon, are code."""
    number = 0
    while number < len(lines):
        line = lines[number]
        following = next((each for each in lines[number + 1 :] if each.strip()), "")
        if line.strip() in ("Example:", "Examples:") and not following.strip().startswith(">>>"):
            for inner in range(number + 1, len(lines)):
                if lines[inner].strip() and _depth(lines[inner]) <= _depth(line):
                    break
                lines[inner] = "    " + lines[inner] if lines[inner].strip() else ""
            lines[number + 1 : number + 1] = [" " * _depth(line) + "    ::", ""]
            number += 2
        elif line.endswith(":") and _depth(following) > _depth(line) and following is not lines[number + 1]:
            lines[number] += ":"  # a section's text stands right below its name
        number += 1


def _tables(lines: list[str]) -> None:
    """Markdown's tables become list-tables."""
    number = 0
    while number < len(lines):
        end = number
        while end < len(lines) and lines[end].strip().startswith("|"):
            end += 1
        if end - number > 2:
            pad = " " * _depth(lines[number])
            made = [f"{pad}.. list-table::", f"{pad}   :header-rows: 1", ""]
            for line in (lines[number], *lines[number + 2 : end]):
                cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
                made += [f"{pad}   {mark} - {cell}" for mark, cell in zip("*" + " " * len(cells), cells, strict=False)]
            lines[number:end] = made
            end = number + len(made)
        number = end + 1


def _depth(line: str) -> int:
    return len(line) - len(line.lstrip())


_CALLED = r"^(?:ctx|iris)\.((?:ccl\.|ops\.|tracing\.)?\w+)$"
_EVERYWHERE = {"barrier", "empty", "zeros", "full", "get_device_context", "get_heap_bases", "get_rank", "iris"}
"""What nearly every example calls."""


# -- directives ------------------------------------------------------------------------------------------------------
class Aliases(SphinxDirective):
    """`.. iris-aliases:: module`: the module's names that are documented elsewhere, each with a link."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        rows = inventory.aliases(self.arguments[0])
        if not rows:
            raise self.error(f"{self.arguments[0]} has no names that are documented elsewhere")
        return self.parse_text_to_nodes("\n".join(f"- ``{name}``: :py:obj:`{target}`" for name, target in rows.items()))


class Settings(SphinxDirective):
    """`.. iris-settings:: class [plugin]`: variable, type, default and meaning of every field."""

    required_arguments = 1
    optional_arguments = 1

    def run(self) -> list[nodes.Node]:
        rows = settings_tables.rows(*self.arguments)
        return [table(("variable", "accepts", "default", "what it is for"), rows)] if rows else []


class Names(SphinxDirective):
    """`.. iris-names::`: the modules of AMD's Iris, their names, and where these are here."""

    def run(self) -> list[nodes.Node]:
        from iris_triton.rocm_iris.names import TABLE

        rows = [(home, f"{', '.join(names.split())}: `{'`, `'.join(paths.split())}`") for home, names, paths in TABLE]
        return [table(("module here", "names: modules of AMD's Iris"), rows)]


class Modules(SphinxDirective):
    """`.. iris-modules:: distribution`: its modules and packages, and the first sentence of each."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        return [table(("", "what belongs there"), inventory.map_of(self.arguments[0]))]


class Algorithms(SphinxDirective):
    """`.. iris-algorithms:: package`: the algorithms of a package, from the first lines of their modules."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        package, sources = self.arguments[0], inventory.sources()
        about = [
            ast.get_docstring(each.tree) or "" for name, each in sources.items() if name.rpartition(".")[0] == package
        ]
        found = [re.sub(r"`+", "``", each) for each in about if each.startswith("`")]
        if not found:
            raise self.error(f"no module of {self.arguments[0]} describes an algorithm")
        parts = (re.split(r"\.(?:  |\n\n)", each, maxsplit=1) for each in found)
        return self.parse_text_to_nodes("\n".join(f"{head}\n{indent(text, '   ')}\n" for head, text in parts))


class Programs(SphinxDirective):
    """`.. iris-programs:: folder`: its programs, the first sentence of each, and what an example calls."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        folder, lines = self.arguments[0], []
        for path in sorted((inventory.ROOT / folder).glob("[!_]*.py")):
            text = path.read_text()
            if "__main__" not in text:
                continue
            self.env.note_dependency(path)
            tree = ast.parse(text)
            about = " ".join((ast.get_docstring(tree) or "").partition("\n\n")[0].split()).replace("`", "``")
            calls = [each.func for each in ast.walk(tree) if isinstance(each, ast.Call)]
            called = re.findall(_CALLED, "\n".join(map(ast.unparse, calls)), re.MULTILINE)
            names = ", ".join(f"``{each}``" for each in sorted(set(called) - _EVERYWHERE) if folder == "examples")
            lines.append(f"- :download:`{path.stem} <../{folder}/{path.name}>`: {about} {names}")
        return self.parse_text_to_nodes("\n".join(lines))


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> nodes.table:
    """A table whose first column is code."""
    group = nodes.tgroup(cols=len(head))
    group += [nodes.colspec(colwidth=1) for _ in head]
    thead, tbody = nodes.thead(), nodes.tbody()
    for part, lines in ((thead, [head]), (tbody, rows)):
        for line in lines:
            row = nodes.row()
            for column, text in enumerate(line):
                code = part is tbody and column == 0
                parts = ["", text] if code else text.split("`")
                words = [nodes.literal(text=each) if odd % 2 else nodes.Text(each) for odd, each in enumerate(parts)]
                row += nodes.entry("", nodes.paragraph("", "", *words))
            part += row
    group += [thead, tbody]
    return nodes.table("", group)


# -- links -----------------------------------------------------------------------------------------------------------
_BORROWED = re.compile(r"<!-- (\S+\.md) stands here.*?-->")
_LINK = re.compile(r"\[([^\]]+)\]\((?!\w+:)([^)#\s]+)((?:#[^)]*)?)\)")
_CODE = re.compile(r"^```.*?^```$", re.M | re.S)


def borrow(app: Sphinx, page: str, source: list[str]) -> None:
    """Put files from the repository's root where pages ask for them, and make links to folders text."""
    docs = pathlib.Path(app.srcdir)

    def whole(match: re.Match[str]) -> str:
        path = docs.parent / match.group(1)
        app.env.note_dependency(path)
        return _outside_code(path.read_text(), lambda text: _LINK.sub(from_root, text))

    def from_root(match: re.Match[str]) -> str:
        text, target, anchor = match.groups()
        inside = target.removeprefix("docs/")
        if inside == target:  # what has a page is linked to that
            page = "index.md" if target == "README.md" else target.lower()
            inside = page if (docs / page).is_file() else f"../{target}"
        return f"[{text}]({inside}{anchor})"

    def unlinked(match: re.Match[str]) -> str:
        return match.group(1) if (docs / page).parent.joinpath(match.group(2)).is_dir() else match.group(0)

    text = _BORROWED.sub(whole, source[0])
    source[0] = _outside_code(text, lambda part: _LINK.sub(unlinked, part))


def _outside_code(text: str, change: Callable[[str], str]) -> str:
    """Change a page, but not its code blocks."""
    parts, end = [], 0
    for block in _CODE.finditer(text):
        parts += [change(text[end : block.start()]), block.group(0)]
        end = block.end()
    return "".join(parts) + change(text[end:])


def aim(app: Sphinx, doctree: nodes.document) -> None:
    """Let a name in a docstring or signature mean what it means in the module that it stands in.

    Sphinx looks for any object whose name ends so, and complains when there are two.
    """
    places = inventory.places()
    for reference in doctree.findall(addnodes.pending_xref):
        target = reference["reftarget"].lstrip(".~")
        if reference.get("refdomain") != "py":
            continue
        reference.attributes.pop("refspecific", None)  # its presence means: search
        source = _module_of(reference)
        first, _, rest = target.partition(".")
        known = places.get(target) or places.get(inventory.home(f"{source}.{target}"))
        if known is None and rest:  # a member of a class
            known = places.get(inventory.home(f"{source}.{first}"))
            known = f"{known}.{rest}" if known else None
        if known is not None:
            reference["reftarget"] = known


def _module_of(reference: nodes.Node) -> str:
    """The module that defines what a reference is in the description of."""
    parent = reference.parent
    while parent is not None and not (isinstance(parent, addnodes.desc) and parent[0].get("ids")):
        parent = parent.parent
    name = parent[0]["ids"][0] if parent is not None else ""
    while name and not inventory.is_defined(inventory.home(name)):
        name = name.rpartition(".")[0]
    return inventory.home(name).rpartition(".")[0]


# -- completeness ----------------------------------------------------------------------------------------------------
def check_complete(app: Sphinx, error: Exception | None) -> None:
    """Everything public has its place in what was written."""
    if error is not None or app.builder.name != "html":
        return
    missing = inventory.lacking(set(app.env.get_domain("py").data["objects"]))
    if missing:
        raise ExtensionError(f"the reference lacks {', '.join(missing)}")


def setup(app: Sphinx) -> dict[str, Any]:
    """Register all of it."""
    show_plain_functions()
    app.add_directive("iris-aliases", Aliases)
    app.add_directive("iris-settings", Settings)
    app.add_directive("iris-names", Names)
    app.add_directive("iris-modules", Modules)
    app.add_directive("iris-algorithms", Algorithms)
    app.add_directive("iris-programs", Programs)
    app.connect("autodoc-skip-member", skip)
    app.connect("autodoc-process-signature", signature)
    app.connect("autodoc-process-docstring", tidy, priority=400)  # napoleon comes afterwards
    app.connect("source-read", borrow)
    app.connect("doctree-read", aim)
    app.connect("build-finished", check_complete)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
