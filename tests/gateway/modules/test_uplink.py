"""Messages of an uplink reach another bus across outages."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

import simplebus
from load.ports import HOST, free_port
from simplebus.bridge.nats_connection import BridgeNatsConnection
from simplebus.client.core.messages import Message
from simplebus.config.errors import ConfigError
from simplebus.gateway import ModuleMessage
from simplebus.gateway import gateway as gateways
from simplebus.gateway.config import GatewayPlan, ModulePlan
from simplebus.gateway.gateway import Gateway
from simplebus.server.run import RunningServer
from tests.bridge.nats_copiers import connect
from tests.jetstream.nats_servers import nats_server
from tests.support.running_server import serving

PATIENCE_S = 60
open_gateway = partial(gateways.open_gateway, drain=PATIENCE_S)


@pytest.fixture(autouse=True)
def _long_flush_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("simplebus.gateway.modules.uplink.FLUSH_TIMEOUT_S", PATIENCE_S)


def plan(port: int, **settings: Any) -> GatewayPlan:
    to = {"to": f"simplebus://127.0.0.1:{port}", "class": "readings", **settings}
    return GatewayPlan((ModulePlan.of("up", "uplink", to),), (("*", "up"),))


def port_of(server: RunningServer) -> int:
    return int(server.addresses[0].rpartition(":")[2])


async def publish_numbers(gateway: Gateway, first: int, count: int) -> None:
    for number in range(first, first + count):
        await gateway.publish(ModuleMessage(b"%d" % number, {"n": str(number), "at": "roof.x"}))


async def read_messages(port: int, count: int, class_: str = "readings") -> list[Message[bytes]]:
    """Return the first messages of the class on the bus."""
    received: list[Message[bytes]] = []
    async with (
        simplebus.connect(f"simplebus://127.0.0.1:{port}") as bus,
        bus.subscribe(class_, durable="test") as messages,
    ):
        with trio.fail_after(PATIENCE_S):
            async for message in messages:
                received.append(message)
                if len(received) == count:
                    break
    return received


def numbers(messages: list[Message[bytes]]) -> list[int]:
    return [int(message.payload) for message in messages]


async def test_uplink_sends_channel_and_properties() -> None:
    async with serving() as server:
        port = port_of(server)
        async with open_gateway(plan(port, channel="other", channel_property="at")) as gateway:
            await publish_numbers(gateway, 0, 500)
            await gateway.publish(ModuleMessage(b"500"))
        received = await read_messages(port, 501)
        assert numbers(received) == list(range(501))
        assert (received[3].channel, received[500].channel) == ("roof.x", "other")
        assert dict(received[3].headers)["n"] == "3"


async def test_uplink_sends_once_after_outage(tmp_path: Path) -> None:
    find_backlogs, port = {"data_dir": str(tmp_path / "kept")}, free_port()
    async with open_gateway(plan(port, **find_backlogs)) as gateway:
        await publish_numbers(gateway, 0, 100)
    async with open_gateway(plan(port, **find_backlogs)) as gateway:
        await publish_numbers(gateway, 100, 100)
        async with serving(port=port):
            assert numbers(await read_messages(port, 200)) == list(range(200))
            await publish_numbers(gateway, 200, 50)
            assert numbers(await read_messages(port, 50)) == list(range(200, 250))


@pytest.mark.parametrize("met", [False, True])
@pytest.mark.parametrize(
    ("name", "settings"),
    [("uplink", {}), ("up", {"name": "roof"}), ("up", {"class": "readings2"})],
)
async def test_renamed_uplink_sends_stored_messages(
    name: str, settings: dict[str, str], met: bool, tmp_path: Path
) -> None:
    """The target may or may not have a connection of the uplink with its first name."""
    find_backlogs, port, sent_count = {"data_dir": str(tmp_path / "kept")}, free_port(), 0
    target_options = {"data_dir": tmp_path / "far"}
    if met:
        async with (
            serving(port=port, **target_options),
            open_gateway(plan(port, **find_backlogs)) as gateway,
        ):
            await publish_numbers(gateway, 0, 50)
            assert numbers(await read_messages(port, 50)) == list(range(50))
        sent_count = 50
    async with open_gateway(plan(port, **find_backlogs)) as gateway:
        await publish_numbers(gateway, sent_count, 100)
    other_plan = plan(port, **find_backlogs, **settings)
    server = replace(other_plan.modules[0], name=name)
    async with open_gateway(GatewayPlan((server,), (("*", name),))) as gateway:
        await publish_numbers(gateway, sent_count + 100, 100)
        async with serving(port=port, **target_options):
            is_another = "class" in settings
            received = numbers(await read_messages(port, 100 if is_another else 200))
            if is_another:
                received += numbers(await read_messages(port, 100, settings["class"]))
    assert received == list(range(sent_count, sent_count + 200))


async def test_unsendable_messages_are_dropped_and_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with serving() as server:
        async with open_gateway(plan(port_of(server), channel_property="at")) as gateway:
            await gateway.publish(ModuleMessage(b"0", {"at": "no..channel"}))
            await gateway.publish(ModuleMessage(b"1" * (2 << 20)))
            await publish_numbers(gateway, 2, 1)
            await gateway.bus.wait_quiet_async()
            module_values = gateway.statistics().modules[0].own
            assert (module_values["heard"], module_values["left_out"]) == (1, 2)
        assert numbers(await read_messages(port_of(server), 1)) == [2]
    assert caplog.text.count("dropped a message that cannot be sent") == 2


async def test_reports_loss_without_data_dir(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("simplebus.gateway.modules.uplink.FLUSH_TIMEOUT_S", 0.0)
    async with open_gateway(plan(free_port())) as gateway:
        await publish_numbers(gateway, 0, 3)
    assert "lost 3 messages that were not sent" in caplog.text


@pytest.mark.parametrize(
    ("settings", "expected_error"),
    [
        ({"to": "http://x"}, "http"),
        ({"class": -1}, "class"),
        ({"clas": "x"}, "did you mean .class."),
        ({"max_memory": 3}, "max_memory"),
    ],
)
def test_rejects_invalid_settings(settings: dict[str, Any], expected_error: str) -> None:
    with pytest.raises(ConfigError, match=expected_error):
        plan(8888, **settings)


@pytest.mark.parametrize("module_values", [{}, {"under_way": 7}])
async def test_stream_stores_each_message_once(
    module_values: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A stream that may be full gets one message at a time, unless `under_way` is set."""
    caplog.set_level("INFO", "simplebus.bridge")
    with nats_server(tmp_path) as nats:
        async with connect(nats) as connection:
            bound = {"discard": "new", "max_msgs": 1000}
            config = {"name": "READINGS", "subjects": ["roof.>"], **bound}
            await connection.nats.api_request("STREAM.CREATE.READINGS", config)
            to = {
                "to": f"nats://{HOST}:{free_port()}, {nats.url}",  # One of a cluster is down.
                "class": 7,
                "channel_property": "at",
                "stream": "READINGS",
                "data_dir": str(tmp_path / "kept"),
                **module_values,
            }
            server = GatewayPlan((ModulePlan.of("up", "uplink", to),), (("*", "up"),))
            for first in 0, 50:  # The second uplink continues where the first one stopped.
                async with open_gateway(server) as gateway:
                    await publish_numbers(gateway, first, 50)
                    with trio.fail_after(PATIENCE_S):
                        while await count_stored(connection) < first + 50:  # noqa: ASYNC110
                            await trio.sleep(0.01)
            assert await count_stored(connection) == 100
            assert ("messages are stored in stream 'READINGS' one at a time" in caplog.text) == (
                not module_values
            )


async def count_stored(connection: BridgeNatsConnection) -> int:
    return int((await connection.nats.api_request("STREAM.INFO.READINGS"))["state"]["messages"])


async def test_locked_data_dir_is_retried(
    tmp_path: Path,
) -> None:
    """A message arrives before the restarted module has opened its directory."""
    find_backlogs = {"data_dir": str(tmp_path / "kept")}
    async with serving() as server:
        port = port_of(server)
        async with (
            open_gateway() as gateway,
            open_gateway(plan(free_port(), **find_backlogs)) as other_plan,
        ):
            await publish_numbers(other_plan, 0, 10)
            await other_plan.bus.wait_quiet_async()
            await gateway.apply(plan(port, **find_backlogs))
            await publish_numbers(gateway, 10, 10)
            with trio.fail_after(PATIENCE_S):
                while gateway.statistics().modules[0].failures < 2:  # noqa: ASYNC110
                    await trio.sleep(0.01)
            for name in other_plan.names:
                await other_plan.remove(name)
            assert numbers(await read_messages(port, 20)) == list(range(20))
