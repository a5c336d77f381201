"""What a configuration file says that no option can: users and their rights, classes.

Rule 1: shapes are declared, msgspec checks them, and what it complains of becomes our sentence.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

import msgspec
import typer

from simplebus.config.mistakes import MESSAGES_MAX, ConfigError, ErrorCollector, suggest_name, check_unique_names, describe_unknown_name
from simplebus.config.parse import FullPolicyChoice, parse_class, parse_size
from simplebus.core.dead_letters import is_dead_letter_class
from simplebus.core.errors import RemoteProtocolError
from simplebus.core.limits import BINDINGS_MAX, CLASS_ID_MAX
from simplebus.core.message_class.subject_bindings import check_subject
from simplebus.core.protocol.requests import NamedClass
from simplebus.core.settings import ClassSettings, FullPolicy, Retention
from simplebus.nats.server.permissions import ResponsePermission, SubjectPermissions
from simplebus.nats.server.users import NatsAuth, NatsUser

R = TypeVar("R")
T = TypeVar("T", bound="Table")

_COMPLAINT = re.compile(r"(?s)(?P<what>.*?)(?: - at `(?P<at>[^`]*)`)?")
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`")
_STEP = re.compile(r"\.[^.\[]+|\[[^\]]*\]")
_MISSING = re.compile(r"Object missing required field `(.*)`")


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A table of the file."""

    @classmethod
    def keys(cls) -> list[str]:
        """What may stand in it."""
        return [field.encode_name for field in msgspec.structs.fields(cls)]


class RightsTable(Table, frozen=True):
    """Subjects that a user may publish or subscribe to. A queue's name may stand behind a subject
    to be subscribed to, after a blank."""

    allow: list[str] | str | None = None
    """None for all."""
    deny: list[str] | str | None = None


class AnswersTable(Table, frozen=True):
    """How a user may answer requests though it may not publish to where answers go."""

    max: int = 1
    """Answers to one request; below 0 for any number."""
    expires: float = 120.0
    """Seconds; below 0 for ever."""


class PermissionsTable(Table, frozen=True):
    """What a user may do; all, without such a table."""

    publish: RightsTable | list[str] | str | None = None
    subscribe: RightsTable | list[str] | str | None = None
    allow_responses: AnswersTable | bool = False


class UserTable(Table, frozen=True):
    """Somebody who may come in through the NATS door: by a password, an nkey or a certificate."""

    user: str = ""
    password: str = ""
    nkey: str = ""
    """The public one."""
    permissions: PermissionsTable | None = None

    def to_user(self, where: str) -> NatsUser:
        """The user. Raises ConfigError when values contradict each other."""
        permissions = nats_permissions(self.permissions, f"{where}.permissions")
        return or_complaint(where, lambda: NatsUser(self.user, self.password, self.nkey, permissions))


class NatsTable(Table, frozen=True):
    """Who may come in through the NATS door. Nobody named is everybody."""

    token: str | None = None
    user: str | None = None
    password: str | None = None
    users: list[UserTable] = []
    no_auth_user: str = ""
    """Who those are that do not say who they are."""
    default_permissions: PermissionsTable | None = None
    """Of users that have none of their own."""

    def to_auth(self, users: list[NatsUser], where: str) -> NatsAuth:
        """What the door goes by; `users` are those of its list. Raises ConfigError when values
        contradict each other."""
        said = {"token": self.token, "user": self.user, "password": self.password}
        for key, value in said.items():
            if value == "":
                raise ConfigError(
                    f"{where}.{key}: it is empty, and would let in everybody; leave it out for that"
                )
        name, password = self.user or "", self.password or ""
        if bool(name) != bool(password):
            raise ConfigError(f"{where}: 'user' and 'password' need each other")
        own = [or_complaint(where, lambda: NatsUser(name, password))] if name else []
        default = nats_permissions(self.default_permissions, f"{where}.default_permissions")
        return or_complaint(
            where,
            lambda: NatsAuth(
                users=(*users, *own),
                token=self.token or "",
                no_auth_user=self.no_auth_user,
                default_permissions=default,
            ),
        )


def nats_of(raw: dict[str, Any], mistakes: ErrorCollector, where: str = "nats") -> tuple[NatsAuth, bool]:
    """What the NATS door goes by, as far as nothing is wrong with it, which is noted; and whether
    there are secrets. Raises ConfigError."""
    mine, users, given = ErrorCollector(), list[NatsUser](), raw.get("users")
    if isinstance(given, list) and all(isinstance(each, dict) for each in given):
        raw = {key: value for key, value in raw.items() if key != "users"}
    else:
        given = []
    has_secrets = False
    for at, each in enumerate(given):
        with mine.collect():
            here = f"{where}.users[{at}]"
            user = table(UserTable, each, here)
            has_secrets |= bool(user.password)
            users.append(user.to_user(here))
    read, auth = what_is_good(NatsTable, raw, where, mine), NatsAuth()
    if read is not None:
        has_secrets |= bool(read.token or read.password)
        if not mine.messages:
            auth = read.to_auth(users, where)
    mistakes.messages += mine.messages
    return auth, has_secrets


class ClassTable(Table, frozen=True):
    """A class, by its name."""

    id: Annotated[int, msgspec.Meta(ge=0, le=CLASS_ID_MAX)] | None = None
    """None for one that the bus gives it."""
    subjects: Annotated[list[str], msgspec.Meta(max_length=BINDINGS_MAX)] = []
    """Of the NATS door, those that are bound to it; patterns perhaps."""
    full: FullPolicyChoice | None = None
    max_messages: Annotated[int, msgspec.Meta(ge=1)] | None = None
    max_memory: int | str | None = None
    """Bytes, or with a unit."""
    keep_messages: Annotated[int, msgspec.Meta(ge=0)] | None = None
    keep_memory: int | str | None = None
    keep_seconds: Annotated[float, msgspec.Meta(ge=0)] | None = None
    """What it keeps that nobody needs any more; none of the three for what all classes do."""
    last_values: bool | None = None
    """Whether it keeps the last message of each channel besides; none for as who names it asks."""
    ack_seconds: float | None = None
    max_deliveries: int | None = None
    backoff: list[float] | None = None
    """Seconds."""
    max_disk: int | str | None = None
    """Bytes of messages that may be on disk only, where full is spill."""

    def to_settings(self, where: str, mistakes: ErrorCollector) -> ClassSettings:
        """What it does in its own way. What is wrong is noted, and left out."""
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
                given[name] = size_of(getattr(self, key.replace("-", "_")), f"{where}.{key}")
        with mistakes.collect():
            if (self.keep_messages, self.keep_memory, self.keep_seconds) != (None, None, None):
                memory = size_of(self.keep_memory, f"{where}.keep-memory")
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
        """The class. Raises ConfigError for all of its name, its subjects and what it does that
        makes no sense."""
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
    """Raise ConfigError for what is no name of a class."""
    try:
        is_name = parse_class(name) == name
    except typer.BadParameter as error:
        raise ConfigError(f"{where}: {error.message}") from None
    if not is_name:
        raise ConfigError(f"{where}: {name!r} is an id, expected a name; the id goes below it")


_KEYS = {
    "messages_max": "max-messages",
    "bytes_max": "max-memory",
    "disk_bytes_max": "max-disk",
    "ack_seconds": "ack-seconds",
    "max_deliveries": "max-deliveries",
    "backoff": "backoff",
    "last_values": "last-values",
}
"""Of what complaints about the settings of a class are, by how they begin."""


def _class_settings(where: str, given: Mapping[str, Any]) -> ClassSettings:
    """Raises ConfigError, by the key, when values make no sense."""
    try:
        return ClassSettings(**given)
    except ValueError as error:
        name, _, said = str(error).partition(" ")
        raise ConfigError(f"{where}.{_KEYS[name]} {said}") from None


_TABLES: dict[str, type[Table]] = {
    "users": UserTable,
    "permissions": PermissionsTable,
    "default_permissions": PermissionsTable,
    "publish": RightsTable,
    "subscribe": RightsTable,
    "allow_responses": AnswersTable,
}
"""By the last word of where a table stands."""


def table(kind: type[T], raw: dict[str, Any], where: str) -> T:
    """A table as it stands in the file, checked. Raises ConfigError, saying where: for all that is
    wrong, as far as it can be looked at without what is."""
    mistakes = ErrorCollector()
    made = what_is_good(kind, raw, where, mistakes)
    mistakes.raise_if_any()
    assert made is not None
    return made


def what_is_good(kind: type[T], raw: dict[str, Any], where: str, mistakes: ErrorCollector) -> T | None:
    """What of a table is good by itself; None where that is no table. What is wrong is noted."""
    spelled: dict[str, str] = {}
    raw = _plain(raw, where, spelled)
    numbers: dict[int, list[int]] = {}
    for _ in range(MESSAGES_MAX):
        try:
            return msgspec.convert(raw, kind)
        except msgspec.ValidationError as error:
            found = _COMPLAINT.fullmatch(str(error))
            assert found is not None
            path = [*map(_step, _STEP.findall((found["at"] or "").removeprefix("$")))]
            below = _shown(raw, path, numbers, spelled)
            mistakes.messages.append(_told(kind, found["what"], where, below, spelled))
            if name := _UNKNOWN.fullmatch(found["what"]):
                path.append(name[1])
            if _MISSING.fullmatch(found["what"]) or not _take_out(raw, path, numbers):
                break
    return None


def _told(kind: type[Table], what: str, where: str, below: str, spelled: Mapping[str, str]) -> str:
    """One complaint of msgspec's as a mistake. `spelled` is how the file writes keys."""
    at = where + below
    if name := _UNKNOWN.fullmatch(what):
        last = re.sub(r"\[.*?\]$", "", at).rpartition(".")[2]
        known = kind if at == where else _TABLES.get(last.replace("-", "_"), kind)
        return describe_unknown_name(spelled.get(name[1], name[1]), known.keys(), at)
    if name := _MISSING.fullmatch(what):
        return f"{at}: {name[1].replace('_', '-')!r} is missing"
    if what.startswith("Invalid enum value "):
        word = what.removeprefix("Invalid enum value ")
        words = _words(kind, below.removeprefix(".").replace("-", "_"))
        expected = f", expected one of {', '.join(words)}" if words else ""
        meant = suggest_name(word.strip("'"), words)
        return f"{at}: {word} is unknown{expected}{meant}"
    return f"{at}: {_in_words(what)}"


def _step(word: str) -> str | int:
    """A step of a path as msgspec writes it: .name or [7]."""
    return word[1:] if word.startswith(".") else int(word[1:-1]) if word[1:-1].isdigit() else word


def _shown(
    raw: Any, path: list[str | int], numbers: dict[int, list[int]], spelled: Mapping[str, str]
) -> str:
    """A path as it is in the file: `numbers` has those of the elements that are left, by list,
    `spelled` how it writes keys."""
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


def _take_out(raw: Any, path: list[str | int], numbers: dict[int, list[int]]) -> bool:
    """Remove what is wrong, so that the rest can be looked at. Returns whether it is there."""
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


def size_of(given: int | str | None, where: str) -> int | None:
    """Bytes. Raises ConfigError for what is no size."""
    try:
        return None if given is None else parse_size(given)
    except typer.BadParameter as error:
        raise ConfigError(f"{where}: {error.message}") from None


def or_complaint(where: str, made: Callable[[], R]) -> R:
    """What is made of values. Raises ConfigError, saying where, for ValueError."""
    try:
        return made()
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None


def nats_permissions(given: PermissionsTable | None, where: str) -> SubjectPermissions | None:
    """What somebody may do with subjects. Raises ConfigError for a pattern that is none."""
    if given is None:
        return None
    publish, subscribe = _rights(given.publish), _rights(given.subscribe)
    answers = given.allow_responses
    responses = ResponsePermission() if answers is True else None
    if isinstance(answers, AnswersTable):
        responses = ResponsePermission(answers.max, answers.expires)
    try:
        return SubjectPermissions(
            publish_allow=_several(publish.allow),
            publish_deny=_several(publish.deny),
            subscribe_allow=_several(subscribe.allow),
            subscribe_deny=_several(subscribe.deny),
            responses=responses,
        )
    except ValueError as error:  # It begins with the name above.
        raise ConfigError(f"{where}.{str(error).replace('_', '.', 1)}") from None


def _rights(given: RightsTable | list[str] | str | None) -> RightsTable:
    return given if isinstance(given, RightsTable) else RightsTable(allow=given)


def _several(given: list[str] | str | None) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given or ())


def _plain(raw: Any, where: str, spelled: dict[str, str]) -> Any:
    """With `_` for `-` in all keys; how they were written is noted. Raises ConfigError for one that
    is there in both forms."""
    if isinstance(raw, dict):
        check_unique_names(raw, where)
        made = {}
        for key, value in raw.items():
            spelled[plain := key.replace("-", "_")] = key
            made[plain] = _plain(value, f"{where}.{key}", spelled)
        return made
    if isinstance(raw, list):
        return [_plain(part, f"{where}[{at}]", spelled) for at, part in enumerate(raw)]
    return raw


_KINDS = {
    "object": "a table",
    "array": "a list",
    "str": "a text",
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
}
"""What msgspec calls values, and TOML."""


def _in_words(complaint: str) -> str:
    """What msgspec says, by TOML's words."""

    def kinds(found: re.Match[str]) -> str:
        given = found[1].split(" | ")
        *most, last = [words for kind, words in _KINDS.items() if kind in given] or [found[0]]
        return f"{', '.join(most)} or {last}" if most else last

    complaint = re.sub(r"`([a-z| ]+)`", kinds, complaint)
    for theirs, ours in (("Expected", "expected"), (" <= ", " up to "), (" >= ", " from ")):
        complaint = complaint.replace(theirs, ours)
    return complaint


def _words(kind: type[Table], key: str) -> list[str]:
    """Which a key may be that may be some only; else none."""
    for each in get_args(get_type_hints(kind).get(key)):
        if isinstance(each, type) and issubclass(each, enum.Enum):
            return [str(word.value) for word in each]
    return []
