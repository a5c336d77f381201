"""Kinds of requests of NATS clients, and of users with permissions, for `load.holds`."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable

from load.brokers import HOST
from load.hold_clients import (
    MEMBERS,
    PATIENCE_S,
    QUIET_S,
    SEPARATE_MESSAGES,
    SETTLE_S,
    SUBSCRIBERS,
    Client,
    HeldServer,
    Kinds,
    discarding,
    encode_envelope,
    publish,
    publish_to_members,
)
from simplebus.core.protocol import frames

NATS_SUBJECTS = 200_000
NATS_SUBSCRIPTIONS = 150_000
ACKED_BY_NATS, ACKED_BY_NATS_QUEUE = 26, 27
"""Classes whose messages NATS clients acknowledge."""
BOUND, RESTRICTED = 60, 61
"""Class with bound subjects, and class of users with permissions."""
USERS = 100
"""Users of each kind in USERS_CONFIG."""
SUBJECT_COUNT = 10_000
CHANNEL_COUNT = 20_000
"""Different subjects, and channels, of messages to users."""
_RULES = ", ".join(f'"restricted deny.{n}.*"' for n in range(20))
USERS_CONFIG = f"""
[classes.bound]
id = {BOUND}
subjects = ["bound.>"]
[classes.restricted]
id = {RESTRICTED}
[[users]]
name = "publisher"
password = "p"
""" + "".join(
    f"""
[[users]]
name = "subjects{n}"
password = "p"
[users.nats]
subscribe = {{ deny = ["secret.{n}", "denied.*"] }}
[[users]]
name = "classes{n}"
password = "p"
[users.permissions]
subscribe = {{ allow = ["bound", "restricted"], deny = ["bound secret.{n}", {_RULES}] }}
[users.nats]
subscribe = {{ deny = ["secret.{n}"] }}
"""
    for n in range(USERS)
)


def _connect(server: HeldServer, user: str = "") -> socket.socket:
    """Return a NATS connection of a user."""
    sock = socket.create_connection((HOST, server.nats), timeout=PATIENCE_S)
    options = '"verbose":false,"pedantic":false,"headers":true'
    if user:
        options += f',"user":"{user}","pass":"p"'
    sock.sendall(f"CONNECT {{{options}}}\r\n".encode())
    return sock


def nats_publish(server: HeldServer) -> None:
    """Small NATS messages in large writes, to a thousand subscriptions of one client."""
    sock = socket.create_connection((HOST, server.nats), timeout=PATIENCE_S)
    subs = b"".join(b"SUB many.* %d\r\n" % n for n in range(1000))
    sock.sendall(
        b'CONNECT {"verbose":false,"pedantic":false,"echo":false}\r\n' + subs + b"PING\r\n"
    )
    publisher = socket.create_connection((HOST, server.nats), timeout=PATIENCE_S)
    publisher.sendall(
        b'CONNECT {"verbose":false,"pedantic":false}\r\n' + b"PUB none 1\r\nx\r\n" * 200_000
    )
    publisher.sendall(b"PUB many.a 1\r\nx\r\n" * 200 + b"PING\r\n")
    sock.settimeout(QUIET_S)
    with contextlib.suppress(TimeoutError):
        while sock.recv(1 << 20):
            pass
    publisher.close()
    sock.close()


def nats_publish_to_many(server: HeldServer) -> None:
    """Publish to NATS subscribers with a connection each, in large and in small writes."""
    sockets = [_connect(server) for _ in range(SUBSCRIBERS)]
    for sock in sockets:
        sock.sendall(b"SUB watched.* 1\r\n")
    with discarding(sockets):
        publisher = _connect(server)
        for count in (1, 1000, 1, 1):
            publisher.sendall(count * b"PUB watched.a 1\r\nx\r\n")
            time.sleep(QUIET_S)
        publisher.close()


def nats_publish_to_subjects(server: HeldServer) -> None:
    """Publish NATS messages with different subjects to one wildcard subscription."""
    subscriber, publisher = _connect(server), _connect(server)
    subscriber.sendall(b"SUB s.> 1\r\n")
    with discarding([subscriber]):
        messages = [b"PUB s.%d 0\r\n\r\n" % number for number in range(NATS_SUBJECTS)]
        publisher.sendall(b"".join(messages))
        time.sleep(QUIET_S)
        publisher.close()


def acknowledge_as_nats_client(class_id: int, member_count: int) -> Callable[[HeldServer], object]:
    """Return a kind in which a NATS client sends +ACK, -NAK, +WPI and +TERM, each for a fifth of
    its messages, and then disconnects. Several members form a queue group.
    """
    subject = b"$SB.SUB.%d.d.in_flight=%d" % (class_id, SEPARATE_MESSAGES)
    queue = b" members" if member_count > 1 else b""

    def acknowledge(server: HeldServer) -> None:
        sock = _connect(server)
        subs = [b"SUB %b%b %d\r\n" % (subject, queue, number) for number in range(member_count)]
        sock.sendall(b"".join(subs))
        replies: list[bytes] = []
        pongs = threading.Semaphore(0)
        reader = threading.Thread(target=_read_replies, args=(sock, replies, pongs), daemon=True)
        reader.start()
        time.sleep(SETTLE_S)
        publish_to_members(server, class_id)
        time.sleep(SETTLE_S)
        payloads = (b"", b"-NAK 600s", b"+WPI", b"+TERM")
        for number, payload in enumerate(payloads):
            acks = [
                b"PUB %b %d\r\n%b\r\n" % (reply, len(payload), payload)
                for reply in replies[number :: len(payloads) + 1]
            ]
            sock.sendall(b"".join(acks) + b"PING\r\n")
            pongs.acquire(timeout=PATIENCE_S)
        sock.shutdown(socket.SHUT_RDWR)
        reader.join()
        sock.close()

    return acknowledge


def _read_replies(sock: socket.socket, replies: list[bytes], pongs: threading.Semaphore) -> None:
    """Append the reply subjects of all messages, and count PONGs, until the connection ends."""
    with contextlib.suppress(ConnectionResetError), sock.makefile("rb") as lines:
        for line in lines:
            if line.startswith((b"MSG ", b"HMSG ")):
                replies.append(line.split(b" ")[3])
            elif line == b"PONG\r\n":
                pongs.release()


def connect_again(server: HeldServer) -> None:
    """Send CONNECT a second time, which ends many NATS subscriptions."""
    sock = _connect(server)
    subs = b"".join(b"SUB again.%d.* %d\r\n" % (n, n) for n in range(NATS_SUBSCRIPTIONS))
    sock.sendall(subs + b"PING\r\n")
    _wait_for_pong(sock)
    sock.sendall(b'CONNECT {"verbose":false}\r\nPING\r\n')
    _wait_for_pong(sock)
    time.sleep(SETTLE_S)
    sock.close()


def _wait_for_pong(sock: socket.socket) -> None:
    """Wait until everything that was sent is processed. Discards all other data."""
    received = b""
    while not received.endswith(b"PONG\r\n"):
        data = sock.recv(1 << 20)
        assert data, "the server closed the connection"
        received = received[-8:] + data


def publish_to_users(user_prefix: str, queue: bytes = b"") -> Callable[[HeldServer], object]:
    """Return a kind in which clients of 100 users subscribe to all subjects, plainly or as members
    of a queue group, and a client publishes on new subjects, and on subjects that are known or
    denied.
    """

    def publish_on_subjects(server: HeldServer) -> None:
        subscribers = [_connect(server, f"{user_prefix}{n}") for n in range(USERS)]
        for sock in subscribers:
            sock.sendall(b"SUB > %b 1\r\nPING\r\n" % queue)
            _wait_for_pong(sock)
        with discarding(subscribers):
            publisher = _connect(server, "publisher")
            for subject, count in ((b"new", SUBJECT_COUNT), (b"denied", SUBJECT_COUNT // 5)):
                messages = [b"PUB %b.%d 0\r\n\r\n" % (subject, n) for n in range(count)]
                publisher.sendall(b"".join(2 * messages) + b"PING\r\n")
                _wait_for_pong(publisher)
            time.sleep(QUIET_S)
            publisher.close()

    return publish_on_subjects


def deliver_class_to_users(server: HeldServer) -> None:
    """Publish messages with different channels to a class whose subjects 100 users receive."""
    subscribers = [_connect(server, f"classes{n}") for n in range(USERS)]
    for sock in subscribers:
        sock.sendall(b"SUB bound.> 1\r\nPING\r\n")
        _wait_for_pong(sock)
    with discarding(subscribers):
        contents = (encode_envelope(f"bound.{n}", b"x") for n in range(CHANNEL_COUNT))
        publish(server, BOUND, contents, kind=frames.ENVELOPE, user="publisher")
        time.sleep(QUIET_S)


def publish_channels_to_users(server: HeldServer) -> None:
    """Publish messages with different channels to a class with subscribers of 100 users."""
    clients = [Client(server, user=f"classes{n}") for n in range(USERS)]
    for client in clients:
        client.subscribe(RESTRICTED, max_in_flight=CHANNEL_COUNT)
    with discarding([client.socket for client in clients]):
        contents = (encode_envelope(f"c.{n}", b"x") for n in range(CHANNEL_COUNT))
        publish(server, RESTRICTED, contents, kind=frames.ENVELOPE, user="publisher")
        time.sleep(QUIET_S)


NATS_KINDS: Kinds = {
    "NATS messages": nats_publish,
    "a NATS message to 5,000 connections": nats_publish_to_many,
    "200,000 NATS messages with different subjects": nats_publish_to_subjects,
    "acks and nacks by a NATS client with 60,000 messages": acknowledge_as_nats_client(
        ACKED_BY_NATS, 1
    ),
    "acks and nacks by 1,000 members of a NATS queue, and their end": acknowledge_as_nats_client(
        ACKED_BY_NATS_QUEUE, MEMBERS
    ),
    "a second CONNECT of a NATS client with 150,000 subscriptions": connect_again,
}
USER_KINDS: Kinds = {
    "NATS messages to 100 users with denied subjects": publish_to_users("subjects"),
    "NATS messages to a queue group of 100 users with denied subjects": publish_to_users(
        "subjects", b"group"
    ),
    "NATS messages to 100 users with permissions for classes": publish_to_users("classes"),
    "messages of a class to NATS clients of 100 users": deliver_class_to_users,
    "messages with 20,000 channels to 100 users": publish_channels_to_users,
}
"""Kinds of requests at a server with USERS_CONFIG."""
