"""Bridges as part of a server: they go with it.

Rule 1: to the server they are clients like others, but its own: they need no socket to it, no TLS,
and no user.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import trio

from simplebus.bridge.facts import facts_of
from simplebus.bridge.running import lanes, run
from simplebus.bridge.settings import Bridge
from simplebus.server.inside import Inside
from simplebus.server.serve import Serving


async def serve_with_bridges(
    serve: Callable[..., Awaitable[None]], bridges: Sequence[Bridge]
) -> None:
    """What `serve` does, and the bridges, from when it is up until it has ended."""
    async with trio.open_nursery() as nursery:
        with trio.CancelScope() as copying:

            async def serve_and_end(task_status: trio.TaskStatus[Serving]) -> None:
                try:
                    await serve(task_status=task_status)
                finally:
                    copying.cancel()

            up: Serving = await nursery.start(serve_and_end)
            made = lanes(bridges, here=Inside(up.engine, "a bridge of this server"))
            if up.watch is not None:
                up.watch.more.append(lambda: facts_of(made))
            await run(made)
