"""`simplebus pub` and `simplebus sub`: publish lines as messages, print messages as lines.

`sub` acknowledges a message after its line is written. `pub` sends input as soon as it arrives and
counts messages after the server has accepted them. Standard output contains messages only.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from typing import Any

import trio
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

import simplebus
from simplebus.client.message_builder import PublishOptions
from simplebus.console.stdin_lines import read_stdin_lines

_BATCH_BYTES = 256 * 1024
_BATCHES_PER_SECOND = 100
_SIGNALS = (signal.SIGINT, signal.SIGTERM)

# Control characters could control the terminal, so they are printed as escapes.
_ESCAPES = {
    code: repr(chr(code))[1:-1] for code in (*range(0x20), *range(0x7F, 0xA0)) if code != 0x09
}

# Publishing --------------------------------------------------------------------------------------


def publish_options(
    *,
    channel: str | None = None,
    key: str | None = None,
    headers: Sequence[tuple[str, str]] | None = None,
    expires: float | None = None,
) -> PublishOptions:
    """Return the options that are published with each message."""
    options: PublishOptions = {"headers": headers, "expires": expires}
    if channel is not None:
        options["channel"] = channel
    if key is not None:
        options["key"] = key.encode("utf-8", "surrogateescape")
    return options


async def publish_texts(
    url: str, class_id: int | str, options: PublishOptions, texts: Sequence[str]
) -> int:
    """Publish each text as a message. Return their number."""
    async with simplebus.connect(url, reconnect=None) as bus:
        await bus.publish_many(
            [text.encode("utf-8", "surrogateescape") for text in texts],
            class_id=class_id,
            **options,
        )
        await bus.drain()
    return len(texts)


async def publish_input(url: str, class_id: int | str, options: PublishOptions) -> int:
    """Publish each line of standard input, without its line end. Return their number."""
    count = 0
    async with simplebus.connect(url, reconnect=None) as bus:
        reader = read_stdin_lines()
        while lines := await reader.read_lines():
            await bus.publish_many(lines, class_id=class_id, confirm=False, **options)
            count += len(lines)
        await bus.drain()
    return count


async def publish_generated(
    url: str,
    class_id: int | str,
    options: PublishOptions,
    *,
    count: int,
    size: int,
    rate: float | None,
) -> int:
    """Publish `count` numbered messages of `size` bytes, at most `rate` per second.

    A terminal shows a progress bar.
    """
    batch_size = max(1, _BATCH_BYTES // (size + 1))
    if rate is not None:
        batch_size = min(batch_size, max(1, int(rate / _BATCHES_PER_SECOND)))
    async with simplebus.connect(url, reconnect=None) as bus:
        with progress() as bar:
            task = bar.add_task("publishing", total=count)
            start = trio.current_time()
            sent = 0
            while sent < count:
                stop = min(sent + batch_size, count)
                await bus.publish_many(
                    [generate_payload(number, size) for number in range(sent, stop)],
                    class_id=class_id,
                    confirm=False,
                    **options,
                )
                sent = stop
                bar.update(task, completed=sent)
                if rate is not None:
                    await trio.sleep_until(start + sent / rate)
            await bus.drain()
    return count


def generate_payload(number: int, size: int) -> bytes:
    """Return a payload of `size` bytes that begins with its number."""
    return (b"%010d " % number).ljust(size, b".")[:size]


def progress() -> Progress:
    """Return a progress bar on standard error, disabled without a terminal."""
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.completed:,.0f} of {task.total:,.0f}"),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    )


# Subscribing -------------------------------------------------------------------------------------


async def print_messages(
    url: str,
    class_id: int | str,
    channels: Sequence[str] = (),
    *,
    durable: str | None = None,
    group: str | None = None,
    by_key: bool = False,
    start: Any = "waiting",
    max_in_flight: int | None = None,
    ack_seconds: float | None = None,
    max_deliveries: int | None = None,
    backoff: Sequence[float] | None = None,
    count: int | None,
    raw: bool,
    ack: bool,
) -> signal.Signals | None:
    """Print messages of a class, one per line, until `count` are printed.

    Returns:
        The signal that stopped the command, or None.
    """
    remaining = count if count is not None else sys.maxsize
    with trio.open_signal_receiver(*_SIGNALS) as signals:
        ended_by: list[signal.Signals] = []
        async with (
            simplebus.connect(url, reconnect=None) as bus,
            bus.subscribe(
                class_id,
                *channels,
                auto_ack=False,
                durable=durable,
                group=group,
                by_key=by_key,
                start=start,
                max_in_flight=max_in_flight,
                ack_seconds=ack_seconds,
                max_deliveries=max_deliveries,
                backoff=backoff,
            ) as messages,
            trio.open_nursery() as nursery,
        ):
            nursery.start_soon(_until_signalled, signals, ended_by, nursery.cancel_scope)
            async for batch in messages.batches():
                batch = batch.part(0, min(remaining, len(batch)))
                lines = b"".join([format_line(payload, raw=raw) for payload in batch.payloads])
                await trio.to_thread.run_sync(_write, lines, abandon_on_cancel=True)
                if ack:
                    messages.ack_batch(batch)
                remaining -= len(batch)
                if not remaining:
                    break
            nursery.cancel_scope.cancel()
    return ended_by[0] if ended_by else None


async def _until_signalled(
    signals: AsyncIterator[int], ended_by: list[signal.Signals], scope: trio.CancelScope
) -> None:
    async for number in signals:
        ended_by.append(signal.Signals(number))
        scope.cancel()


def format_line(payload: bytes, *, raw: bool) -> bytes:
    """Return a payload as a line, with control characters as escapes unless `raw`."""
    if raw:
        return payload + b"\n"
    text = payload.decode("utf-8", "backslashreplace").translate(_ESCAPES)
    return text.encode() + b"\n"


def _write(data: bytes) -> None:
    """Write to standard output without a buffer, so that acknowledged lines are not lost."""
    while data:
        data = data[os.write(sys.stdout.fileno(), data) :]
