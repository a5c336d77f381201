"""Canonical form of the subjects that request a class; see `acked`.

A token can be written in several ways. Permissions and requests are converted to one form before
they are compared. A permission for a class applies to its id, its name and its dead letters. A deny
pattern also denies all subjects that begin with its tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import quote, unquote

SUBSCRIBE_PREFIX = b"$SB.SUB."
"""Prefix of the subject of an acked subscription."""
REQUEST_PREFIX = "$SB."
"""Prefix of patterns about requesting classes, not about subjects within them."""
FILTER_TOKEN = "filter"
"""Token followed by a subject pattern in plain form."""

_TOKEN_SAFE = "!\"#$&'()+,/:;<=?@[\\]^_`{|}~-"
_WILDCARDS = ("*", ">")
_ID_CHARACTERS_MAX = 5
_NO_DURABLE = ("-",)


def encode_token(text: str) -> str:
    """Return a name as a single subject token."""
    return quote(text, safe=_TOKEN_SAFE).replace(".", "%2E")


def normalize_pattern(pattern: str) -> str:
    """Return a pattern in canonical form, if it is about requesting classes."""
    if not pattern.startswith(REQUEST_PREFIX):
        return pattern
    subject, *queue = pattern.split()
    first, second, *class_tokens = subject.split(".")
    if class_tokens:
        class_tokens[0] = _normalize_class(class_tokens[0])
        class_tokens[1:] = normalize_options(class_tokens[1:])
    return " ".join([".".join([first, second, *class_tokens]), *queue])


def _normalize_class(text: str) -> str:
    token = _normalize_token(text)
    if token.isascii() and token.isdigit() and len(token) <= _ID_CHARACTERS_MAX:
        return str(int(token))
    return token


def normalize_options(tokens: list[str]) -> list[str]:
    """Return the tokens behind the class in canonical form."""
    end = tokens.index(FILTER_TOKEN, 1) if FILTER_TOKEN in tokens[1:] else len(tokens)
    return [*map(_normalize_token, tokens[:end]), *tokens[end:]]


def prefixes(subject: str) -> list[str]:
    """Return a canonical subject and its prefixes from the class on. A filter is not shortened."""
    tokens = subject.split(".")
    end = tokens.index(FILTER_TOKEN, 4) if FILTER_TOKEN in tokens[4:] else len(tokens)
    return [".".join(tokens[:n]) for n in dict.fromkeys((*range(3, end + 1), len(tokens)))]


def _normalize_token(text: str) -> str:
    if text in _WILDCARDS:
        return text
    try:
        return encode_token(unquote(text, errors="strict"))
    except UnicodeDecodeError:
        return text  # Not valid UTF-8: no permission matches it.


@dataclass(frozen=True, slots=True)
class ClassRequest:
    """Request for a class, as canonical subjects for permission checks."""

    names: tuple[str, ...]
    """Equivalent subjects of the request: one must be allowed."""
    related: tuple[str, ...] = ()
    """Subjects of the class or its contents under other names: none of these and `names` may be
    denied.
    """


def make_class_request(
    names: Iterable[int | str], related: Iterable[int | str], option_tokens: tuple[str, ...]
) -> ClassRequest:
    """Return a class request. `names` and `related` are class ids and names."""
    return ClassRequest(
        _request_subjects(names, option_tokens), _request_subjects(related, option_tokens)
    )


def _request_subjects(
    names: Iterable[int | str], option_tokens: tuple[str, ...]
) -> tuple[str, ...]:
    # A missing durable and `-` mean the same.
    token_choices = [(), _NO_DURABLE] if option_tokens in ((), _NO_DURABLE) else [option_tokens]
    prefix = SUBSCRIBE_PREFIX.decode()
    return tuple(
        ".".join([prefix + (encode_token(name) if isinstance(name, str) else str(name)), *tokens])
        for name in names
        for tokens in token_choices
    )
