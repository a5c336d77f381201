"""Settings of the uplink.

Parsed settings are consistent: the class may be copied, addresses are valid, files can be read,
and no setting is ignored. Credentials are in the settings or in a file; the environment
supplies the rest, as for other clients. No text made from settings contains a secret.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec

from simplebus.bridge.build import NatsAccess
from simplebus.bridge.nats_connection import parse_addresses
from simplebus.bridge.reserved_headers import is_reserved_subject
from simplebus.bridge.settings import CopiedClass, is_nats_address, record_channel
from simplebus.client.addresses import Address
from simplebus.client.core.arguments import check_integer
from simplebus.client.credentials import ENVIRONMENT_VARIABLES, Access
from simplebus.config.errors import describe_unknown_name
from simplebus.core import dead_letters
from simplebus.core.channel.pattern import check_name
from simplebus.core.limits import CLASS_ID_MAX, NAME_CHARACTERS_MAX
from simplebus.gateway.config import convert_settings

_CREDENTIAL_FIELDS = ("user", "password", "token", "seed")
_TLS_FIELDS = ("ca", "cert", "key")
_LONGEST_DEFAULT_NAME = "-" + 64 * "m"
"""Text with the length of the longest generated uplink name."""


class UplinkTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings in the file."""

    to: str
    """Address of the target; for a NATS cluster several, separated by commas."""
    class_: int | str = msgspec.field(name="class")
    """Class of the messages, at the target and in the local bus."""
    channel: str = ""
    channel_property: str = ""
    """Property with the channel of a message."""
    data_dir: str = ""
    """Directory for stored messages; empty to keep them in memory."""
    max_memory: Annotated[int, msgspec.Meta(ge=1 << 20)] = 64 << 20
    """Bytes of messages in memory."""
    name: str = ""
    """Unique name of the uplink at the target. The default is the module's name with a unique
    suffix.
    """
    stream: str = ""
    """JetStream stream that must store the messages."""
    under_way: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """Messages in flight into the stream; None for the number that keeps their order."""
    user: str = ""
    """User at the target, with `password`."""
    password: str = ""
    token: str = ""
    """Token, instead of user and password."""
    seed: str = ""
    """Seed of an NKEY, for a NATS server."""
    ca: str = ""
    """PEM file with certificate authorities; empty for the system's."""
    cert: str = ""
    """File with the client certificate."""
    key: str = ""
    """File with its key, if it is not in the same file."""
    credentials: str | dict[str, str] = ""
    """File with these settings except `seed`, or a table of user, password, token or seed."""

    def __repr__(self) -> str:
        return f"<to={re.sub('(?<=//).*@', '…@', self.to)!r}, class={self.class_!r}, …>"


@dataclass(frozen=True, slots=True)
class UplinkSettings:
    """Checked settings."""

    table: UplinkTable
    access: Access
    """Credentials and TLS settings."""

    @property
    def has_secrets(self) -> bool:
        """True if the file with these settings should not be readable by others."""
        table = self.table
        return bool(table.password or table.token or table.seed or "@" in table.to)

    @property
    def nats_access(self) -> NatsAccess:
        """Credentials and TLS settings for a NATS server."""
        seed = self.table.seed
        return NatsAccess({"seed": seed} if seed else {}, self.access)


def parse(raw: Mapping[str, Any], environment: Mapping[str, str] | None = None) -> UplinkSettings:
    """Check settings.

    Args:
        raw: Settings from the file.
        environment: Environment variables; None for those of the process.

    Raises:
        ValueError: The settings are contradictory, or a file cannot be read.
    """
    table = _merge_credentials(convert_settings(raw, UplinkTable))
    _check_class(table)
    has_credentials = _check_address(table)
    if table.channel:
        check_name(table.channel)
    if is_nats_address(table.to) and is_reserved_subject(table.channel):
        raise ValueError(f"channel: {table.channel!r} is reserved for the NATS server")
    if table.data_dir and Path(table.data_dir).exists() and not Path(table.data_dir).is_dir():
        raise ValueError(f"data_dir: {table.data_dir} is not a directory")
    try:
        access = _access(table, os.environ if environment is None else environment, has_credentials)
        uplink_settings = UplinkSettings(table, access)
        if access.ca or access.cert:
            access.tls()
    except OSError as error:
        problem = error.strerror or str(error)
        if error.filename:
            problem = f"{error.filename} cannot be read: {problem}"
        raise ValueError(problem) from None
    if is_nats_address(table.to):
        uplink_settings.nats_access.check()
    return uplink_settings


def _merge_credentials(table: UplinkTable) -> UplinkTable:
    """Return the settings with the entries of a `credentials` table merged."""
    if isinstance(table.credentials, str):
        return table
    for name in table.credentials:
        if name not in _CREDENTIAL_FIELDS:
            raise ValueError(describe_unknown_name(name, _CREDENTIAL_FIELDS, "credentials"))
        if getattr(table, name):
            raise ValueError(f"{name!r} is set in credentials and outside; expected one of them")
    return msgspec.structs.replace(table, **table.credentials, credentials="")


def _check_class(table: UplinkTable) -> None:
    class_ = table.class_
    if isinstance(class_, int):
        check_integer("class", class_, minimum=0, maximum=CLASS_ID_MAX)
    elif not class_.isprintable() or not 0 < len(class_) <= NAME_CHARACTERS_MAX:
        raise ValueError(
            f"class: expected an id, or a name of 1 to {NAME_CHARACTERS_MAX} characters, got "
            f"{class_!r}"
        )
    CopiedClass(class_)
    if isinstance(class_, str) and dead_letters.is_dead_letter_class(class_):
        raise ValueError(
            f"class: {class_!r} holds dead letters, of which a bus drops the oldest; "
            "expected another"
        )
    try:
        check_name(record_channel(table.name or _LONGEST_DEFAULT_NAME, class_, back=False))
    except ValueError:
        raise ValueError(f"name: expected a valid part of a channel, got {table.name!r}") from None


def _check_address(table: UplinkTable) -> bool:
    """Return True if the address contains credentials.

    Raises ValueError for settings that do not fit the address.
    """
    if is_nats_address(table.to):
        CopiedClass(table.class_, stream=table.stream, under_way=table.under_way)
        has_credentials = parse_addresses(table.to)[0].credentials is not None
        if has_credentials and any(
            getattr(table, name) for name in (*_CREDENTIAL_FIELDS, "credentials")
        ):
            raise ValueError("credentials are in the address and outside; expected one of them")
        return has_credentials
    secure = Address.parse(table.to).is_secure
    for name in ("stream", "under_way", "seed", *(() if secure else _TLS_FIELDS)):
        if getattr(table, name):
            schemes = "simplebuss:// or tls://" if name in _TLS_FIELDS else "nats:// or tls://"
            raise ValueError(
                f"{name}: needs an address that begins with {schemes}, got {table.to!r}"
            )
    return False


def _access(table: UplinkTable, environment: Mapping[str, str], has_credentials: bool) -> Access:
    """Return credentials and TLS settings. Raises ValueError, or OSError for a file."""
    table_values = {
        name: value for name in ENVIRONMENT_VARIABLES if (value := getattr(table, name))
    }
    if table.credentials:
        if table_values or table.seed:
            raise ValueError(
                "credentials: the file replaces all other access settings; remove one or the other"
            )
        assert isinstance(table.credentials, str)
        return Access.from_file(table.credentials)
    variables = dict(environment)
    is_configured = has_credentials or any(getattr(table, name) for name in _CREDENTIAL_FIELDS)
    for name in ("user", "password", "token") if is_configured else ():
        variables.pop(ENVIRONMENT_VARIABLES[name], None)
    if table.cert:
        variables.pop(ENVIRONMENT_VARIABLES["key"], None)
    files = {
        ENVIRONMENT_VARIABLES[name]: table_values[name]
        for name in _TLS_FIELDS
        if name in table_values
    }
    access = Access.from_environment(variables | files)
    if not is_configured:
        return access
    password = table.password or (
        environment.get(ENVIRONMENT_VARIABLES["password"], "") if table.user else ""
    )
    return replace(access, user=table.user, password=password, token=table.token)
