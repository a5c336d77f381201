"""How a loop over a subscription was left: by `break` or `return`, cancelled, or nobody can say.

A loop's iterator lives on the stack of the statement that runs it, and dies when that is left. Then
the interpreter is at one of two places: at the instruction that drops the iterator, which is what
`break` and `return` come to; or at whatever in the body raised, or was cancelled.

Rule 1: when in doubt a loop was not left by `break`. Its message comes again, which is allowed; one
that was not processed is never acknowledged. So it is where a generator stands between a loop and
its statement, for that dies of an exception in any case; where an iterator is kept and asked by
`next`; and on an interpreter that names its instructions otherwise.
"""

from __future__ import annotations

import dis
import inspect
import sys
from types import CodeType, FrameType

from simplebus.client.aio.cancellation import is_being_cancelled
from simplebus.client.core.acks import ACKED, NACKED, AckOutcome

_BEGINS = {"GET_ITER", "FOR_ITER", "GET_AITER"}
_DROPS = {"POP_TOP", "POP_ITER"}


def statement(depth: int = 2) -> CodeType | None:
    """Where the loop stands whose statement has called the caller; None if no statement has."""
    frame = sys._getframe(depth)
    return frame.f_code if _instruction(frame) in _BEGINS else None


def verdict(stands: CodeType | None, depth: int = 2) -> AckOutcome | None:
    """What is said of the message that a loop was at; None when it is to be put back. To be asked
    by what the loop's end has called."""
    try:
        frame = sys._getframe(depth)
    except ValueError:  # The interpreter ends.
        return NACKED
    if frame.f_code is stands and _instruction(frame) in _DROPS:
        return ACKED
    if not frame.f_code.co_flags & inspect.CO_ASYNC_GENERATOR and is_being_cancelled():
        return None
    return NACKED


def _instruction(frame: FrameType) -> str:
    return dis.opname[frame.f_code.co_code[frame.f_lasti]]
