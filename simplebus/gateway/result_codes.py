"""The module bus as functions that return result codes, for programs that use result codes.

Errors become their result code, and None stands for a missing handle.

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
    """Return a new bus with one reference, or None if it cannot be created."""
    try:
        return ModuleBus()
    except ModuleBusError:
        return None


def inc_ref(bus: ModuleBus | None) -> None:
    """Add a reference. Does nothing without a bus."""
    if bus is not None:
        bus.inc_ref()


def dec_ref(bus: ModuleBus | None) -> None:
    """Release a reference; the last one frees the bus. Does nothing without a bus."""
    if bus is not None:
        bus.dec_ref()


def destroy(bus: ModuleBus | None) -> None:
    """Same as `dec_ref`."""
    dec_ref(bus)


def publish(
    bus: ModuleBus | None, source: object | None, message: ModuleMessage | bytes | None
) -> Result:
    """Publish a message of `source` to the modules that receive its messages."""
    return _result(bus, ModuleBus.publish, message, source=source)


def add_module(bus: ModuleBus | None, module: object | None) -> Result:
    """Add a module, which receives the messages of all others."""
    return _result(bus, ModuleBus.add_module, module)


def remove_module(bus: ModuleBus | None, module: object | None) -> Result:
    """Remove a module."""
    return _result(bus, ModuleBus.remove_module, module)


def _result(bus: ModuleBus | None, call: Callable[..., None], *args: Any, **options: Any) -> Result:
    if bus is None:
        return Result.INVALIDARG
    try:
        call(bus, *args, **options)
    except ModuleBusError as error:
        return error.result
    return Result.OK
