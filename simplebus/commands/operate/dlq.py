"""`simplebus dlq`: lists, shows, requeues and purges dead letters.

Texts of other clients are printed without control characters.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from simplebus.commands.client_options import with_client_options
from simplebus.commands.operate.explain import printable
from simplebus.commands.operate.message_text import encode_content, format_content, format_key
from simplebus.config.parse import URL, URL_OPTION, parse_class
from simplebus.console.errors import fail

if TYPE_CHECKING:
    from simplebus.client.aio.bus import Bus
    from simplebus.client.dead_letters import DeadLetter, DeadLetterFilter, DeadLetterQueue
    from simplebus.core.protocol.inquiry import ClassInfo

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help=(
        "Inspect, requeue and purge dead letters. A message that a subscription could not process "
        "becomes a dead letter, stored in the class dead.CLASS.\n\nEither name selects the dead "
        "letters: orders or dead.orders.\n\n\b\n"
        "  simplebus dlq ls\n"
        "  simplebus dlq show orders --limit 5\n"
        "  simplebus dlq requeue orders --reason max_deliveries\n"
        "  simplebus dlq purge orders --sequence 17 --yes"
    ),
)

T = TypeVar("T")

_CLASS = typer.Argument(
    parser=parse_class,
    metavar="CLASS",
    show_default=False,
    help="Class of the original messages, or class of the dead letters: its id or name.",
)
_JSON = typer.Option("--json", help="Print one JSON object per line.")
_REASON = typer.Option(
    "--reason",
    metavar="REASON",
    show_default=False,
    help="Select by reason: max_deliveries, terminated or uncarriable.",
)
_SUBSCRIPTION = typer.Option(
    "--subscription",
    metavar="NAME",
    show_default=False,
    help="Select by the durable or group that could not process the message.",
)
_SEQUENCE = typer.Option(
    "--sequence",
    min=0,
    metavar="N",
    show_default=False,
    help="Select by sequence, as `show` prints it. Repeat the option for more.",
)
_ALL = typer.Option("--all", help="Select all dead letters of the class.")


@app.command(help="List the classes with dead letters: count, oldest time and reasons.")
@with_client_options
def ls(
    class_: Annotated[
        Any,
        typer.Argument(
            parser=parse_class,
            metavar="[CLASS]",
            show_default="all classes",
            help="Only this class, by id or name.",
        ),
    ] = None,
    as_json: Annotated[bool, _JSON] = False,
    url: Annotated[str, URL_OPTION] = URL,
) -> None:
    from simplebus.client import dead_letters

    async def inspect(bus: Bus) -> list[DeadLetterQueue]:
        if class_ is None:
            return await dead_letters.list_queues(bus)
        return [await dead_letters.inspect_queue(bus, await _find(bus, class_))]

    queues = _run(url, inspect)
    for queue in queues:
        if as_json:
            _print(
                {
                    "class": queue.name,
                    "class_id": queue.class_id,
                    "letters": queue.letter_count,
                    "oldest": queue.oldest_time,
                    "reasons": dict(queue.count_by_reason),
                    "counted": queue.inspected_count,
                    "dropped": queue.dropped_count,
                }
            )
            continue
        reasons = ", ".join(
            f"{reason or 'no reason'} {n:,}" for reason, n in queue.count_by_reason.items()
        )
        if queue.inspected_count < queue.letter_count:
            reasons += f" (of the oldest {queue.inspected_count:,})"
        if queue.dropped_count:
            reasons += f"; {queue.dropped_count:,} older ones made room for them and are gone"
        oldest = f", the oldest of {_moment(queue.oldest_time)}" if queue.oldest_time else ""
        _echo(f"{queue.name}: {_letters(queue.letter_count)}{oldest}: {reasons}")
    if not queues and not as_json:
        typer.echo("no dead letters")


@app.command(help="Print dead letters, oldest first.")
@with_client_options
def show(
    class_: Annotated[Any, _CLASS],
    limit: Annotated[
        int,
        typer.Option(
            "--limit", min=1, metavar="COUNT", help="Maximum number of dead letters to print."
        ),
    ] = 20,
    reason: Annotated[str | None, _REASON] = None,
    subscription: Annotated[str | None, _SUBSCRIPTION] = None,
    as_json: Annotated[bool, _JSON] = False,
    url: Annotated[str, URL_OPTION] = URL,
) -> None:
    from simplebus.client import dead_letters

    selection = dead_letters.DeadLetterFilter(reason=reason, subscription=subscription)

    async def read(bus: Bus) -> list[DeadLetter]:
        letters: list[DeadLetter] = []
        async for batch in dead_letters.DeadLetterReader(bus, await _find(bus, class_), selection):
            letters += batch
            if len(letters) >= limit:
                break
        return letters[:limit]

    letters = _run(url, read)
    for letter in letters:
        if as_json:
            _print(_to_json(letter))
        else:
            for line in _lines(letter):
                _echo(line)
    if not letters and not as_json:
        typer.echo("no such dead letters")


@app.command(
    help=(
        "Publish dead letters again to their original classes.\n\n"
        "Each dead letter is purged after the server has confirmed its message. If the command is "
        "interrupted in between, a message may be delivered twice. The message has the headers "
        "requeued-from and requeued-count, and is delivered to every subscription of its class."
    )
)
@with_client_options
def requeue(
    class_: Annotated[Any, _CLASS],
    sequence: Annotated[list[int] | None, _SEQUENCE] = None,
    everything: Annotated[bool, _ALL] = False,
    reason: Annotated[str | None, _REASON] = None,
    subscription: Annotated[str | None, _SUBSCRIPTION] = None,
    as_json: Annotated[bool, _JSON] = False,
    url: Annotated[str, URL_OPTION] = URL,
) -> None:
    from simplebus.client import dead_letters

    selection = _choice(sequence, reason, subscription, everything=everything)

    async def work(bus: Bus) -> tuple[int, str]:
        letter_class, count, refused_count, problem = await _find(bus, class_), 0, 0, ""
        async for batch in dead_letters.DeadLetterReader(bus, letter_class, selection):
            requeued, refused = await dead_letters.requeue_letters(bus, letter_class, batch)
            count, refused_count = count + len(requeued), refused_count + len(refused)
            for letter in requeued if as_json else ():
                _print(
                    {"sequence": letter.sequence, "class": letter.source_class, "requeued": True}
                )
            for letter, error in refused[: not problem]:
                problem = f"{letter_class.name}#{letter.sequence} was refused: {error}"
        return count, problem + f"; {refused_count} were refused in all" * (refused_count > 1)

    count, problem = _run(url, work)
    _report(count, "published again", sequence, problem, as_json=as_json)


@app.command(help="Discard dead letters.")
@with_client_options
def purge(
    class_: Annotated[Any, _CLASS],
    sequence: Annotated[list[int] | None, _SEQUENCE] = None,
    everything: Annotated[bool, _ALL] = False,
    reason: Annotated[str | None, _REASON] = None,
    subscription: Annotated[str | None, _SUBSCRIPTION] = None,
    yes: Annotated[
        bool, typer.Option("--yes", help="Discard them. Without --yes, only print their number.")
    ] = False,
    as_json: Annotated[bool, _JSON] = False,
    url: Annotated[str, URL_OPTION] = URL,
) -> None:
    from simplebus.client import dead_letters

    selection = _choice(sequence, reason, subscription, everything=everything)

    async def work(bus: Bus) -> int:
        letter_class, count = await _find(bus, class_), 0
        async for batch in dead_letters.DeadLetterReader(bus, letter_class, selection):
            count += (
                await dead_letters.purge_letters(bus, letter_class, batch) if yes else len(batch)
            )
            for letter in batch if as_json and yes else ():
                _print({"sequence": letter.sequence, "class": letter.source_class, "purged": True})
        return count

    count = _run(url, work)
    if not yes:
        fail(f"{_letters(count)} would be purged; add --yes to purge them", status=2)
    _report(count, "purged", sequence, "", as_json=as_json)


def _choice(
    sequences: list[int] | None, reason: str | None, subscription: str | None, *, everything: bool
) -> DeadLetterFilter:
    from simplebus.client.dead_letters import DeadLetterFilter

    chosen = bool(sequences) or reason is not None or subscription is not None
    if chosen == everything:
        fail("expected --all, or --sequence, --reason or --subscription", status=2)
    return DeadLetterFilter(frozenset(sequences) if sequences else None, reason, subscription)


async def _find(bus: Bus, class_: int | str) -> ClassInfo:
    """Return the dead letter class of a class. Raises BusError if the class has no dead letters."""
    from simplebus.client import dead_letters
    from simplebus.core.errors import BusError

    found = await dead_letters.find_dead_letter_class(bus, class_)
    if found is None:
        if await dead_letters.has_class(bus, class_):
            raise BusError(f"class {class_} has no dead letters")
        raise BusError(f"there is no class {class_!r}")
    return found


def _run(url: str, work: Callable[[Bus], Coroutine[Any, Any, T]]) -> T:
    """Connect to the server and return the result of `work`."""
    import trio

    import simplebus

    async def connected() -> T:
        async with simplebus.connect(url, reconnect=None) as bus:
            return await work(bus)

    return trio.run(connected)


def _report(
    count: int, action: str, sequences: list[int] | None, problem: str, *, as_json: bool
) -> None:
    """Print the result; exit with status 1 if a selected dead letter was not processed."""
    if not as_json:
        typer.echo(f"{_letters(count)} {action}")
    if problem:
        fail(printable(problem))
    missing = len(set(sequences)) - count if sequences else 0
    if missing > 0:
        fail(f"{missing} of the {len(set(sequences or ()))} sequences were not found")


def _letters(count: int) -> str:
    return f"{count:,} dead letter{'' if count == 1 else 's'}"


def _lines(letter: DeadLetter) -> list[str]:
    """Return a dead letter as lines of text."""
    subscription = letter.subscription or (
        f"session {letter.session}" if letter.session else "an unnamed subscription"
    )
    if letter.attempts == "0":
        history = f" for {subscription}"
    else:
        plural = "y" if letter.attempts == "1" else "ies"
        history = f" after {letter.attempts} deliver{plural} to {subscription}"
    time = f", {_moment(letter.time)}" if letter.time else ""
    lines = [
        f"#{letter.sequence}  {letter.reason or 'no reason'}{history}{time}",
        f"    was {letter.source_class}#{letter.source_sequence}"
        + (f"  {letter.channel}" if letter.channel else "")
        + format_key(letter.key),
    ]
    if letter.error:
        lines.append(f"    error: {letter.error}")
    return lines + format_content(letter.headers, letter.payload)


def _to_json(letter: DeadLetter) -> dict[str, object]:
    """Return a dead letter as a JSON object."""
    return {
        "sequence": letter.sequence,
        "reason": letter.reason,
        "class": letter.source_class,
        "class_sequence": letter.source_sequence,
        "attempts": letter.attempts,
        "subscription": letter.subscription,
        "session": letter.session,
        "since": letter.time,
        "error": letter.error,
        "channel": letter.channel,
        **encode_content(letter.key, letter.headers, letter.payload),
    }


def _print(record: dict[str, object]) -> None:
    import msgspec

    typer.echo(msgspec.json.encode(record).decode())


def _echo(text: str) -> None:
    typer.echo(printable(text))


def _moment(seconds: str) -> str:
    """Return a header's time in ISO format, or unchanged if it is not a time."""
    try:
        return datetime.fromtimestamp(float(seconds), UTC).isoformat(" ", "seconds")
    except (ValueError, OverflowError, OSError):
        return seconds
