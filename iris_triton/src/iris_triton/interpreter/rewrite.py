"""Turns a jitted function's source into Python that means what Triton's compiler means by it.

Every operator, condition, call and attribute becomes a call of a helper (see `calls` and `operators`), the way the
compiler visits the same syntax tree.  So nothing of triton.language has to be patched, and the same process can compile
kernels while others run here.  Line numbers and the file name stay the user's: tracebacks point into the kernel.

The helpers reach the function as closure cells; the user's module is not touched.
"""

from __future__ import annotations

import ast
import inspect
from types import CellType, CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from iris_triton import _compat

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_PREFIX = "_iris_"

_BINARY: dict[type[ast.operator], str] = {
    ast.Add: "add",
    ast.Sub: "sub",
    ast.Mult: "mul",
    ast.Div: "truediv",
    ast.FloorDiv: "floordiv",
    ast.Mod: "mod",
    ast.Pow: "pow",
    ast.LShift: "lshift",
    ast.RShift: "rshift",
    ast.BitAnd: "and",
    ast.BitOr: "or",
    ast.BitXor: "xor",
}
_COMPARE: dict[type[ast.cmpop], str] = {
    ast.Lt: "lt",
    ast.LtE: "le",
    ast.Gt: "gt",
    ast.GtE: "ge",
    ast.Eq: "eq",
    ast.NotEq: "ne",
    ast.Is: "is",
    ast.IsNot: "isnot",
}
_UNARY: dict[type[ast.unaryop], str] = {ast.USub: "neg", ast.UAdd: "pos", ast.Invert: "invert", ast.Not: "not"}


class _Rewriter(ast.NodeTransformer):
    def __init__(self, module: Callable[[str], ModuleType | None]) -> None:
        self._module = module

    def _helper(self, name: str, node: ast.AST, *arguments: ast.expr) -> ast.expr:
        call = ast.Call(ast.Name(_PREFIX + name, ast.Load()), list(arguments), [])
        return ast.copy_location(call, node)

    # -- expressions --------------------------------------------------------------------------------------------------
    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        self.generic_visit(node)
        name = _BINARY.get(type(node.op))
        return node if name is None else self._helper(name, node, node.left, node.right)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        if isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant):
            return node
        self.generic_visit(node)
        return self._helper(_UNARY[type(node.op)], node, node.operand)

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        self.generic_visit(node)
        parts, left = [], node.left
        for op, right in zip(node.ops, node.comparators, strict=True):
            name = _COMPARE.get(type(op))
            part: ast.expr = ast.Compare(left, [op], [right])
            if name is not None:
                part = self._helper(name, node, left, right)
            parts.append(ast.copy_location(part, node))
            left = right
        return parts[0] if len(parts) == 1 else self._boolop(node, True, parts)

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        self.generic_visit(node)
        return self._boolop(node, isinstance(node.op, ast.And), node.values)

    def _boolop(self, node: ast.AST, is_and: bool, operands: list[ast.expr]) -> ast.expr:
        nothing = ast.arguments([], [], None, [], [], None, [])
        delayed = [ast.copy_location(ast.Lambda(nothing, operand), operand) for operand in operands]
        return self._helper("boolop", node, ast.Constant(is_and), *delayed)

    def visit_IfExp(self, node: ast.IfExp) -> ast.expr:
        self.generic_visit(node)
        node.test = self._helper("truth", node.test, node.test)
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        if isinstance(node.ctx, ast.Load) and self._module_at(node.value) is None:
            self.generic_visit(node)
            return self._helper("attribute", node, node.value, ast.Constant(node.attr))
        self.generic_visit(node)
        return node

    def _module_at(self, node: ast.expr) -> ModuleType | None:
        """The module that an expression like `tl.math` names, if it does; such attributes need no helper."""
        if isinstance(node, ast.Name):
            return self._module(node.id)
        if isinstance(node, ast.Attribute) and (parent := self._module_at(node.value)) is not None:
            found = getattr(parent, node.attr, None)
            return found if isinstance(found, ModuleType) else None
        return None

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        self.generic_visit(node)
        if not isinstance(node.ctx, ast.Load):
            return node
        return self._helper("item", node, node.value, _as_index(node.slice))

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        call = ast.Call(ast.Name(_PREFIX + "call", ast.Load()), [node.func, *node.args], node.keywords)
        return ast.copy_location(call, node)

    # -- statements ---------------------------------------------------------------------------------------------------
    def visit_Assign(self, node: ast.Assign) -> ast.stmt:
        self.generic_visit(node)
        node.value = self._helper("assign", node.value, node.value)
        return node

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.stmt:
        read = ast.parse(ast.unparse(node.target), mode="eval").body
        for child in ast.walk(read):
            ast.copy_location(child, node.target)
        value = ast.copy_location(ast.BinOp(read, node.op, node.value), node)
        return self.visit_Assign(ast.copy_location(ast.Assign([node.target], value), node))

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.stmt | None:
        if node.value is None:
            return ast.copy_location(ast.Pass(), node)
        plain = ast.copy_location(ast.Assign([node.target], node.value), node)
        if not ast.unparse(node.annotation).strip("'\"").endswith("constexpr"):
            return self.visit_Assign(plain)
        self.generic_visit(plain)
        plain.value = self._helper("unwrap", node.value, plain.value)
        return plain

    def visit_If(self, node: ast.If) -> ast.stmt:
        self.generic_visit(node)
        node.test = self._helper("truth", node.test, node.test)
        return node

    def visit_While(self, node: ast.While) -> ast.stmt:
        self.generic_visit(node)
        node.test = self._helper("truth", node.test, node.test)
        return node

    def visit_Assert(self, node: ast.Assert) -> ast.stmt:
        self.generic_visit(node)
        arguments = [node.test, *([node.msg] if node.msg is not None else [])]
        return ast.copy_location(ast.Expr(self._helper("check", node, *arguments)), node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.stmt:
        node.decorator_list, node.returns = [], None
        for argument in [
            *node.args.posonlyargs,
            *node.args.args,
            *node.args.kwonlyargs,
            node.args.vararg,
            node.args.kwarg,
        ]:
            if argument is not None:
                argument.annotation = None
        # Default values are those of the original function; here they only say which parameters have one.
        node.args.defaults = [ast.copy_location(ast.Constant(None), node) for _ in node.args.defaults]
        node.args.kw_defaults = [
            default and ast.copy_location(ast.Constant(None), node) for default in node.args.kw_defaults
        ]
        node.body = [self.visit(statement) for statement in node.body]
        return node


def _as_index(node: ast.expr) -> ast.expr:
    """A subscript as an expression: slices become calls of `slice`."""
    if isinstance(node, ast.Slice):
        parts = [part or ast.copy_location(ast.Constant(None), node) for part in (node.lower, node.upper, node.step)]
        return ast.copy_location(ast.Call(ast.Name(_PREFIX + "slice", ast.Load()), parts, []), node)
    if isinstance(node, ast.Tuple):
        return ast.copy_location(ast.Tuple([_as_index(part) for part in node.elts], ast.Load()), node)
    return node


def rewrite(function: Any, helpers: Mapping[str, Callable[..., Any]]) -> FunctionType:
    """Make the Python function that runs a jitted function.

    Args:
        function: the jitted function.
        helpers: what the rewritten code calls, by name.

    Returns:
        A function with the original's parameters, defaults, globals and closure.
    """
    original: FunctionType = function.fn
    closure = dict(zip(original.__code__.co_freevars, original.__closure__ or (), strict=True))
    local = set(original.__code__.co_varnames)

    def module(name: str) -> ModuleType | None:
        found = None if name in local or name in closure else original.__globals__.get(name)
        return found if isinstance(found, ModuleType) else None

    tree = ast.parse(function.src)
    definition = tree.body[0]
    assert isinstance(definition, ast.FunctionDef)
    _Rewriter(module).visit(definition)
    name, definition.name = definition.name, _PREFIX + "body"  # else a recursive call would find the enclosing scope
    names = [*(_PREFIX + name for name in helpers), *closure]
    scope = ast.parse(f"def {_PREFIX}scope({', '.join(names)}): pass").body[0]
    assert isinstance(scope, ast.FunctionDef)
    scope.body = [definition]
    whole = ast.fix_missing_locations(ast.Module([scope], []))
    ast.increment_lineno(whole, _compat.definition_line(function) - 1)
    code = compile(whole, inspect.getsourcefile(original) or original.__code__.co_filename, "exec")
    inner = _code_of(_code_of(code, scope.name), definition.name)
    inner = inner.replace(co_name=name, co_qualname=original.__qualname__)
    cells = {_PREFIX + name: CellType(helper) for name, helper in helpers.items()} | closure
    made = FunctionType(
        inner, original.__globals__, original.__name__, closure=tuple(cells[name] for name in inner.co_freevars)
    )
    made.__defaults__ = _unwrapped(original.__defaults__)
    if original.__kwdefaults__:
        made.__kwdefaults__ = {name: _value(default) for name, default in original.__kwdefaults__.items()}
    made.__qualname__, made.__module__ = original.__qualname__, original.__module__
    return made


def _code_of(outer: CodeType, name: str) -> CodeType:
    return next(c for c in outer.co_consts if isinstance(c, CodeType) and c.co_name == name)


def _value(default: Any) -> Any:
    return default.value if isinstance(default, _compat.core.constexpr) else default


def _unwrapped(defaults: tuple[Any, ...] | None) -> tuple[Any, ...] | None:
    return None if defaults is None else tuple(_value(default) for default in defaults)
