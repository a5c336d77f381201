"""nats-py and nats.js with users, nkeys, a token and certificates; permissions; slow consumers."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import nkeys
import pytest
from nats.aio.client import Client
from nats.errors import Error

from tests.nats.clients.programs import javascript, outcomes
from tests.nats.running_server import (
    PATIENT,
    NatsTestServer,
    RawClient,
    on_asyncio,
    settle,
    start_server,
    wait_for,
)
from tests.support.certificates import CertificateAuthority

pytestmark = pytest.mark.xdist_group("nats clients")

PAYLOAD_MAX, PENDING_MAX = 1 << 16, 1 << 20
SEED = nkeys.encode_seed(bytes(range(32)), prefix=nkeys.PREFIX_BYTE_USER).decode()
OTHER_SEED = nkeys.encode_seed(bytes(32), prefix=nkeys.PREFIX_BYTE_USER).decode()
KEY = nkeys.from_seed(SEED.encode()).public_key.decode()

USERS_TOML = f"""
[nats]
max-payload = {PAYLOAD_MAX}
max-pending = {PENDING_MAX}

[[nats.users]]
user = "all"
password = "right"

[[nats.users]]
nkey = "{KEY}"

[[nats.users]]
user = "narrow"
password = "right"
[nats.users.permissions]
publish = {{ allow = ["narrow.>"], deny = ["narrow.secret"] }}
subscribe = {{ allow = ["narrow.>", "_INBOX.>", "shared shifts"], deny = ["narrow.secret"] }}
"""
USERS_CONF = f"""
max_payload: {PAYLOAD_MAX}
max_pending: {PENDING_MAX}
authorization: {{
    users: [
        {{ user: all, password: right }}
        {{ nkey: {KEY} }}
        {{ user: narrow, password: right, permissions: {{
            publish: {{ allow: ["narrow.>"], deny: ["narrow.secret"] }}
            subscribe: {{
                allow: ["narrow.>", "_INBOX.>", "shared shifts"]
                deny: ["narrow.secret"]
            }}
        }} }}
    ]
}}
"""
TOKEN_TOML = """
[nats]
token = "sesame"

[nats.tls]
cert = "{cert}"
key = "{key}"
ca = "{ca}"
verify = true
"""
TOKEN_CONF = """
tls: {{ cert_file: "{cert}", key_file: "{key}", ca_file: "{ca}", verify: true }}
authorization: {{ token: sesame }}
"""


@pytest.fixture(scope="module")
def users() -> Iterator[NatsTestServer]:
    with start_server(toml=USERS_TOML, conf=USERS_CONF) as server:
        yield server


@dataclass(frozen=True)
class Certified:
    """Server and client certificates of one authority."""

    server: NatsTestServer
    authority: CertificateAuthority

    def context(self, *, has_certificate: bool = True) -> ssl.SSLContext:
        """Return a client's TLS context, with or without a client certificate."""
        ssl_context = ssl.create_default_context(cafile=str(self.authority.path))
        if has_certificate:
            client_pair = self.authority.issue("client")
            ssl_context.load_cert_chain(client_pair.cert, client_pair.key)
        return ssl_context


@pytest.fixture(scope="module")
def token(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Certified]:
    authority = CertificateAuthority(tmp_path_factory.mktemp("certified"))
    server = authority.issue("localhost")
    paths = {"cert": server.cert, "key": server.key, "ca": authority.path}
    with start_server(toml=TOKEN_TOML.format(**paths), conf=TOKEN_CONF.format(**paths)) as running:
        yield Certified(running, authority)


async def connected(server: NatsTestServer, **options: Any) -> tuple[Client, list[str]]:
    """Connect a client without reconnect. Returns the client and the list of its errors."""
    errors: list[str] = []

    async def note(error: Exception) -> None:
        errors.append(str(error))

    client = Client()
    await client.connect(server.url, error_cb=note, allow_reconnect=False, **PATIENT, **options)
    return client, errors


@pytest.fixture
def collect_garbage() -> Iterator[None]:
    """Collect garbage after the test.

    nats-py drops failed connections without closing them; Python's warning must not appear in
    another
    test.
    """
    yield
    gc.collect()


forgets = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


async def is_served(server: NatsTestServer, **options: Any) -> None:
    """Check that a client receives its own messages."""
    client, errors = await connected(server, **options)
    subscription = await client.subscribe("long.and.binary")
    payloads = [bytes(PAYLOAD_MAX), b"\r\n", b"", os.urandom(1000)] * 10
    for payload in payloads:
        await client.publish("long.and.binary", payload)
    assert [(await subscription.next_msg(timeout=60)).data for _ in payloads] == payloads
    await client.close()
    assert errors == []


# Authentication -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{"user": "all", "password": "right"}, {"nkeys_seed_str": SEED}]
)
@on_asyncio
async def test_valid_credentials_are_accepted(
    users: NatsTestServer, options: dict[str, str]
) -> None:
    await is_served(users, **options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"user": "all", "password": "wrong"},
        {"user": "nobody", "password": "right"},
        {"token": "right"},
        {"nkeys_seed_str": OTHER_SEED},
    ],
)
@forgets
@pytest.mark.usefixtures("collect_garbage")
@on_asyncio
async def test_invalid_credentials_are_refused(
    users: NatsTestServer, options: dict[str, str]
) -> None:
    with pytest.raises(Error, match="Authorization Violation"):
        await connected(users, **options)


@forgets
@pytest.mark.usefixtures("collect_garbage")
@on_asyncio
async def test_client_reports_an_invalid_nkey_seed(users: NatsTestServer) -> None:
    with pytest.raises(nkeys.ErrInvalidSeed):
        await connected(users, nkeys_seed_str=SEED[:-1])
    await is_served(users, nkeys_seed_str=SEED)


@forgets
@pytest.mark.usefixtures("collect_garbage")
@on_asyncio
async def test_certificate_and_token_are_accepted(token: Certified) -> None:
    await is_served(token.server, tls=token.context(), token="sesame")
    with pytest.raises(Error, match="Authorization Violation"):
        await connected(token.server, tls=token.context(), token="wrong")


@forgets
@pytest.mark.usefixtures("collect_garbage")
@on_asyncio
async def test_missing_certificate_is_refused(token: Certified) -> None:
    with pytest.raises((Error, ssl.SSLError, OSError)):
        await connected(token.server, tls=token.context(has_certificate=False), token="sesame")


@forgets
@pytest.mark.usefixtures("collect_garbage")
@on_asyncio
async def test_client_refuses_an_untrusted_server_certificate(token: Certified) -> None:
    with pytest.raises(ssl.SSLCertVerificationError):
        await connected(token.server, tls=ssl.create_default_context(), token="sesame")


def test_nats_js_upgrades_to_tls(token: Certified) -> None:
    client_pair = token.authority.issue("client")
    paths = [str(path) for path in (token.authority.path, client_pair.cert, client_pair.key)]
    found = outcomes(javascript(), "tls", token.server.url, "sesame", *paths)
    assert found == {"length": PAYLOAD_MAX, "isRequired": True}


# Permissions --------------------------------------------------------------------------------------


@on_asyncio
async def test_denied_operations_are_reported_and_others_continue(users: NatsTestServer) -> None:
    client, errors = await connected(users, user="narrow", password="right")
    other_client, _ = await connected(users, user="all", password="right")
    all_messages = await other_client.subscribe(">")
    await settle(other_client)
    own_messages = await client.subscribe("narrow.*")
    await client.subscribe("wide.*")
    await client.subscribe("shared", queue="shifts")
    await client.subscribe("shared")
    for subject in ("wide.one", "narrow.secret", "narrow.one"):
        await client.publish(subject, b"mine")
    assert (await own_messages.next_msg(timeout=60)).subject == "narrow.one"
    for subject in ("narrow.secret", "narrow.two"):
        await other_client.publish(subject, b"theirs")
    assert (await own_messages.next_msg(timeout=60)).subject == "narrow.two"
    subjects = [(await all_messages.next_msg(timeout=60)).subject for _ in range(3)]
    assert subjects == ["narrow.one", "narrow.secret", "narrow.two"]
    await client.close()
    await other_client.close()
    assert [message.lower() for message in errors] == [
        f"nats: permissions violation for {operation}"
        for operation in (
            'subscription to "wide.*"',
            'subscription to "shared"',
            'publish to "wide.one"',
            'publish to "narrow.secret"',
        )
    ]


def test_nats_js_receives_permission_errors(users: NatsTestServer) -> None:
    assert outcomes(javascript(), "denied", users.url, "narrow", "right") == {
        "connectError": "AuthorizationError",
        "subscribeError": "PermissionViolationError",
        "publishError": 'Permissions Violation for Publish to "not.yours"',
        "isOpen": True,
    }


# Slow consumers -----------------------------------------------------------------------------------


@on_asyncio
async def test_slow_consumer_is_disconnected_without_affecting_others(
    users: NatsTestServer,
) -> None:
    hello = json.dumps({"verbose": False, "user": "all", "pass": "right"})
    publisher, publisher_errors = await connected(users, user="all", password="right")
    subscriber, subscriber_errors = await connected(users, user="all", password="right")
    with RawClient(users, f"CONNECT {hello}", "SUB flood 1", "PING") as asleep:
        asleep.read_until(b"PONG\r\n")
        count, received = 20 * PENDING_MAX // PAYLOAD_MAX, []

        async def call(message: Any) -> None:
            received.append(message.data[:4])

        await subscriber.subscribe("flood", cb=call, pending_bytes_limit=-1)
        await settle(subscriber)
        for number in range(count):
            await publisher.publish("flood", b"%04d" % number + bytes(PAYLOAD_MAX - 4))
            # A client that reads never reaches half of max_pending.
            await wait_for(
                lambda sent=number + 1: len(received) > sent - PENDING_MAX // PAYLOAD_MAX // 2
            )
        await wait_for(lambda: len(received) == count)
        assert received == [b"%04d" % number for number in range(count)]
        loop = asyncio.get_running_loop()
        remaining = await loop.run_in_executor(None, asleep.read_until_closed)
        assert len(remaining) < count * PAYLOAD_MAX
        assert b"-ERR" not in remaining[-100:]
    await publisher.close()
    await subscriber.close()
    assert publisher_errors == subscriber_errors == []
