"""How channels are renamed on their way.

Rule 1: of several rules the first whose pattern matches decides; where none does, a channel stays
as it is.
Rule 2: what the wildcards of a pattern stand for fills those of its template, in order: a `*` one
segment, a last `#` or `>` the rest. So a rule can put segments in front, take some away, and change
them.

    orders.eu.#   ─►  eu.orders.#        orders.eu.paid  ─►  eu.orders.paid
    #             ─►  site-4.#           (no channel)    ─►  site-4
"""

from __future__ import annotations

from collections.abc import Iterable

from simplebus.core.channel.pattern import check_name, check_pattern, matches

_REST = ("#", ">")


_KNOWN_MAX = 65_536


class Renaming:
    """The rules of one lane. Raises ValueError for what is no pattern or fits no template."""

    def __init__(self, rules: Iterable[tuple[str, str]] = ()) -> None:
        self._rules = [_Rule(pattern, template) for pattern, template in rules]
        self._known: dict[str, str] = {}

    @property
    def is_none(self) -> bool:
        """Whether channels stay as they are."""
        return not self._rules

    def name(self, channel: str) -> str:
        """What a channel is called at the far end; empty for none, both ways.

        Raises ValueError where that is not legal: it has become too long.
        """
        if not self._rules:
            return channel
        found = self._known.get(channel)
        if found is None:
            found = next((r.apply(channel) for r in self._rules if r.fits(channel)), channel)
            if found:
                check_name(found)
            if len(self._known) >= _KNOWN_MAX:
                self._known.clear()
            self._known[channel] = found
        return found

    def names(self, channel: str) -> bool:
        """Whether it is a rule that says what the new name of this channel begins with."""
        rule = next((r for r in self._rules if r.fits(channel)), None)
        return rule is not None and rule.says_first


class _Rule:
    def __init__(self, pattern: str, template: str) -> None:
        check_pattern(pattern)
        self._pattern = pattern
        self._segments = pattern.split(".")
        self._template = template.split(".") if template else []
        _check_template(pattern, self._segments, template, self._template)

    @property
    def says_first(self) -> bool:
        return bool(self._template) and self._template[0] not in ("*", "#")

    def fits(self, channel: str) -> bool:
        return matches(self._pattern, channel)

    def apply(self, channel: str) -> str:
        given = channel.split(".") if channel else []
        ones = iter([given[i] for i, part in enumerate(self._segments) if part == "*"])
        rest = given[len(self._segments) - 1 :] if self._segments[-1] in _REST else []
        made: list[str] = []
        for part in self._template:
            if part == "*":
                made.append(next(ones))
            elif part == "#":
                made += rest
            else:
                made.append(part)
        return ".".join(made)


def _check_template(pattern: str, segments: list[str], template: str, parts: list[str]) -> None:
    if template and not all(parts):
        raise ValueError(f"{template!r} is no template of a channel: it has an empty segment")
    wanted, there = parts.count("*"), segments.count("*")
    if wanted > there:
        raise ValueError(
            f"the template {template!r} has {wanted} times '*', and the pattern {pattern!r} "
            f"{there} times"
        )
    if ">" in parts or "#" in parts[:-1]:
        raise ValueError(f"in the template {template!r} '#' stands last, and '>' nowhere")
    if "#" in parts and segments[-1] not in _REST:
        raise ValueError(
            f"the template {template!r} ends with '#', and the pattern {pattern!r} with neither "
            "'#' nor '>'"
        )
