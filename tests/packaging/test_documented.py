"""Every module, public name, hook, setting and error says what it is."""

import ast
import inspect

import iris_core
from iris_core import hooks, protocols, types

from .workspace import parsed, shown, sources


def public_without_docstring(path):
    """Public functions and classes at the top of a file, and the file itself."""
    tree = parsed(path)
    if not ast.get_docstring(tree):
        yield shown(path)
    if path.name.startswith("_") and path.name != "__init__.py":
        return
    for node in tree.body:
        is_public = isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
        if is_public and not ast.get_docstring(node):
            yield f"{shown(path)}:{node.lineno} {node.name}"


def test_modules_functions_and_classes():
    assert [missing for path in sources() for missing in public_without_docstring(path)] == []


def test_names_of_iris_core_and_methods_of_iris_exist_and_are_documented():
    for name in iris_core.__all__:
        value = getattr(iris_core, name)
        assert not (inspect.isclass(value) or inspect.isfunction(value)) or inspect.getdoc(value), name
    methods = [name for name, _ in inspect.getmembers(iris_core.Iris) if not name.startswith("_")]
    assert len(methods) > 20
    assert [name for name in methods if not inspect.getdoc(getattr(iris_core.Iris, name))] == []


def public_members(cls):
    return {name: value for name, value in vars(cls).items() if not name.startswith("_") and callable(value)}


def test_every_hook_is_specified_documented_and_listed():
    specified = {**public_members(hooks.ProviderHooks), **public_members(hooks.ObserverHooks)}
    assert set(specified) == {*hooks.PROVIDER_HOOKS, *hooks.OPTIONAL_PROVIDER_HOOKS, *hooks.OBSERVER_HOOKS}
    for name, hook in specified.items():
        assert name.startswith("iris_")
        assert inspect.getdoc(hook), name
        assert hasattr(hook, f"{hooks.PROJECT_NAME}_spec"), name


def test_every_method_of_the_protocols_is_documented():
    classes = [cls for _, cls in inspect.getmembers(protocols, inspect.isclass) if cls.__module__ == protocols.__name__]
    assert classes
    for cls in classes:
        assert [name for name, value in public_members(cls).items() if not inspect.getdoc(value)] == [], cls


def test_every_plugin_kind_has_a_group():
    groups = [kind.group for kind in types.PluginKind]
    assert len(set(groups)) == len(groups)
    assert all(group.startswith("iris.") for group in groups)
