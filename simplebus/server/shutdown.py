"""Graceful shutdown: publishers are disconnected, and stored messages are delivered.

A server with a journal does not wait for deliveries, because they continue after the restart. But
it waits until the journal contains every accepted message, also if the disk refuses writes now.
Publishers stay connected meanwhile, to receive their confirms; new messages are refused.
The deadline is a limit; a second stop signal ends the wait at once.
"""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator
from itertools import islice

import trio

from simplebus.core.broker.wait_reasons import format_message_count
from simplebus.core.errors import Reason
from simplebus.core.limits import CHANGED_SESSIONS_PER_TURN, STOPPED_CONNECTIONS_PER_TURN
from simplebus.core.protocol import frames
from simplebus.core.protocol.requests import ErrorReply
from simplebus.core.steps import drain_list
from simplebus.logs.event_logger import EventLogger
from simplebus.server.nats_listener import NatsListener
from simplebus.server.server import Server
from simplebus.server.signals import STOP_SIGNALS, log_ignored_signal

# Time for which a shutdown reads from clients that keep publishing, and its poll interval.
_STOP_PUBLISHERS_MAX_SECONDS = 0.5
_POLL_SECONDS = 0.005
# A client that replaces a subscription, as bridges often do, has the new one after this time.
_SETTLE_SECONDS = 0.05

log = EventLogger("simplebus.server")


async def drain(
    server: Server,
    nats_listener: NatsListener | None,
    seconds: float,
    signals: AsyncIterator[int],
    *,
    is_signaled: bool = True,
) -> None:
    """Wait until stored messages are acknowledged and NATS clients are flushed.

    Args:
        server: The server to drain.
        nats_listener: Its NATS listener, if any.
        seconds: Time limit.
        signals: Received signals. A second stop signal ends the wait.
        is_signaled: True if a stop signal started the shutdown.
    """
    await announce_draining(server, nats_listener)
    server.remove_rate_limits()
    if nats_listener is not None:
        nats_listener.begin_draining()
    with trio.move_on_after(seconds) as scope:
        async with trio.open_nursery() as nursery:

            async def stop_at_once() -> None:
                is_stop_expected = is_signaled
                async for number in signals:
                    name = signal.Signals(number).name
                    if number in STOP_SIGNALS and is_stop_expected:
                        log.info("drain.interrupted", "{signal}: stopping at once", signal=name)
                        nursery.cancel_scope.cancel()
                    elif number in STOP_SIGNALS:
                        log.info("drain.repeated", "{signal}: already draining", signal=name)
                        is_stop_expected = True
                    elif number == signal.SIGHUP:
                        log.warning(
                            "reload.refused",
                            "{signal}: settings not reloaded, because the server shuts down",
                            signal=name,
                        )
                    else:
                        log_ignored_signal(number)

            nursery.start_soon(stop_at_once)
            await wait_for_disk(server)
            await stop_publishers(server)
            if nats_listener is not None:
                await nats_listener.stop_publishers()
            while server.count_unwritten():
                await wait_for_disk(server)
                await trio.sleep(_POLL_SECONDS)
            await server.wait_drained()
            while server.connections:
                await trio.sleep(_SETTLE_SECONDS)
                if server.is_drained:
                    break
                await server.wait_drained()
            if server.jetstream is not None:
                await server.jetstream.finish()
            if nats_listener is not None:
                await nats_listener.wait_flushed()
            nursery.cancel_scope.cancel()
    if scope.cancelled_caught:
        log.warning(
            "drain.timed_out", "drain timeout of {seconds:g} s exceeded: stopping", seconds=seconds
        )


async def wait_for_disk(server: Server) -> None:
    """Wait while accepted messages cannot be written. Returns at once if the disk works."""
    is_logged = False
    while (count := server.count_unwritten()) and (error := server.journal_error):
        if not is_logged:
            is_logged = True
            log.warning(
                "drain.disk_failed",
                "waiting for the disk with {messages} accepted and not written: {error}",
                messages=format_message_count(count),
                count=count,
                error=error,
            )
        await trio.sleep(_POLL_SECONDS)


async def stop_publishers(server: Server) -> None:
    """Disconnect clients without subscriptions, each when its received bytes are processed."""
    deadline = trio.current_time() + _STOP_PUBLISHERS_MAX_SECONDS
    first_seen: dict[int, float] = {}
    has_publishers = True
    while has_publishers:
        now, previously_seen, first_seen = trio.current_time(), first_seen, {}
        for number, connection in enumerate(drain_list(list(server.connections.values())), 1):
            if number % STOPPED_CONNECTIONS_PER_TURN == 0:
                await trio.lowlevel.checkpoint()
            session = connection.session
            if session.subscriptions or session.is_closed:
                continue
            since = first_seen[session.session_id] = previously_seen.get(session.session_id, now)
            is_settled = now - since >= _SETTLE_SECONDS
            if now > deadline or (is_settled and not connection.has_unread()):
                connection.disconnect_after_input()
        has_publishers = bool(first_seen)
        await trio.sleep(_POLL_SECONDS)


async def announce_draining(server: Server, nats_listener: NatsListener | None) -> None:
    """Notify version 2 clients and NATS clients that the server is about to end."""
    reply = ErrorReply(
        code=Reason.DRAINING,
        message="the server is stopping",
    )
    notice = frames.encode(frames.ERROR, content=reply.encode())
    connections = drain_list(list(server.connections.values()))
    while part := list(islice(connections, CHANGED_SESSIONS_PER_TURN)):
        for connection in part:
            if connection.session.has_confirms and not connection.session.is_closed:
                connection.session.outbox.queue_reply(notice)
        server.flush_ready()
        await trio.lowlevel.checkpoint()  # Other clients are served between two turns.
    if nats_listener is not None:
        await nats_listener.send_lame_duck()
