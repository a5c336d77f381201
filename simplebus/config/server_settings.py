"""Core settings computed from the configuration of `simplebus serve`."""

from __future__ import annotations

from collections.abc import Mapping

from simplebus.config.configuration import name_field_by_option
from simplebus.config.server_schema import LIMITS, ServerConfig
from simplebus.core.limits import RECEIVE_BYTES, RING_BYTES_MIN, Limits
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
        raise ValueError("\n".join(f"{each}: {reason}" for each in spilling))
    for class_ in config.memory.last_values:
        class_id, name = class_.id, class_.name or ""
        own = settings.settings_for_class(-1 if class_id is None else class_id, name)
        if own.last_values is None and settings.full_policy_for(own) is FullPolicy.SPILL:
            raise ValueError(
                f"--last-values {name or class_id}: it spills, and such a class keeps none"
            )
