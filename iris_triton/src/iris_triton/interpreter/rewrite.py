"""Rewrite a jitted function's source to Python with the semantics of Triton's compiler.

Every operator, condition, call and attribute becomes a call of a helper (see `calls` and `operators`), the way the
compiler visits the same syntax tree.  So nothing of triton.language has to be patched, and the same process can compile
kernels while others run here.  Line numbers and the file name stay the user's: tracebacks point into the kernel.

The helpers reach the function as closure cells; the user's module is not touched.
"""

import ast
import copy
from collections.abc import Callable, Container, Mapping
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any, TypeVar

from iris_triton import _compat

_Node = TypeVar("_Node", bound=ast.AST)
_PREFIX = "_iris_"


def _at(place: ast.AST, node: _Node) -> _Node:
    return ast.copy_location(node, place)


def _name(name: str, place: ast.AST) -> ast.Name:
    return _at(place, ast.Name(_PREFIX + name, ast.Load()))


class _Rewriter(ast.NodeTransformer):
    def __init__(self, helpers: Container[str], module: Callable[[str], ModuleType | None]) -> None:
        self._helpers, self._module = helpers, module

    def _helper(self, name: str, node: ast.AST, *arguments: ast.expr) -> ast.expr:
        return _at(node, ast.Call(_name(name, node), list(arguments), []))

    def _operator(self, op: ast.AST, node: ast.expr, *operands: ast.expr) -> ast.expr:
        name = type(op).__name__
        return self._helper(name, node, *operands) if name in self._helpers else node

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        self.generic_visit(node)
        return self._operator(node.op, node, node.left, node.right)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        if isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant):
            return node
        self.generic_visit(node)
        return self._operator(node.op, node, node.operand)

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        self.generic_visit(node)
        parts = []
        for left, op, right in zip([node.left, *node.comparators], node.ops, node.comparators, strict=False):
            part = _at(node, ast.Compare(left, [op], [right]))
            parts.append(self._operator(op, part, left, right))
        return parts[0] if len(parts) == 1 else self._boolop(node, True, parts)

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        self.generic_visit(node)
        return self._boolop(node, isinstance(node.op, ast.And), node.values)

    def _boolop(self, node: ast.AST, is_and: bool, operands: list[ast.expr]) -> ast.expr:
        nothing = ast.arguments([], [], None, [], [], None, [])
        delayed = [_at(operand, ast.Lambda(nothing, operand)) for operand in operands]
        return self._helper("boolop", node, _at(node, ast.Constant(is_and)), *delayed)

    def _condition(self, node: Any) -> Any:
        self.generic_visit(node)
        node.test = self._helper("truth", node.test, node.test)
        return node

    visit_IfExp = visit_If = visit_While = _condition

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        is_plain = not isinstance(node.ctx, ast.Load) or self._module_at(node.value) is not None
        self.generic_visit(node)
        return node if is_plain else self._helper("attribute", node, node.value, _at(node, ast.Constant(node.attr)))

    def _module_at(self, node: ast.expr) -> ModuleType | None:
        """Return the module that an expression like `tl.math` names, if it does; such attributes need no helper."""
        if isinstance(node, ast.Name):
            return self._module(node.id)
        if isinstance(node, ast.Attribute) and (parent := self._module_at(node.value)) is not None:
            found = getattr(parent, node.attr, None)
            return found if isinstance(found, ModuleType) else None
        return None

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        self.generic_visit(node)
        is_read = isinstance(node.ctx, ast.Load)
        return self._helper("item", node, node.value, _as_index(node.slice)) if is_read else node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        return _at(node, ast.Call(_name("call", node), [node.func, *node.args], node.keywords))

    def visit_Assign(self, node: ast.Assign) -> ast.stmt:
        self.generic_visit(node)
        node.value = self._helper("assign", node.value, node.value)
        return node

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.stmt:
        read = copy.deepcopy(node.target)
        read.ctx = ast.Load()
        value = _at(node, ast.BinOp(read, node.op, node.value))
        return self.visit_Assign(_at(node, ast.Assign([node.target], value)))

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.stmt | None:
        if node.value is None:
            return _at(node, ast.Pass())
        plain = _at(node, ast.Assign([node.target], node.value))
        if not ast.unparse(node.annotation).strip("'").endswith("constexpr"):
            return self.visit_Assign(plain)
        self.generic_visit(plain)
        plain.value = self._helper("unwrap", node.value, plain.value)
        return plain

    def visit_Assert(self, node: ast.Assert) -> ast.stmt:
        self.generic_visit(node)
        return _at(node, ast.Expr(self._helper("check", node, node.test, *filter(None, [node.msg]))))

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.stmt:
        # Only the body is run: decorators, annotations and defaults are those of the original function.
        node.decorator_list = []
        node.body = [self.visit(statement) for statement in node.body]
        return node


def _as_index(node: ast.expr) -> ast.expr:
    """Return a subscript as an expression: slices become calls of `slice`."""
    if isinstance(node, ast.Slice):
        parts = [part or _at(node, ast.Constant(None)) for part in (node.lower, node.upper, node.step)]
        return _at(node, ast.Call(_name("slice", node), parts, []))
    if isinstance(node, ast.Tuple):
        return _at(node, ast.Tuple([_as_index(part) for part in node.elts], ast.Load()))
    return node


def rewrite(function: Any, helpers: Mapping[str, Callable[..., Any]]) -> FunctionType:
    """Make the Python function that runs a jitted function, with its parameters, defaults, globals and closure.

    The rewritten code calls `helpers` by name; those for operators have the names of the syntax tree ("Add", "Lt").
    """
    original: FunctionType = function.fn
    closure = dict(zip(original.__code__.co_freevars, original.__closure__ or (), strict=True))
    local = set(original.__code__.co_varnames)

    def module(name: str) -> ModuleType | None:
        found = None if name in local or name in closure else original.__globals__.get(name)
        return found if isinstance(found, ModuleType) else None

    above = "\n" * (_compat.definition_line(function) - 1)  # so that the lines have their numbers in the file
    definition = ast.parse(above + function.src).body[0]
    assert isinstance(definition, ast.FunctionDef)
    _Rewriter(helpers, module).visit(definition)
    name, definition.name = definition.name, _PREFIX + "body"  # else a recursive call would find the enclosing scope
    names = [*(_PREFIX + name for name in helpers), *closure]
    scope = ast.parse(f"def {_PREFIX}scope({', '.join(names)}): pass").body[0]
    assert isinstance(scope, ast.FunctionDef)
    scope.body = [definition]
    inner = compile(ast.Module([scope], []), original.__code__.co_filename, "exec")
    for outer in (scope.name, definition.name):
        inner = next(c for c in inner.co_consts if isinstance(c, CodeType) and c.co_name == outer)
    inner = inner.replace(co_name=name, co_qualname=original.__qualname__)
    cells = {_PREFIX + name: CellType(helper) for name, helper in helpers.items()} | closure
    made = FunctionType(
        inner, original.__globals__, original.__name__, closure=tuple(cells[name] for name in inner.co_freevars)
    )
    unwrap = _compat.core._unwrap_if_constexpr
    made.__defaults__ = tuple(map(unwrap, original.__defaults__ or ()))
    made.__kwdefaults__ = {name: unwrap(default) for name, default in (original.__kwdefaults__ or {}).items()}
    made.__qualname__, made.__module__ = original.__qualname__, original.__module__
    return made
