"""`simplebus explain`: prints which messages wait for which subscription, and why.

The server computes the answers; this module formats them as text or JSON. Texts of other clients
are printed without control characters.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from simplebus.config.parse import URL, URL_OPTION, parse_class
from simplebus.console.errors import fail

if TYPE_CHECKING:
    import msgspec

    from simplebus.core.protocol.inquiry import (
        BusInfo,
        ChannelClassInfo,
        ChannelInfo,
        ClassInfo,
        InquireReply,
        MatchInfo,
        PositionInfo,
        SessionInfo,
    )

HELP = (
    "Explain the state of the server: which subscriptions receive which messages and why, which "
    "messages are in flight, and why messages were dropped.\n\n\b\n"
    "  simplebus explain                   summary of the server\n"
    "  simplebus explain orders            a class, by name or id\n"
    "  simplebus explain orders.eu.paid    a channel: its matching subscriptions\n"
    "  simplebus explain session 4         a session\n\n"
    "A name that is both a class and a channel is explained as both."
)

Line = tuple[int, str]
"""Indentation depth and text."""

_NEAREST = 3


def explain(
    what: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CLASS|CHANNEL|session N]",
            show_default=False,
            help="Class, channel or session to explain; by default a summary of the server.",
        ),
    ] = None,
    session: Annotated[
        int | None,
        typer.Option(
            "--session", min=0, metavar="N", show_default=False, help="Id of a session to explain."
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the server's answer, one JSON object per line.")
    ] = False,
    url: Annotated[str, URL_OPTION] = URL,
) -> None:
    """See HELP."""
    words = " ".join(what or []).split()
    if len(words) == 2 and words[0] == "session" and words[1].isascii() and words[1].isdigit():
        if session not in (None, int(words[1])):
            fail(f"two sessions were given: {words[1]} and {session}", status=2)
        words, session = [], int(words[1])
    if len(words) > 1 or (words and session is not None):
        fail(f"one class, channel or session is explained, got {' '.join(words)!r}", status=2)
    from functools import partial

    import trio

    word = words[0] if words else None
    answers, complaint = trio.run(partial(_inquire, url, word, session))
    if complaint:
        fail(complaint)
    if as_json:
        import msgspec

        for answer in answers:
            typer.echo(msgspec.json.encode(answer).decode())
        return
    for answer in answers:
        print_lines(describe_reply(answer))


async def _inquire(
    url: str, word: str | None, session: int | None
) -> tuple[list[InquireReply], str]:
    """Return the server's answers and "", or no answers and an error message."""
    import simplebus
    from simplebus.core.errors import Reason, RefusedError

    async with simplebus.connect(url, reconnect=None) as bus:
        if session is not None:
            try:
                return [await bus.explain(session=session)], ""
            except RefusedError as error:
                there = [f"{one.session}" for one in (await bus.explain()).sessions]
                return [], f"{error.sentence}: {', '.join(there)}"
        if word is None:
            return [await bus.explain()], ""
        answers: list[InquireReply] = []
        names = await bus.explain()
        if _may_be_class(word, names):
            try:
                answers.append(await bus.explain(parse_class(word)))
            except RefusedError as error:
                if error.code != Reason.UNKNOWN_CLASS:
                    raise
        try:
            channel = await bus.explain(channel=word)
        except (RefusedError, ValueError) as error:
            return answers, "" if answers else f"{word!r} is no class, and no channel: {error}"
        if channel.listeners or any(_is_used(cls) or not answers for cls in channel.classes):
            answers.append(channel)
        if answers:
            return answers, ""
        return [], _unknown(word, [line.name for line in names.classes])


def _may_be_class(word: str, names: BusInfo) -> bool:
    """Return True if a class of this name may exist."""
    try:
        class_ = parse_class(word)
    except typer.BadParameter:
        return False
    known = any(class_ in (line.name, line.class_id) for line in names.classes)
    return known or names.classes_left_out > 0


def _is_used(cls: ChannelClassInfo) -> bool:
    """Return True if the class stores messages of the channel or has matching patterns."""
    return bool(cls.stored or cls.subjects or any(match.pattern for match in cls.matches))


def _unknown(word: str, names: Sequence[str]) -> str:
    """Return an error for an unknown name, with similar names."""
    from difflib import get_close_matches

    nearest = get_close_matches(word, filter(None, names), _NEAREST)
    said = f"no class is called {word!r}, and no subscription has a channel of that name"
    return f"{said}; did you mean {', '.join(nearest)}?" if nearest else said


# Lines -------------------------------------------------------------------------------------------


def describe_reply(said: InquireReply) -> list[Line]:
    """Return an answer as lines of text."""
    from simplebus.core.protocol.inquiry import BusInfo, ChannelInfo, ClassInfo

    if isinstance(said, BusInfo):
        return list(_bus(said))
    if isinstance(said, ClassInfo):
        return list(_class(said))
    if isinstance(said, ChannelInfo):
        return list(_channel(said))
    return list(_session(said))


def print_lines(found: list[Line]) -> None:
    """Print lines, wrapped to the terminal's width."""
    import shutil
    import textwrap

    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
    for depth, text in found:
        indent, plain = "  " * depth, printable(text)
        if not width:
            typer.echo(indent + plain)
            continue
        wrapped = textwrap.wrap(
            plain,
            max(20, width),
            initial_indent=indent,
            subsequent_indent=indent + "    ",
            break_on_hyphens=False,
        )
        typer.echo("\n".join(wrapped or [""]))


def printable(text: str) -> str:
    """Return the text with control characters as escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _bus(said: BusInfo) -> Iterator[Line]:
    from simplebus.core.broker.wait_reasons import format_bytes, format_message_count

    yield (
        0,
        f"bus {said.bus}: {format_bytes(said.memory_bytes)} of {format_bytes(said.memory_max)} "
        "are used",
    )
    yield 1, f"durability of confirmed messages: {said.level}"
    if said.failure:
        yield 1, f"JOURNAL WRITES FAIL: {said.failure}"
    if said.refused:
        yield 1, f"refused: {_counts(said.refused)}"
    yield from _heading(1, "classes", said.classes, said.classes_left_out)
    for line in said.classes:
        stored = [] if line.is_elsewhere else [format_message_count(line.stored)]
        text = f"{_class_name(line.class_id, line.name)}: "
        text += ", ".join([*stored, _format_count(line.positions, "subscription")])
        if line.publishers:
            text += f", {_format_count(line.publishers, 'publisher')} waiting for room"
        yield 2, text + (f", {line.dropped:,} dropped" if line.dropped else "")
    yield from _heading(1, "sessions", said.sessions, said.sessions_left_out)
    for one in said.sessions:
        user = f", user {one.user!r}" if one.user else ""
        yield (
            2,
            f"{_format_session(one.session, one.name, one.peer)}: {_version(one.version)}{user}",
        )


def _class(said: ClassInfo) -> Iterator[Line]:
    from simplebus.core.broker.wait_reasons import (
        format_bytes,
        format_duration,
        format_message_count,
    )

    yield 0, _class_name(said.class_id, said.name)
    yield 1, said.waits_for
    stored = f"stored: {format_message_count(said.stored)}"
    if said.stored:
        stored += f" ({said.floor} to {said.head - 1}), {format_bytes(said.stored_bytes)}"
        if said.oldest_seconds is not None and said.newest_seconds is not None:
            stored += (
                f", {format_duration(said.newest_seconds)} to "
                f"{format_duration(said.oldest_seconds)} old"
            )
    bounds = [f"{said.stored_max:,}"] if said.stored_max else []
    bounds += [format_bytes(said.memory_max)] if said.memory_max else []
    if not said.unknown:
        most = f"; at most {' and '.join(bounds)}, then {said.policy}" if bounds else ""
        yield 1, stored + most
    if said.on_way:
        yield 1, f"not yet confirmed by the cluster: {format_message_count(said.on_way)}"
    if said.backlog:
        yield 1, f"waiting for a first subscription: {format_message_count(said.backlog)}"
    if said.keeps:
        yield 1, f"retention after acknowledgement: {said.keeps}"
    if said.subjects:
        yield 1, f"NATS subjects: {' '.join(said.subjects)}"
    if said.safe < said.head:
        yield 1, f"not durable ({said.level}) yet: {format_message_count(said.head - said.safe)}"
    if said.purged:
        yield 1, f"purged but not yet released: {format_message_count(said.purged)}"
    yield (
        1,
        (
            f"so far: {said.delivered:,} delivered, {said.redelivered:,} redelivered, "
            f"{said.acknowledged:,} acknowledged"
        ),
    )
    if said.dropped:
        yield 1, f"dropped: {_counts(said.dropped)}"
    if said.dead_letters:
        of = said.name or said.class_id
        yield 1, f"dead letters: {said.dead_letters:,}, see simplebus dlq show {of}"
    yield from _heading(1, "subscriptions", said.positions, said.positions_left_out)
    for position in said.positions:
        yield from _position(2, position)
    if said.publishers:
        yield from _heading(
            1, "publishers that wait for room", said.publishers, said.publishers_left_out
        )
    for each in said.publishers:
        gone = ", gone" if each.is_gone else ""
        yield (
            2,
            (
                f"{_format_session(each.session, each.name, each.peer)}{gone}: "
                f"{format_message_count(each.messages)}, "
                f"{format_bytes(each.bytes)}, since {format_duration(each.seconds)}"
            ),
        )


def _position(depth: int, said: PositionInfo, *, of_class: bool = False) -> Iterator[Line]:
    from simplebus.core.broker.wait_reasons import (
        complete_sentence,
        format_bytes,
        format_duration,
        format_message_count,
    )

    names = [
        f"{what} {name!r}"
        for what, name in (("durable", said.durable), ("group", said.group))
        if name
    ]
    if said.session >= 0:
        names.append(_format_session(said.session, said.name, said.peer))
        names.append(f"subscription {said.number}")
    if said.owner and (said.durable or said.group):
        names.append(f"made by user {said.owner!r}")
    if of_class:
        names.insert(0, f"class {said.class_id}")
    yield depth, ", ".join(names) or "a group"
    depth += 1
    yield depth, complete_sentence(said.waits, said.waits_for)
    limit = f" of {said.in_flight_max:,}" if said.in_flight_max else ""
    figures = [f"{said.in_flight:,}{limit} in flight ({format_bytes(said.in_flight_bytes)})"]
    if said.oldest is not None:
        figures.append(
            f"the oldest {said.oldest.sequence}, first sent "
            f"{format_duration(said.oldest.first_seconds)} ago, "
            f"again in {format_duration(said.oldest.due_seconds)}"
        )
    figures += [
        f"{count:,} {what}"
        for count, what in (
            (said.unsent, "not sent yet"),
            (said.again, "to be sent again"),
            (said.behind, "behind others of their key"),
            (said.put_off, f"put off, the first for {format_duration(said.put_off_seconds)}"),
            (said.unburied, "given up, without room among the dead letters"),
        )
        if count
    ]
    yield depth, "; ".join(figures)
    if said.patterns:
        more = f" and {said.patterns_left_out} more" if said.patterns_left_out else ""
        yield depth, f"for {' '.join(said.patterns)}{more}"
    yield (
        depth,
        f"floor {said.floor}, cursor {said.cursor}: {format_message_count(said.lag)} behind the "
        "head",
    )
    if said.undelivered:
        yield depth, f"not delivered: {_counts(said.undelivered)}"
    for member in said.members:
        yield (
            depth,
            (
                f"{_format_session(member.session, member.name, member.peer)}: "
                f"{member.in_flight:,} of {member.in_flight_max:,}; "
                f"{complete_sentence(member.waits, member.waits_for)}"
            ),
        )
    if said.members_left_out:
        yield depth, f"and {_format_count(said.members_left_out, 'member')} more"


def _channel(said: ChannelInfo) -> Iterator[Line]:
    from simplebus.core.broker.wait_reasons import format_message_count

    yield 0, f"channel {said.channel}"
    for cls in said.classes:
        yield (
            1,
            f"{_class_name(cls.class_id, cls.name)}: {format_message_count(cls.stored)} of it "
            "stored",
        )
        if cls.subjects:
            yield 2, f"stores NATS messages, bound by {' '.join(cls.subjects)}"
        for match in cls.matches:
            yield 2, f"goes to {_match(match)}"
        for match in cls.near:
            yield 2, f"does not go to {_match(match)}: {match.why_not}"
        if cls.left_out:
            yield 2, f"and {_format_count(cls.left_out, 'subscription')} more may get it"
    if said.classes_left_out:
        yield 1, f"and {_format_count(said.classes_left_out, 'class')} more"
    for listener in said.listeners:
        who = f"queue group {listener.queue!r} of {listener.members}" if listener.queue else ""
        yield 1, f"NATS: {who or listener.peer} by {listener.pattern}"
    if said.listeners_left_out:
        yield 1, f"NATS: {said.listeners_left_out} more"


def _match(match: MatchInfo) -> str:
    if match.pattern:
        return f"{match.who}, by {match.pattern}"
    return f"{match.who}, which gets every message" if not match.why_not else match.who


def _session(said: SessionInfo) -> Iterator[Line]:
    from simplebus.core.broker.wait_reasons import (
        format_bytes,
        format_duration,
        format_message_count,
    )

    user = f", user {said.user!r}" if said.user else ""
    yield (
        0,
        f"{_format_session(said.session, said.name, said.peer)}: {_version(said.version)}{user}",
    )
    if said.waits_for:
        yield 1, said.waits_for
    most = "at most " if said.leaves_out and said.unconfirmed else ""
    waits = f", {said.parked:,} of them waiting for room" if said.parked else ""
    yield 1, f"{most}{format_message_count(said.unconfirmed)} unconfirmed{waits}"
    if said.pending_bytes:
        yield 1, f"{format_bytes(said.pending_bytes)} are kept for it"
    if said.heartbeat:
        yield 1, f"a heartbeat every {format_duration(said.heartbeat)}"
    if said.refused:
        yield 1, f"refused: {_counts(said.refused)}"
    yield from _heading(1, "subscriptions", said.positions, said.positions_left_out)
    for position in said.positions:
        yield from _position(2, position, of_class=True)


def _heading(
    depth: int, what: str, those: Sequence[msgspec.Struct], left_out: int
) -> Iterator[Line]:
    count = len(those) + left_out
    if not count:
        yield depth, f"no {what}"
    elif left_out:
        yield depth, f"{what}, {len(those)} of {count:,}:"
    else:
        yield depth, f"{what}:"


def _class_name(class_id: int, name: str) -> str:
    return f"class {class_id} {name!r}" if name else f"class {class_id}"


def _format_session(session: int, name: str, peer: str) -> str:
    called = f" {name!r}" if name else ""
    return f"session {session}{called} ({peer})"


def _version(version: int) -> str:
    words = {-1: "at another server", 0: "no handshake yet"}
    return words.get(version, f"version {version}")


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{reason} {count:,}" for reason, count in sorted(counts.items()))


def _format_count(count: int, what: str) -> str:
    plural = "es" if what.endswith("s") else "s"
    return f"{count:,} {what}{'' if count == 1 else plural}"
