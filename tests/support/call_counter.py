"""Number of function calls as a measure of work that does not depend on the machine."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType

COUNTED_PACKAGES = ("simplebus", "tests")


def count_calls(function: Callable[[], object]) -> int:
    """Return how many functions `function` calls at any depth.

    Functions of simplebus and its tests are counted, and the C functions that these call. What the
    Python functions of libraries call is not counted: `isinstance` with an abstract class, for
    example, calls more functions the first time, until Python has cached the result.
    The garbage collector is paused because it may run finalizers at any time.
    """
    count = 0

    def count_call(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        count += event in ("call", "c_call") and package in COUNTED_PACKAGES

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
