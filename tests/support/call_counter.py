"""Number of function calls as a measure of work that does not depend on the machine."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType


def count_calls(function: Callable[[], object]) -> int:
    """Return how many functions `function` calls, in Python and in C, at any depth.

    The garbage collector is paused because it may run finalizers at any time.
    """
    count = 0

    def count_call(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    former_profiler, is_collecting = sys.getprofile(), gc.isenabled()
    gc.disable()
    sys.setprofile(count_call)
    try:
        function()
    finally:
        sys.setprofile(former_profiler)
        if is_collecting:
            gc.enable()
    return count
