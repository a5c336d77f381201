"""The users of a configuration file, and of a file of their own: who may come in, and may do what.

Rule 1: shapes are declared, and checked where all tables are; see `config_tables`.

    [[users]]
    name = "till"
    password = "$argon2id$…"                as `simplebus user add` writes it
    token = "sha256:…"                      instead of name and password
    nkey = "U…"                             of the NATS door
    certificate = "CN=till,OU=shops"        or an email address, or a DNS name
    addresses = ["10.1.0.0/16"]             for those who cannot say who they are
    max-connections = 100
    max-message-rate = 1000                 published in a second, by all of them together
    max-byte-rate = "10MiB"
    max-classes = 100                       that it may make
    max-durables = 100                      and groups, in all classes together

    [users.permissions]                     without it: everything
    publish = { allow = ["orders eu.#"], deny = ["orders eu.test"] }
    subscribe = ["orders", "dead.*"]
    admin = ["inquire", "purge dead.*"]
    wildcards = true

    [users.nats]                            of subjects that are bound to no class
    publish = ["metrics.>"]
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from simplebus.config.mistakes import MESSAGES_MAX, ConfigError, ErrorCollector, describe_toml_error
from simplebus.config.schema import (
    PermissionsTable,
    Table,
    nats_permissions,
    or_complaint,
    size_of,
    what_is_good,
)
from simplebus.config.toml_lines import locate_keys, add_location
from simplebus.core import toml
from simplebus.core.users.permissions import PermissionRule, PermissionRules, Permissions
from simplebus.core.users.rate_limit import RateLimit
from simplebus.core.users.users import User, Users
from simplebus.nats.server.permissions import SubjectPermissions as NatsPermissions
from simplebus.nats.server.users import decode_user_key

T = TypeVar("T")
Texts = tuple[str, ...] | str

_BYTES_MAX = 64 << 20
_ARGON2 = re.compile(
    r"\$argon2(id|i|d)\$v=\d+\$m=\d+,t=\d+,p=\d+\$[A-Za-z0-9+/]{8,}\$[A-Za-z0-9+/]{8,}"
)


class AllowedTable(Table, frozen=True):
    """Classes, perhaps with channels."""

    allow: Texts | None = None
    """None for all."""
    deny: Texts | None = None


class GrantedTable(Table, frozen=True):
    """What a user may do; all, without such a table."""

    publish: AllowedTable | Texts | None = None
    subscribe: AllowedTable | Texts | None = None
    admin: Texts = ()
    wildcards: bool = True


class UserTable(Table, frozen=True):
    """One who may come in."""

    name: str
    password: str = ""
    token: str = ""
    nkey: str = ""
    certificate: Texts = ()
    addresses: Texts = ()
    max_connections: Annotated[int, msgspec.Meta(ge=0)] = 0
    max_message_rate: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """Messages a second that all its connections together may publish."""
    max_byte_rate: int | str = 0
    """Bytes of them, or with a unit."""
    max_classes: Annotated[int, msgspec.Meta(ge=0)] | None = None
    max_durables: Annotated[int, msgspec.Meta(ge=0)] | None = None
    permissions: GrantedTable | None = None
    nats: PermissionsTable | None = None

    def to_user(self, where: str, *, is_whole: bool = True) -> User:
        """The user. Raises ConfigError for all values that make no sense; how it may come in is not
        asked where this is not all that is said of it."""
        mistakes, granted, size = ErrorCollector(), None, 0
        with mistakes.collect():
            if self.nkey:
                or_complaint(f"{where}.nkey", lambda: decode_user_key(self.nkey))
        with mistakes.collect():
            if self.password.startswith("$argon2") and not _ARGON2.fullmatch(self.password):
                raise ConfigError(
                    f"{where}.password: it begins with $argon2, and is no hash as `simplebus user "
                    "add` writes it"
                )
        with mistakes.collect():
            size = size_of(self.max_byte_rate, f"{where}.max-byte-rate") or 0
        with mistakes.collect():
            granted = _granted(self.permissions, f"{where}.permissions")
        name = "it"  # A name that is none is told once.
        with mistakes.collect():
            name = or_complaint(f"{where}.name", lambda: User(self.name)).name
        for key, part in self._single_values():
            with mistakes.collect():
                or_complaint(f"{where}.{key}", partial(User, name, **part))
        mistakes.raise_if_any()
        with mistakes.collect():
            made = or_complaint(
                where,
                lambda: User(
                    self.name,
                    self.password,
                    self.token,
                    self.nkey,
                    _several(self.certificate),
                    _several(self.addresses),
                    granted,
                    self.max_connections,
                    RateLimit(self.max_message_rate, size),
                    self.max_classes,
                    self.max_durables,
                ),
            )
            shows = (made.password, made.token, made.nkey, made.certificates, made.networks)
            if is_whole and not any(shows):
                raise ConfigError(
                    f"{where}: user {self.name!r} cannot come in: expected a password, token, "
                    "nkey, certificate or addresses"
                )
        mistakes.raise_if_any()
        return made

    def _single_values(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """What else can be wrong by itself: of what key, and as a user that has nothing else."""
        yield "password", {"password": self.password}
        yield "token", {"token": self.token}
        for each in _several(self.certificate):
            yield "certificate", {"certificates": (each,)}
        for each in _several(self.addresses):
            yield "addresses", {"addresses": (each,)}


@dataclass(frozen=True, slots=True)
class ConfiguredUsers:
    """What was read."""

    users: tuple[User, ...] = ()
    nats: Mapping[str, NatsPermissions] = field(default_factory=dict)
    """By name, what they may do with subjects that are bound to no class."""
    is_said: bool = False
    """Whether it is said who the users are. If that is nobody, nobody may come in."""

    def to_users(self, key: bytes = b"") -> Users | None:
        """As a bus asks for them; None where everybody may come in. Raises ValueError for two that
        are alike. `key` is by chance."""
        from simplebus.core.users.passwords import PasswordVerifier

        return Users(self.users, PasswordVerifier(key)) if self.is_said else None


def users_of(raw: Any, where: str = "users") -> ConfiguredUsers:
    """The users of a file. Raises ConfigError, saying where, for all that is wrong with them."""
    if not isinstance(raw, list):
        raise ConfigError(f"{where}: expected [[{where}]], one table for each user")
    found: list[User] = []
    names: set[str] = set()
    nats: dict[str, NatsPermissions] = {}
    mistakes = ErrorCollector()
    for at, each in enumerate(raw):
        here, mine = f"{where}[{at}]", ErrorCollector()
        with mine.collect():
            if not isinstance(each, dict):
                raise ConfigError(f"{here}: expected a table, as [[{where}]] begins one")
            if isinstance(name := each.get("name"), str):
                if name in names:
                    mistakes.messages.append(f"{here}.name: there is another user {name!r}")
                names.add(name)
            if (one := what_is_good(UserTable, each, here, mine)) is not None:
                with mine.collect():
                    if permissions := nats_permissions(one.nats, f"{here}.nats"):
                        nats[one.name] = permissions
                found.append(one.to_user(here, is_whole=not mine.messages))
        mistakes.messages += mine.messages
    all_of_them = ConfiguredUsers(tuple(found), nats, is_said=True)
    with mistakes.collect():
        or_complaint(where, all_of_them.known)
    mistakes.raise_if_any()
    return all_of_them


def read_users(path: Path) -> tuple[ConfiguredUsers, str]:
    """The users of a file of their own, and a warning, if there is a reason for one. Raises
    ConfigError."""
    try:
        with open(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            raw = file.read(_BYTES_MAX + 1)
            text = raw.decode("utf-8-sig") if len(raw) <= _BYTES_MAX else ""
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is no TOML: it is not UTF-8") from None
    if len(raw) > _BYTES_MAX:
        raise ConfigError(f"{path} is longer than {_BYTES_MAX >> 20} MiB: these are no users")
    found = users_in(text, path)
    warning = ""
    if not found.users:
        warning = f"{path} has no users: nobody may connect"
    elif mode & stat.S_IROTH:
        warning = f"{path} holds secrets, and every user may read it; chmod 640 it, or 600"
    return found, warning


def users_in(text: str, path: Path) -> ConfiguredUsers:
    """The users of the text of a file of their own. Raises ConfigError, with the file and the line,
    for all that is wrong with it."""
    try:
        raw = toml.loads(text)
    except toml.TOMLDecodeError as error:
        raise ConfigError(describe_toml_error(path, str(error))) from None
    mistakes, found = ErrorCollector(), ConfiguredUsers()
    mistakes.messages += [
        f"{name!r} is unknown; there is nothing but [[users]]" for name in raw if name != "users"
    ]
    with mistakes.collect():
        found = users_of(raw.get("users", []))
    if mistakes.messages:
        lines = locate_keys(text)
        raise ConfigError(*(add_location(each, path, lines) for each in mistakes.messages[:MESSAGES_MAX]))
    return found


def together(groups: Sequence[ConfiguredUsers]) -> ConfiguredUsers:
    """Users of several files. Raises ValueError for two that are alike."""
    nats: dict[str, NatsPermissions] = {}
    for group in groups:
        nats |= group.nats
    users = tuple(user for group in groups for user in group.users)
    made = ConfiguredUsers(users, nats, any(group.is_said for group in groups))
    made.known()
    return made


def _granted(given: GrantedTable | None, where: str) -> Permissions | None:
    if given is None:
        return None
    mistakes, publish, subscribe = ErrorCollector(), PermissionRules(), PermissionRules()
    with mistakes.collect():
        publish = _rules(given.publish, f"{where}.publish")
    with mistakes.collect():
        subscribe = _rules(given.subscribe, f"{where}.subscribe")
    admin = _parsed(Permissions.parse_right, given.admin, f"{where}.admin", mistakes)
    mistakes.raise_if_any()
    return Permissions(publish, subscribe, admin, given.wildcards)


def _rules(given: AllowedTable | Texts | None, where: str) -> PermissionRules:
    mistakes, is_short = ErrorCollector(), not isinstance(given, AllowedTable)
    said = given if isinstance(given, AllowedTable) else AllowedTable(allow=given)
    allow = None
    if said.allow is not None:
        allow = _parsed(PermissionRule.parse, said.allow, where if is_short else f"{where}.allow", mistakes)
    deny = _parsed(PermissionRule.parse, said.deny or (), f"{where}.deny", mistakes)
    mistakes.raise_if_any()
    return or_complaint(where, lambda: PermissionRules(allow, deny))


def _parsed(
    parse: Callable[[str], T], given: Texts, where: str, mistakes: ErrorCollector
) -> tuple[T, ...]:
    """What each of these texts means. Where one means nothing is noted."""
    found = []
    for at, text in enumerate(_several(given)):
        with mistakes.collect():
            here = where if isinstance(given, str) else f"{where}[{at}]"
            found.append(or_complaint(here, partial(parse, text)))
    return tuple(found)


def _several(given: Texts) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given)
