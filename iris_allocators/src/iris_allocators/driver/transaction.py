"""Steps that are undone in reverse order unless all of them succeed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


class Transaction:
    """Remembers how to undo each step; leaving the block without `commit` undoes them, the latest first.

    A step that cannot be undone does not keep the others from being undone; it is noted on the error that caused the
    rollback.

    Example:
        >>> steps = []
        >>> with Transaction() as undo:
        ...     steps.append("made")
        ...     undo.add(steps.append, "unmade")
        >>> steps
        ['made', 'unmade']
    """

    def __init__(self) -> None:
        self._steps: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []

    def add(self, function: Callable[..., Any], *args: Any) -> None:
        """Remember that `function(*args)` undoes the step just taken."""
        self._steps.append((function, args))

    def commit(self) -> None:
        """Keep all steps: forget how to undo them."""
        self._steps.clear()

    def __enter__(self) -> Transaction:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        first: Exception | None = None
        while self._steps:
            function, args = self._steps.pop()
            try:
                function(*args)
            except Exception as e:  # noqa: BLE001 - noted or raised below; the other steps come first
                first = first or e
                if error is not None:
                    error.add_note(f"while undoing: {e}")
        try:
            if first is not None and error is None:
                raise first
        finally:
            first = None  # else the error's traceback would keep this frame, which keeps the error
