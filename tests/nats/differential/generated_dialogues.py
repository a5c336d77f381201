"""Generated scripts: clients connect, subscribe, publish and unsubscribe in any order.

Few names are used, so that subjects often match subscriptions. Pedantic clients are excluded with
nats-server: it reports `Invalid Publish Subject` before the payload is complete, and again after.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import TypeVar

from hypothesis import strategies as st

from tests.nats.differential.compare import Script, Step

T = TypeVar("T")

# Creating a strategy costs more than drawing from it.
_BOOLEANS = st.booleans()
_integers = functools.cache(st.integers)


def _one_of(options: Sequence[T]) -> st.SearchStrategy[T]:
    return _one_of_these(tuple(options))


@functools.cache
def _one_of_these(options: tuple[T, ...]) -> st.SearchStrategy[T]:
    return st.sampled_from(options)


CHUNKS = _one_of([1, 2, 3, 5, 11, 64, 500])

_CLIENTS = ("a", "b", "c")
_WORDS = ("a", "b", "c", "x", "foo", "bar", "#", "in")
_PATTERN_WORDS = (*_WORDS, "*", "*", ">", "a*")
_SIDS = (b"1", b"2", b"3", b"x")


@functools.cache
def _subject(words: tuple[str, ...], with_invalid: bool) -> st.SearchStrategy[bytes]:
    joined = st.lists(_one_of(words), min_size=1, max_size=4).map(
        lambda parts: ".".join(parts).encode()
    )
    if not with_invalid:
        return joined
    return st.one_of(joined, joined, joined, _one_of([b"a..b", b".", b"a.", b">.a"]))


def _connect(draw: st.DrawFn, user: bool, with_options: bool, pedantic: bool = False) -> bytes:
    options: dict[str, object] = {
        name: draw(_BOOLEANS) for name in ("verbose", "echo") if not with_options
    }
    options["verbose"] = options.get("verbose", False)
    options["pedantic"] = pedantic and draw(_BOOLEANS)
    if not with_options and draw(_BOOLEANS):
        options["headers"] = draw(_BOOLEANS)
        if options["headers"]:
            options["no_responders"] = draw(_BOOLEANS)
        else:
            options["no_responders"] = False
    if user:
        options["user"] = draw(
            _one_of(["all", "publisher", "denied", "answerer", "answers", "overruled"])
        )
        options["pass"] = "p"
    return b"CONNECT " + json.dumps(options).encode() + b"\r\n"


@functools.cache
def _commands(user: bool, queues: bool, pedantic: bool) -> st.SearchStrategy[list[bytes]]:
    return st.lists(_command(user, queues, pedantic), min_size=1, max_size=4)


@st.composite
def _command(draw: st.DrawFn, user: bool, queues: bool, pedantic: bool) -> bytes:
    kind = draw(_one_of(["SUB", "SUB", "PUB", "PUB", "PUBS", "MANY", "UNSUB", "AGAIN"]))
    if kind == "SUB":
        queue = b" " + draw(_one_of([b"g", b"h"])) if queues and draw(_BOOLEANS) else b""
        subject = draw(_subject(_PATTERN_WORDS, with_invalid=True))
        return b"SUB %s%s %s\r\n" % (subject, queue, draw(_one_of(_SIDS)))
    if kind == "UNSUB":
        max_suffix = b"" if queues else draw(_one_of([b"", b" 1", b" 3", b" 70"]))
        return b"UNSUB %s%s\r\n" % (draw(_one_of(_SIDS)), max_suffix)
    if kind == "AGAIN":
        if draw(_integers(0, 3)):
            return b"PING\r\n"
        return _connect(draw, user, queues, pedantic)
    subject = draw(_subject((*_WORDS, "*"), with_invalid=True))
    payload = draw(_one_of([b"", b"x", b"\r\nPUB a 1\r\ny\r\n", b"\x00" * 20]))
    reply = b" " + draw(_subject(("in", "a", "x"), with_invalid=False)) if draw(_BOOLEANS) else b""
    if kind == "PUB":
        return b"PUB %s%s %d\r\n%s\r\n" % (subject, reply, len(payload), payload)
    count = draw(_integers(2, 90))
    if kind == "PUBS":  # One line before each payload: parsed as a uniform batch.
        return b"PUB %s%s %d\r\n%s\r\n" % (subject, reply, len(payload), payload) * count
    return b"".join(  # Several subjects and sizes: parsed as a mixed batch.
        b"PUB %s %d\r\n%s\r\n" % (name, len(payload) + index % 3, payload + b"z" * (index % 3))
        for index in range(count)
        for name in (subject, b"foo.x")
    )


@st.composite
def scripts(
    draw: st.DrawFn, *, user: bool = False, queues: bool = False, pedantic: bool = False
) -> Script:
    """Strategy for scripts. Clients of `user` authenticate; others may omit CONNECT. `pedantic`
    allows
    pedantic clients.
    """
    steps = []
    for client in _CLIENTS[: draw(_integers(1, 3))]:
        if user or queues or draw(_integers(0, 5)):
            steps.append(Step(client, _connect(draw, user, queues, pedantic)))
        else:
            steps.append(Step(client, b'CONNECT {"pedantic":false}\r\n'))
    names = [step.client for step in steps]
    for _ in range(draw(_integers(1, 6))):
        commands = draw(_commands(user, queues, pedantic))
        steps.append(Step(draw(_one_of(names)), b"".join(commands)))
    return tuple(steps)


_BLANKS = (b" ", b" ", b" ", b"\t", b"  ", b" \t ")
_ENDS = (b"\r\n", b"\r\n", b"\r\n", b"\n", b" \r\n")
_SIZES = (b"%d", b"%d", b"%03d", b"%09d")
_ODD = st.sampled_from(
    [b" ", b"\t", b"\r", b"\n", b"x", b"0", b"-", b"+", b".", b"\x00", b"\xff", b"{", b""]
)
_OTHERS = (
    *(b"PING", b"PONG", b"PINGx", b"PING 1", b"+OK", b"INFO {}", b"MSG a 1 1"),
    *(b"UNSUB 1", b"UNSUB 1 2", b"UNSUB 1 x", b"CONNECT {}", b'CONNECT {"verbose":false}', b"PUB"),
)


@st.composite
def _line(draw: st.DrawFn) -> bytes:
    """Strategy for a command with at most one wrong byte."""
    kind = draw(_one_of(["PUB", "PUB", "HPUB", "SUB", "other"]))
    blank = _one_of(_BLANKS)
    body = b""
    if kind == "other":
        text = draw(_one_of(_OTHERS))
    elif kind == "SUB":
        words = [b"SUB", draw(_subject(_PATTERN_WORDS, with_invalid=True)), draw(_one_of(_SIDS))]
        text = words[0] + b"".join(draw(blank) + token for token in words[1:])
    else:
        payload = draw(_one_of([b"", b"abc", b"\r\n", b"x" * 12]))
        words = [kind.encode(), draw(_subject((*_WORDS, "*"), with_invalid=True))]
        if draw(_BOOLEANS):
            words.append(b"re.ply")
        sizes = [len(payload)]
        if kind == "HPUB":
            payload = b"NATS/1.0\r\n\r\n" + payload
            sizes = [12, len(payload)]
        words += [draw(_one_of(_SIZES)) % size for size in sizes]
        text = words[0] + b"".join(draw(blank) + token for token in words[1:])
        body = payload + b"\r\n"
    if draw(_integers(0, 3)) == 0:
        text = text.lower()
    text += draw(_one_of(_ENDS)) + body
    if draw(_integers(0, 3)) == 0:
        index = draw(_integers(0, len(text) - 1))
        text = text[:index] + draw(_ODD) + text[index + draw(_integers(0, 1)) :]
    return text


_LINES = st.lists(_line(), min_size=1, max_size=3)


@st.composite
def odd_lines(draw: st.DrawFn) -> Script:
    """Strategy for one client with nearly valid lines and another client that subscribes to its
    subjects.
    """
    first = draw(
        st.sampled_from(
            [
                b'CONNECT {"pedantic":false}\r\n',
                b'CONNECT {"verbose":false,"pedantic":false}\r\n',
                b'CONNECT {"verbose":false,"pedantic":false,"headers":true}\r\n',
            ]
        )
    )
    lines = draw(_LINES)
    return (
        Step("b", b'CONNECT {"verbose":false,"headers":true}\r\nSUB > 1\r\n'),
        # The line ends complete any partial command, and the PINGs check that the server still
        # answers. Sent at once, because the output of nats-server depends on where its reads end.
        Step("a", first + b"".join(lines) + b"\r\n" * 1000, pings=1 << 30),
    )
