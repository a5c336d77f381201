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
        lame_duck_grace_period: "15s"
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
        lame-duck-grace = 15
        lame-duck-time = 1
    """,
}
"""Configurations of simplebus."""


@dataclass(frozen=True)
class Certificates:
    """Certificates."""

    authority: CertificateAuthority
    certificate: Certificate
    """The servers',"""
    ada: Certificate
    bob: Certificate
    """those of two clients,"""
    eve: Certificate
    """and one that the authority has not signed."""


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    authority = CertificateAuthority(tmp_path_factory.mktemp("tls"))
    other_authority = CertificateAuthority(tmp_path_factory.mktemp("other"), "other")
    ada = authority.issue("ada", email=ADA)
    return Certificates(
        authority,
        authority.issue("localhost"),
        ada,
        authority.issue("bob"),
        other_authority.issue("eve"),
    )


@pytest.fixture(scope="module")
def pairs(
    certificates: Certificates, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Mapping[str, Pair]]:
    """Run all server pairs."""
    certificate, config_template = (
        certificates.certificate,
        {
            "clients": CLIENTS_MAX,
            "ca": certificates.authority.path,
            "ada": ADA,
            "pending": PENDING_BYTES_MAX,
        },
    )
    conf_tls = (
        f'cert_file: "{certificate.cert}", key_file: "{certificate.key}", timeout: {TLS_SECONDS}'
    )
    toml_tls = f'cert = "{certificate.cert}"\nkey = "{certificate.key}"\ntimeout = {TLS_SECONDS}'
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(len(CONF)) as pool:

        def start(case: str) -> Pair:
            conf = CONF[case].format(tls=conf_tls, **config_template)
            toml = TOML[case].format(tls=toml_tls, **config_template)
            return stack.enter_context(side_by_side(tmp_path_factory.mktemp(case), conf, toml))

        yield dict(zip(CONF, pool.map(start, CONF), strict=True))


def tls_context(
    certificates: Certificates, certificate: Certificate | None = None
) -> ssl.SSLContext:
    """Return a client's TLS context, with or without a client certificate."""
    context = ssl.create_default_context(cafile=str(certificates.authority.path))
    if certificate is not None:
        context.load_cert_chain(certificate.cert, certificate.key)
    return context


# TLS after INFO -----------------------------------------------------------------------------------


def conversation_over_tls(server: Side, certificates: Certificates) -> Any:
    peer = server.peer().use_tls(tls_context(certificates)).greet()
    return peer.send(b"SUB a 1\r\nPUB a 2\r\nhi\r\nnonsense\r\n").read_until_closed().story


def second_info(server: Side, certificates: Certificates) -> Any:
    peer = server.peer().use_tls(tls_context(certificates))
    return peer.greet(b'CONNECT {"protocol":1,"tls_required":true}\r\nPING\r\n').settle().story


def oldest_tls_version(server: Side, certificates: Certificates) -> Any:
    context = tls_context(certificates)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    return server.peer().use_tls(context).greet().story


def plain_connect(server: Side, certificates: Certificates) -> Any:
    return server.peer().send(GREETING).read_until_closed().story


def plain_ping(server: Side, certificates: Certificates) -> Any:
    return server.peer().send(b"PING\r\n").read_until_closed().story


def tls_before_info(server: Side, certificates: Certificates) -> Any:
    return server.peer(tls_context=tls_context(certificates), awaits_info=False).story


def invalid_handshake(server: Side, certificates: Certificates) -> Any:
    peer = server.peer(awaits_info=False).send(b"\x16\x03\x01\x00\x05nonsense").read_until_closed()
    return b"-ERR" in peer.received, peer.ending  # Besides these, a TLS alert.


def connection_above_limit(server: Side, certificates: Certificates) -> Any:
    """Connect above the limit before the TLS handshake."""
    accepted = connect_clients(lambda: server.peer().use_tls(tls_context(certificates)).greet())
    return server.peer().read_until_closed().story, [peer.settle().ending for peer in accepted]


def connect_clients(open_peer: Callable[[], Peer], count: int = CLIENTS_MAX) -> list[Peer]:
    """Connect this many clients; retry until the server notices that earlier ones left."""
    accepted: list[Peer] = []
    deadline = time.monotonic() + PATIENCE_SECONDS
    while len(accepted) < count:
        assert time.monotonic() < deadline, "clients are still refused"
        peer = open_peer()
        if not peer.ending:
            accepted.append(peer)
    return accepted


# TLS first, users from certificates ---------------------------------------------------------------


def user_of_certificate(server: Side, certificates: Certificates) -> Any:
    peer = server.peer(tls_context=tls_context(certificates, certificates.ada)).greet()
    return peer.send(b"PUB secret 0\r\n\r\n").settle().story


def certificate_without_user(server: Side, certificates: Certificates) -> Any:
    return (
        server.peer(tls_context=tls_context(certificates, certificates.bob))
        .send(GREETING)
        .read_until_closed()
        .story
    )


def plain_text_before_tls(server: Side, certificates: Certificates) -> Any:
    peer = server.peer(awaits_info=False).send(GREETING).read_until_closed()
    return b"-ERR" in peer.received, b"INFO" in peer.received, peer.ending


def connection_above_limit_before_tls(server: Side, certificates: Certificates) -> Any:
    """The refusal is plain text although the client expects TLS."""
    accepted = connect_clients(
        lambda: server.peer(
            tls_context=tls_context(certificates, certificates.ada), awaits_info=False
        ).greet()
    )
    clear = bytes(server.peer(awaits_info=False).read_until_closed().received)
    surprised = server.peer(
        tls_context=tls_context(certificates, certificates.ada), awaits_info=False
    ).ending
    return clear, surprised, [peer.settle().ending for peer in accepted]


# Optional TLS with certificates -------------------------------------------------------------------


def plain_and_tls_clients(server: Side, certificates: Certificates) -> Any:
    plain = server.peer().greet(b'CONNECT {"verbose":false,"tls_required":true}\r\nPING\r\n')
    secret = server.peer().use_tls(tls_context(certificates, certificates.ada)).greet()
    secret.send(b"SUB x 1\r\n").settle()
    plain.send(b"PUB x 2\r\nhi\r\n").settle()
    return plain.story, secret.settle().story


def missing_certificate(server: Side, certificates: Certificates) -> Any:
    return server.peer().use_tls(tls_context(certificates)).send(GREETING).read_until_closed().story


def missing_certificate_in_oldest_tls_version(server: Side, certificates: Certificates) -> Any:
    context = tls_context(certificates)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    return server.peer().use_tls(context).send(GREETING).read_until_closed().story


def certificate_of_unknown_authority(server: Side, certificates: Certificates) -> Any:
    return (
        server.peer()
        .use_tls(tls_context(certificates, certificates.eve))
        .send(GREETING)
        .read_until_closed()
        .story
    )


def tls_after_plain_text(server: Side, certificates: Certificates) -> Any:
    return server.peer().greet().use_tls(tls_context(certificates, certificates.ada)).ending


# Slow clients ----------------------------------------------------------------------------------

BODY = bytes(65_000)
BATCH = 10
BATCHES = 16
"""Together more than the sockets' buffers and PENDING_BYTES_MAX."""
MESSAGE = b"MSG a 1 65000\r\n" + BODY + b"\r\n"


def slow(server: Side, subject: bytes) -> Peer:
    peer = server.peer(kept_bytes=SMALL_BYTES).greet()
    return peer.send(b"SUB %b 1\r\nSUB q 2\r\n" % subject).settle()


def requester(server: Side) -> Peer:
    """Connect a client that requests no-responders replies."""
    peer = server.peer()
    peer.greet(b'CONNECT {"verbose":false,"headers":true,"no_responders":true}\r\nPING\r\n')
    return peer.send(b"SUB _INBOX.> 1\r\n").settle()


def publish_batch(subject: bytes) -> bytes:
    return b"PUB %b 65000\r\n%b\r\n" % (subject, BODY) * BATCH


def client_that_does_not_read(server: Side, certificates: Certificates) -> Any:
    """A slow consumer is closed without an error line; other clients continue."""
    stuck, reader, publisher = slow(server, b"a"), server.peer().greet(), requester(server)
    reader.send(b"SUB a 1\r\n").settle()
    start = len(reader.text)
    for batch in range(1, BATCHES + 1):
        publisher.send(publish_batch(b"a")).settle()
        reader.until_bytes(start + batch * BATCH * len(MESSAGE))
    publisher.send(b"PUB q _INBOX.1 0\r\n\r\n").settle()
    assert stuck.read_until_closed().received.startswith(b"INFO")
    received = stuck.text.partition(MESSAGE[:10])
    all_messages = MESSAGE * BATCH * BATCHES
    return (
        (received[2] != b"", len(received[2]) < len(all_messages)),
        all_messages.startswith(received[1] + received[2]),
        reader.text[start:] == all_messages,
        publisher.story,
        reader.settle().ending,
        stuck.ending,
    )


def client_above_write_timeout(server: Side, certificates: Certificates) -> Any:
    """The client stays below max_pending and exceeds the write timeout."""
    stuck, publisher = slow(server, b"d"), requester(server)
    for _ in range(BATCHES):
        publisher.send(publish_batch(b"d")).settle()
    deadline = time.monotonic() + PATIENCE_SECONDS
    while b"503" not in publisher.received:
        assert time.monotonic() < deadline, "the slow client is still connected"
        publisher.send(b"PUB q _INBOX.1 0\r\n\r\n").settle()
        time.sleep(0.01)
    return publisher.ending, b"-ERR" in stuck.read_until_closed().received, stuck.ending


# Connection limits --------------------------------------------------------------------------------


def client_above_limit(server: Side, certificates: Certificates) -> Any:
    accepted = connect_clients(lambda: server.peer().greet())
    refused = (
        server.peer().send(GREETING).read_until_closed().story,
        server.peer().read_until_closed().story,
    )
    accepted.pop().socket.close()
    (next_client,) = connect_clients(lambda: server.peer().greet(), 1)
    return refused, next_client.settle().story, [peer.settle().ending for peer in accepted]


DIALOGUES: dict[str, tuple[Callable[[Side, Certificates], Any], ...]] = {
    "required": (
        conversation_over_tls,
        second_info,
        oldest_tls_version,
        plain_connect,
        plain_ping,
        tls_before_info,
        invalid_handshake,
        connection_above_limit,
    ),
    "first": (
        user_of_certificate,
        certificate_without_user,
        plain_text_before_tls,
        invalid_handshake,
        connection_above_limit_before_tls,
    ),
    "optional": (
        plain_and_tls_clients,
        missing_certificate,
        missing_certificate_in_oldest_tls_version,
        certificate_of_unknown_authority,
        tls_after_plain_text,
        client_above_write_timeout,
    ),
    "plain": (
        client_that_does_not_read,
        client_above_limit,
    ),
}


@pytest.mark.parametrize(
    ("case", "dialogue"),
    [(case, dialogue) for case, dialogues in DIALOGUES.items() for dialogue in dialogues],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_dialogues_match_nats_server(
    pairs: Mapping[str, Pair],
    certificates: Certificates,
    case: str,
    dialogue: Callable[[Side, Certificates], Any],
) -> None:
    expected, actual = pairs[case].run(lambda server: dialogue(server, certificates))
    assert actual == expected


# Timeouts and lame duck mode ----------------------------------------------------------------------


def late_handshakes(server: Side) -> Any:
    """Clients that do not start the TLS handshake in time."""
    half = server.peer(awaits_info=False).send(b"\x16\x03\x01\x02\x00\x01")
    silent = server.peer(awaits_info=False)
    return [
        (bytes(peer.read_until_closed().received).startswith(b"INFO"), peer.ending)
        for peer in (half, silent)
    ]


def optional_handshakes(server: Side) -> Any:
    half = server.peer().send(b"\x16\x03\x01\x02\x00\x01")
    partial = server.peer().send(GREETING[:1])
    silent = server.peer()
    story = half.read_until_closed().story  # The server now treats the other clients as plain text.
    return story, partial.greet(GREETING[1:]).story, silent.greet().story


def lame_duck(server: Side) -> Any:
    new, old, ungreeted = server.peer(), server.peer().greet(), server.peer()
    new.greet(b'CONNECT {"verbose":false,"protocol":1}\r\nPING\r\n').send(b"SUB a 1\r\n").settle()
    ungreeted.send(b'CONNECT {"protocol":1}\r\n').until(b"+OK\r\n")
    server.process.send_signal(signal.SIGUSR2)
    new.until(b'"ldm":true')
    refused = refusal_of_connection(server)
    old.send(b"PUB a 2\r\nhi\r\n").settle()
    new.settle()
    ungreeted.greet(b"PING\r\n").settle()
    stories = [peer.read_until_closed().story for peer in (new, old, ungreeted)]
    return refused, stories, server.process.wait(PATIENCE_SECONDS)


def refusal_of_connection(server: Side) -> str:
    """Return the refusal of a connection during lame duck mode."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        try:
            server.peer(awaits_info=False)
        except OSError as error:
            return type(error).__name__
        time.sleep(0.005)
    return "not refused"


def test_timed_behaviour_matches_nats_server(pairs: Mapping[str, Pair]) -> None:
    dialogues_by_case = {  # Lame duck mode ends the servers, so this test is the last one.
        "required": late_handshakes,
        "first": late_handshakes,
        "optional": optional_handshakes,
        "plain": lame_duck,
    }
    with ThreadPoolExecutor(len(dialogues_by_case)) as pool:
        results = pool.map(lambda case: pairs[case].run(dialogues_by_case[case]), dialogues_by_case)
        for case, (expected, actual) in zip(dialogues_by_case, results, strict=True):
            assert actual == expected, case
