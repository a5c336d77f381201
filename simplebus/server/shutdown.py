"""How a server ends: nobody new comes in, publishers are told to go, and what is under way is
finished.

Rule 1: what is kept past the process waits for nobody: it is there again when the server is.
Rule 2: the deadline is kept, and a second signal is the deadline: the first one only says what a
server does that drains because its last client has left.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import AsyncIterator

import trio

from simplebus.core.errors import Reason
from simplebus.core.protocol import frames
from simplebus.core.protocol.requests import ErrorReply
from simplebus.core.session.version2 import Version2Decoder
from simplebus.server.nats_listener import NatsDoor
from simplebus.server.server import Engine
from simplebus.server.signals import STOPPING, say_ignored

# How long is read on from who goes on publishing, and how often that is looked at.
_FINISH_SECONDS_MAX = 0.5
_LOOK_SECONDS = 0.005
# Who leaves a subscription for the next one, as bridges do all the time, has that by then.
_SURE_SECONDS = 0.05

log = logging.getLogger("simplebus.server")


async def drain(
    engine: Engine,
    door: NatsDoor | None,
    seconds: float,
    signals: AsyncIterator[int],
    *,
    is_told_to_end: bool = True,
) -> None:
    """Wait until every subscriber has acknowledged what is stored for it, and every NATS client
    has taken what waits for it, up to the deadline or a second signal. One has come already if the
    server `is_told_to_end`."""
    say_draining(engine, door)
    engine.end_rates()
    with trio.move_on_after(seconds) as scope:
        async with trio.open_nursery() as nursery:

            async def stop_at_once() -> None:
                is_told = is_told_to_end
                async for number in signals:
                    name = signal.Signals(number).name
                    if number in STOPPING and is_told:
                        log.info("%s: stopping at once", name)
                        nursery.cancel_scope.cancel()
                    elif number in STOPPING:
                        log.info("%s: draining already", name)
                        is_told = True
                    elif number == signal.SIGHUP:
                        log.warning("%s: nothing is read again: the server drains", name)
                    else:
                        say_ignored(number)

            nursery.start_soon(stop_at_once)
            await finish_publishers(engine)
            if door is not None:
                await door.finish_publishers()
            await engine.drained()
            while engine.connections:
                await trio.sleep(_SURE_SECONDS)
                if engine.is_drained:
                    break
                await engine.drained()
            if engine.cluster is not None:
                await engine.cluster.finish()
            if door is not None:
                await door.flushed()
            nursery.cancel_scope.cancel()
    if scope.cancelled_caught:
        log.warning("the %g s of the drain are over: stopping", seconds)


async def finish_publishers(engine: Engine) -> None:
    """Stop reading from peers that only publish, each as soon as what it has sent is read."""
    last = trio.current_time() + _FINISH_SECONDS_MAX
    since: dict[int, float] = {}
    while publishers := [c for c in engine.connections.values() if not c.session.subscriptions]:
        now = trio.current_time()
        since = {c.session.session_id: since.get(c.session.session_id, now) for c in publishers}
        for connection in publishers:
            is_sure = now - since[connection.session.session_id] >= _SURE_SECONDS
            if now > last or (is_sure and not connection.has_unread()):
                connection.cut()
        await trio.sleep(_LOOK_SECONDS)


def say_draining(engine: Engine, door: NatsDoor | None) -> None:
    """Tell peers that have a word for it that the server is about to end."""
    reply = ErrorReply(
        code=Reason.DRAINING,
        message="this server is about to end; what it does not confirm is to be sent again",
        count=0,
    )
    notice = frames.encode(frames.ERROR, content=reply.encode())
    for connection in list(engine.connections.values()):
        if (
            isinstance(connection.session.decoder, Version2Decoder)
            and not connection.session.is_closed
        ):
            connection.session.outbox.queue_reply(notice)
            connection.flush()
    if door is not None:
        door.front.say_lame_duck()
        door.settle()
