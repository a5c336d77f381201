"""Configuration file of `serve`, in TOML.

The file may set every option of `serve`. The command line takes precedence over the environment,
and the environment over the file. All errors are reported at once, each with file, line and key;
unknown keys are errors.

    [serve]                     options:         max-memory = "4GiB"      --max-memory
    [nats]                      NATS listener:   max-payload = "8MiB"     --nats-max-payload
    [nats.tls]                                   cert = "server.pem"      --nats-tls-cert
    [tls]                       all listeners:   cert = "server.pem"      --tls-cert
    [classes.orders]            id = 7, subjects = ["orders.>"], keep-seconds = 3600
    [[users]]                   users of all listeners and their permissions
    [[bridges]]                 bridges to other servers

Paths are relative to the file's directory. In names `_` may stand for `-`.
"""

from __future__ import annotations

import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simplebus.config.nats_users import NatsTable, NatsUsers
from simplebus.config.server_schema import SETTING_TABLES, SETTINGS, ClassTable
from simplebus.config.server_settings import class_settings, named_class
from simplebus.config.table_reader import TOP_TABLES, TableReader
from simplebus.config.toml_document import TomlDocument, read_document
from simplebus.config.users import ConfiguredUsers, read_users
from simplebus.core.protocol.requests import NamedClass
from simplebus.core.settings import ClassSettings, FullPolicy, Settings

if TYPE_CHECKING:
    from simplebus.bridge.settings import BridgeSettings


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """Content of a configuration file."""

    document: TomlDocument
    options: Mapping[str, Any] = field(default_factory=dict)
    """Values of settings, by name."""
    nats_users: NatsUsers = field(default_factory=NatsUsers)
    """Users of the deprecated `[nats]` table."""
    classes: Mapping[str, NamedClass] = field(default_factory=dict)
    """Classes by name."""
    class_settings: Mapping[int | str, ClassSettings] = field(default_factory=dict)
    """Settings of single classes."""
    bridges: tuple[BridgeSettings, ...] = ()
    users: ConfiguredUsers = field(default_factory=ConfiguredUsers)
    """Users of all listeners."""
    warnings: tuple[str, ...] = ()

    def ineffective_settings(self, settings: Settings) -> list[str]:
        """Return a warning for each class setting without effect under `settings`."""
        return [
            self.document.add_location(
                f"classes.{name}.max-disk has no effect: the class does not spill"
            )
            for name, each in self.class_settings.items()
            if each.disk_bytes_max is not None
            and (each.full_policy or settings.full_policy) is not FullPolicy.SPILL
        ]


def read_config(path: Path) -> tuple[ConfigFile, tuple[str, ...]]:
    """Return the valid part of a file, and the error messages.

    Raises:
        ConfigError: If the file cannot be read or is not TOML.
    """
    document = read_document(path)
    tables = document.tables
    reader = TableReader(path.parent)
    reader.check_names(tables, TOP_TABLES, "")
    options: dict[str, Any] = {}
    nats_users = NatsUsers()
    for name in SETTING_TABLES:
        settings = [setting for setting in SETTINGS.values() if setting.toml_table == name]
        match name:
            case "nats":
                values = reader.copy_table(tables.get("nats", {}), "nats")
                nats_tls = values.pop("tls", {})
                count = len(reader.errors.messages)
                read = reader.read_values(values, [*settings, *NatsTable.settings()], name)
                nats_names = [
                    setting.name for setting in NatsTable.settings() if setting.name in read
                ]
                users_of_nats = NatsTable(**{key: read.pop(key) for key in nats_names}).to_users(
                    reader
                )
                if len(reader.errors.messages) == count:
                    nats_users = users_of_nats
            case "nats.tls":
                read = reader.read_values(reader.copy_table(nats_tls, name), settings, name)
            case _:
                values = reader.copy_table(tables.get(name, {}), name)
                read = reader.read_values(values, settings, name)
        options |= read
    reader.has_secrets |= any(address.credentials for address in options.get("engine") or ())
    classes: dict[str, NamedClass] = {}
    settings_of_classes: dict[int | str, ClassSettings] = {}
    owners: dict[int, str] = {}
    for name, value in reader.copy_table(tables.get("classes", {}), "classes").items():
        path_of_class = f"classes.{name}"
        table = reader.read_table(ClassTable, value, path_of_class)
        if table.id is not None and (owner := owners.setdefault(table.id, name)) != name:
            reader.errors.messages.append(
                f"{path_of_class}.id: {table.id} is the id of {owner!r} too"
            )
        settings_of_classes[name] = class_settings(table, path_of_class, reader.errors)
        with reader.errors.collect():
            classes[name] = named_class(table, name, path_of_class)
    bridges: tuple[BridgeSettings, ...] = ()
    if "bridges" in tables:
        from simplebus.config.bridges import read_bridges  # Imports the client.

        bridges = read_bridges(reader, tables["bridges"], is_served=True)
    users = read_users(reader, tables["users"]) if "users" in tables else ConfiguredUsers()
    warnings = [*map(document.add_location, reader.warnings)]
    if reader.has_secrets and document.mode & stat.S_IROTH:
        warnings.append(f"{path} holds passwords or tokens, and every user may read it")
    file = ConfigFile(
        document,
        options,
        nats_users,
        classes,
        settings_of_classes,
        bridges,
        users,
        tuple(warnings),
    )
    return file, document.locate(reader.errors.messages)
