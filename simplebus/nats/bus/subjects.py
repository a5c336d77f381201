"""How subjects are spelled that ask for classes; see `nats.acked`.

Rule 1: there are many ways to write a token, and one in which it is judged: what is allowed or
denied, and what is asked for, are brought to that one first.
Rule 2: a class goes by its id and by its name, and its dead letters are its own, too.
Rule 3: what is denied is denied with all that may be said behind it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import quote, unquote

SUBSCRIBE_PREFIX = b"$SB.SUB."
"""How the subject of such a subscription begins."""
REQUEST_PREFIX = "$SB."
"""How patterns begin that are about asking for classes, and not about what is in them."""
FILTER_TOKEN = "filter"
"""The token behind which a subject follows that is as it is."""

_TOKEN_SAFE = "!\"#$&'()+,/:;<=?@[\\]^_`{|}~-"
_WILDCARDS = ("*", ">")
_ID_CHARACTERS_MAX = 5
_NO_DURABLE = ("-",)


def encode_token(text: str) -> str:
    """A name as a single token of a subject."""
    return quote(text, safe=_TOKEN_SAFE).replace(".", "%2E")


def normalize_pattern(pattern: str) -> str:
    """A pattern, perhaps one of subjects that ask for classes: then it is brought to the one
    spelling."""
    if not pattern.startswith(REQUEST_PREFIX):
        return pattern
    subject, *queue = pattern.split()
    first, second, *asked = subject.split(".")
    if asked:
        asked[0] = _normalize_class(asked[0])
        asked[1:] = normalize_options(asked[1:])
    return " ".join([".".join([first, second, *asked]), *queue])


def _normalize_class(text: str) -> str:
    once = _normalize_token(text)
    if once.isascii() and once.isdigit() and len(once) <= _ID_CHARACTERS_MAX:
        return str(int(once))
    return once


def normalize_options(tokens: list[str]) -> list[str]:
    """What stands behind the class, in the one spelling."""
    end = tokens.index(FILTER_TOKEN, 1) if FILTER_TOKEN in tokens[1:] else len(tokens)
    return [*map(_normalize_token, tokens[:end]), *tokens[end:]]


def prefixes(subject: str) -> list[str]:
    """How a subject in the one spelling begins, from the class on, and all of it. Of a filter there
    is no beginning: it is one pattern."""
    tokens = subject.split(".")
    end = tokens.index(FILTER_TOKEN, 4) if FILTER_TOKEN in tokens[4:] else len(tokens)
    return [".".join(tokens[:n]) for n in dict.fromkeys((*range(3, end + 1), len(tokens)))]


def _normalize_token(text: str) -> str:
    if text in _WILDCARDS:
        return text
    try:
        return encode_token(unquote(text, errors="strict"))
    except UnicodeDecodeError:
        return text  # Nobody is granted that.


@dataclass(frozen=True, slots=True)
class ClassRequest:
    """For which class one asks. All are subjects in the one spelling."""

    names: tuple[str, ...]
    """By which it can be asked for in the same way: to be allowed one of them is enough."""
    related: tuple[str, ...] = ()
    """And those by which it, or what is in it, is known besides: none of all may be denied."""


def make_class_request(
    names: Iterable[int | str], related: Iterable[int | str], option_tokens: tuple[str, ...]
) -> ClassRequest:
    """`own` and `others` are ids and names; `behind` is what stands behind the class."""
    return ClassRequest(
        _request_subjects(names, option_tokens), _request_subjects(related, option_tokens)
    )


def _request_subjects(
    names: Iterable[int | str], option_tokens: tuple[str, ...]
) -> tuple[str, ...]:
    # Who says nothing of a durable has none: both are the same.
    ways = [(), _NO_DURABLE] if option_tokens in ((), _NO_DURABLE) else [option_tokens]
    begin = SUBSCRIBE_PREFIX.decode()
    return tuple(
        ".".join([begin + (encode_token(each) if isinstance(each, str) else str(each)), *way])
        for each in names
        for way in ways
    )
