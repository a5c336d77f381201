"""What the module bus raises, and the three results that its calls can have.

    ModuleBusError          an error; `result` is ERROR, or INVALIDARG where the caller is wrong
    ├── ModuleBusFullError  no room, and waiting for it is not wanted or would never end
    └── MalformedError      bytes that are no message

Rule 1: whoever gets one of these knows that nothing of what was asked has happened.
"""

from __future__ import annotations

import enum
import math

import trio

from simplebus.core.errors import BusError


class Result(enum.StrEnum):
    """How a call of the module bus ends."""

    OK = "ok"
    ERROR = "error"
    INVALIDARG = "invalidarg"


class ModuleBusError(BusError):
    """The module bus did not do what it was asked to."""

    result = Result.ERROR

    def __init__(self, sentence: str, result: Result = Result.ERROR) -> None:
        super().__init__(sentence)
        self.result = result
        """ERROR, or INVALIDARG when the arguments make no sense."""


class ModuleBusFullError(ModuleBusError):
    """A module that is to hear the message has no room for it. No module was given it."""


class MalformedError(ModuleBusError):
    """These bytes are no message."""

    def __init__(self, sentence: str) -> None:
        super().__init__(sentence, Result.INVALIDARG)


def invalid(sentence: str) -> ModuleBusError:
    """The error for arguments that make no sense."""
    return ModuleBusError(sentence, Result.INVALIDARG)


def parted(
    error: BaseException, *, in_thread: bool = False, hears_ctrl_c: bool = True
) -> tuple[Exception | None, BaseException | None]:
    """What a module has failed with, as one that can be told and kept; and what is not its own
    doing: that its task is cancelled, or Ctrl-C, unless that cannot have been raised where it is.
    In a thread of its own, all is its doing."""
    theirs: tuple[type[BaseException], ...] = ()
    if not in_thread:
        theirs = (trio.Cancelled,) * is_cancelled() + (KeyboardInterrupt,) * hears_ctrl_c
    own, rest = _split(error, theirs)
    if own is None or isinstance(own, Exception):
        return own, rest
    told = f"it raised {own!r}"
    if isinstance(own, SystemExit):
        told = f"it called sys.exit({own.code!r}), which does not end a gateway"
    failure = RuntimeError(told)
    failure.__cause__ = own
    return failure, rest


def described(error: BaseException) -> str:
    """What a module has failed with, as one line of a report: what an error says of itself may fail
    as well."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return f"{type(error).__name__}, which cannot say what it is"


def _split(
    error: BaseException, theirs: tuple[type[BaseException], ...]
) -> tuple[BaseException | None, BaseException | None]:
    """What is none of theirs, and what is."""
    if isinstance(error, BaseExceptionGroup):
        rest, own = error.split(theirs)
        return own, rest
    return (None, error) if isinstance(error, theirs) else (error, None)


def is_cancelled() -> bool:
    """Whether this task was, while somebody else had a turn: so the call that it comes from was."""
    return trio.lowlevel.in_trio_task() and trio.current_effective_deadline() == -math.inf
