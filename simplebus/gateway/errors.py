"""What the module bus raises, and the three results that its calls can have.

    ModuleBusError          an error; `result` is ERROR, or INVALIDARG where the caller is wrong
    ├── ModuleBusFullError  no room, and waiting for it is not wanted or would never end
    └── MalformedError      bytes that are no message

Rule 1: whoever gets one of these knows that nothing of what was asked has happened.
"""

from __future__ import annotations

import enum

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


def failure_of(
    error: BaseException, *, in_thread: bool = False, hears_ctrl_c: bool = True
) -> Exception | None:
    """What a module has failed with, as one that can be told and kept; None for what is not its
    own doing: that its task is cancelled, or Ctrl-C, unless that cannot have been raised where it
    is. In a thread of its own, all is its doing."""
    if isinstance(error, Exception):
        return error
    if isinstance(error, SystemExit):
        told = f"it called sys.exit({error.code!r}), which does not end a gateway"
    elif (
        in_thread
        or (isinstance(error, KeyboardInterrupt) and not hears_ctrl_c)
        or (isinstance(error, BaseExceptionGroup) and not error.split(_ITS_OWN)[1])
    ):
        told = f"it raised {error!r}"
    else:
        return None
    failure = RuntimeError(told)
    failure.__cause__ = error
    return failure


_ITS_OWN = (Exception, SystemExit)
