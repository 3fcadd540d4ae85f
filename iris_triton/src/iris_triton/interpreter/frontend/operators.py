"""Operators of kernels: `a + b`, `a < b`, `if a:` and `x[i]` of tensors, constexprs and plain values; loads and stores.

The general case asks Triton's semantic layer.  Most operations in a kernel have operands of one type, and these are
computed here at once, which is several times faster; tests hold both ways against each other.
"""

import functools
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl

from iris_triton import _compat
from iris_triton.interpreter.frontend import numerics
from iris_triton.interpreter.frontend.elementwise import shift_left, shift_right
from iris_triton.interpreter.frontend.semantic import AmbiguousConditionError, numpy_for
from iris_triton.interpreter.frontend.values import Array, TypeFacts, facts_of, plain_form, wrap
from iris_triton.interpreter.memory import accesses

_Tensor = tl.tensor
_constexpr = tl.constexpr

_SEQUENCES = (list, tuple, tl.tuple)
_CONSTANTS = frozenset((int, float, bool, str))
_FLOAT32_MAX = 3.4e38
_WHOLE = slice(None)
_INT1 = facts_of(tl.int1)

_NUMBERS = ("float", "half", "int", "unsigned")
_BITS = ("bool", "int", "unsigned")
_ORDERED = ("float", "half", "int")
_COMPARED = (*_NUMBERS, "bool")

BINARY: dict[str, tuple[str, Callable[..., Array] | None, tuple[str, ...]]] = {
    "Add": ("add", np.add, _NUMBERS),
    "Sub": ("sub", np.subtract, _NUMBERS),
    "Mult": ("mul", np.multiply, _NUMBERS),
    "Div": ("truediv", np.divide, ("float",)),
    "FloorDiv": ("floordiv", numerics.int_div, ("int",)),
    "Mod": ("mod", np.fmod, ("int",)),
    "Pow": ("pow", None, ()),
    "LShift": ("lshift", shift_left, ("int",)),
    "RShift": ("rshift", shift_right, ("int",)),
    "BitAnd": ("and", np.bitwise_and, _BITS),
    "BitOr": ("or", np.bitwise_or, _BITS),
    "BitXor": ("xor", np.bitwise_xor, _BITS),
    "Lt": ("lt", np.less, _ORDERED),
    "LtE": ("le", np.less_equal, _ORDERED),
    "Gt": ("gt", np.greater, _ORDERED),
    "GtE": ("ge", np.greater_equal, _ORDERED),
    "Eq": ("eq", np.equal, _COMPARED),
    "NotEq": ("ne", np.not_equal, _COMPARED),
}
"""Operators by their names in the syntax tree: Python's name, and which kinds of operands numpy computes at once."""

_LOAD_HINTS: dict[str, tuple[Any, ...]] = {"cache_modifier": ("", ".ca", ".cg", ".cv"), "volatile": (False, True)}
_COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")


def unwrap(value: Any) -> Any:
    """Return the value of a constexpr, anything else as it is."""
    return value.value if isinstance(value, _constexpr) else value


def _number(facts: TypeFacts, value: Any) -> Any:
    """Return a Python number as the compiler would type it next to this type; None if that is not plain."""
    number = facts.number
    if value.__class__ is int:
        is_plain = -(2**31) <= value < 2**31 or (number is np.int64 and 2**32 <= value < 2**63)
    else:
        is_plain = value.__class__ is float and number is np.float32 and -_FLOAT32_MAX < value < _FLOAT32_MAX
    return number(value) if is_plain and number is not None else None


def _pair(left: Any, right: Any) -> tuple[Any, Any, Any, TypeFacts] | None:
    """Arrays, result type and facts of two operands of one scalar type; None if the semantic layer must decide.

    Of two signed integers of different types, the facts are the wider one's.
    """
    if left.__class__ is _Tensor:
        type_ = left.type
        facts = facts_of(type_)
        if right.__class__ is not _Tensor:
            number = _number(facts, right)
            return None if number is None else (left.handle.data, number, type_, facts)
        other = right.type
        one, two = left.handle.data, right.handle.data
        if type_ is not other:
            other_facts = facts_of(other)
            if facts.scalar is not other_facts.scalar and facts.scalar != other_facts.scalar:
                if facts.kind != "int" or other_facts.kind != "int":
                    return None
                if facts.kept.itemsize < other_facts.kept.itemsize:
                    facts, other_facts, one = other_facts, facts, one.astype(other_facts.kept)
                else:
                    two = two.astype(facts.kept)
            type_ = facts.joint(other_facts)
            if type_ is None:
                return None
        return one, two, type_, facts
    if right.__class__ is _Tensor:
        facts = facts_of(right.type)
        number = _number(facts, left)
        return None if number is None else (number, right.handle.data, right.type, facts)
    return None


def _offset(pointer: Any, offset: Any) -> Any:
    """Return pointer + offset, or None if the semantic layer must decide."""
    type_ = pointer.type
    facts = facts_of(type_)
    if facts.kind != "pointer":
        return None
    addresses = pointer.handle.data
    if offset.__class__ is int and -(2**31) <= offset < 2**31:
        return wrap(addresses + np.uint64((offset * facts.step) & 0xFFFFFFFFFFFFFFFF), type_)
    if offset.__class__ is not _Tensor:
        return None
    other = facts_of(offset.type)
    type_ = facts.joint(other) if other.kind == "int" else None
    if type_ is None:
        return None
    delta = np.multiply(offset.handle.data, facts.step, dtype=np.int64).view(np.uint64)
    return wrap(addresses + delta, type_)


def _expand(value: Any, index: Any) -> Any:
    """`value[:, None]` and the like; None for anything else."""
    facts = facts_of(value.type)
    form = facts.form
    if index.__class__ is not tuple or form is None or form.layout is not None:
        return None
    axes = [part for part in index if part is not None]
    if len(axes) != len(form.shape) or any(part.__class__ is not slice or part != _WHOLE for part in axes):
        return None
    data = value.handle.data[index]
    return wrap(data, facts.block(plain_form(data.shape)))


def truth(value: Any) -> bool:
    """Decide what `if value:` and `while value:` mean."""
    if value.__class__ is bool:
        return bool(value)
    if isinstance(value, _Tensor):
        data = value.handle.data
        if data.size != 1:
            raise AmbiguousConditionError(
                f"a condition must be a scalar, not a block of shape {list(data.shape)}: reduce it, or use tl.where"
            )
        return bool(data.reshape(-1)[0])
    if isinstance(value, _constexpr):
        return bool(value.value)
    inner = getattr(value, "condition", None)  # tl.condition, around the condition of a while loop
    return truth(inner) if inner is not None and isinstance(value, tl.core.base_value) else bool(value)


def _add(plus: Callable[[Any, Any], Any], left: Any, right: Any) -> Any:
    if left.__class__ is _Tensor:
        result = _offset(left, right.value if right.__class__ is _constexpr else right)
        return plus(left, right) if result is None else result
    return left + right if left.__class__ is right.__class__ is tuple else plus(left, right)


def _plain_sum(left: Any, right: Any) -> Any:
    """`+` of what are no tensors; lists and tuples are the same in kernels."""
    mixed = left.__class__ is not right.__class__ and isinstance(left, _SEQUENCES) and isinstance(right, _SEQUENCES)
    return [*left, *right] if mixed else left + right


def _active(mask: Any, pointer: TypeFacts) -> Any:
    """Return the array of a mask that needs no conversion or broadcast; NotImplemented for others."""
    if mask is None:
        return None
    if mask.__class__ is _Tensor:
        facts = facts_of(mask.type)
        if facts.kind == "bool" and facts.form is pointer.form:
            return mask.handle.data
    return NotImplemented


class Operators:
    """Operators and the most frequent builtins, over a semantic layer; a part of `calls.Dialect`."""

    call: Callable[..., Any]  # runs methods that aggregates define for operators
    attribute: Callable[[Any, str], Any]
    assign: Callable[[Any], Any]

    def __init__(self, semantic: Any, around: Callable[[str, Callable[..., Any]], Callable[..., Any]] | None) -> None:
        """Take the semantic layer, and what makes of each operator the one that is used, if anything."""
        self.semantic = semantic
        self.table: dict[str, Callable[..., Any]] = {
            **{name: self._binary(*row) for name, row in BINARY.items()},
            "USub": self._unary("__neg__", operator.neg, np.negative, ("int",)),
            "UAdd": self._unary("__pos__", operator.pos),
            "Invert": self._unary("__invert__", operator.invert, np.invert, _BITS),
            "Not": self._unary("__not__", lambda value: not truth(value)),
            "Is": lambda a, b: unwrap(a) is unwrap(b),
            "IsNot": lambda a, b: unwrap(a) is not unwrap(b),
            "truth": truth,
            "unwrap": unwrap,
            "boolop": self._boolop,
            "item": self._item,
        }
        self.table["Add"] = functools.partial(_add, self.table["Add"])
        if around is not None:
            self.table = {name: around(name, run) for name, run in self.table.items()}

    def general(self, name: str, left: Any, right: Any) -> Any:
        """Make an operator by way of the semantic layer; `name` as in `__name__`."""
        if isinstance(left, _Tensor):
            return _compat.builtin_body(getattr(_Tensor, f"__{name}__"))(left, right, _semantic=self.semantic)
        if isinstance(right, _Tensor):
            return _compat.builtin_body(getattr(_Tensor, f"__r{name}__"))(right, left, _semantic=self.semantic)
        left, right = unwrap(left), unwrap(right)
        if isinstance(left, tl.core.base_value) and not isinstance(left, tl.tuple):
            return self.call(self.attribute(left, f"__{name}__"), right)
        return NotImplemented

    def _binary(
        self, name: str, numpy: Callable[..., Array] | None, kinds: tuple[str, ...]
    ) -> Callable[[Any, Any], Any]:
        general, compares = self.general, name in _COMPARISONS
        python: Callable[[Any, Any], Any] = _plain_sum if name == "add" else getattr(operator, f"__{name}__")

        def op(left: Any, right: Any) -> Any:
            left = left.value if left.__class__ is _constexpr else left
            right = right.value if right.__class__ is _constexpr else right
            if left.__class__ in _CONSTANTS and right.__class__ in _CONSTANTS:
                return python(left, right)
            if numpy is not None:
                pair = _pair(left, right)
                if pair is not None and pair[3].kind in kinds:
                    type_ = _INT1.like(facts_of(pair[2]).form) if compares else pair[2]
                    return wrap(numpy(pair[0], pair[1]), type_)
            result = general(name, left, right)
            return python(left, right) if result is NotImplemented else result

        return op

    def _unary(
        self, method: str, python: Callable[[Any], Any], numpy: Callable[[Any], Array] | None = None,
        kinds: tuple[str, ...] = (),
    ) -> Callable[[Any], Any]:  # fmt: skip
        body = _compat.builtin_body(getattr(_Tensor, method, None))

        def op(value: Any) -> Any:
            if isinstance(value, _Tensor):
                if numpy is not None and facts_of(value.type).kind in kinds:
                    return wrap(numpy(value.handle.data), value.type)
                return value if body is None else body(value, _semantic=self.semantic)
            return python(unwrap(value))

        return op

    def _boolop(self, is_and: bool, *operands: Callable[[], Any]) -> Any:
        """`and` and `or`: constexprs decide at once; tensors are all evaluated and combined elementwise."""
        tensors = []
        value: Any = None
        for operand in operands:
            value = operand()
            if isinstance(value, _Tensor):
                tensors.append(value)
            elif bool(unwrap(value)) is not is_and:
                return unwrap(value)
        if not tensors:
            return unwrap(value)
        combine = self.semantic.logical_and if is_and else self.semantic.logical_or
        result = tensors.pop()
        while tensors:
            result = combine(tensors.pop(), result)
        return result

    def _item(self, value: Any, index: Any) -> Any:
        if isinstance(value, _Tensor):
            if (expanded := _expand(value, index)) is not None:
                return expanded
            return _compat.builtin_body(_Tensor.__getitem__)(value, index, _semantic=self.semantic)
        return unwrap(value)[tuple(map(unwrap, index)) if isinstance(index, tuple) else unwrap(index)]

    # -- frequent builtins; NotImplemented where the builtin itself has to decide --------------------------------------
    def quick_cast(self, value: Any, dtype: Any, fp_downcast_rounding: Any = None, bitcast: Any = False) -> Any:
        """tl.cast of a tensor, without a way to round."""
        if value.__class__ is not _Tensor or fp_downcast_rounding is not None:
            return NotImplemented
        dtype = unwrap(dtype)
        if dtype is value.type.scalar:
            return value
        return (self.semantic.bitcast if unwrap(bitcast) else self.semantic.cast)(value, dtype)

    def quick_where(self, condition: Any, x: Any, y: Any) -> Any:
        """tl.where by a condition that has the shape of the result."""
        x, y = unwrap(x), unwrap(y)
        pair = _pair(self.assign(x) if x.__class__ is y.__class__ is int else x, y)
        if pair is None or condition.__class__ is not _Tensor:
            return NotImplemented
        facts = facts_of(condition.type)
        if facts.kind != "bool" or facts.form is not facts_of(pair[2]).form:
            return NotImplemented
        return wrap(np.where(condition.handle.data, pair[0], pair[1]), pair[2])

    def quick_reduce(self, value: Any, axis: Any, combine_fn: Any, keep_dims: Any = False) -> Any:
        """tl.reduce along the last axis by what numpy has."""
        facts = facts_of(value.type) if value.__class__ is _Tensor else _INT1
        if facts.kind not in ("int", "float") or facts.form is None or facts.form.layout is not None:
            return NotImplemented
        axis, last, data = unwrap(axis), len(facts.form.shape) - 1, value.handle.data
        numpy = numpy_for(combine_fn, facts.kind == "float")
        if numpy is None or unwrap(keep_dims) or axis not in ((last, -1) if last else (0, -1, None)):
            return NotImplemented
        result = numpy.reduce(data, axis=-1, dtype=data.dtype)
        if not last:
            return wrap(result.reshape(1), facts.scalar)
        return wrap(result, facts.block(plain_form(facts.form.shape[:-1])))

    def quick_load(self, pointer: Any, mask: Any = None, other: Any = None, **hints: Any) -> Any:
        """tl.load of a block or scalar."""
        if pointer.__class__ is not _Tensor:
            return NotImplemented
        if polls := bool(hints):  # most loads have none
            if any(unwrap(hint) not in _LOAD_HINTS.get(name, ()) for name, hint in hints.items()):
                return NotImplemented
            polls = unwrap(hints.get("volatile")) or _compat.is_uncached((unwrap(hints.get("cache_modifier")),))
        facts, mask, other, fill = facts_of(pointer.type), unwrap(mask), unwrap(other), None
        active = _active(mask, facts)
        if facts.element is None or active is NotImplemented:
            return NotImplemented
        if other is not None:
            if mask is None or other.__class__ not in (int, float) or facts.numpy.kind not in "if":
                return NotImplemented
            if facts.numpy.kind == "i" and (other.__class__ is float or not -128 <= other < 128):
                return NotImplemented
            fill = np.array(other, facts.numpy)
        data = accesses.load(pointer.handle.data, active, fill, facts.numpy, poll=polls)
        return wrap(data, facts.pointee.like(facts.form))

    def quick_store(self, pointer: Any, value: Any, mask: Any = None, **hints: Any) -> Any:
        """tl.store of a value of the pointer's type and shape without cache hints."""
        if hints or pointer.__class__ is not _Tensor or value.__class__ is not _Tensor:
            return NotImplemented
        facts, given = facts_of(pointer.type), facts_of(value.type)
        active = _active(unwrap(mask), facts)
        if active is NotImplemented or not facts.storable or given.form is not facts.form:
            return NotImplemented
        if given.scalar is not facts.element and given.scalar != facts.element:
            return NotImplemented
        return accesses.store(pointer.handle.data, active, value.handle.data)
