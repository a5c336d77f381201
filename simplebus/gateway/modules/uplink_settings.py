"""What an uplink is told: where to, what of, and who it is there.

Rule 1: what is returned can be carried out: a class that may be copied, addresses, files that can
be read. What would be ignored is refused.
Rule 2: who it is stands in the settings, or in a file that they name, as at the far end of a
bridge; what they do not say the environment may, as for other clients. No text that is made of
settings shows a secret.
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
from simplebus.config.mistakes import unknown
from simplebus.core import dead_letters
from simplebus.core.channel.pattern import check_name
from simplebus.core.limits import CLASS_ID_MAX, NAME_CHARACTERS_MAX
from simplebus.gateway.config import converted

_WHO = ("user", "password", "token", "seed")
_FILES = ("ca", "cert", "key")
_UNNAMED = "-" + 64 * "m"
"""As long as what an uplink without a name is called there."""


class UplinkTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What may stand in its settings."""

    to: str
    """An address; or several, of a cluster of NATS servers, with commas between."""
    class_: int | str = msgspec.field(name="class")
    """The class that messages get there, and here meanwhile."""
    channel: str = ""
    channel_property: str = ""
    """The property that holds a message's channel."""
    data_dir: str = ""
    """Where they are kept; in memory only if it is not set."""
    max_memory: Annotated[int, msgspec.Meta(ge=1 << 20)] = 64 << 20
    """Bytes that they may take in memory."""
    name: str = ""
    """What this uplink is called there, where no two may be called alike. Without it, it is called
    like the module, and as no other."""
    stream: str = ""
    """Of a NATS server: the stream of JetStream that has to take what is published."""
    under_way: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """So many messages are on their way into it at once; None for what keeps their order."""
    user: str = ""
    """Who it is there, with `password`;"""
    password: str = ""
    token: str = ""
    """or this alone;"""
    seed: str = ""
    """or, for a NATS server, that of a user's key."""
    ca: str = ""
    """A file of authorities, as PEM, that may have signed the certificate there; without it, those
    that the system trusts."""
    cert: str = ""
    """A file with its own certificate, for a server that asks for one."""
    key: str = ""
    """Its key, where it does not stand in the same file."""
    credentials: str | dict[str, str] = ""
    """A file of these but `seed`, which then says it all; or a table of the first four."""

    def __repr__(self) -> str:
        return f"<to={re.sub('(?<=//).*@', '…@', self.to)!r}, class={self.class_!r}, …>"


@dataclass(frozen=True, slots=True)
class UplinkSettings:
    """Settings that make sense."""

    table: UplinkTable
    access: Access
    """Who it is there, and whom it trusts."""

    @property
    def has_secrets(self) -> bool:
        """Whether the file that says this is one that others are not to read."""
        table = self.table
        return bool(table.password or table.token or table.seed or "@" in table.to)

    @property
    def nats_access(self) -> NatsAccess:
        """The same, for a NATS server."""
        seed = self.table.seed
        return NatsAccess({"seed": seed} if seed else {}, self.access)


def parse(raw: Mapping[str, Any], environment: Mapping[str, str] | None = None) -> UplinkSettings:
    """Raises ValueError for what makes no sense, and for a file that is no good."""
    table = _without_table(converted(raw, UplinkTable))
    _check_class(table)
    names_somebody = _check_address(table)
    if table.channel:
        check_name(table.channel)
    if is_nats_address(table.to) and is_reserved_subject(table.channel):
        raise ValueError(f"channel: {table.channel!r} is the NATS server's own")
    if table.data_dir and Path(table.data_dir).exists() and not Path(table.data_dir).is_dir():
        raise ValueError(f"data_dir: {table.data_dir} is no directory")
    try:
        access = _access(table, os.environ if environment is None else environment, names_somebody)
        made = UplinkSettings(table, access)
        if access.ca or access.cert:
            access.tls()
    except OSError as error:
        why = error.strerror or str(error)
        if error.filename:
            why = f"{error.filename} cannot be read: {why}"
        raise ValueError(why) from None
    if is_nats_address(table.to):
        made.nats_access.check()
    return made


def _without_table(table: UplinkTable) -> UplinkTable:
    """The same, with who it is where that is to stand."""
    if isinstance(table.credentials, str):
        return table
    for name in table.credentials:
        if name not in _WHO:
            raise ValueError(unknown(name, _WHO, "credentials"))
        if getattr(table, name):
            raise ValueError(f"{name!r} stands in credentials and beside it, expected either")
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
            f"class: in {class_!r} a bus has its dead letters, and drops the oldest of them; "
            "expected another"
        )
    try:
        check_name(record_channel(table.name or _UNNAMED, class_, back=False))
    except ValueError:
        raise ValueError(
            f"name: expected what may be part of a channel, got {table.name!r}"
        ) from None


def _check_address(table: UplinkTable) -> bool:
    """Whether the address says who it is. Raises ValueError for what goes with no such address."""
    if is_nats_address(table.to):
        CopiedClass(table.class_, stream=table.stream, under_way=table.under_way)
        names_somebody = parse_addresses(table.to)[0].credentials is not None
        if names_somebody and any(getattr(table, name) for name in (*_WHO, "credentials")):
            raise ValueError("who it is stands in the address and beside it, expected either")
        return names_somebody
    secure = Address.parse(table.to).is_secure
    for name in ("stream", "under_way", "seed", *(() if secure else _FILES)):
        if getattr(table, name):
            where = "simplebuss:// or tls://" if name in _FILES else "nats:// or tls://"
            raise ValueError(f"{name}: it goes with an address of {where}, got {table.to!r}")
    return False


def _access(table: UplinkTable, environment: Mapping[str, str], names_somebody: bool) -> Access:
    """Raises ValueError, and OSError for a file that is no good."""
    own = {name: value for name in ENVIRONMENT_VARIABLES if (value := getattr(table, name))}
    if table.credentials:
        if own or table.seed:
            raise ValueError("the file of credentials says it all, or leave it out")
        assert isinstance(table.credentials, str)
        return Access.from_file(table.credentials)
    said = dict(environment)
    is_said = names_somebody or any(getattr(table, name) for name in _WHO)
    for name in ("user", "password", "token") if is_said else ():
        said.pop(ENVIRONMENT_VARIABLES[name], None)
    if table.cert:
        said.pop(ENVIRONMENT_VARIABLES["key"], None)
    files = {ENVIRONMENT_VARIABLES[name]: own[name] for name in _FILES if name in own}
    found = Access.from_environment(said | files)
    if not is_said:
        return found
    password = table.password or (environment.get(ENVIRONMENT_VARIABLES["password"], "") if table.user else "")
    return replace(found, user=table.user, password=password, token=table.token)
