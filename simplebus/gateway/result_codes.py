"""The module bus as plain calls that return results, for whoever ports a program that has them so.

Rule 1: nothing is decided here: an error's result is returned, and None stands for no handle.

    bus = create()
    if add_module(bus, display) is Result.OK:
        publish(bus, None, ModuleMessage(b"21.5"))
    destroy(bus)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from simplebus.gateway.bus import ModuleBus
from simplebus.gateway.errors import ModuleBusError, Result
from simplebus.gateway.messages import ModuleMessage


def create() -> ModuleBus | None:
    """A new bus with one reference. None if it cannot be made."""
    try:
        return ModuleBus()
    except ModuleBusError:
        return None


def inc_ref(bus: ModuleBus | None) -> None:
    """Hold one reference more. Does nothing without a bus."""
    if bus is not None:
        bus.inc_ref()


def dec_ref(bus: ModuleBus | None) -> None:
    """Give a reference back: the last one frees the bus. Does nothing without a bus."""
    if bus is not None:
        bus.dec_ref()


def destroy(bus: ModuleBus | None) -> None:
    """As `dec_ref`."""
    dec_ref(bus)


def publish(
    bus: ModuleBus | None, source: object | None, message: ModuleMessage | bytes | None
) -> Result:
    """Give the message to all who hear the source."""
    return _result(bus, ModuleBus.publish, message, source=source)


def add_module(bus: ModuleBus | None, module: object | None) -> Result:
    """Have the module hear what others publish."""
    return _result(bus, ModuleBus.add_module, module)


def remove_module(bus: ModuleBus | None, module: object | None) -> Result:
    """Have the module hear no more."""
    return _result(bus, ModuleBus.remove_module, module)


def _result(bus: ModuleBus | None, call: Callable[..., None], *given: Any, **more: Any) -> Result:
    if bus is None:
        return Result.INVALIDARG
    try:
        call(bus, *given, **more)
    except ModuleBusError as error:
        return error.result
    return Result.OK
