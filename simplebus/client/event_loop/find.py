"""Detection of the event loop."""

from __future__ import annotations

import sniffio

from simplebus.client.event_loop.services import EventLoop


def find_event_loop() -> EventLoop:
    """Return the event loop that runs the current task."""
    if sniffio.current_async_library() == "trio":
        from simplebus.client.event_loop.trio_loop import TrioEventLoop

        return TrioEventLoop()
    from simplebus.client.event_loop.asyncio_loop import AsyncioEventLoop

    return AsyncioEventLoop()
