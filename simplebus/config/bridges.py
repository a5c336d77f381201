"""The `[[bridges]]` tables of a configuration file.

[[bridges]]
name = "hq"                        names the stored positions: do not change it
to = "nats://a:4222, nats://b:4222"
classes = ["orders", 7]            unchanged; or with settings for each class:

[[bridges.copy]]
class = "orders"
rewrite = [["eu.#", "till-4.eu.#"]]

[bridges.target]                   credentials at `to`; [bridges.source] at `from`
user = "bridge"
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from simplebus.bridge.loop_header import HOPS_MAX
from simplebus.bridge.settings import BridgeSettings, CopiedClass, check_loops, is_nats_address
from simplebus.client.addresses import Address
from simplebus.client.credentials import Access
from simplebus.config.parse import parse_class
from simplebus.config.setting import COUNT, FILE, FLAG, SECONDS, TEXT, Kind, SettingsTable
from simplebus.config.table_reader import TableReader

_PASSWORD = re.compile(r"//[^/@]*:[^@]*@")
"""Password in an address."""


def _parse_address(text: str) -> str:
    if text and is_nats_address(text):
        from simplebus.bridge.nats_connection import parse_addresses

        parse_addresses(text)
    elif text:
        Address.parse(text)
    return text


def _parse_rewrite(pair: list[Any]) -> tuple[str, str]:
    if len(pair) != 2 or not all(isinstance(part, str) for part in pair):
        raise ValueError(f"expected a list of a pattern and a template, got {pair!r}")
    return pair[0], pair[1]


_CLASS = Kind("text or integer", "CLASS", parse_class, (int, str))
_ADDRESS = Kind("text", "URL", _parse_address)
_REWRITE = Kind("list of two texts", "", _parse_rewrite, (list,))
_SECRET = replace(TEXT, is_secret=True)


@dataclass(frozen=True)
class CopyTable(SettingsTable):
    """Class to copy."""

    class_: int | str = _CLASS.setting(
        "Class to copy, by name or id. From a NATS server: the class at the target.",
        is_required=True,
    )
    to: int | str | None = _CLASS.setting("Class at the target. Left out: the same.")
    channels: tuple[str, ...] = TEXT.setting(
        "Patterns of the channels to copy. Left out: all. From a NATS server: its subjects.",
        is_list=True,
    )
    rewrite: tuple[tuple[str, str], ...] = _REWRITE.setting(
        "Pattern and template of each rule that renames channels. The first matching rule applies.",
        is_list=True,
    )
    start: str = TEXT.setting(
        "First message that a new copier copies: `waiting`, `new`, `earliest` or `last`.",
        default="waiting",
    )
    stream: str = TEXT.setting(
        "JetStream stream to read, or that must store the messages. Left out: NATS without "
        "JetStream.",
        default="",
    )
    under_way: int | None = replace(COUNT, unit="messages").setting(
        "Messages in flight into the stream, 1 to 24,576. Left out: as many as keep their order."
    )

    def to_class(self) -> CopiedClass:
        """Return the class. Raises ValueError for contradictory settings."""
        values = (getattr(self, setting.field_name) for setting in self.settings())
        return CopiedClass(*values)


def _text(path: Path | None) -> str:
    return "" if path is None else str(path)


@dataclass(frozen=True)
class AccessTable(SettingsTable):
    """Credentials of a bridge at one end, and the authorities it trusts there."""

    user: str = TEXT.setting("User name.", default="")
    password: str = _SECRET.setting("Password of the user.", default="")
    token: str = _SECRET.setting("Token, instead of user and password.", default="")
    ca: Path | None = FILE.setting(
        "PEM file of trusted authorities. Left out: those of the system."
    )
    cert: Path | None = FILE.setting("PEM file with a client certificate.")
    key: Path | None = FILE.setting("PEM file with its key, if it is not in the same file.")
    credentials: Path | None = FILE.setting("TOML file with all of these keys, instead of them.")

    def to_access(self) -> Access:
        """Return the credentials. Raises ValueError for contradictions and invalid files."""
        access = Access(
            self.user, self.password, self.token, _text(self.ca), _text(self.cert), _text(self.key)
        )
        if self.credentials and access != Access():
            raise ValueError("'credentials' cannot be combined with other keys")
        file = self.credentials
        try:
            return Access.from_file(str(file)) if file else access
        except OSError as error:
            raise ValueError(f"{file} cannot be read: {error.strerror}") from None


_ACCESS = Kind("table", "", str, (), table=AccessTable)


@dataclass(frozen=True)
class BridgeTable(SettingsTable):
    """Bridge between two servers."""

    name: str = TEXT.setting(
        "Name of the bridge, under which both servers store its position: do not change it.",
        default="",
        is_required=True,
    )
    from_: str = _ADDRESS.setting(
        "Address of the source. In the file of `serve`, left out: that server.", default=""
    )
    to: str = _ADDRESS.setting(
        "Address of the target, in the same form. `nats://` and `tls://` addresses are NATS "
        "servers; those of a cluster are separated by commas.",
        default="",
    )
    classes: tuple[int | str, ...] = _CLASS.setting(
        "Classes to copy unchanged, by name or id.", is_list=True
    )
    copy: Any = Kind("list of tables", "", str, (), table=CopyTable).setting(
        "See `[[bridges.copy]]`.", is_list=True
    )
    both: bool = FLAG.setting("`true` copies in both directions.")
    hops: int = replace(COUNT, unit="servers").setting(
        "Maximum number of servers that a copied message has passed.", default=HOPS_MAX
    )
    heartbeat: float = SECONDS.setting(
        "Silence after which a peer is checked; after three times as long the connection is lost.",
        default=10.0,
    )
    path: bool = FLAG.setting(
        "`false` omits the header `bridge-path` for a NATS target; only if no message can return "
        "from there.",
        default=True,
    )
    user: str = TEXT.setting("User at a NATS server.", default="")
    password: str = _SECRET.setting("Password at a NATS server.", default="")
    token: str = _SECRET.setting("Token at a NATS server.", default="")
    seed: str = _SECRET.setting("Seed of an nkey at a NATS server.", default="")
    source: AccessTable = _ACCESS.setting(
        "Credentials at the source, see below.", default=AccessTable(), old_names=("near",)
    )
    target: AccessTable = _ACCESS.setting(
        "Credentials at the target, see below.", default=AccessTable(), old_names=("far",)
    )

    def to_bridge(self, reader: TableReader, path: str) -> BridgeSettings:
        """Return the bridge, whose table is at `path`.

        Errors in its classes and credentials are added to those of `reader`. Raises ValueError for
        contradictory settings.
        """
        copied, access = [], {"source": Access(), "target": Access()}
        for index, class_ in enumerate(self.classes):
            with reader.errors.collect(f"{path}.classes[{index}]"):
                copied.append(CopiedClass(class_))
        for copy_path, table, is_valid in self.copy:
            with reader.errors.collect(copy_path):
                if is_valid:
                    copied.append(table.to_class())
        for name in access:
            with reader.errors.collect(f"{path}.{name}"):
                access[name] = getattr(self, name).to_access()
        nats_values = {name: getattr(self, name) for name in ("user", "password", "token", "seed")}
        return BridgeSettings(
            self.name,
            self.from_,
            self.to,
            tuple(copied),
            is_bidirectional=self.both,
            hops_max=self.hops,
            heartbeat_seconds=self.heartbeat,
            has_path=self.path,
            nats_credentials={name: value for name, value in nats_values.items() if value},
            source_access=access["source"],
            target_access=access["target"],
        )


def read_bridges(
    reader: TableReader, tables: Any, *, is_served: bool
) -> tuple[BridgeSettings, ...]:
    """Return the valid bridges of the value of the key `bridges`.

    `is_served` is true for the file of `serve`: a missing end is that server.
    """
    bridges: list[BridgeSettings] = []
    for path, table, is_valid in reader.read_tables(BridgeTable, tables, "bridges"):
        reader.has_secrets |= bool(_PASSWORD.search(f"{table.from_} {table.to}"))
        missing = [key for key, end in (("from", table.from_), ("to", table.to)) if not end]
        if missing and is_valid and (not is_served or len(missing) == 2):
            reader.errors.messages += (
                [f"{path}: 'to' is missing, or 'from'"]
                if is_served
                else [f"{path}: {key!r} is missing" for key in missing]
            )
            is_valid = False
        with reader.errors.collect(path):
            bridge = table.to_bridge(reader, path) if is_valid else None
            if bridge is not None:
                _check_nats(bridge)
                bridges.append(bridge)
    with reader.errors.collect("bridges"):
        check_loops(bridges)
    return tuple(bridges)


def _check_nats(bridge: BridgeSettings) -> None:
    """Raise ValueError if the credentials cannot be used with a NATS server."""
    for address, access in (
        (bridge.source, bridge.source_access),
        (bridge.target, bridge.target_access),
    ):
        if is_nats_address(address):
            from simplebus.bridge.build import NatsAccess

            NatsAccess(bridge.nats_credentials, access).check()
