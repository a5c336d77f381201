"""Server settings computed from the options of `simplebus serve`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simplebus.config.parse import CLASS_MEMORY_MIN, DEFAULT, FullPolicyChoice
from simplebus.core.limits import RECEIVE_BYTES, Limits

if TYPE_CHECKING:
    from simplebus.config.file import ConfigFile
    from simplebus.core.protocol.requests import NamedClass
    from simplebus.core.settings import Settings

LIMIT_FLAGS = {
    "frame_bytes": "--max-frame",
    "class_messages": "--max-class-messages",
    "class_bytes": "--max-class-memory",
    "dead_letter_bytes": "--max-dead-letters",
    "total_bytes": "--max-memory",
    "total_pending_bytes": "--max-total-pending",
    "pending_bytes": "--max-pending",
    "connections": "--max-connections",
    "classes": "--max-classes",
    "subscriptions": "--max-subscriptions",
    "durables": "--max-durables",
    "credit_bytes": "--max-credit",
    "hello_seconds": "--hello-timeout",
    "frame_seconds": "--frame-timeout",
    "stall_seconds": "--stall-timeout",
}
"""The option of each field of `Limits`."""

_SETTING_FLAGS = {
    **LIMIT_FLAGS,
    "ack_timeout": "--ack-timeout",
    "tick_seconds": "--tick",
    "heartbeat_seconds": "--heartbeat",
    "max_deliveries": "--max-deliveries",
}

_RELATED = {
    "frame_bytes": "a frame may take at most half of --max-class-memory",
    "class_bytes": "a class may not take more than --max-memory, which all classes share",
    "total_pending_bytes": "one connection may take --max-pending of it",
    "pending_bytes": "a whole frame of --max-frame and one read must fit into it",
}
"""Why the bounds of a limit are what they are, where another option decides."""


def server_settings(
    *,
    ack_timeout: int,
    tick: float,
    full: FullPolicyChoice,
    max_memory: int,
    max_class_memory: int | None,
    max_class_messages: int,
    max_frame: int | None,
    max_pending: int | None,
    max_total_pending: int | None,
    max_connections: int,
    max_classes: int,
    hello_timeout: float,
    frame_timeout: float,
    stall_timeout: float,
    heartbeat: float,
    keep_messages: int,
    keep_memory: int,
    keep_seconds: float,
    max_credit: int,
    max_subscriptions: int,
    max_durables: int,
    max_dead_letters: int,
    max_deliveries: int,
    last_values: Sequence[NamedClass] | None = None,
    config: ConfigFile | None = None,
    data_dir: Path | None = None,
    **_: Any,
) -> Settings:
    """Return the server settings for the options of `serve`; missing limits fit the given ones.

    Raises:
        ValueError: If options contradict each other.
    """
    from simplebus.core.settings import FullPolicy, Retention, Settings

    if max_memory < CLASS_MEMORY_MIN:
        raise ValueError(f"--max-memory must be at least {CLASS_MEMORY_MIN}, got {max_memory}")
    if max_class_memory is None:
        max_class_memory = min(DEFAULT.class_bytes, max_memory)
    if max_class_memory < CLASS_MEMORY_MIN:
        minimum, value = CLASS_MEMORY_MIN, max_class_memory
        raise ValueError(f"--max-class-memory must be from {minimum} to {max_memory}, got {value}")
    if max_frame is None:
        max_frame = min(DEFAULT.frame_bytes, max_class_memory // 2)
    if max_pending is None:
        max_pending = max(DEFAULT.pending_bytes, max_frame + RECEIVE_BYTES)
    if max_total_pending is None:
        max_total_pending = max(DEFAULT.total_pending_bytes, max_pending)
    try:
        settings = Settings(
            limits=Limits(
                frame_bytes=max_frame,
                class_messages=max_class_messages,
                class_bytes=max_class_memory,
                total_bytes=max_memory,
                pending_bytes=max_pending,
                total_pending_bytes=max_total_pending,
                connections=max_connections,
                classes=max_classes,
                subscriptions=max_subscriptions,
                durables=max_durables,
                dead_letter_bytes=max_dead_letters,
                credit_bytes=max_credit,
                hello_seconds=hello_timeout,
                frame_seconds=frame_timeout,
                stall_seconds=stall_timeout,
            ),
            ack_timeout=ack_timeout,
            tick_seconds=tick,
            full_policy=FullPolicy(full),
            keep=Retention(messages=keep_messages, bytes=keep_memory, seconds=keep_seconds),
            heartbeat_seconds=heartbeat,
            classes=config.class_settings if config else {},
            deliveries_max=max_deliveries,
        )
    except ValueError as error:
        raise ValueError(name_setting_option(str(error))) from None
    if settings.has_spilling_class and data_dir is None:
        class_settings = settings.classes.items()
        spilling = [
            f"classes.{name}.full"
            for name, each in class_settings
            if each.full_policy is FullPolicy.SPILL
        ]
        if settings.full_policy is FullPolicy.SPILL:
            spilling.insert(0, "--full")
        reason = "spill keeps on disk what does not fit into memory: it needs --data-dir"
        raise ValueError("\n".join(f"{each}: {reason}" for each in spilling))
    for class_ in last_values or ():
        own_settings = settings.settings_for_class(
            -1 if class_.id is None else class_.id, class_.name or ""
        )
        if (
            own_settings.last_values is None
            and settings.full_policy_for(own_settings) is FullPolicy.SPILL
        ):
            what = class_.name or class_.id
            raise ValueError(f"--last-values {what}: it spills, and such a class keeps none")
    return settings


def name_setting_option(text: str) -> str:
    """A sentence about a setting, with the setting's option instead of its name."""
    for name, flag in _SETTING_FLAGS.items():
        if f"{name} " in text:
            explanation = f" ({_RELATED[name]})" if name in _RELATED and " from " in text else ""
            return text.removeprefix("limit ").replace(f"{name} ", f"{flag} ", 1) + explanation
    return text
