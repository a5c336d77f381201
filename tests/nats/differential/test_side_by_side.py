"""Dialogues that need sockets or time: TLS, slow clients, connection limits, lame duck mode.

Both servers run during the test. Timeouts are configured; a client waits until it is closed.
"""

from __future__ import annotations

import contextlib
import signal
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

from tests.nats.differential.side_by_side import (
    GREETING,
    PATIENCE_SECONDS,
    Pair,
    Peer,
    Side,
    side_by_side,
)
from tests.support.certificates import CertificateAuthority
from tests.support.certificates import CertificatePair as Certificate

pytestmark = pytest.mark.xdist_group("nats-side-by-side")

CLIENTS_MAX = 4
PENDING_BYTES_MAX = 2 << 20
SMALL_BYTES = 20_000
"""Receive buffer of a slow client, in bytes."""
TLS_SECONDS = 4
"""A busy machine may be late with a handshake."""
ADA = "ada@example.com"
CONF = {
    "required": "max_connections: {clients}\ntls {{ {tls} }}",
    "first": """
        max_connections: {clients}
        tls {{ {tls}, handshake_first: true, verify_and_map: true, ca_file: "{ca}" }}
        authorization {{
            users = [{{ user: "{ada}", permissions {{ publish: {{ deny: "secret" }} }} }}]
        }}
    """,
    "optional": """
        write_deadline: "2s"
        allow_non_tls: true
        tls {{ {tls}, verify: true, ca_file: "{ca}" }}
    """,
    "plain": """
        max_connections: {clients}
        max_payload: 65536
        max_pending: {pending}
        lame_duck_grace_period: "5s"
        lame_duck_duration: "30s"
    """,
}
"""Configurations of nats-server."""
TOML = {
    "required": "[nats]\nmax-connections = {clients}\n[nats.tls]\n{tls}",
    "first": """
        [nats]
        max-connections = {clients}
        [[nats.users]]
        user = "{ada}"
        password = "unused"
        permissions = {{ publish = {{ deny = ["secret"] }} }}
        [nats.tls]
        {tls}
        handshake-first = true
        verify-and-map = true
        ca = "{ca}"
    """,
    "optional": """
        [nats]
        write-timeout = 2
        [nats.tls]
        {tls}
        optional = true
        verify = true
        ca = "{ca}"
    """,
    "plain": """
        [nats]
        max-connections = {clients}
        max-payload = 65536
        max-pending = {pending}
        lame-duck-grace = 5
        lame-duck-time = 1
    """,
}
"""Configurations of simplebus."""


@dataclass(frozen=True)
class Papers:
    """Certificates."""

    authority: CertificateAuthority
    own: Certificate
    """The servers',"""
    ada: Certificate
    bob: Certificate
    """those of two clients,"""
    eve: Certificate
    """and one that the authority has not signed."""


@pytest.fixture(scope="module")
def papers(tmp_path_factory: pytest.TempPathFactory) -> Papers:
    authority = CertificateAuthority(tmp_path_factory.mktemp("tls"))
    other = CertificateAuthority(tmp_path_factory.mktemp("other"), "other")
    ada = authority.issue("ada", email=ADA)
    return Papers(
        authority, authority.issue("localhost"), ada, authority.issue("bob"), other.issue("eve")
    )


@pytest.fixture(scope="module")
def pairs(papers: Papers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, Pair]]:
    """Run all server pairs."""
    own, words = (
        papers.own,
        {
            "clients": CLIENTS_MAX,
            "ca": papers.authority.path,
            "ada": ADA,
            "pending": PENDING_BYTES_MAX,
        },
    )
    conf_tls = f'cert_file: "{own.cert}", key_file: "{own.key}", timeout: {TLS_SECONDS}'
    toml_tls = f'cert = "{own.cert}"\nkey = "{own.key}"\ntimeout = {TLS_SECONDS}'
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(len(CONF)) as pool:

        def start(case: str) -> Pair:
            conf = CONF[case].format(tls=conf_tls, **words)
            toml = TOML[case].format(tls=toml_tls, **words)
            return stack.enter_context(side_by_side(tmp_path_factory.mktemp(case), conf, toml))

        yield dict(zip(CONF, pool.map(start, CONF), strict=True))


def trusting(papers: Papers, own: Certificate | None = None) -> ssl.SSLContext:
    """Return a client's TLS context, with or without a client certificate."""
    made = ssl.create_default_context(cafile=str(papers.authority.path))
    if own is not None:
        made.load_cert_chain(own.cert, own.key)
    return made


# TLS after INFO -----------------------------------------------------------------------------------


def a_conversation(side: Side, papers: Papers) -> Any:
    peer = side.peer().use_tls(trusting(papers)).greet()
    return peer.send(b"SUB a 1\r\nPUB a 2\r\nhi\r\nnonsense\r\n").rest().story


def the_second_info(side: Side, papers: Papers) -> Any:
    peer = side.peer().use_tls(trusting(papers))
    return peer.greet(b'CONNECT {"protocol":1,"tls_required":true}\r\nPING\r\n').settle().story


def the_oldest_version(side: Side, papers: Papers) -> Any:
    context = trusting(papers)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    return side.peer().use_tls(context).greet().story


def going_on_in_clear(side: Side, papers: Papers) -> Any:
    return side.peer().send(GREETING).rest().story


def a_short_word_in_clear(side: Side, papers: Papers) -> Any:
    return side.peer().send(b"PING\r\n").rest().story


def tls_before_info(side: Side, papers: Papers) -> Any:
    return side.peer(first=trusting(papers), hears=False).story


def garbage(side: Side, papers: Papers) -> Any:
    peer = side.peer(hears=False).send(b"\x16\x03\x01\x00\x05nonsense").rest()
    return b"-ERR" in peer.received, peer.ending  # Beside that an alert, which is no word.


def one_too_many(side: Side, papers: Papers) -> Any:
    """Connect above the limit before the TLS handshake."""
    inside = let_in(lambda: side.peer().use_tls(trusting(papers)).greet())
    return side.peer().rest().story, [peer.settle().ending for peer in inside]


def let_in(come: Callable[[], Peer], count: int = CLIENTS_MAX) -> list[Peer]:
    """Connect this many clients; retry until the server notices that earlier ones left."""
    inside: list[Peer] = []
    deadline = time.monotonic() + PATIENCE_SECONDS
    while len(inside) < count:
        assert time.monotonic() < deadline, "there is no room for them"
        peer = come()
        if not peer.ending:
            inside.append(peer)
    return inside


# TLS first, users from certificates ---------------------------------------------------------------


def who_it_is(side: Side, papers: Papers) -> Any:
    peer = side.peer(first=trusting(papers, papers.ada)).greet()
    return peer.send(b"PUB secret 0\r\n\r\n").settle().story


def nobody_who_is_known(side: Side, papers: Papers) -> Any:
    return side.peer(first=trusting(papers, papers.bob)).send(GREETING).rest().story


def clear_words_first(side: Side, papers: Papers) -> Any:
    peer = side.peer(hears=False).send(GREETING).rest()
    return b"-ERR" in peer.received, b"INFO" in peer.received, peer.ending


def one_too_many_first(side: Side, papers: Papers) -> Any:
    """The refusal is plain text although the client expects TLS."""
    inside = let_in(lambda: side.peer(first=trusting(papers, papers.ada), hears=False).greet())
    clear = bytes(side.peer(hears=False).rest().received)
    surprised = side.peer(first=trusting(papers, papers.ada), hears=False).ending
    return clear, surprised, [peer.settle().ending for peer in inside]


# Optional TLS with certificates -------------------------------------------------------------------


def both_kinds_meet(side: Side, papers: Papers) -> Any:
    plain = side.peer().greet(b'CONNECT {"verbose":false,"tls_required":true}\r\nPING\r\n')
    secret = side.peer().use_tls(trusting(papers, papers.ada)).greet()
    secret.send(b"SUB x 1\r\n").settle()
    plain.send(b"PUB x 2\r\nhi\r\n").settle()
    return plain.story, secret.settle().story


def without_a_certificate(side: Side, papers: Papers) -> Any:
    return side.peer().use_tls(trusting(papers)).send(GREETING).rest().story


def without_a_certificate_in_the_oldest_version(side: Side, papers: Papers) -> Any:
    context = trusting(papers)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    return side.peer().use_tls(context).send(GREETING).rest().story


def with_somebody_else_s_certificate(side: Side, papers: Papers) -> Any:
    return side.peer().use_tls(trusting(papers, papers.eve)).send(GREETING).rest().story


def tls_behind_clear_words(side: Side, papers: Papers) -> Any:
    return side.peer().greet().use_tls(trusting(papers, papers.ada)).ending


# Slow clients ----------------------------------------------------------------------------------

BODY = bytes(65_000)
BATCH = 10
BATCHES = 16
"""More than sockets and PENDING_BYTES_MAX hold, together."""
MESSAGE = b"MSG a 1 65000\r\n" + BODY + b"\r\n"


def slow(side: Side, subject: bytes) -> Peer:
    peer = side.peer(kept_bytes=SMALL_BYTES).greet()
    return peer.send(b"SUB %b 1\r\nSUB q 2\r\n" % subject).settle()


def asking(side: Side) -> Peer:
    """Connect a client that requests no-responders replies."""
    peer = side.peer()
    peer.greet(b'CONNECT {"verbose":false,"headers":true,"no_responders":true}\r\nPING\r\n')
    return peer.send(b"SUB _INBOX.> 1\r\n").settle()


def much(subject: bytes) -> bytes:
    return b"PUB %b 65000\r\n%b\r\n" % (subject, BODY) * BATCH


def one_that_does_not_read(side: Side, papers: Papers) -> Any:
    """A slow consumer is closed without an error line; other clients continue."""
    stuck, other, publisher = slow(side, b"a"), side.peer().greet(), asking(side)
    other.send(b"SUB a 1\r\n").settle()
    begin = len(other.words)
    for batch in range(1, BATCHES + 1):
        publisher.send(much(b"a")).settle()
        other.until_bytes(begin + batch * BATCH * len(MESSAGE))
    publisher.send(b"PUB q _INBOX.1 0\r\n\r\n").settle()
    assert stuck.rest().received.startswith(b"INFO")
    heard = stuck.words.partition(MESSAGE[:10])
    everything = MESSAGE * BATCH * BATCHES
    return (
        (heard[2] != b"", len(heard[2]) < len(everything)),
        everything.startswith(heard[1] + heard[2]),
        other.words[begin:] == everything,
        publisher.story,
        other.settle().ending,
        stuck.ending,
    )


def one_that_takes_nothing_for_too_long(side: Side, papers: Papers) -> Any:
    """The client stays below max_pending and exceeds the write timeout."""
    stuck, publisher = slow(side, b"d"), asking(side)
    for _ in range(BATCHES):
        publisher.send(much(b"d")).settle()
    deadline = time.monotonic() + PATIENCE_SECONDS
    while b"503" not in publisher.received:
        assert time.monotonic() < deadline, "it is still there"
        publisher.send(b"PUB q _INBOX.1 0\r\n\r\n").settle()
        time.sleep(0.01)
    return publisher.ending, b"-ERR" in stuck.rest().received, stuck.ending


# Connection limits --------------------------------------------------------------------------------


def one_client_too_many(side: Side, papers: Papers) -> Any:
    inside = let_in(lambda: side.peer().greet())
    outside = side.peer().send(GREETING).rest().story, side.peer().rest().story
    inside.pop().socket.close()
    (late,) = let_in(lambda: side.peer().greet(), 1)
    return outside, late.settle().story, [peer.settle().ending for peer in inside]


DIALOGUES: dict[str, tuple[Callable[[Side, Papers], Any], ...]] = {
    "required": (
        a_conversation,
        the_second_info,
        the_oldest_version,
        going_on_in_clear,
        a_short_word_in_clear,
        tls_before_info,
        garbage,
        one_too_many,
    ),
    "first": (who_it_is, nobody_who_is_known, clear_words_first, garbage, one_too_many_first),
    "optional": (
        both_kinds_meet,
        without_a_certificate,
        without_a_certificate_in_the_oldest_version,
        with_somebody_else_s_certificate,
        tls_behind_clear_words,
        one_that_takes_nothing_for_too_long,
    ),
    "plain": (
        one_that_does_not_read,
        one_client_too_many,
    ),
}


@pytest.mark.parametrize(
    ("case", "dialogue"),
    [(case, dialogue) for case, them in DIALOGUES.items() for dialogue in them],
    ids=lambda it: it if isinstance(it, str) else it.__name__,
)
def test_dialogues_match_nats_server(
    pairs: Mapping[str, Pair],
    papers: Papers,
    case: str,
    dialogue: Callable[[Side, Papers], Any],
) -> None:
    theirs, ours = pairs[case].told(lambda side: dialogue(side, papers))
    assert ours == theirs


# Timeouts and lame duck mode ----------------------------------------------------------------------


def late_ones(side: Side) -> Any:
    """Clients that do not start the TLS handshake in time."""
    half = side.peer(hears=False).send(b"\x16\x03\x01\x02\x00\x01")
    silent = side.peer(hears=False)
    return [(bytes(it.rest().received).startswith(b"INFO"), it.ending) for it in (half, silent)]


def those_who_need_not(side: Side) -> Any:
    half = side.peer().send(b"\x16\x03\x01\x02\x00\x01")
    begun = side.peer().send(GREETING[:1])
    silent = side.peer()
    story = half.rest().story  # Now the others are taken for such as want no TLS.
    return story, begun.greet(GREETING[1:]).story, silent.greet().story


def lame_duck(side: Side) -> Any:
    new, old, ungreeted = side.peer(), side.peer().greet(), side.peer()
    new.greet(b'CONNECT {"verbose":false,"protocol":1}\r\nPING\r\n').send(b"SUB a 1\r\n").settle()
    ungreeted.send(b'CONNECT {"protocol":1}\r\n').until(b"+OK\r\n")
    side.process.send_signal(signal.SIGUSR2)
    new.until(b'"ldm":true')
    refused = how_it_is_refused(side)
    old.send(b"PUB a 2\r\nhi\r\n").settle()
    new.settle()
    ungreeted.greet(b"PING\r\n").settle()
    stories = [one.rest().story for one in (new, old, ungreeted)]
    return refused, stories, side.process.wait(PATIENCE_SECONDS)


def how_it_is_refused(side: Side) -> str:
    """Return the refusal of a connection during lame duck mode."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        try:
            side.peer(hears=False)
        except OSError as error:
            return type(error).__name__
        time.sleep(0.005)
    return "it is not"


def test_timed_behaviour_matches_nats_server(pairs: Mapping[str, Pair]) -> None:
    asked = {  # It ends those servers whose lame duck it is: this test comes last.
        "required": late_ones,
        "first": late_ones,
        "optional": those_who_need_not,
        "plain": lame_duck,
    }
    with ThreadPoolExecutor(len(asked)) as pool:
        told = pool.map(lambda case: pairs[case].told(asked[case]), asked)
        for case, (theirs, ours) in zip(asked, told, strict=True):
            assert ours == theirs, case
