"""Many small cases in one test."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping


def for_each(
    argument: str, cases: Mapping[str, object]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Call a test for every case, with the case as `argument`; a failure has a note with its name.

    A separate test costs each worker milliseconds, which is more than a small case takes.
    """
    assert cases

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(**fixtures: object) -> None:
            for name, case in cases.items():
                try:
                    test(**fixtures, **{argument: case})
                except BaseException as error:
                    error.add_note(f"{argument}: {name}")
                    raise

        signature = inspect.signature(test)
        parameters = [each for name, each in signature.parameters.items() if name != argument]
        run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return run

    return decorate
