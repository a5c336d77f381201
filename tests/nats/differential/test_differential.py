"""Every dialogue has the same output from simplebus and nats-server.

nats-server receives each step whole; simplebus also in chunks. See `compare` for the exceptions.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings

from simplebus.core.users.users import User, Users
from simplebus.nats.limits import NatsLimits
from simplebus.nats.settings import NatsSettings
from tests.nats.differential import generated_dialogues
from tests.nats.differential.compare import ClientOutput, Reference, Script, reference
from tests.nats.differential.dialogues import ALL
from tests.nats.differential.dialogues_auth import SERVER_CASES, ServerCase
from tests.nats.running_server import NatsTestServer
from tests.nats.server.nats_peer import NatsServerHarness
from tests.support.cases import for_each

pytestmark = pytest.mark.xdist_group("nats-reference")

PLAIN = ServerCase("", NatsLimits(), None, ALL)
EVERY: dict[str, ServerCase] = {"plain": PLAIN, **SERVER_CASES}

OTHERWISE = {
    # When nats-server checks permissions, it treats the `>` of `foo.>` as an ordinary token. A user
    # who may subscribe to `foo.*` therefore receives everything below foo. simplebus refuses this.
    ("users", "subscribing to more words than allowed"),
}
"""Dialogues with an intended difference."""

# Scripts above this size are sent in larger chunks.
_LONG_BYTES = 1_500
_PIECE_BYTES = 97
_VERY_LONG_BYTES = 20_000
_THROUGH_SOCKETS = ("by hand: ", "connecting: ", "lexing: ", "headers: ", "no responders: ")


@pytest.fixture(scope="module")
def references() -> Iterator[Callable[[str], Reference]]:
    """Start nats-server for a case when it is first needed."""
    running: dict[str, Reference] = {}
    with contextlib.ExitStack() as stack:

        def get(case: str) -> Reference:
            if case not in running:
                running[case] = stack.enter_context(reference(EVERY[case].config))
            return running[case]

        yield get


def create_harness(case: ServerCase) -> NatsServerHarness:
    return NatsServerHarness(NatsSettings(limits=case.limits, users=case.auth))


def script_bytes(script: Script) -> int:
    """Return the number of bytes in a script."""
    return sum(len(step.data) for step in script if isinstance(step.data, bytes))


def chunkings(script: Script) -> tuple[int, ...]:
    count = script_bytes(script)
    if count > _VERY_LONG_BYTES:
        return (0, 4099)
    return (0, 7, _PIECE_BYTES) if count > _LONG_BYTES else (0, 1, 7)


def affordable(script: Script, chunks: int) -> int:
    return max(chunks, _PIECE_BYTES) if script_bytes(script) > _LONG_BYTES else chunks


def pooled(
    outputs: dict[str, ClientOutput],
) -> tuple[Counter[tuple[str, ...]], dict[str, ClientOutput]]:
    """Return all messages together, and the other output by client."""
    messages: Counter[tuple[str, ...]] = Counter()
    other_output = {}
    for name, output in outputs.items():
        messages.update(item[:2] + item[3:] for item in output.items if "MSG" in item[0])
        other_items = tuple(item for item in output.items if "MSG" not in item[0])
        other_output[name] = ClientOutput(other_items, output.closed)
    return messages, other_output


@for_each(
    "place",
    {
        f"{case}, {name}": (case, name)
        for case, dialogues in EVERY.items()
        for name in dialogues.scripts
    },
)
def test_dialogues_match_the_recorded_reference(
    references: Callable[[str], Reference], place: tuple[str, str]
) -> None:
    case, name = place
    script = EVERY[case].scripts[name]
    expected = references(case).play(script)
    for chunks in chunkings(script):
        actual = create_harness(EVERY[case]).play(script, chunks)
        if name.startswith("groups: "):
            assert pooled(actual) == pooled(expected), f"in chunks of {chunks}"
        elif (case, name) in OTHERWISE:
            assert actual != expected, "the output no longer differs"
        else:
            assert actual == expected, f"in chunks of {chunks}"


@settings(max_examples=3 * settings().max_examples)
@given(generated_dialogues.scripts(), generated_dialogues.CHUNKS)
def test_generated_dialogues_match_the_reference(
    references: Callable[[str], Reference], script: Script, chunks: int
) -> None:
    expected = references("plain").play(script)
    assert create_harness(PLAIN).play(script) == expected
    assert create_harness(PLAIN).play(script, affordable(script, chunks)) == expected


@settings(max_examples=2 * settings().max_examples)
@given(generated_dialogues.odd_lines())
def test_mutated_lines_match_the_reference(
    references: Callable[[str], Reference], script: Script
) -> None:
    expected = references("plain").play(script)
    assert create_harness(PLAIN).play(script) == expected
    assert create_harness(PLAIN).play(script, 1) == expected


@settings(max_examples=2 * settings().max_examples)
@given(generated_dialogues.scripts(user=True), generated_dialogues.CHUNKS)
def test_generated_user_dialogues_match_the_reference(
    references: Callable[[str], Reference], script: Script, chunks: int
) -> None:
    expected = references("users").play(script)
    assert create_harness(EVERY["users"]).play(script) == expected
    assert create_harness(EVERY["users"]).play(script, affordable(script, chunks)) == expected


@settings(max_examples=2 * settings().max_examples)
@given(generated_dialogues.scripts(queues=True), generated_dialogues.CHUNKS)
def test_generated_group_dialogues_match_the_reference(
    references: Callable[[str], Reference], script: Script, chunks: int
) -> None:
    expected = pooled(references("plain").play(script))
    assert pooled(create_harness(PLAIN).play(script)) == expected
    assert pooled(create_harness(PLAIN).play(script, affordable(script, chunks))) == expected


def test_intended_differences_exist() -> None:
    assert {
        (case, name) for case, dialogues in EVERY.items() for name in dialogues.scripts
    } >= OTHERWISE


@pytest.mark.parametrize("chunks", [0, 1])
def test_process_matches_the_reference_over_sockets(
    references: Callable[[str], Reference], shared_server: NatsTestServer, chunks: int
) -> None:
    create_harness = Reference(shared_server.port)
    for name, script in ALL.items():
        if name.startswith(_THROUGH_SOCKETS) and script_bytes(script) < _LONG_BYTES:
            assert create_harness.play(script, chunks) == references("plain").play(script), name


def test_silence_matches_the_reference() -> None:
    connect_text = b'CONNECT {"verbose":false,"user":"u","pass":"p"}\r\nPING\r\n'
    config = """
        authorization { timeout: 0.5, users = [{user: u, password: p}] }
        ping_interval: "200ms"
        ping_max: 3
    """
    limits = NatsLimits(auth_seconds=0.5, ping_seconds=0.2, pings_max=3)
    case = NatsServerHarness(NatsSettings(limits=limits, users=Users((User("u", "p"),))))
    clients = [case.client(), case.client(b"CONNEC"), case.client(connect_text)]
    for tick in range(40):
        case.nats_server.now = tick / 20
        case.nats_server.tick()
        case.settle()
    with reference(config) as reference_server:
        no_connect, partial_connect, stale = reference_server.listen(b"", b"CONNEC", connect_text)
    # nats-server also sends PINGs to clients before CONNECT. With its default times this cannot
    # happen.
    expected = [
        no_connect.replace(b"PING\r\n", b""),
        partial_connect.replace(b"PING\r\n", b""),
        stale,
    ]
    assert [client.lines() for client in clients] == expected
    assert all(client.closed for client in clients)
