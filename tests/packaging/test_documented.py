"""Every module and public name says what it is."""

import ast

from iris_core import hooks

from .workspace import parsed, shown, sources

ALSO_METHODS = ("iris_core/api.py", "iris_core/hooks.py", "iris_core/protocols.py")


def public_without_docstring(path):
    """Public functions and classes at the top of a file, some classes' methods, and the file itself."""
    tree = parsed(path)
    if not ast.get_docstring(tree):
        yield shown(path)
    if path.name.startswith("_") and path.name != "__init__.py":
        return
    nodes = list(tree.body)
    if str(path).endswith(ALSO_METHODS):
        nodes += [
            each for node in nodes if isinstance(node, ast.ClassDef) and node.name[0] != "_" for each in node.body
        ]
    for node in nodes:
        is_public = isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
        if is_public and not ast.get_docstring(node):
            yield f"{shown(path)}:{node.lineno} {node.name}"


def test_modules_functions_and_classes():
    assert [missing for path in sources() for missing in public_without_docstring(path)] == []


def test_every_hook_is_specified_and_listed():
    specified = {**vars(hooks.ProviderHooks), **vars(hooks.ObserverHooks)}
    listed = {*hooks.PROVIDER_HOOKS, *hooks.OPTIONAL_PROVIDER_HOOKS, *hooks.OBSERVER_HOOKS}
    assert {name for name in specified if hasattr(specified[name], f"{hooks.PROJECT_NAME}_spec")} == listed
    assert listed == {name for name in specified if not name.startswith("_")}
