"""NatsConnection with real nats-servers: reconnect, TLS, JetStream requests."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio

from simplebus.core.errors import BusConnectionError, RemoteProtocolError
from simplebus.nats.client import encode, jetstream_codec
from simplebus.nats.client.client import RequestReplies, ServerReady
from simplebus.nats.client.credentials import Credentials
from simplebus.nats.client.events import ReceivedMessages
from simplebus.nats.client.jetstream_codec import JetStreamError
from simplebus.net.nats_connection import (
    NatsAddress,
    NatsConnection,
    NatsConnectionEvent,
    NatsConnectionLost,
)
from tests.jetstream.nats_servers import HOST, NatsServer, nats_server
from tests.support.certificates import CertificateAuthority

PATIENCE_SECONDS = 60.0
SEED = "SUAAAAICAMCAKBQHBAEQUCYMBUHA6EARCIJRIFIWC4MBSGQ3DQOR4H776Y"


class ClientOutput:
    """Events of a connection."""

    def __init__(self) -> None:
        self.events: list[NatsConnectionEvent] = []
        self._more = trio.Event()

    def drain(self, event: NatsConnectionEvent) -> None:
        self.events.append(event)
        self._more.set()
        self._more = trio.Event()

    def all(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    async def until(self, condition: Callable[[], bool]) -> None:
        with trio.fail_after(PATIENCE_SECONDS):
            while not condition():
                await self._more.wait()


@asynccontextmanager
async def linked(*urls: str, **options: Any) -> AsyncIterator[tuple[NatsConnection, ClientOutput]]:
    output = ClientOutput()
    link = NatsConnection([NatsAddress.parse(url) for url in urls], output.drain, **options)
    async with trio.open_nursery() as nursery:
        await nursery.start(link.run)
        with trio.fail_after(PATIENCE_SECONDS):
            await link.wait_ready()
        yield link, output
        nursery.cancel_scope.cancel()


def test_silent_server_times_out() -> None:
    core = NatsConnection([NatsAddress("one")], print).core
    core.start_connection(0.0)
    for second in range(15):
        core.tick(second)
    with pytest.raises(RemoteProtocolError, match="did not answer 2 PINGs"):
        core.tick(15)


async def test_jetstream_request_publish_and_fetch(jetstream_server: NatsServer) -> None:
    count = 1000
    async with linked(jetstream_server.url) as (link, output):
        with pytest.raises(JetStreamError, match="stream not found") as missing:
            await link.api_request("STREAM.INFO.WORDS")
        assert missing.value.code in jetstream_codec.NOT_FOUND
        stream_config = {"name": "WORDS", "subjects": ["words"], "storage": "memory"}
        assert (await link.api_request("STREAM.CREATE.WORDS", stream_config))["config"][
            "name"
        ] == "WORDS"
        consumer = {"durable_name": "all", "ack_policy": "explicit"}
        consumer_request = {"stream_name": "WORDS", "config": consumer}
        await link.api_request("CONSUMER.CREATE.WORDS.all", consumer_request)

        core = link.core
        first = core.reserve_numbers(count)
        numbers = encode.format_digits(np.arange(count), 6)
        headers = (b"NATS/1.0\r\nNats-Msg-Id: me:", numbers, b"\r\n\r\n")
        batch = encode.encode_equal_messages(
            b"words", numbers, reply=core.reply_subjects(first, count), headers=headers
        )
        for _ in range(2):  # The second request succeeds.
            core.write(batch)
        link.flush()
        await output.until(
            lambda: sum(e.messages.count for e in output.all(RequestReplies)) == 2 * count
        )
        answers = output.all(RequestReplies)
        acks = [jetstream_codec.parse_pub_acks(answer.messages) for answer in answers]
        assert not any(ack.errors for ack in acks)
        sequences = np.concatenate([ack.sequences for ack in acks])
        assert sequences.tolist() == 2 * list(range(1, count + 1))
        assert sum(int(ack.duplicates.sum()) for ack in acks) == count
        assert np.concatenate([a.numbers for a in answers]).tolist() == 2 * list(
            range(first, first + count)
        )

        sid = core.subscribe("inbox.mine")
        core.publish(
            "$JS.API.CONSUMER.MSG.NEXT.WORDS.all",
            jetstream_codec.pull_request(batch=count, expires_seconds=10),
            reply="inbox.mine",
        )
        link.flush()
        await output.until(lambda: sum(e.count for e in output.all(ReceivedMessages)) == count)
        received = [e for e in output.all(ReceivedMessages) if e.count]
        assert {int(s) for each in received for s in each.sids} == {sid}
        assert [p for e in received for p in e.all_payloads()] == [
            b"%06d" % n for n in range(count)
        ]
        for each in received:
            deliveries = jetstream_codec.parse_deliveries(each)
            assert deliveries.good.all()
            assert (deliveries.attempts == 1).all()
            assert (deliveries.counts == deliveries.sequences).all()
            core.write(jetstream_codec.encode_acks(each))
        link.flush()
        state: dict[str, Any] = {}
        with trio.fail_after(PATIENCE_SECONDS):
            while state.get("ack_floor", {}).get("stream_seq") != count:
                state = await link.api_request("CONSUMER.INFO.WORDS.all")
        assert state["num_ack_pending"] == 0


async def test_reconnects_to_a_discovered_server(tmp_path: Path) -> None:
    with nats_server(tmp_path) as first:
        async with linked("nats://127.0.0.1:1", first.url) as (link, output):
            sid = link.core.subscribe("a.*")
            link.flush()
            first.kill()
            await output.until(lambda: bool(output.all(NatsConnectionLost)))
            assert not link.is_ready
            with pytest.raises(BusConnectionError, match="no connection"):
                await link.request("a.b")
            first.start()
            await output.until(lambda: len(output.all(ServerReady)) == 2)
            link.core.publish("a.b", b"again")
            link.flush()
            await output.until(lambda: bool(output.all(ReceivedMessages)))
            (message,) = output.all(ReceivedMessages)
            assert (int(message.sids[0]), message.payload(0)) == (sid, b"again")


async def test_invalid_host_name_is_skipped(
    jetstream_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cluster may announce any text as an address."""
    monkeypatch.setattr("simplebus.net.nats_connection.random.shuffle", lambda servers: None)
    async with linked("nats://a..b", jetstream_server.url) as (link, _):
        assert jetstream_server.url.endswith(link.server)


async def test_request_fails_when_the_connection_is_lost(tmp_path: Path) -> None:
    with nats_server(tmp_path) as server:
        async with linked(server.url) as (link, _):
            headers, _ = await link.request("nobody.there")
            assert jetstream_codec.parse_status(headers)[0] == jetstream_codec.NO_RESPONDERS
            link.core.subscribe("silent")
            link.flush()
            with pytest.raises(BusConnectionError, match="no reply to"):
                await link.request("silent", seconds=0.05)
            async with trio.open_nursery() as nursery:

                async def send_request() -> None:
                    with pytest.raises(BusConnectionError, match="lost the connection"):
                        await link.request("silent")

                nursery.start_soon(send_request)
                await trio.testing.wait_all_tasks_blocked(0.01)
                server.kill()


AUTH = """
authorization {{ users: [
  {{ nkey: {key} }}, {{ user: ada, password: "p w/" }}
] }}
tls {{ cert_file: "{cert}", key_file: "{pem}" }}
"""


async def test_users_and_nkeys_authenticate_over_tls(tmp_path: Path) -> None:
    authority = CertificateAuthority(tmp_path)
    pair = authority.issue("localhost")
    key = Credentials(seed=SEED).connect_fields("")["nkey"]
    trusted = ssl.create_default_context(cafile=str(authority.path))
    server_config = AUTH.format(key=key, cert=pair.cert, pem=pair.key)
    with nats_server(tmp_path, server_config) as server:
        keyed = {"credentials": Credentials(seed=SEED), "tls": trusted}
        async with linked(server.url, **keyed) as (link, _):
            assert link.core.info is not None
            assert link.core.info.tls_required
        async with linked(f"tls://ada:p%20w%2F@localhost:{server.port}", tls=trusted) as (link, _):
            assert link.is_ready


async def test_refused_connection_is_retried_and_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with nats_server(tmp_path, "authorization { token: secret }") as server:
        link = NatsConnection(
            [NatsAddress.parse(f"nats://wrong@{HOST}:{server.port}")], lambda event: None
        )
        known_servers, tries = link._servers_to_try, 0
        with trio.fail_after(PATIENCE_SECONDS), trio.CancelScope() as scope:

            def tried() -> list[NatsAddress]:
                nonlocal tries
                tries += 1
                if tries > 4:
                    scope.cancel()
                return known_servers()

            monkeypatch.setattr(link, "_servers_to_try", tried)
            await link.run()
    warnings = [r for r in caplog.messages if "Authorization Violation" in r]
    assert len(warnings) == 1
    assert "secret" not in caplog.text


@pytest.mark.parametrize("text", ["http://a", "nats://", "nats://a:b", "nats://a/b"])
def test_invalid_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected nats|[Pp]ort"):
        NatsAddress.parse(text)


def test_address_contains_credentials() -> None:
    assert str(NatsAddress.parse("a")) == "a:4222"
    assert NatsAddress.parse("nats://t@a").credentials == Credentials(token="t")
    assert NatsAddress.parse("tls://a:1").tls
