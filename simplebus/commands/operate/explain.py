"""`simplebus explain`: prints which messages wait for which subscription, and why.

The server computes the answers; this module formats them as text or JSON. Texts of other clients
are printed without control characters.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from simplebus.config.parse import URL, URL_OPTION, parse_class, parse_digits
from simplebus.console.errors import fail
from simplebus.core.limits import SEQUENCE_MAX

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
    target: Annotated[
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
    words = " ".join(target or []).split()
    number = parse_digits(words[1], SEQUENCE_MAX) if len(words) == 2 else None
    if words[:1] == ["session"] and number is not None:
        if session not in (None, number):
            fail(f"expected one session, got {number} and {session}", status=2)
        words, session = [], number
    if len(words) > 1 or (words and session is not None):
        fail(f"expected one class, channel or session, got {' '.join(words)!r}", status=2)
    from functools import partial

    import trio

    word = words[0] if words else None
    answers, error = trio.run(partial(_inquire, url, word, session))
    if error:
        fail(error)
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
                session_ids = [
                    f"{session_info.session}" for session_info in (await bus.explain()).sessions
                ]
                return [], f"{error.sentence}: {', '.join(session_ids)}"
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
        return [], _describe_unknown_name(word, [line.name for line in names.classes])


def _may_be_class(word: str, names: BusInfo) -> bool:
    """Return True if a class of this name may exist."""
    try:
        class_ = parse_class(word)
    except typer.BadParameter:
        return False
    is_listed = any(class_ in (line.name, line.class_id) for line in names.classes)
    return is_listed or names.classes_left_out > 0


def _is_used(cls: ChannelClassInfo) -> bool:
    """Return True if the class stores messages of the channel or has matching patterns."""
    return bool(cls.stored or cls.subjects or any(match.pattern for match in cls.matches))


def _describe_unknown_name(word: str, names: Sequence[str]) -> str:
    """Return an error for an unknown name, with similar names."""
    from difflib import get_close_matches

    similar = get_close_matches(word, filter(None, names), _NEAREST)
    message = f"no class is called {word!r}, and no subscription has a channel of that name"
    return f"{message}; did you mean {', '.join(similar)}?" if similar else message


# Lines -------------------------------------------------------------------------------------------


def describe_reply(info: InquireReply) -> list[Line]:
    """Return an answer as lines of text."""
    from simplebus.core.protocol.inquiry import BusInfo, ChannelInfo, ClassInfo

    if isinstance(info, BusInfo):
        return list(_bus(info))
    if isinstance(info, ClassInfo):
        return list(_class(info))
    if isinstance(info, ChannelInfo):
        return list(_channel(info))
    return list(_session(info))


def print_lines(lines: list[Line]) -> None:
    """Print lines, wrapped to the terminal's width."""
    import shutil
    import textwrap

    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
    for depth, text in lines:
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


def _bus(info: BusInfo) -> Iterator[Line]:
    from simplebus.core.broker.wait_reasons import format_bytes, format_count, format_message_count

    yield (
        0,
        f"bus {info.bus}: {format_bytes(info.memory_bytes)} of {format_bytes(info.memory_max)} "
        "are used",
    )
    for line in info.classes:
        if line.warning:
            yield 1, f"{_class_name(line.class_id, line.name)}: {line.warning}"
    yield 1, f"durability of confirmed messages: {info.level}"
    if info.failure:
        yield 1, f"JOURNAL WRITES FAIL: {info.failure}"
    if info.refused:
        yield 1, f"refused: {_counts(info.refused)}"
    yield from _heading(1, "classes", info.classes, info.classes_left_out)
    for line in info.classes:
        stored = [] if line.is_remote else [format_message_count(line.stored)]
        text = f"{_class_name(line.class_id, line.name)}: "
        text += ", ".join([*stored, format_count(line.positions, "subscription")])
        if line.publishers:
            text += f", {format_count(line.publishers, 'publisher')} waiting for space"
        yield 2, text + (f", {line.dropped:,} dropped" if line.dropped else "")
    yield from _heading(1, "sessions", info.sessions, info.sessions_left_out)
    for session in info.sessions:
        user = f", user {session.user!r}" if session.user else ""
        yield (
            2,
            f"{_format_session(session.session, session.name, session.peer)}: "
            f"{_version(session.version)}{user}",
        )


def _class(info: ClassInfo) -> Iterator[Line]:
    from simplebus.core.broker.wait_reasons import (
        format_bytes,
        format_duration,
        format_message_count,
    )
    from simplebus.core.errors import DEAD_LETTER_REASONS

    yield 0, _class_name(info.class_id, info.name)
    yield 1, info.waits_for
    stored = f"stored: {format_message_count(info.stored)}"
    if info.stored:
        stored += f" ({info.floor} to {info.head - 1}), {format_bytes(info.stored_bytes)}"
        if info.oldest_seconds is not None and info.newest_seconds is not None:
            stored += (
                f", {format_duration(info.newest_seconds)} to "
                f"{format_duration(info.oldest_seconds)} old"
            )
    limit_texts = [f"{info.stored_max:,}"] if info.stored_max else []
    limit_texts += [format_bytes(info.memory_max)] if info.memory_max else []
    if not info.unknown:
        limits = f"; at most {' and '.join(limit_texts)}, then {info.policy}" if limit_texts else ""
        yield 1, stored + limits
    if info.on_way:
        yield 1, f"not yet confirmed by the cluster: {format_message_count(info.on_way)}"
    if info.backlog:
        yield 1, f"waiting for a first subscription: {format_message_count(info.backlog)}"
    if info.retention:
        yield 1, f"retention after acknowledgement: {info.retention}"
    if info.subjects:
        yield 1, f"NATS subjects: {' '.join(info.subjects)}"
    if info.durable_before < info.head:
        pending_count = info.head - info.durable_before
        yield 1, f"not durable ({info.level}) yet: {format_message_count(pending_count)}"
    if info.purged:
        yield 1, f"purged but not yet released: {format_message_count(info.purged)}"
    yield (
        1,
        (
            f"so far: {info.delivered:,} delivered, {info.redelivered:,} redelivered, "
            f"{info.acknowledged:,} acknowledged"
        ),
    )
    dead_lettered = {k: v for k, v in info.dropped.items() if k in DEAD_LETTER_REASONS}
    if dropped := {k: v for k, v in info.dropped.items() if k not in dead_lettered}:
        yield 1, f"dropped: {_counts(dropped)}"
    if dead_lettered:
        yield 1, f"moved to dead letters: {_counts(dead_lettered)}"
    if info.dead_letters:
        class_ = info.name or info.class_id
        yield 1, f"dead letters: {info.dead_letters:,}, see simplebus dlq show {class_}"
    yield from _heading(1, "subscriptions", info.positions, info.positions_left_out)
    for position in info.positions:
        yield from _position(2, position)
    if info.publishers:
        yield from _heading(
            1, "publishers that wait for space", info.publishers, info.publishers_left_out
        )
    for publisher in info.publishers:
        state = ", gone" if publisher.is_gone else ""
        yield (
            2,
            (
                f"{_format_session(publisher.session, publisher.name, publisher.peer)}{state}: "
                f"{format_message_count(publisher.messages)}, "
                f"{format_bytes(publisher.bytes)}, since {format_duration(publisher.seconds)}"
            ),
        )


def _position(depth: int, info: PositionInfo, *, of_class: bool = False) -> Iterator[Line]:
    from simplebus.core.broker.wait_reasons import (
        complete_sentence,
        format_bytes,
        format_count,
        format_duration,
        format_message_count,
    )

    names = [
        f"{kind} {name!r}"
        for kind, name in (("durable", info.durable), ("group", info.group))
        if name
    ]
    if info.session >= 0:
        names.append(_format_session(info.session, info.name, info.peer))
        names.append(f"subscription {info.number}")
    if info.owner and (info.durable or info.group):
        names.append(f"created by user {info.owner!r}")
    if of_class:
        names.insert(0, f"class {info.class_id}")
    yield depth, ", ".join(names) or "a group"
    depth += 1
    yield depth, complete_sentence(info.waits, info.waits_for)
    limit = f" of {info.in_flight_max:,}" if info.in_flight_max else ""
    counts = [f"{info.in_flight:,}{limit} in flight ({format_bytes(info.in_flight_bytes)})"]
    if info.oldest is not None:
        counts.append(
            f"the oldest {info.oldest.sequence}, first sent "
            f"{format_duration(info.oldest.first_seconds)} ago, "
            f"again in {format_duration(info.oldest.due_seconds)}"
        )
    counts += [
        f"{count:,} {state}"
        for count, state in (
            (info.unsent, "not sent yet"),
            (info.to_redeliver, "to be sent again"),
            (info.blocked_by_key, "waiting for an earlier message of their key"),
            (info.delayed, f"delayed, the first for {format_duration(info.delayed_seconds)}"),
            (info.waiting_dead_letters, "waiting for space in the class of dead letters"),
        )
        if count
    ]
    yield depth, "; ".join(counts)
    if info.patterns:
        more = f" and {info.patterns_left_out} more" if info.patterns_left_out else ""
        yield depth, f"for {' '.join(info.patterns)}{more}"
    yield (
        depth,
        f"floor {info.floor}, cursor {info.cursor}: {format_message_count(info.lag)} behind the "
        "head",
    )
    if info.undelivered:
        yield depth, f"not delivered: {_counts(info.undelivered)}"
    for member in info.members:
        yield (
            depth,
            (
                f"{_format_session(member.session, member.name, member.peer)}: "
                f"{member.in_flight:,} of {member.in_flight_max:,}; "
                f"{complete_sentence(member.waits, member.waits_for)}"
            ),
        )
    if info.members_left_out:
        yield depth, f"and {format_count(info.members_left_out, 'member')} more"


def _channel(info: ChannelInfo) -> Iterator[Line]:
    from simplebus.core.broker.wait_reasons import format_count, format_message_count

    yield 0, f"channel {info.channel}"
    for cls in info.classes:
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
            yield 2, f"and {format_count(cls.left_out, 'subscription')} more may receive it"
    if info.classes_left_out:
        yield 1, f"and {format_count(info.classes_left_out, 'class')} more"
    for listener in info.listeners:
        target = f"queue group {listener.queue!r} of {listener.members}" if listener.queue else ""
        yield 1, f"NATS: {target or listener.peer} by {listener.pattern}"
    if info.listeners_left_out:
        yield 1, f"NATS: {info.listeners_left_out} more"


def _match(match: MatchInfo) -> str:
    if match.pattern:
        return f"{match.who}, by {match.pattern}"
    return f"{match.who}, which receives every message" if not match.why_not else match.who


def _session(info: SessionInfo) -> Iterator[Line]:
    from simplebus.core.broker.wait_reasons import (
        format_bytes,
        format_duration,
        format_message_count,
    )

    user = f", user {info.user!r}" if info.user else ""
    yield (
        0,
        f"{_format_session(info.session, info.name, info.peer)}: {_version(info.version)}{user}",
    )
    if info.waits_for:
        yield 1, info.waits_for
    limit = "at most " if info.leaves_out and info.unconfirmed else ""
    waits = f", {info.parked:,} of them waiting for space" if info.parked else ""
    yield 1, f"{limit}{format_message_count(info.unconfirmed)} unconfirmed{waits}"
    if info.pending_bytes:
        yield 1, f"{format_bytes(info.pending_bytes)} are waiting to be sent to it"
    if info.heartbeat:
        yield 1, f"a heartbeat every {format_duration(info.heartbeat)}"
    if info.refused:
        yield 1, f"refused: {_counts(info.refused)}"
    yield from _heading(1, "subscriptions", info.positions, info.positions_left_out)
    for position in info.positions:
        yield from _position(2, position, of_class=True)


def _heading(
    depth: int, title: str, items: Sequence[msgspec.Struct], left_out: int
) -> Iterator[Line]:
    count = len(items) + left_out
    if not count:
        yield depth, f"no {title}"
    elif left_out:
        yield depth, f"{title}, {len(items)} of {count:,}:"
    else:
        yield depth, f"{title}:"


def _class_name(class_id: int, name: str) -> str:
    return f"class {class_id} {name!r}" if name else f"class {class_id}"


def _format_session(session: int, name: str, peer: str) -> str:
    quoted_name = f" {name!r}" if name else ""
    return f"session {session}{quoted_name} ({peer})"


def _version(version: int) -> str:
    words = {-1: "at another server", 0: "no handshake yet"}
    return words.get(version, f"version {version}")


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{reason} {count:,}" for reason, count in sorted(counts.items()))
