"""Rules that rename channels.

The first rule whose pattern matches decides; a channel that matches none keeps its name. The
wildcards of the template are filled, in order, with what those of the pattern matched: `*` is one
segment, a last `#` or `>` is the rest. So a rule can add, remove and reorder leading segments.

    orders.eu.#   ─►  eu.orders.#        orders.eu.paid  ─►  eu.orders.paid
    #             ─►  site-4.#           (no channel)    ─►  site-4
"""

from __future__ import annotations

from collections.abc import Iterable

from simplebus.core.channel.pattern import check_name, check_pattern, matches

_TAIL_WILDCARDS = ("#", ">")


_CACHE_ENTRIES_MAX = 65_536


class ChannelMap:
    """Renaming rules of a copier.

    Raises:
        ValueError: A pattern is invalid, or its template does not fit it.
    """

    def __init__(self, rules: Iterable[tuple[str, str]] = ()) -> None:
        self._rules = [_RenameRule(pattern, template) for pattern, template in rules]
        self._cache: dict[str, str] = {}

    @property
    def is_identity(self) -> bool:
        """True if no channel is renamed."""
        return not self._rules

    def map_channel(self, channel: str) -> str:
        """Return the name of a channel at the target; an empty name stands for no channel.

        Raises:
            ValueError: The new name is invalid, for example too long.
        """
        if not self._rules:
            return channel
        renamed = self._cache.get(channel)
        if renamed is None:
            renamed = next(
                (rule.apply(channel) for rule in self._rules if rule.matches_channel(channel)),
                channel,
            )
            if renamed:
                check_name(renamed)
            if len(self._cache) >= _CACHE_ENTRIES_MAX:
                self._cache.clear()
            self._cache[channel] = renamed
        return renamed

    def sets_first_segment(self, channel: str) -> bool:
        """Return True if a rule sets the first segment of this channel's new name."""
        rule = next((rule for rule in self._rules if rule.matches_channel(channel)), None)
        return rule is not None and rule.has_literal_first_segment


class _RenameRule:
    def __init__(self, pattern: str, template: str) -> None:
        check_pattern(pattern)
        self._pattern = pattern
        self._segments = pattern.split(".")
        self._template = template.split(".") if template else []
        _check_template(pattern, self._segments, template, self._template)

    @property
    def has_literal_first_segment(self) -> bool:
        return bool(self._template) and self._template[0] not in ("*", "#")

    def matches_channel(self, channel: str) -> bool:
        return matches(self._pattern, channel)

    def apply(self, channel: str) -> str:
        segments = channel.split(".") if channel else []
        stars = iter([segments[i] for i, part in enumerate(self._segments) if part == "*"])
        tail_segments = (
            segments[len(self._segments) - 1 :] if self._segments[-1] in _TAIL_WILDCARDS else []
        )
        renamed: list[str] = []
        for part in self._template:
            if part == "*":
                renamed.append(next(stars))
            elif part == "#":
                renamed += tail_segments
            else:
                renamed.append(part)
        return ".".join(renamed)


def _check_template(pattern: str, segments: list[str], template: str, parts: list[str]) -> None:
    if template and not all(parts):
        raise ValueError(f"{template!r} is not a valid template: it has an empty segment")
    star_count, available_count = parts.count("*"), segments.count("*")
    if star_count > available_count:
        raise ValueError(
            f"the template {template!r} has {star_count} '*', but the pattern {pattern!r} has "
            f"{available_count}"
        )
    if ">" in parts or "#" in parts[:-1]:
        raise ValueError(
            f"template {template!r}: '#' must be the last segment, and '>' is not allowed"
        )
    if "#" in parts and segments[-1] not in _TAIL_WILDCARDS:
        raise ValueError(
            f"the template {template!r} ends with '#', but the pattern {pattern!r} does not end "
            "with '#' or '>'"
        )
