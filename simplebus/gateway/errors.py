"""Errors and result codes of the module bus.

    ModuleBusError          `result` is ERROR, or INVALIDARG for invalid arguments
    ├── ModuleBusFullError  a queue is full, and waiting is not wanted or would not end
    └── MalformedError      the bytes are not a message

A call that raises one of them has changed nothing.
"""

from __future__ import annotations

import enum
import math

import trio

from simplebus.core.errors import BusError


class Result(enum.StrEnum):
    """Result code of a call of the module bus."""

    OK = "ok"
    ERROR = "error"
    INVALIDARG = "invalidarg"


class ModuleBusError(BusError):
    """A call of the module bus failed.

    Args:
        sentence: Description of the failure.
        result: ERROR, or INVALIDARG for invalid arguments.
    """

    result = Result.ERROR

    def __init__(self, sentence: str, result: Result = Result.ERROR) -> None:
        super().__init__(sentence)
        self.result = result
        """ERROR, or INVALIDARG for invalid arguments."""


class ModuleBusFullError(ModuleBusError):
    """A module has no room for the message. No module received the message."""


class MalformedError(ModuleBusError):
    """The bytes are not a message."""

    def __init__(self, sentence: str) -> None:
        super().__init__(sentence, Result.INVALIDARG)


def invalid_argument(sentence: str) -> ModuleBusError:
    """Return the error for invalid arguments."""
    return ModuleBusError(sentence, Result.INVALIDARG)


def split_failure(
    error: BaseException, *, in_thread: bool = False, can_raise_ctrl_c: bool = True
) -> tuple[Exception | None, BaseException | None]:
    """Split an exception into the failure of a module, and the part that is not its fault.

    Cancellation of the task, and Ctrl-C, are not the module's fault. In the thread of a module,
    every exception is the module's fault.

    Args:
        error: Exception that a module raised.
        in_thread: True if the module runs in a separate thread.
        can_raise_ctrl_c: False if Ctrl-C cannot be raised in this call.

    Returns:
        The failure as an Exception, or None; and the rest of the exception, or None.
    """
    foreign_types: tuple[type[BaseException], ...] = ()
    if not in_thread:
        foreign_types = (trio.Cancelled,) * is_cancelled() + (KeyboardInterrupt,) * can_raise_ctrl_c
    module_error, remaining_error = _split_by_type(error, foreign_types)
    if module_error is None or isinstance(module_error, Exception):
        return module_error, remaining_error
    text = f"it raised {module_error!r}"
    if isinstance(module_error, SystemExit):
        text = f"it called sys.exit({module_error.code!r}), which does not end a gateway"
    failure = RuntimeError(text)
    failure.__cause__ = module_error
    return failure, remaining_error


def describe_error(error: BaseException) -> str:
    """Return an exception as one line. Its `str` may fail."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return f"{type(error).__name__}, whose text is not available"


def _split_by_type(
    error: BaseException, foreign_types: tuple[type[BaseException], ...]
) -> tuple[BaseException | None, BaseException | None]:
    """Return the part of an exception that has none of the types, and the part that has one."""
    if isinstance(error, BaseExceptionGroup):
        foreign_error, module_error = error.split(foreign_types)
        return module_error, foreign_error
    return (None, error) if isinstance(error, foreign_types) else (error, None)


def is_cancelled() -> bool:
    """Return True if the current trio task is cancelled."""
    return trio.lowlevel.in_trio_task() and trio.current_effective_deadline() == -math.inf
