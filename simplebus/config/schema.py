"""Tables of the configuration file that no option can set: NATS users, permissions, classes.

Tables are msgspec Structs; their field names are the TOML keys. msgspec checks the values, and its
errors are translated to the terms of TOML, with the key's path in front.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

import msgspec
import typer

from simplebus.config.errors import (
    MESSAGES_MAX,
    ConfigError,
    ErrorCollector,
    check_unique_names,
    describe_unknown_name,
    suggest_name,
)
from simplebus.config.parse import FullPolicyChoice, parse_class, parse_size
from simplebus.core.dead_letters import is_dead_letter_class
from simplebus.core.errors import RemoteProtocolError
from simplebus.core.limits import BINDINGS_MAX, CLASS_ID_MAX
from simplebus.core.message_class.subject_bindings import check_subject
from simplebus.core.protocol.requests import NamedClass
from simplebus.core.settings import ClassSettings, FullPolicy, Retention
from simplebus.nats.subject_permissions import ResponsePermission, SubjectPermissions
from simplebus.nats.users import NatsAuth, NatsUser

R = TypeVar("R")
T = TypeVar("T", bound="Table")

_MSGSPEC_ERROR = re.compile(r"(?s)(?P<what>.*?)(?: - at `(?P<at>[^`]*)`)?")
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`")
_STEP = re.compile(r"\.[^.\[]+|\[[^\]]*\]")
_MISSING = re.compile(r"Object missing required field `(.*)`")


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of the tables of the configuration file."""

    @classmethod
    def keys(cls) -> list[str]:
        """Return the keys of the table."""
        return [field.encode_name for field in msgspec.structs.fields(cls)]


class SubjectRulesTable(Table, frozen=True):
    """Subjects that a user may publish or subscribe to.

    A subject to subscribe to may be followed by a space and a queue group.
    """

    allow: list[str] | str | None = None
    """None allows every subject."""
    deny: list[str] | str | None = None


class ResponsesTable(Table, frozen=True):
    """Limits of replies to subjects that a user may not publish to otherwise."""

    max: int = 1
    """Maximum replies per request; negative for no limit."""
    expires: float = 120.0
    """Seconds to reply; negative for no limit."""


class SubjectPermissionsTable(Table, frozen=True):
    """Permissions for subjects. A user without the table may use every subject."""

    publish: SubjectRulesTable | list[str] | str | None = None
    subscribe: SubjectRulesTable | list[str] | str | None = None
    allow_responses: ResponsesTable | bool = False


class NatsUserTable(Table, frozen=True):
    """User of the NATS listener, with a password, an nkey or a certificate."""

    user: str = ""
    password: str = ""
    nkey: str = ""
    """Public key."""
    permissions: SubjectPermissionsTable | None = None

    def to_user(self, where: str) -> NatsUser:
        """Return the user. Raises ConfigError if values contradict each other."""
        permissions = build_subject_permissions(self.permissions, f"{where}.permissions")
        return build_located(
            where, lambda: NatsUser(self.user, self.password, self.nkey, permissions)
        )


class NatsTable(Table, frozen=True):
    """Authentication of the NATS listener. Without users, everybody can connect."""

    token: str | None = None
    user: str | None = None
    password: str | None = None
    users: list[NatsUserTable] = []
    no_auth_user: str = ""
    """User of clients that send no credentials."""
    default_permissions: SubjectPermissionsTable | None = None
    """Permissions of users without permissions of their own."""

    def to_auth(self, users: list[NatsUser], where: str) -> NatsAuth:
        """Return the authentication settings. Raises ConfigError if values contradict each other.

        `users` are the users of the table's list.
        """
        said = {"token": self.token, "user": self.user, "password": self.password}
        for key, value in said.items():
            if value == "":
                raise ConfigError(
                    f"{where}.{key}: an empty value would let everybody in; remove the key instead"
                )
        name, password = self.user or "", self.password or ""
        if bool(name) != bool(password):
            raise ConfigError(f"{where}: 'user' and 'password' need each other")
        own = [build_located(where, lambda: NatsUser(name, password))] if name else []
        default = build_subject_permissions(
            self.default_permissions, f"{where}.default_permissions"
        )
        return build_located(
            where,
            lambda: NatsAuth(
                users=(*users, *own),
                token=self.token or "",
                no_auth_user=self.no_auth_user,
                default_permissions=default,
            ),
        )


def parse_nats_table(
    raw: dict[str, Any], mistakes: ErrorCollector, where: str = "nats"
) -> tuple[NatsAuth, bool]:
    """Return the valid part of the `[nats]` table, and whether it contains secrets.

    Errors are added to `mistakes`.
    """
    mine, users, given = ErrorCollector(), list[NatsUser](), raw.get("users")
    if isinstance(given, list) and all(isinstance(each, dict) for each in given):
        raw = {key: value for key, value in raw.items() if key != "users"}
    else:
        given = []
    has_secrets = False
    for at, each in enumerate(given):
        with mine.collect():
            here = f"{where}.users[{at}]"
            user = parse_table(NatsUserTable, each, here)
            has_secrets |= bool(user.password)
            users.append(user.to_user(here))
    read, auth = parse_valid_part(NatsTable, raw, where, mine), NatsAuth()
    if read is not None:
        has_secrets |= bool(read.token or read.password)
        if not mine.messages:
            auth = read.to_auth(users, where)
    mistakes.messages += mine.messages
    return auth, has_secrets


class ClassTable(Table, frozen=True):
    """Settings of one class."""

    id: Annotated[int, msgspec.Meta(ge=0, le=CLASS_ID_MAX)] | None = None
    """None if the server assigns the id."""
    subjects: Annotated[list[str], msgspec.Meta(max_length=BINDINGS_MAX)] = []
    """NATS subjects or patterns that are bound to the class."""
    full: FullPolicyChoice | None = None
    max_messages: Annotated[int, msgspec.Meta(ge=1)] | None = None
    max_memory: int | str | None = None
    """Bytes, or a text with a unit."""
    keep_messages: Annotated[int, msgspec.Meta(ge=0)] | None = None
    keep_memory: int | str | None = None
    keep_seconds: Annotated[float, msgspec.Meta(ge=0)] | None = None
    """Retention; if none of the three keys is set, the retention of all classes applies."""
    last_values: bool | None = None
    """True if the class keeps the last message of each channel; None leaves it to the clients."""
    ack_seconds: float | None = None
    max_deliveries: int | None = None
    backoff: list[float] | None = None
    """Seconds."""
    max_disk: int | str | None = None
    """Maximum bytes of messages that are on disk only, for `full = "spill"`."""

    def to_settings(self, where: str, mistakes: ErrorCollector) -> ClassSettings:
        """Return the valid settings of the class. Errors are added to `mistakes`."""
        given: dict[str, Any] = {
            "full_policy": None if self.full is None else FullPolicy(self.full),
            "messages_max": self.max_messages,
            "last_values": self.last_values,
            "ack_seconds": self.ack_seconds,
            "deliveries_max": self.max_deliveries,
            "backoff_seconds": None if self.backoff is None else tuple(self.backoff),
        }
        for name, key in (("bytes_max", "max-memory"), ("disk_bytes_max", "max-disk")):
            with mistakes.collect():
                given[name] = parse_size_value(
                    getattr(self, key.replace("-", "_")), f"{where}.{key}"
                )
        with mistakes.collect():
            if (self.keep_messages, self.keep_memory, self.keep_seconds) != (None, None, None):
                memory = parse_size_value(self.keep_memory, f"{where}.keep-memory")
                given["keep"] = Retention(
                    self.keep_messages or 0, memory or 0, self.keep_seconds or 0.0
                )
        for name, value in list(given.items()):  # Each by itself, and then all together.
            with mistakes.collect():
                _class_settings(where, {name: given.pop(name)})
                given[name] = value
        with mistakes.collect():
            return _class_settings(where, given)
        return ClassSettings()

    def to_class(self, name: str, where: str) -> NamedClass:
        """Return the class. Raises ConfigError with all errors in its name, subjects and settings."""
        mistakes = ErrorCollector()
        with mistakes.collect():
            _check_name(name, where)
        for at, subject in enumerate(self.subjects):
            try:
                check_subject(subject)
            except RemoteProtocolError as error:
                mistakes.messages.append(f"{where}.subjects[{at}]: {error.sentence}")
        if is_dead_letter_class(name):
            if self.full not in (None, FullPolicyChoice.BLOCK, FullPolicyChoice.DROP_OLDEST):
                mistakes.messages.append(
                    f"{where}.full: {self.full.value} has no effect on a class of dead letters, "
                    "expected drop_oldest or block"
                )
            if self.last_values:
                mistakes.messages.append(
                    f"{where}.last-values has no effect on a class of dead letters: leave it out"
                )
        mistakes.raise_if_any()
        return NamedClass(id=self.id, name=name, subjects=self.subjects)


def _check_name(name: str, where: str) -> None:
    """Raise ConfigError if `name` is not a class name."""
    try:
        is_name = parse_class(name) == name
    except typer.BadParameter as error:
        raise ConfigError(f"{where}: {error.message}") from None
    if not is_name:
        raise ConfigError(
            f"{where}: {name!r} is an id; expected a class name, and the id as a key of its table"
        )


_KEYS = {
    "messages_max": "max-messages",
    "bytes_max": "max-memory",
    "disk_bytes_max": "max-disk",
    "ack_seconds": "ack-seconds",
    "max_deliveries": "max-deliveries",
    "backoff": "backoff",
    "last_values": "last-values",
}
"""TOML key by the first word of an error of `ClassSettings`."""


def _class_settings(where: str, given: Mapping[str, Any]) -> ClassSettings:
    """Build the settings of a class. Raises ConfigError with the key's path."""
    try:
        return ClassSettings(**given)
    except ValueError as error:
        name, _, said = str(error).partition(" ")
        raise ConfigError(f"{where}.{_KEYS[name]} {said}") from None


_TABLES: dict[str, type[Table]] = {
    "users": NatsUserTable,
    "permissions": SubjectPermissionsTable,
    "default_permissions": SubjectPermissionsTable,
    "publish": SubjectRulesTable,
    "subscribe": SubjectRulesTable,
    "allow_responses": ResponsesTable,
}
"""Table type by the last part of its path."""


def parse_table(kind: type[T], raw: dict[str, Any], where: str) -> T:
    """Return a valid table. Raises ConfigError with all errors and their paths."""
    mistakes = ErrorCollector()
    made = parse_valid_part(kind, raw, where, mistakes)
    mistakes.raise_if_any()
    assert made is not None
    return made


def parse_valid_part(
    kind: type[T], raw: dict[str, Any], where: str, mistakes: ErrorCollector
) -> T | None:
    """Return the table without its invalid values; None if nothing can be read.

    Errors are added to `mistakes`.
    """
    spelled: dict[str, str] = {}
    raw = _normalize_keys(raw, where, spelled)
    numbers: dict[int, list[int]] = {}
    for _ in range(MESSAGES_MAX):
        try:
            return msgspec.convert(raw, kind)
        except msgspec.ValidationError as error:
            found = _MSGSPEC_ERROR.fullmatch(str(error))
            assert found is not None
            path = [*map(_parse_step, _STEP.findall((found["at"] or "").removeprefix("$")))]
            below = _format_path(raw, path, numbers, spelled)
            mistakes.messages.append(_describe_error(kind, found["what"], where, below, spelled))
            if name := _UNKNOWN.fullmatch(found["what"]):
                path.append(name[1])
            if _MISSING.fullmatch(found["what"]) or not _remove(raw, path, numbers):
                break
    return None


def _describe_error(
    kind: type[Table], what: str, where: str, below: str, spelled: Mapping[str, str]
) -> str:
    """Translate one error of msgspec. `spelled` maps keys to their spelling in the file."""
    at = where + below
    if name := _UNKNOWN.fullmatch(what):
        last = re.sub(r"\[.*?\]$", "", at).rpartition(".")[2]
        known = kind if at == where else _TABLES.get(last.replace("-", "_"), kind)
        return describe_unknown_name(spelled.get(name[1], name[1]), known.keys(), at)
    if name := _MISSING.fullmatch(what):
        return f"{at}: {name[1].replace('_', '-')!r} is missing"
    if what.startswith("Invalid enum value "):
        word = what.removeprefix("Invalid enum value ")
        words = _enum_values(kind, below.removeprefix(".").replace("-", "_"))
        expected = f", expected one of {', '.join(words)}" if words else ""
        meant = suggest_name(word.strip("'"), words)
        return f"{at}: {word} is unknown{expected}{meant}"
    return f"{at}: {_translate_types(what)}"


def _parse_step(word: str) -> str | int:
    """Return a step of a msgspec path, written as `.name` or `[7]`."""
    return word[1:] if word.startswith(".") else int(word[1:-1]) if word[1:-1].isdigit() else word


def _format_path(
    raw: Any, path: list[str | int], numbers: dict[int, list[int]], spelled: Mapping[str, str]
) -> str:
    """Return a path as the file writes it.

    `numbers` maps lists to the original indexes of their remaining elements.
    """
    shown = ""
    for step in path:
        if isinstance(step, int):
            shown += f"[{numbers[id(raw)][step] if id(raw) in numbers else step}]"
        else:
            shown += f".{spelled.get(step, step)}"
        try:
            raw = raw[step]
        except (LookupError, TypeError):
            raw = None
    return shown


def _remove(raw: Any, path: list[str | int], numbers: dict[int, list[int]]) -> bool:
    """Remove an invalid value, so that the rest can be checked. Return False if it is missing."""
    try:
        *way, last = path
        for step in way:
            raw = raw[step]
        if isinstance(raw, list):
            numbers.setdefault(id(raw), list(range(len(raw)))).pop(int(last))
        del raw[last]
    except (LookupError, TypeError, ValueError):
        return False
    return True


def parse_size_value(given: int | str | None, where: str) -> int | None:
    """Return a size in bytes. Raises ConfigError."""
    try:
        return None if given is None else parse_size(given)
    except typer.BadParameter as error:
        raise ConfigError(f"{where}: {error.message}") from None


def build_located(where: str, made: Callable[[], R]) -> R:
    """Return the result of a constructor; raise ConfigError with the path for its ValueError."""
    try:
        return made()
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None


def build_subject_permissions(
    given: SubjectPermissionsTable | None, where: str
) -> SubjectPermissions | None:
    """Return NATS permissions. Raises ConfigError for an invalid pattern."""
    if given is None:
        return None
    publish, subscribe = _as_rules_table(given.publish), _as_rules_table(given.subscribe)
    answers = given.allow_responses
    responses = ResponsePermission() if answers is True else None
    if isinstance(answers, ResponsesTable):
        responses = ResponsePermission(answers.max, answers.expires)
    try:
        return SubjectPermissions(
            publish_allow=_as_tuple(publish.allow),
            publish_deny=_as_tuple(publish.deny),
            subscribe_allow=_as_tuple(subscribe.allow),
            subscribe_deny=_as_tuple(subscribe.deny),
            responses=responses,
        )
    except ValueError as error:  # The message begins with the parameter's name.
        raise ConfigError(f"{where}.{str(error).replace('_', '.', 1)}") from None


def _as_rules_table(given: SubjectRulesTable | list[str] | str | None) -> SubjectRulesTable:
    return given if isinstance(given, SubjectRulesTable) else SubjectRulesTable(allow=given)


def _as_tuple(given: list[str] | str | None) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given or ())


def _normalize_keys(raw: Any, where: str, spelled: dict[str, str]) -> Any:
    """Return the value with `_` for `-` in all keys; record the original spelling.

    Raises ConfigError if a key is given in both forms.
    """
    if isinstance(raw, dict):
        check_unique_names(raw, where)
        made = {}
        for key, value in raw.items():
            spelled[plain := key.replace("-", "_")] = key
            made[plain] = _normalize_keys(value, f"{where}.{key}", spelled)
        return made
    if isinstance(raw, list):
        return [_normalize_keys(part, f"{where}[{at}]", spelled) for at, part in enumerate(raw)]
    return raw


_TYPE_NAMES = {
    "object": "a table",
    "array": "a list",
    "str": "a text",
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
}
"""TOML names of msgspec's types."""


def _translate_types(complaint: str) -> str:
    """Return an error of msgspec with TOML's type names."""

    def kinds(found: re.Match[str]) -> str:
        given = found[1].split(" | ")
        *most, last = [words for kind, words in _TYPE_NAMES.items() if kind in given] or [found[0]]
        return f"{', '.join(most)} or {last}" if most else last

    complaint = re.sub(r"`([a-z| ]+)`", kinds, complaint)
    for theirs, ours in (("Expected", "expected"), (" <= ", " up to "), (" >= ", " from ")):
        complaint = complaint.replace(theirs, ours)
    return complaint


def _enum_values(kind: type[Table], key: str) -> list[str]:
    """Return the allowed values of a key with an enum type; empty for other keys."""
    for each in get_args(get_type_hints(kind).get(key)):
        if isinstance(each, type) and issubclass(each, enum.Enum):
            return [str(word.value) for word in each]
    return []
