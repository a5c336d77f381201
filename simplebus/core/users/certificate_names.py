"""What a certificate may call its holder, in one spelling, so that two names can be compared.

Rule 1: a subject is its parts, the last one first: types go by their short names, values are
escaped where they must be, and what stands on one level is in no order of its own.
Rule 2: a name is of one kind: a subject, an email address, an URI or a DNS name. Whoever may have
one kind of them signed does not become who is called so by another.

    CN=ada, ou=shops      CN=ada,OU=shops            as openssl, RFC 2253 and RFC 4514 write it
    2.5.4.3=a\\3Db         CN=a=b
    Till.EXAMPLE          till.example
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Iterator

Subject = Iterable[Iterable[tuple[str, str]]]
"""Levels, each of one type and value, or several."""

_PERSONS = "0.9.2342.19200300.100.1."
_SHORT = {
    "COMMONNAME": "CN",
    "COUNTRYNAME": "C",
    "LOCALITYNAME": "L",
    "STATEORPROVINCENAME": "ST",
    "STREETADDRESS": "STREET",
    "ORGANIZATIONNAME": "O",
    "ORGANIZATIONALUNITNAME": "OU",
    "DOMAINCOMPONENT": "DC",
    "USERID": "UID",
    "GIVENNAME": "GN",
    "SURNAME": "SN",
    "EMAIL": "EMAILADDRESS",
    "E": "EMAILADDRESS",
    "1.2.840.113549.1.9.1": "EMAILADDRESS",
    "2.5.4.3": "CN",
    "2.5.4.4": "SN",
    "2.5.4.5": "SERIALNUMBER",
    "2.5.4.6": "C",
    "2.5.4.7": "L",
    "2.5.4.8": "ST",
    "2.5.4.9": "STREET",
    "2.5.4.10": "O",
    "2.5.4.11": "OU",
    "2.5.4.12": "TITLE",
    "2.5.4.17": "POSTALCODE",
    "2.5.4.42": "GN",
    f"{_PERSONS}1": "UID",
    f"{_PERSONS}25": "DC",
}
_BEGINS_SUBJECT = re.compile(r" *([A-Za-z][A-Za-z0-9-]*|[0-9]+(\.[0-9]+)+) *=")
_ESCAPED = ',+"\\<>;'
_TOKEN = re.compile(r"\\([0-9A-Fa-f]{2})|\\(.)|([,;+])|(.)", re.DOTALL)
_DUMPED = re.compile("#([0-9A-Fa-f]{2})+")
_TEXTS = (0x0C, 0x13, 0x14, 0x16)
"""Of DER: UTF-8, printable, teletex and ASCII."""
_SHOWN_CHARACTERS = 80


class Kind(enum.Enum):
    """Of a name."""

    SUBJECT = enum.auto()
    EMAIL = enum.auto()
    URI = enum.auto()
    DNS = enum.auto()


def kind_of(name: str) -> Kind:
    """By what it looks like: of no other kind it is anything."""
    if _BEGINS_SUBJECT.match(name):
        return Kind.SUBJECT
    if ":" in name or "/" in name:
        return Kind.URI
    return Kind.EMAIL if "@" in name else Kind.DNS


def spelled(name: str) -> str:
    """A name in the one spelling. Raises ValueError for what is none."""
    if not name or not name.isprintable():
        raise ValueError(f"{name[:_SHOWN_CHARACTERS]!r} is no name in a certificate")
    match kind_of(name):
        case Kind.SUBJECT:
            return subject(_read(name))
        case Kind.DNS:
            return name.lower()
        case Kind.EMAIL:  # Who is meant at a host, that host alone knows.
            who, _, host = name.rpartition("@")
            return f"{who}@{host.lower()}"
    return name


def subject(levels: Subject) -> str:
    """As one text, the first of these levels first."""
    return ",".join(
        "+".join(sorted(f"{_short(key)}={_escape(value)}" for key, value in level))
        for level in levels
    )


def _short(key: str) -> str:
    return _SHORT.get(key.upper(), key.upper())


def _escape(value: str) -> str:
    found = "".join("\\" + c if c in _ESCAPED else c for c in value)
    if found[:1] in ("#", " "):
        found = "\\" + found
    return found[:-1] + "\\ " if value.endswith(" ") and len(value) > 1 else found


def _read(text: str) -> list[list[tuple[str, str]]]:
    """The levels of a subject, as they are written."""
    levels: list[list[tuple[str, str]]] = [[]]
    for part, ends in _split(text):
        begin = _BEGINS_SUBJECT.match(part)
        if begin is None:
            raise ValueError(
                f"{text[:_SHOWN_CHARACTERS]!r} is no subject: {part[:_SHOWN_CHARACTERS]!r} is no "
                "type, = and a value"
            )
        levels[-1].append((begin[1], _value(part[begin.end() :])))
        if ends in (",", ";"):
            levels.append([])
    return levels


def _split(text: str) -> Iterator[tuple[str, str]]:
    """Parts, as they are written, and what stands behind each: a separator, or nothing."""
    begin = 0
    for token in _TOKEN.finditer(text):
        if token[3]:
            yield text[begin : token.start()], token[3]
            begin = token.end()
    yield text[begin:], ""


def _value(written: str) -> str:
    """What a value means. Blanks around it that are not escaped are none of it."""
    written = written.lstrip(" ")
    if _DUMPED.fullmatch(written.rstrip(" ")):
        return _dumped(bytes.fromhex(written.rstrip(" ")[1:])) or written
    found, solid = bytearray(), 0
    for token in _TOKEN.finditer(written):
        found += bytes.fromhex(token[1]) if token[1] else (token[2] or token[4] or "").encode()
        if token[4] != " ":
            solid = len(found)
    try:
        return found[:solid].decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{written[:_SHOWN_CHARACTERS]!r} is not UTF-8: {error.reason}") from None


def _dumped(raw: bytes) -> str:
    """A text as DER has it; empty for anything else."""
    is_text = len(raw) > 1 and raw[0] in _TEXTS and raw[1] == len(raw) - 2 < 128
    return raw[2:].decode(errors="replace") if is_text else ""
