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

ASKS = b"$SB.SUB."
"""How the subject of such a subscription begins."""
CLASSES = "$SB."
"""How patterns begin that are about asking for classes, and not about what is in them."""
FILTER = "filter"
"""The token behind which a subject follows that is as it is."""

_TOKEN_SAFE = "!\"#$&'()+,/:;<=?@[\\]^_`{|}~-"
_WILDCARDS = ("*", ">")
_ID_CHARACTERS_MAX = 5
_NO_DURABLE = ("-",)


def token(text: str) -> str:
    """A name as a single token of a subject."""
    return quote(text, safe=_TOKEN_SAFE).replace(".", "%2E")


def spelled(pattern: str) -> str:
    """A pattern, perhaps one of subjects that ask for classes: then it is brought to the one
    spelling."""
    if not pattern.startswith(CLASSES):
        return pattern
    subject, *queue = pattern.split()
    first, second, *asked = subject.split(".")
    if asked:
        asked[0] = _class(asked[0])
        asked[1:] = rest(asked[1:])
    return " ".join([".".join([first, second, *asked]), *queue])


def _class(text: str) -> str:
    once = _once(text)
    if once.isascii() and once.isdigit() and len(once) <= _ID_CHARACTERS_MAX:
        return str(int(once))
    return once


def rest(tokens: list[str]) -> list[str]:
    """What stands behind the class, in the one spelling."""
    end = tokens.index(FILTER, 1) if FILTER in tokens[1:] else len(tokens)
    return [*map(_once, tokens[:end]), *tokens[end:]]


def beginnings(subject: str) -> list[str]:
    """How a subject in the one spelling begins, from the class on, and all of it. Of a filter there
    is no beginning: it is one pattern."""
    tokens = subject.split(".")
    end = tokens.index(FILTER, 4) if FILTER in tokens[4:] else len(tokens)
    return [".".join(tokens[:n]) for n in dict.fromkeys((*range(3, end + 1), len(tokens)))]


def _once(text: str) -> str:
    if text in _WILDCARDS:
        return text
    try:
        return token(unquote(text, errors="strict"))
    except UnicodeDecodeError:
        return text  # Nobody is granted that.


@dataclass(frozen=True, slots=True)
class Asked:
    """For which class one asks. All are subjects in the one spelling."""

    own: tuple[str, ...]
    """By which it can be asked for in the same way: to be allowed one of them is enough."""
    others: tuple[str, ...] = ()
    """And those by which it, or what is in it, is known besides: none of all may be denied."""


def asked(own: Iterable[int | str], others: Iterable[int | str], behind: tuple[str, ...]) -> Asked:
    """`own` and `others` are ids and names; `behind` is what stands behind the class."""
    return Asked(_subjects(own, behind), _subjects(others, behind))


def _subjects(called: Iterable[int | str], behind: tuple[str, ...]) -> tuple[str, ...]:
    # Who says nothing of a durable has none: both are the same.
    ways = [(), _NO_DURABLE] if behind in ((), _NO_DURABLE) else [behind]
    begin = ASKS.decode()
    return tuple(
        ".".join([begin + (token(each) if isinstance(each, str) else str(each)), *way])
        for each in called
        for way in ways
    )
