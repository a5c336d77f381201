"""First inputs of the fuzz targets: the test vectors of the protocols, and small journals."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from simplebus.core.protocol.requests import NamedClass
from tests.behaviour.wire_peer import numbered
from tests.behaviour.wire_peer_v2 import connect_version2, publish, subscribe
from tests.core.protocol.vectors import VECTORS, Vector, vector_bytes
from tests.storage.journaled_broker import KeptBus

NATS_COMMANDS = (
    b'CONNECT {"verbose":true,"headers":true}\r\nPING\r\n',
    b"SUB a.*.> group 7\r\nPUB a.b.c 2\r\nhi\r\nUNSUB 7 1\r\n",
    b"PUB a reply 0\r\n\r\nPUB a 1\r\nx\r\nPUB a 1\r\ny\r\nPUB a 1\r\nz\r\n",
    b"HPUB a 22 24\r\nNATS/1.0\r\nKey: value\r\n\r\nhi\r\n+OK\r\nPONG\r\n",
)
"""Inputs of the parser of NATS commands."""


def build_seeds(target: str) -> list[bytes]:
    """Return the first inputs of a target."""
    match target:
        case "envelope":
            return [
                vector_bytes(vector, "content_")
                for name in ("valid", "invalid")
                for vector in _read("v2-envelopes", name)
            ]
        case "nats":
            return [b"\x05" + commands for commands in NATS_COMMANDS]
        case "version1":
            found = [vector_bytes(vector) for vector in _read("frames", "frames")]
            return [b"\x07" + each for each in (*found, b"".join(found))]
        case "version2":
            clients = [
                vector_bytes(vector)
                for vector in _read("v2-frames", "frames")
                if vector["sender"] == "client" and vector["kind"] != "connect"
            ]
            return [b"\x07" + each for each in (*clients, b"".join(clients))]
        case "journal":
            return list(_build_journals())
    raise ValueError(f"unknown target {target!r}")


def _read(file: str, name: str) -> list[Vector]:
    vectors: list[Vector] = json.loads((VECTORS / f"{file}.json").read_text())[name]
    return vectors


def _build_journals() -> Iterator[bytes]:
    """Yield the files of small journals, as the target `journal` divides them."""
    for is_closed in (False, True):
        directory = Path(tempfile.mkdtemp(prefix="simplebus-fuzz-"))
        bus = KeptBus(directory)
        peer = connect_version2(bus, classes=[NamedClass(id=1, name="orders")])
        peer.send(subscribe(1, 1, durable="billing"), publish(1, 0, *numbered(3)))
        bus.sync()
        if is_closed:
            bus.close()
        else:
            bus.crash()
        (segment,) = (directory / "classes" / "00001").glob("*.log")
        states = sorted((directory / "state").glob("*.log"))
        parts = segment.read_bytes().rstrip(b"\0"), states[-1].read_bytes().rstrip(b"\0")
        shutil.rmtree(directory)
        share = round(255 * len(parts[0]) / sum(map(len, parts)))
        total = sum(map(len, parts))
        while total * share // 255 < len(parts[0]):
            share += 1
        # Zeros at the end of a file are not written space, so that the parts can be divided.
        padding = total * share // 255 - len(parts[0])
        yield bytes([share]) + parts[0] + bytes(padding) + parts[1]
