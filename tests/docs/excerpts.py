"""Pages that show parts of files: a marker in front of a code block says what the block is.

    <!-- file: examples/plugins/x/pyproject.toml -->                                the whole file
    <!-- file: examples/plugins/x/src/x/allocator.py: ExampleAllocator.commit _address -->  functions, classes, names

Run as a program, with pages as its arguments, it writes the parts into the pages.
"""

import ast
import importlib.util
import pathlib
import re
import sys
import textwrap

ROOT = pathlib.Path(__file__).resolve().parents[2]

_BLOCK = re.compile(
    r"(<!-- file: (?P<path>[^\s:]+)(?:: (?P<names>[^>]+?))? -->\n```\w*\n)(?P<code>.*?)(?=^```$)", re.M | re.S
)


def script(path):
    spec = importlib.util.spec_from_file_location(pathlib.Path(path).stem, ROOT / "docs" / path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def fenced(page, before=""):
    """The blocks of Python of a page, or those behind some text."""
    return re.findall(rf"{before}```python\n(.*?)```", page, re.DOTALL)


def links(page):
    """What a page links to outside of code, relative to its folder; nothing of other hosts."""
    found = re.findall(r"\]\(([^)#\s]+)", re.sub(r"```.*?```", "", page, flags=re.DOTALL))
    return [link for link in found if ":" not in link]


def shown(page):
    """Yield every marked block of a page as (marker, code in the page, code in the file)."""
    for match in _BLOCK.finditer(page):
        yield match.group(1).splitlines()[0], match.group("code"), _excerpt(match)


def written(page):
    """A page with every marked block as it should be."""
    return _BLOCK.sub(lambda match: match.group(1) + _excerpt(match), page)


def _excerpt(match):
    source = (ROOT / match.group("path")).read_text()
    names = (match.group("names") or "").split()
    apart = "\n\n" if all("." in name for name in names) else "\n\n\n"  # methods stand closer than functions
    return apart.join(_part(source, name) for name in names) + "\n" if names else source


def _part(source, name):
    """The lines of a function, class, method or name, with its comment and decorators, moved to the left."""
    nodes, node = ast.parse(source).body, None
    for part in name.split("."):
        node = next((each for each in nodes if part in _names(each)), None)
        if node is None:
            raise LookupError(f"{name} is not in the file")
        nodes = getattr(node, "body", [])
    lines = source.splitlines()
    begin = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", []))]) - 1
    while begin and re.match(r" *# (?!--)", lines[begin - 1]):
        begin -= 1
    return textwrap.dedent("\n".join(lines[begin : node.end_lineno]))


def _names(node):
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    return [getattr(node, "name", "")]


if __name__ == "__main__":
    for page in map(pathlib.Path, sys.argv[1:]):
        page.write_text(written(page.read_text()))
