"""Longest holds of the event loop, in CPU time, by every kind of request at its maximum.

    python load/run.py holds [--rounds N] [--only TEXT]

No request holds the loop for longer than HOLD_MAX_S: longer work is cut into steps, between which
the server processes other clients. The server runs with an instrument that reports each step of a
millisecond or more; see `load.hold_server`. The requests run one kind after the other, and each row
is the longest step from the beginning of a kind to the beginning of the next one. `--only` measures
the kinds with a text in their title, after those whose messages they need. The clients run on
another core than the event loop: Linux charges network interrupts to the thread that they
interrupt, and on a shared core the event loop would also be charged for those of the clients. The
median of the rounds counts, because Linux also charges pauses of a virtual machine to a thread. The
row CONTROL shows these pauses: a fixed computation is repeated on the core of the event loop while
nothing else runs.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

from load import attacks
from load.brokers import HOST, REPOSITORY
from load.hold_clients import (
    HELD_MESSAGES,
    MEMBERS,
    PATIENCE_S,
    QUIET_S,
    SEPARATE_MESSAGES,
    SETTLE_S,
    SUBSCRIBERS,
    Client,
    HeldServer,
    Kinds,
    discard_all,
    encode_envelope,
    publish,
    publish_to_members,
    serving,
)
from load.measure import RunOptions
from load.nats_holds import NATS_KINDS, USER_KINDS, USERS_CONFIG
from load.processes import Process, separate_core
from load.report import Row
from simplebus.core.limits import BINDINGS_MAX, FETCH_MESSAGES_MAX, GROUP_IN_FLIGHT_MAX, Limits
from simplebus.core.protocol import frames

HOLD_MAX_S = 0.005
CONTROL = "control: a computation of 2 ms without the server"
CONTROL_S = 60.0
EXPIRY_S = 8.0
CLASSES = Limits().classes
MESSAGES = 1_000_000
CHANNELS = 50_000
BULK_MESSAGES = 100_000
CONNECTIONS = 5000
FULL, CHANNELED, VALUES, TIMED, GROUPED, REJECTED, WATCHED = 1, 2, 3, 4, 5, 7, 8
"""Classes."""
SCATTERED_CLASSES = list(range(101, 201))

HELD_BY_MEMBERS, DROPPED, OVERDUE = 21, 22, 23
"""Classes of groups whose members hold many messages."""
GAPS, ACKED = 24, 25
"""Classes whose messages are rejected and acknowledged between others."""
CONFIG = f"""
[classes."group.dropped"]
id = {DROPPED}
full = "drop_oldest"
max-messages = {HELD_MESSAGES}
[classes."group.overdue"]
id = {OVERDUE}
ack-seconds = 3
""" + "".join(f'[classes."declared.{n}"]\n' for n in range(100))


def run(run_options: RunOptions) -> list[Row]:
    """Return the rows of the scenario."""
    hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
    rounds = [_run_round(run_options) for _ in range(run_options.rounds)]
    return [_join_rounds(rows) for rows in zip(*rounds, strict=True)]


def _run_round(run_options: RunOptions) -> list[Row]:
    """Return the rows of one round."""
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        config, users_config = Path(directory) / "bus.toml", Path(directory) / "users.toml"
        config.write_text(CONFIG)
        users_config.write_text(USERS_CONFIG)
        for kinds, options in (
            (KINDS, ("--config", str(config))),
            (USER_KINDS, ("--config", str(users_config))),
            (JOURNAL_KINDS, ("--data-dir", str(Path(directory) / "data"))),
        ):
            kinds = select_kinds(kinds, run_options.only)
            if not kinds:
                continue
            with (
                serving(*options, *run_options.server_args) as server,
                separate_core(server.process.pid),
            ):
                rows += measure(server, kinds)
    if run_options.only in CONTROL:
        rows.append(measure_control())
    return [row for row in rows if run_options.only in row.title]


def _join_rounds(rows: tuple[Row, ...]) -> Row:
    """Return one row with the values of all rounds, and the note of the longest hold."""
    longest = max(rows, key=lambda row: row.median)
    return replace(longest, values=[value for row in rows for value in row.values])


def select_kinds(kinds: Kinds, only: str) -> Kinds:
    """Return the kinds with this text in their title, and the kinds that they need, in order."""
    chosen = {title: kind for title, kind in kinds.items() if only in title}
    needed = {each for kind in chosen.values() for each in NEEDED.get(kind, ())}
    return {t: kind for t, kind in kinds.items() if t in chosen or kind in needed}


def measure(server: HeldServer, kinds: Kinds) -> list[Row]:
    """Run each kind of request, and return the longest hold of each."""
    begins = []
    for kind in kinds.values():
        begins.append(time.monotonic())
        kind(server)
        time.sleep(SETTLE_S)
    holds, rows = server.holds(), []
    for number, title in enumerate(kinds):
        end = begins[number + 1] if number + 1 < len(begins) else time.monotonic()
        found = sorted(
            (hold for hold in holds if begins[number] <= hold.at < end),
            key=lambda each: -each.seconds,
        )
        long_count = sum(each.seconds > HOLD_MAX_S for each in found)
        note = f"{long_count} above {HOLD_MAX_S * 1e3:g} ms"
        if found:
            first = found[0]
            note += f"; {first.task}: {first.stack}"
            note += f"; garbage {first.gc_seconds * 1e3:.1f} ms, {first.faults} page faults"
        longest = found[0].seconds * 1e3 if found else 1.0
        rows.append(
            Row("holds", title, [longest], "ms", HOLD_MAX_S * 1e3, less_is_better=True, note=note)
        )
    return rows


def measure_control() -> Row:
    """Return the row of the longest repetition of a fixed computation."""
    arguments = map(str, (CONTROL_S, HOLD_MAX_S))
    command = [sys.executable, "-m", "load.hold_control", *arguments]
    with (
        Process("the control", command, directory=REPOSITORY) as process,
        separate_core(process.pid),
    ):
        found = json.loads(process.finish(timeout_s=2 * CONTROL_S))
    note = f"{found['long_count']} above {HOLD_MAX_S * 1e3:g} ms in {CONTROL_S:g} s"
    return Row("holds", CONTROL, [found["longest"] * 1e3], "ms", less_is_better=True, note=note)


def _timed(payload: bytes, expires_ms: int) -> bytes:
    return b"\x02" + expires_ms.to_bytes(8, "big") + payload


def _http(server: HeldServer, path: str) -> None:
    sock = socket.create_connection((HOST, server.http), timeout=PATIENCE_S)
    sock.sendall(f"GET {path} HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\n\r\n".encode())
    while sock.recv(1 << 20):
        pass
    sock.close()


# Requests ----------------------------------------------------------------------------------------


def connect_and_wait(server: HeldServer) -> None:
    Client(server, 1).close()


def publish_plain(server: HeldServer) -> None:
    """Many small messages of version 1 in large writes, to a class without a subscriber."""
    frame = frames.encode(frames.MESSAGE, class_id=FULL, content=b"0123456789abcdef")
    sock = socket.create_connection((HOST, server.tcp), timeout=PATIENCE_S)
    sock.sendall(frames.encode(frames.CONNECT, content=b"[%d]" % FULL))
    block = frame * 50_000
    for _ in range(4 * MESSAGES // 50_000):
        sock.sendall(block)
    time.sleep(1.0)
    sock.close()


def publish_large(server: HeldServer) -> None:
    """Messages of almost a mebibyte."""
    contents = (b"x" * ((1 << 20) - 100) for _ in range(64))
    publish(server, 6, contents, kind=frames.MESSAGE)


def publish_envelopes(server: HeldServer) -> None:
    contents = (encode_envelope(f"site.{n % CHANNELS}.power", b"%d" % n) for n in range(MESSAGES))
    publish(server, CHANNELED, contents, kind=frames.ENVELOPE)


def publish_timed(server: HeldServer) -> None:
    expires_ms = int((time.time() + EXPIRY_S) * 1000)
    contents = (_timed(b"%d" % n, expires_ms) for n in range(MESSAGES // 2))
    publish(server, TIMED, contents, kind=frames.ENVELOPE)


def _publish_after_bulk(
    server: HeldServer, class_ids: list[int], build_frame: Callable[[int], bytes]
) -> None:
    """Publish equal messages, so that the server reads much at once, and then other ones."""
    client = Client(server, *class_ids)
    numbers = range(2 * BULK_MESSAGES)
    equal = [
        frames.encode(frames.MESSAGE, class_id=class_ids[0], message_id=number, content=b"x" * 100)
        for number in numbers[:BULK_MESSAGES]
    ]
    for messages in (equal, [build_frame(number) for number in numbers[BULK_MESSAGES:]]):
        client.socket.sendall(b"".join(messages))
        client.read_for(QUIET_S)
    client.close()


def publish_to_classes_in_turn(server: HeldServer) -> None:
    def build_frame(number: int) -> bytes:
        class_id = SCATTERED_CLASSES[number % len(SCATTERED_CLASSES)]
        return frames.encode(frames.MESSAGE, class_id=class_id, message_id=number, content=b"x")

    _publish_after_bulk(server, SCATTERED_CLASSES, build_frame)


def publish_malformed(server: HeldServer) -> None:
    """Every other envelope has an invalid channel."""

    def build_frame(number: int) -> bytes:
        content = encode_envelope("a", b"x") if number % 2 else encode_envelope("..", b"x")
        return frames.encode(
            frames.ENVELOPE, class_id=SCATTERED_CLASSES[0], message_id=number, content=content
        )

    _publish_after_bulk(server, SCATTERED_CLASSES[:1], build_frame)


def publish_delayed(server: HeldServer) -> None:
    def build_frame(number: int) -> bytes:
        delayed = b"\x04" + (100 + number % 5000).to_bytes(8, "big") + b"x"
        return frames.encode(
            frames.ENVELOPE, class_id=SCATTERED_CLASSES[1], message_id=number, content=delayed
        )

    _publish_after_bulk(server, SCATTERED_CLASSES[1:2], build_frame)


def expire(server: HeldServer) -> None:
    """Wait until the messages of `publish_timed` have expired, which a durable has not received."""
    client = Client(server, TIMED)
    client.subscribe(TIMED, durable="late", max_in_flight=1)
    client.close()
    time.sleep(EXPIRY_S)


def fetch(server: HeldServer) -> None:
    client = Client(server)
    for _ in range(20):
        client.send(frames.FETCH, {"count": FETCH_MESSAGES_MAX, "times": True}, class_id=CHANNELED)
    client.wait(frames.FETCH, 20)
    client.close()


def subscribe_with_filter(server: HeldServer) -> None:
    client = Client(server, CHANNELED)
    client.subscribe(CHANNELED, start="earliest", channels=["site.7.*"])
    client.read_for(QUIET_S)
    patterns = [f"site.{n}.*" for n in range(BINDINGS_MAX)]
    client.subscribe(CHANNELED, 2, start="earliest", channels=patterns)
    client.read_for(QUIET_S)
    client.subscribe(CHANNELED, 3, start={"time": time.time() - 1})
    client.read_for(QUIET_S)
    client.close()


def ack_in_ranges(server: HeldServer) -> None:
    """Receive a million messages, ack every other one, and then the others."""
    client = Client(server, FULL)
    client.subscribe(FULL, start="earliest", durable="acks", max_in_flight=MESSAGES)
    client.read_for(QUIET_S)
    for remainder in (0, 1):
        acks = b"".join(
            frames.encode_ack(class_id=1, timer_index=0, first=n, last=n + 1)
            for n in range(remainder, MESSAGES, 2)
        )
        client.socket.sendall(acks)
        client.read_for(QUIET_S)
    client.close()


def nack_in_ranges(server: HeldServer) -> None:
    client = Client(server, FULL)
    client.subscribe(FULL, durable="acks", max_in_flight=MESSAGES)
    client.read_for(QUIET_S)
    first = MESSAGES
    nacks = b"".join(
        frames.encode(frames.NACK, class_id=1, content=b"%d-%d 60000" % (n, n + 1))
        for n in range(first, first + MESSAGES // 8, 2)
    )
    client.socket.sendall(nacks)
    client.read_for(QUIET_S)
    client.close()


def nack_and_hand_over(server: HeldServer) -> None:
    """Reject messages in a subscription without a durable, and continue with another one."""
    contents = (b"%d" % n for n in range(MESSAGES // 4))
    publish(server, REJECTED, contents, kind=frames.MESSAGE)
    client = Client(server, REJECTED)
    client.subscribe(REJECTED, max_in_flight=MESSAGES)
    client.read_for(QUIET_S)
    nacks = b"".join(
        frames.encode(frames.NACK, class_id=1, content=b"%d-%d 60000" % (n, n + 1))
        for n in range(0, MESSAGES // 8, 2)
    )
    client.socket.sendall(nacks)
    client.read_for(QUIET_S)
    client.close()
    time.sleep(SETTLE_S)
    client = Client(server, REJECTED)
    client.subscribe(REJECTED, max_in_flight=MESSAGES)
    client.read_for(QUIET_S)
    client.close()


def reject_at_once(server: HeldServer) -> None:
    """Extend, delay and give up the messages between gaps with one request each."""
    for number, options in enumerate(({"durable": "rejecting"}, {"group": "rejecting"})):
        client = Client(server, GAPS)
        client.subscribe(GAPS, start="new", max_in_flight=SEPARATE_MESSAGES, **options)
        contents = (b"%d" % n for n in range(SEPARATE_MESSAGES))
        publish(server, GAPS, contents, kind=frames.MESSAGE)
        client.read_for(QUIET_S)
        first, last = number * SEPARATE_MESSAGES, (number + 1) * SEPARATE_MESSAGES
        nacks = b"".join(
            frames.encode(frames.NACK, class_id=1, content=b"%d-%d 0" % (n, n + 1))
            for n in range(first, last, 2)
        )
        client.socket.sendall(nacks)
        client.read_for(QUIET_S)
        for kind, option in (
            (frames.WORKING, b""),
            (frames.NACK, b" 1"),
            (frames.NACK, b" terminate"),
        ):
            content = b"%d-%d" % (first, last) + option
            client.socket.sendall(frames.encode(kind, class_id=1, content=content))
            client.read_for(QUIET_S)
        client.close()


def ack_members_messages(server: HeldServer) -> None:
    """Acknowledge the messages of a group's member one by one, in random order."""
    client = Client(server, ACKED)
    client.subscribe(ACKED, group="acking", max_in_flight=SEPARATE_MESSAGES)
    contents = (b"%d" % n for n in range(SEPARATE_MESSAGES))
    publish(server, ACKED, contents, kind=frames.MESSAGE)
    client.read_for(QUIET_S)
    part = GROUP_IN_FLIGHT_MAX
    for first in range(0, SEPARATE_MESSAGES, part):
        ids = list(range(first, min(first + part, SEPARATE_MESSAGES)))
        Random(1).shuffle(ids)
        acks = (frames.encode_ack(class_id=1, timer_index=0, first=n, last=n + 1) for n in ids)
        client.socket.sendall(b"".join(acks))
        client.read_for(QUIET_S)
    client.close()


def purge(server: HeldServer) -> None:
    client = Client(server)
    client.send(frames.PURGE, {}, class_id=CHANNELED)
    client.wait(frames.PURGE)
    client.send(frames.PURGE, {}, class_id=FULL)
    client.wait(frames.PURGE)
    client.close()


def open_groups(server: HeldServer) -> None:
    """A thousand members of a group, and of a key-ordered group, with many messages, that
    disconnect.
    """
    contents = (encode_envelope(f"key.{n % 5000}", b"%d" % n) for n in range(MESSAGES // 4))
    publish(server, GROUPED, contents, kind=frames.ENVELOPE)
    for by_key in (False, True):
        clients = [Client(server, GROUPED) for _ in range(MEMBERS // 500)]
        for number in range(1, MEMBERS // len(clients) + 1):
            for client in clients:
                body = {"group": f"g {by_key}", "by_key": by_key, "start": "earliest"}
                client.send(frames.SUBSCRIBE, body, class_id=GROUPED, number=number)
        for client in clients:
            client.read_for(QUIET_S)
            client.close()


def with_members(
    class_id: int, act: Callable[[HeldServer, list[Client]], object]
) -> Callable[[HeldServer], object]:
    """Return a kind that acts while a thousand members of a group, and then of a key-ordered group,
    hold many messages.
    """

    def act_on_groups(server: HeldServer) -> None:
        for by_key in (False, True):
            clients = [Client(server, class_id) for _ in range(2)]
            for number in range(1, MEMBERS // len(clients) + 1):
                for client in clients:
                    body = {"group": "members", "by_key": by_key}
                    client.send(frames.SUBSCRIBE, body, class_id=class_id, number=number)
            sockets = [client.socket for client in clients]
            for client in clients:
                client.read_for(QUIET_S)
            readers = threading.Thread(target=discard_all, args=(sockets,), daemon=True)
            readers.start()
            publish_to_members(server, class_id)
            act(server, clients)
            time.sleep(SETTLE_S)
            for sock in sockets:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
            readers.join()

    return act_on_groups


def purge_held(server: HeldServer, clients: list[Client]) -> None:
    client = Client(server)
    client.send(frames.PURGE, {}, class_id=HELD_BY_MEMBERS)
    client.wait(frames.PURGE)
    client.close()


def drop_held(server: HeldServer, clients: list[Client]) -> None:
    publish_to_members(server, DROPPED)


def wait_for_overdue(server: HeldServer, clients: list[Client]) -> None:
    time.sleep(EXPIRY_S)


def leave(server: HeldServer, clients: list[Client]) -> None:
    clients[0].socket.shutdown(socket.SHUT_RDWR)


def keep_last_values(server: HeldServer) -> None:
    reader = Client(server, {"id": VALUES, "last_values": True})
    reader.subscribe(VALUES)
    reader.close()
    contents = (encode_envelope(f"sensor.{n % CHANNELS}", b"%d" % n) for n in range(4 * CHANNELS))
    publish(server, VALUES, contents, kind=frames.ENVELOPE)
    client = Client(server, VALUES)
    client.subscribe(VALUES, start="last_values")
    client.read_for(QUIET_S)
    client.close()


def publish_to_many(server: HeldServer) -> None:
    """Publish to subscribers with a connection each, in large and in small writes."""
    sockets = [_subscribe_version_1(server, WATCHED) for _ in range(SUBSCRIBERS)]
    readers = threading.Thread(target=discard_all, args=(sockets,), daemon=True)
    readers.start()
    publisher = Client(server, WATCHED)
    frame = frames.encode(frames.MESSAGE, class_id=WATCHED, content=b"0123456789abcdef")
    for count in (1, 1000, 1, 1):
        publisher.socket.sendall(count * frame)
        publisher.read_for(QUIET_S)
    publisher.close()
    for sock in sockets:
        sock.shutdown(socket.SHUT_RDWR)
    readers.join()


def _subscribe_version_1(server: HeldServer, class_id: int) -> socket.socket:
    sock = socket.create_connection((HOST, server.tcp), timeout=PATIENCE_S)
    sock.sendall(frames.encode(frames.CONNECT, content=b"[%d]" % class_id))
    sock.sendall(frames.encode(frames.SUBSCRIBE, class_id=class_id))
    return sock


def declare_classes(server: HeldServer) -> None:
    Client(server, *(f"class {n}" for n in range(CLASSES - 500))).close()


def create_durables(server: HeldServer) -> None:
    """Many durables in many classes."""
    for part in range(4):
        client = Client(server, *(f"class {n}" for n in range(1000 * part, 1000 * part + 800)))
        client.close()
    client = Client(server, "class 1", FULL)
    for number in range(1, 1001):
        body = {"durable": f"d {number}"}
        client.send(frames.SUBSCRIBE, body, class_id=FULL, number=number)
    client.wait(frames.SUBSCRIBE, 1000)
    client.close()


def inquire(server: HeldServer) -> None:
    client = Client(server)
    for body in (
        {"about": "bus"},
        {"about": "class", "class": FULL},
        {"about": "class", "class": CHANNELED},
        {"about": "class", "class": GROUPED},
        {"about": "channel", "channel": "site.7.power"},
        {"about": "session", "session": 0},
    ):
        client.send(frames.INQUIRE, body)
        client.wait(frames.INQUIRE)
    client.close()


def read_http(server: HeldServer) -> None:
    """Each page of the HTTP port, while many classes and connections exist."""
    sockets = [
        socket.create_connection((HOST, server.nats), timeout=PATIENCE_S)
        for _ in range(CONNECTIONS)
    ]
    for sock in sockets:
        sock.sendall(b'CONNECT {"verbose":false}\r\nSUB a.%d 1\r\nPING\r\n' % sock.fileno())
    for path in (
        *("/metrics", "/facts", "/healthz", "/varz", "/classz", "/subsz?subs=1&limit=100000", "/"),
        f"/connz?limit={2 * CONNECTIONS}&subs=1",
        f"/connz?limit={2 * CONNECTIONS}&sort=bytes_to",
    ):
        _http(server, path)
    for sock in sockets:
        sock.close()


def reload(server: HeldServer) -> None:
    """Reload the settings while many classes and connections exist."""
    sockets = []
    for _ in range(CONNECTIONS // 2):
        for port, greeting in (
            (server.nats, b'CONNECT {"verbose":false}\r\n'),
            (server.tcp, frames.encode(frames.CONNECT, content=b"[%d]" % FULL)),
        ):
            sockets.append(socket.create_connection((HOST, port), timeout=PATIENCE_S))
            sockets[-1].sendall(greeting)
    time.sleep(SETTLE_S)
    os.kill(server.process.pid, signal.SIGHUP)
    time.sleep(SETTLE_S)
    for sock in sockets:
        sock.close()


def attack(kind: str) -> Callable[[HeldServer], object]:
    """Return an attack of `load.attacks` as a kind of request."""
    return lambda server: attacks.ATTACKS[kind](server.tcp, server.nats)


KINDS: Kinds = {
    "connect": connect_and_wait,
    "messages of version 1, 4,000,000": publish_plain,
    "messages of 1 MiB": publish_large,
    "envelopes, 1,000,000 with 50,000 channels": publish_envelopes,
    "envelopes with expiry, 500,000": publish_timed,
    "expiry of these": expire,
    "messages to 100 classes in turn, 100,000": publish_to_classes_in_turn,
    "50,000 malformed envelopes between others": publish_malformed,
    "messages with 5,000 delays, 100,000": publish_delayed,
    "Fetch, 20 of the largest": fetch,
    "Subscribe from the first of 1,000,000, with patterns": subscribe_with_filter,
    "Acks of 1,000,000 messages, one by one": ack_in_ranges,
    "Nacks of 62,500 messages, one by one": nack_in_ranges,
    "62,500 Nacks without a durable, and the next Subscribe": nack_and_hand_over,
    "groups with 1,000 members": open_groups,
    "Nacks of 60,000 messages between gaps": reject_at_once,
    "Acks of a member, one by one, in random order": ack_members_messages,
    "Purge of 200,000 messages of 1,000 members": with_members(HELD_BY_MEMBERS, purge_held),
    "drop_oldest with 1,000 members": with_members(DROPPED, drop_held),
    "ack timeouts of 1,000 members": with_members(OVERDUE, wait_for_overdue),
    "500 of 1,000 members leave": with_members(HELD_BY_MEMBERS, leave),
    "last values of 50,000 channels": keep_last_values,
    "a message to 5,000 connections": publish_to_many,
    "Purge of 5,000,000 messages": purge,
    "Connect with 3,596 new classes": declare_classes,
    "Inquire, every kind": inquire,
    "HTTP pages with 5,000 connections": read_http,
    "reload with 5,000 connections": reload,
    **NATS_KINDS,
    "61,440 patterns": attack("patterns"),
    "200,000 NATS wildcards": attack("wildcards"),
    "5,000 silent connections": attack("connections"),
}
JOURNAL_KINDS: Kinds = {
    "journal: Connect with 3,596 new classes": declare_classes,
    "journal: 1,000 durables": create_durables,
    "journal: 1,000,000 envelopes": publish_envelopes,
    "journal: messages of version 1, 4,000,000": publish_plain,
    "journal: Acks of 1,000,000 messages, one by one": ack_in_ranges,
    "journal: Purge": purge,
}
"""Kinds of requests that are measured with a journal, and with its snapshots."""
NEEDED: dict[Callable[[HeldServer], object], tuple[Callable[[HeldServer], object], ...]] = {
    expire: (publish_timed,),
    fetch: (publish_envelopes,),
    subscribe_with_filter: (publish_envelopes,),
    ack_in_ranges: (publish_plain,),
    nack_in_ranges: (publish_plain, ack_in_ranges),
    purge: (publish_plain, publish_envelopes),
    inquire: (publish_plain, publish_envelopes, declare_classes),
    read_http: (declare_classes,),
    reload: (declare_classes,),
}
"""Kinds that create the messages or classes that a kind needs."""
