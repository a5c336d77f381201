"""The `[[bridges]]` tables of a configuration file.

[[bridges]]
name = "hq"                        names the stored positions: do not change it
from = "simplebus://till:8888"     by default, the server of this file
to = "simplebus://hq:8888"         a NATS cluster: "nats://a:4222, nats://b:4222"
classes = ["orders", 7]            unchanged; or with settings for each class:

[[bridges.copy]]
class = "orders"
to = "orders-eu"                   class at the target
channels = ["eu.#"]                copy only matching channels
rewrite = [["eu.#", "till-4.eu.#"]]
stream = "ORDERS"                  stream of a NATS server
under_way = 1                      maximum messages in flight into the stream

[bridges.source]                   credentials at `from`; [bridges.target] at `to`
user = "bridge"
password = "…"                     or token = "…"
ca = "authority.pem"               for simplebuss:// or tls://; also cert and key
credentials = "till.toml"          or all of these in a file

Paths are relative to the file's directory. `near` and `far` are former names of `source` and
`target`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import typer

from simplebus.bridge.loop_header import HOPS_MAX
from simplebus.bridge.settings import BridgeSettings, CopiedClass, check_loops, is_nats_address
from simplebus.client.addresses import Address
from simplebus.client.credentials import Access
from simplebus.config.errors import ConfigError, ErrorCollector
from simplebus.config.parse import parse_class
from simplebus.config.schema import Seconds, TomlTable, parse_table

_PASSWORD = re.compile(r"//[^/@]*:[^@]*@")
"""Password in an address."""


class CopyTable(TomlTable, frozen=True):
    """Class to copy."""

    class_: int | str = msgspec.field(name="class")
    to: int | str | None = None
    channels: list[str] = msgspec.field(default_factory=list)
    rewrite: list[tuple[str, str]] = msgspec.field(default_factory=list)
    start: str = "waiting"
    stream: str = ""
    under_way: int | None = None


class AccessTable(TomlTable, frozen=True):
    """Credentials of a bridge at one end, and the authorities it trusts there."""

    user: str = ""
    password: str = ""
    token: str = ""
    ca: str = ""
    cert: str = ""
    key: str = ""
    credentials: str = ""

    @property
    def has_secrets(self) -> bool:
        return bool(self.password or self.token)

    def to_access(self, path: str, folder: Path) -> Access:
        """Return the credentials, with paths relative to `folder`.

        Raises:
            ConfigError: If values contradict each other, or a file is invalid.
        """
        values = {name: getattr(self, name) for name in self.__struct_fields__}
        for name in ("ca", "cert", "key", "credentials"):
            values[name] = str(folder / values[name]) if values[name] else ""
        file = values.pop("credentials")
        if file and any(values.values()):
            raise ConfigError(f"{path}: 'credentials' cannot be combined with other keys")
        try:
            return Access.from_file(file) if file else Access(**values)
        except OSError as error:
            raise ConfigError(f"{path}: {file} cannot be read: {error.strerror}") from None
        except ValueError as error:
            raise ConfigError(f"{path}: {error}") from None


class BridgeTable(TomlTable, frozen=True):
    """Bridge between two servers."""

    name: str
    from_: str = msgspec.field(name="from", default="")
    to: str = ""
    classes: list[int | str] = msgspec.field(default_factory=list)
    copy: list[CopyTable] = msgspec.field(default_factory=list)
    both: bool = False
    hops: int = HOPS_MAX
    heartbeat: Seconds = Seconds(10)
    path: bool = True
    user: str = ""
    password: str = ""
    token: str = ""
    seed: str = ""
    source: AccessTable | None = None
    target: AccessTable | None = None
    near: AccessTable | None = None
    """Former name of `source`."""
    far: AccessTable | None = None
    """Former name of `target`."""

    @property
    def has_secrets(self) -> bool:
        own = self.password or self.token or self.seed or _PASSWORD.search(self.from_ + self.to)
        accesses = self.source, self.target, self.near, self.far
        return bool(own or any(access and access.has_secrets for access in accesses))


_FORMER_NAMES = {"source": "near", "target": "far"}


@dataclass(frozen=True, slots=True)
class ConfiguredBridges:
    """Bridges of a configuration file."""

    bridges: tuple[BridgeSettings, ...] = ()
    has_secrets: bool = False
    warnings: tuple[str, ...] = ()
    """Warnings about former names; each begins with its key."""


def parse_bridges(tables: Any, folder: Path, *, is_served: bool) -> ConfiguredBridges:
    """Return the bridges of a parsed file.

    Args:
        tables: Value of the key `bridges`.
        folder: Directory of the file.
        is_served: True for the file of `serve`: a missing end is that server.

    Raises:
        ConfigError: With all errors, without the file's name.
    """
    if not isinstance(tables, list) or not all(isinstance(values, dict) for values in tables):
        raise ConfigError("bridges: expected tables, as [[bridges]] begins them")
    bridges: list[BridgeSettings] = []
    has_secrets, warnings, errors = False, list[str](), ErrorCollector()
    names: set[object] = set()
    for index, values in enumerate(tables):
        path = f"bridges[{index}]"
        if isinstance(name := values.get("name"), str):
            if name in names:
                errors.messages.append(f"{path}.name: there is another bridge {name!r}")
            names.add(name)
        with errors.collect():
            table = parse_table(BridgeTable, values, path)
            has_secrets |= table.has_secrets
            warnings += [
                f"{path}.{former} is deprecated: use {path}.{name}"
                for name, former in _FORMER_NAMES.items()
                if getattr(table, former) is not None
            ]
            bridges.append(_build_bridge(table, path, folder, is_served=is_served))
    errors.raise_if_any()
    try:
        check_loops(bridges)
    except ValueError as error:
        raise ConfigError(f"bridges: {error}") from None
    return ConfiguredBridges(tuple(bridges), has_secrets, tuple(warnings))


def _build_bridge(
    table: BridgeTable, path: str, folder: Path, *, is_served: bool
) -> BridgeSettings:
    errors, copied_classes = ErrorCollector(), list[CopiedClass]()
    addresses = {"from": table.from_, "to": table.to}
    missing = [name for name, address in addresses.items() if not address]
    if not is_served:
        errors.messages += [f"{path}: {name!r} is missing" for name in missing]
    elif len(missing) == len(addresses):
        errors.messages.append(f"{path}: 'to' is missing, or 'from'")
    for name, address in addresses.items():
        with errors.collect():
            _check_address(address, f"{path}.{name}")
    copy_tables = [
        (CopyTable(class_), f"{path}.classes[{index}]")
        for index, class_ in enumerate(table.classes)
    ]
    copy_tables += [(class_, f"{path}.copy[{index}]") for index, class_ in enumerate(table.copy)]
    for copy_table, copy_path in copy_tables:
        with errors.collect():
            copied_classes.append(_build_copied_class(copy_table, copy_path))
    nats_values = {name: getattr(table, name) for name in ("user", "password", "token", "seed")}
    accesses = {}
    for name, former in _FORMER_NAMES.items():
        with errors.collect():
            current, old = getattr(table, name), getattr(table, former)
            if current is not None and old is not None:
                raise ConfigError(
                    f"{path}.{former}: former name of {name!r}; expected only {name!r}"
                )
            access, used = (old, former) if old is not None else (current, name)
            accesses[f"{name}_access"] = (access or AccessTable()).to_access(
                f"{path}.{used}", folder
            )
    errors.raise_if_any()
    try:
        bridge = BridgeSettings(
            table.name,
            table.from_,
            table.to,
            tuple(copied_classes),
            is_bidirectional=table.both,
            hops_max=table.hops,
            heartbeat_seconds=float(table.heartbeat),  # JSON of a Connect has no subclasses.
            has_path=table.path,
            nats_credentials={name: value for name, value in nats_values.items() if value},
            **accesses,
        )
        _check_nats(bridge)
    except ValueError as error:
        has_key = str(error).startswith("hops ")
        raise ConfigError(f"{path}{'.' if has_key else ': '}{error}") from None
    return bridge


def _check_nats(bridge: BridgeSettings) -> None:
    """Raise ValueError if the credentials cannot be used with a NATS server."""
    for address, access in (
        (bridge.source, bridge.source_access),
        (bridge.target, bridge.target_access),
    ):
        if is_nats_address(address):
            from simplebus.bridge.build import NatsAccess

            NatsAccess(bridge.nats_credentials, access).check()


def _check_address(address: str, path: str) -> None:
    """Raise ConfigError if the address is neither empty nor valid."""
    try:
        if address and is_nats_address(address):
            from simplebus.bridge.nats_connection import (
                parse_addresses,
            )

            parse_addresses(address)
        elif address:
            Address.parse(address)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None


def _build_copied_class(table: CopyTable, path: str) -> CopiedClass:
    try:
        return CopiedClass(
            _parse_class(table.class_),
            None if table.to is None else _parse_class(table.to),
            tuple(table.channels),
            tuple(table.rewrite),
            table.start,
            table.stream,
            table.under_way,
        )
    except (ValueError, typer.BadParameter) as error:
        raise ConfigError(f"{path}: {getattr(error, 'message', error)}") from None


def _parse_class(value: int | str) -> int | str:
    return parse_class(str(value)) if isinstance(value, int) else parse_class(value)
