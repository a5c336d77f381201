"""Documentation of the subscription options in the signatures that `help` shows."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable

import pytest

import simplebus
from simplebus.client.subscribe_options import SubscribeOptions, subscribe_request

METHODS = [
    simplebus.Bus.subscribe,
    simplebus.Bus.handle,
    simplebus.BlockingBus.subscribe,
    simplebus.BlockingBus.handle,
]


def documented_arguments(function: Callable[..., object]) -> list[str]:
    """Return the names in the `Args:` section of a docstring."""
    text = inspect.getdoc(function) or ""
    section = text.split("\nArgs:\n")[1].split("\n\n")[0]
    return re.findall(r"^    (\w+):", section, re.MULTILINE)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.__qualname__)
def test_every_option_is_a_documented_parameter(method: Callable[..., object]) -> None:
    parameters = inspect.signature(method).parameters
    shared = inspect.signature(subscribe_request).parameters
    for option in SubscribeOptions.__annotations__:
        assert parameters[option].kind is inspect.Parameter.KEYWORD_ONLY
        assert parameters[option].default == shared[option].default
        assert parameters[option].annotation == shared[option].annotation
    assert documented_arguments(method) == [name for name in parameters if name != "self"]


def test_the_shared_request_takes_exactly_the_options() -> None:
    parameters = inspect.signature(subscribe_request).parameters
    assert list(parameters) == ["channels", *SubscribeOptions.__annotations__]
