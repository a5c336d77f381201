"""Core settings, of the server and of single classes, from the values of settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import typer

from simplebus.config.errors import ConfigError, ErrorCollector
from simplebus.config.parse import parse_class
from simplebus.config.server_schema import (
    LIMITS,
    ClassTable,
    ServerConfig,
    find_field_setting,
    name_field_by_option,
)
from simplebus.core.dead_letters import is_dead_letter_class
from simplebus.core.errors import RemoteProtocolError
from simplebus.core.limits import BINDINGS_MAX, RECEIVE_BYTES, RING_BYTES_MIN, Limits
from simplebus.core.message_class.subject_bindings import check_subject
from simplebus.core.protocol.requests import NamedClass
from simplebus.core.settings import ClassSettings, FullPolicy, Retention, Settings

_CLASS_MEMORY_MIN = 4 * RING_BYTES_MIN


def server_settings(
    config: ServerConfig, classes: Mapping[int | str, ClassSettings] | None = None
) -> Settings:
    """Return the server settings; missing limits fit the given ones.

    Args:
        config: Values of all settings.
        classes: Settings of single classes.

    Raises:
        ValueError: If settings contradict each other.
    """
    try:
        settings = Settings(
            limits=_limits(config),
            keep=Retention(**config.values_of(Retention)),
            classes=classes or {},
            **config.values_of(Settings),
        )
    except ValueError as error:
        raise name_field_by_option(error, Limits, Settings) from None
    _check_spilling(config, settings)
    return settings


def _limits(config: ServerConfig) -> Limits:
    """Return the limits. Raises ValueError, with names of options or of fields."""
    memory, smallest = config.memory, _CLASS_MEMORY_MIN
    if memory.max_memory < smallest:
        raise ValueError(f"--max-memory must be at least {smallest}, got {memory.max_memory}")
    class_bytes = memory.max_class_memory
    if class_bytes is None:
        class_bytes = min(LIMITS.class_bytes, memory.max_memory)
    if class_bytes < smallest:
        raise ValueError(
            f"--max-class-memory must be from {smallest} to {memory.max_memory}, got {class_bytes}"
        )
    frame_bytes = memory.max_frame
    if frame_bytes is None:
        frame_bytes = min(LIMITS.frame_bytes, class_bytes // 2)
    pending_bytes = memory.max_pending
    if pending_bytes is None:
        pending_bytes = max(LIMITS.pending_bytes, frame_bytes + RECEIVE_BYTES)
    total_pending_bytes = memory.max_total_pending
    if total_pending_bytes is None:
        total_pending_bytes = max(LIMITS.total_pending_bytes, pending_bytes)
    derived = {
        "class_bytes": class_bytes,
        "frame_bytes": frame_bytes,
        "pending_bytes": pending_bytes,
        "total_pending_bytes": total_pending_bytes,
    }
    return Limits(**config.values_of(Limits) | derived)


def _check_spilling(config: ServerConfig, settings: Settings) -> None:
    """Raise ValueError if a class spills without a journal, or keeps last values and spills."""
    if settings.has_spilling_class and config.durability.data_dir is None:
        spilling = ["--full"] if settings.full_policy is FullPolicy.SPILL else []
        spilling += [
            f"classes.{name}.full"
            for name, each in settings.classes.items()
            if each.full_policy is FullPolicy.SPILL
        ]
        reason = "spill keeps on disk what does not fit into memory: it needs --data-dir"
        raise ValueError("\n".join(f"{key}: {reason}" for key in spilling))
    for class_ in config.memory.last_values:
        class_id, name = class_.id, class_.name or ""
        settings_of_class = settings.settings_for_class(-1 if class_id is None else class_id, name)
        if (
            settings_of_class.last_values is None
            and settings.full_policy_for(settings_of_class) is FullPolicy.SPILL
        ):
            raise ValueError(
                f"--last-values {name or class_id}: a class that spills cannot keep last values"
            )


# Single classes -----------------------------------------------------------------------------------


def class_settings(table: ClassTable, path: str, errors: ErrorCollector) -> ClassSettings:
    """Return the valid settings of a class, whose table is at `path`.

    Errors are added to `errors`.
    """
    values = {
        setting.sets[1]: getattr(table, setting.field_name)
        for setting in table.settings()
        if setting.sets is not None
    }
    if (table.keep_messages, table.keep_memory, table.keep_seconds) != (None, None, None):
        values["keep"] = Retention(
            table.keep_messages or 0, table.keep_memory or 0, table.keep_seconds or 0.0
        )
    for name, value in list(values.items()):  # Each by itself, and then all together.
        with errors.collect():
            _build_class_settings(path, {name: values.pop(name)})
            values[name] = value
    with errors.collect():
        return _build_class_settings(path, values)
    return ClassSettings()


def _build_class_settings(path: str, values: Mapping[str, Any]) -> ClassSettings:
    """Return the settings of a class. Raises ConfigError with the key's path."""
    try:
        return ClassSettings(**values)
    except ValueError as error:
        found = find_field_setting(error, ClassTable.settings(), [ClassSettings])
        text = f".{found[0].toml_key} {found[1]}" if found else f": {error}"
        raise ConfigError(path + text) from None


def named_class(table: ClassTable, name: str, path: str) -> NamedClass:
    """Return a class. Raises ConfigError with all errors in its name and subjects."""
    errors = ErrorCollector()
    with errors.collect():
        _check_class_name(name, path)
    if len(table.subjects) > BINDINGS_MAX:
        errors.messages.append(
            f"{path}.subjects: expected up to {BINDINGS_MAX}, got {len(table.subjects)}"
        )
    for index, subject in enumerate(table.subjects):
        try:
            check_subject(subject)
        except RemoteProtocolError as error:
            errors.messages.append(f"{path}.subjects[{index}]: {error.sentence}")
    if is_dead_letter_class(name):
        if table.full not in (None, FullPolicy.BLOCK, FullPolicy.DROP_OLDEST):
            errors.messages.append(
                f"{path}.full: {table.full.value} has no effect on a class of dead letters, "
                "expected drop_oldest or block"
            )
        if table.last_values:
            errors.messages.append(
                f"{path}.last-values has no effect on a class of dead letters: leave it out"
            )
    errors.raise_if_any()
    return NamedClass(id=table.id, name=name, subjects=[*table.subjects])


def _check_class_name(name: str, path: str) -> None:
    """Raise ConfigError if `name` is not a class name."""
    try:
        is_name = parse_class(name) == name
    except typer.BadParameter as error:
        raise ConfigError(f"{path}: {error.message}") from None
    if not is_name:
        raise ConfigError(
            f"{path}: {name!r} is an id; expected a class name, and the id as a key of its table"
        )
