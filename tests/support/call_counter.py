"""Number of function calls as a measure of work that does not depend on the machine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType


def count_calls(function: Callable[[], object]) -> int:
    """Return how many functions `function` calls, in Python and in C, at any depth."""
    count = 0

    def count_call(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    former = sys.getprofile()
    sys.setprofile(count_call)
    try:
        function()
    finally:
        sys.setprofile(former)
    return count
