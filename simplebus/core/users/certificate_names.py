r"""Normal form of the names in a client certificate, so that names can be compared.

A subject lists its parts from last to first, with short type names and the necessary escapes; the
parts of one level are sorted. Subjects, email addresses, URIs and DNS names are different kinds and
never equal. Otherwise a client that may obtain one kind of name could impersonate another user.

    CN=ada, ou=shops      CN=ada,OU=shops            as openssl, RFC 2253 and RFC 4514 write it
    2.5.4.3=a\3Db         CN=a=b
    Till.EXAMPLE          till.example
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

SubjectLevels = Iterable[Iterable[tuple[str, str]]]
"""Levels of a subject, each with one or more (type, value) pairs."""

_PERSON_OID_PREFIX = "0.9.2342.19200300.100.1."
_SHORT_TYPES = {
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
    f"{_PERSON_OID_PREFIX}1": "UID",
    f"{_PERSON_OID_PREFIX}25": "DC",
}
_BEGINS_SUBJECT = re.compile(r" *([A-Za-z][A-Za-z0-9-]*|[0-9]+(\.[0-9]+)+) *=")
_ESCAPED = ',+"\\<>;'
_TOKEN = re.compile(r"\\([0-9A-Fa-f]{2})|\\(.)|([,;+])|(.)", re.DOTALL)
_DER_HEX = re.compile("#([0-9A-Fa-f]{2})+")
_DER_TEXT_TAGS = (0x0C, 0x13, 0x14, 0x16)
"""DER tags of UTF-8, printable, teletex and ASCII strings."""
_SHOWN_CHARACTERS = 80


class CertificateNameKind(enum.Enum):
    """Kind of a name in a certificate."""

    SUBJECT = enum.auto()
    EMAIL = enum.auto()
    URI = enum.auto()
    DNS = enum.auto()


_ALTERNATIVE_NAME_KINDS = {
    "email": CertificateNameKind.EMAIL,
    "DNS": CertificateNameKind.DNS,
    "URI": CertificateNameKind.URI,
}


def classify_name(name: str) -> CertificateNameKind:
    """Return the kind that the form of a name implies."""
    if _BEGINS_SUBJECT.match(name):
        return CertificateNameKind.SUBJECT
    if ":" in name or "/" in name:
        return CertificateNameKind.URI
    return CertificateNameKind.EMAIL if "@" in name else CertificateNameKind.DNS


def certificate_names(certificate: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the normalized names in a certificate, the most specific first.

    `certificate` is what `ssl.SSLSocket.getpeercert` returns.
    """
    alternatives = certificate.get("subjectAltName", ())
    names = [
        name
        for key, kind in _ALTERNATIVE_NAME_KINDS.items()
        for name_kind, value in alternatives
        if name_kind == key
        and classify_name(value) is kind
        and (name := _normalized_or_empty(value))
    ]
    subject = format_subject(reversed(certificate.get("subject", ())))
    return (*names, subject) if subject else tuple(names)


def _normalized_or_empty(name: str) -> str:
    """Return the normalized spelling; empty if the text is not a certificate name."""
    try:
        return normalize_name(name)
    except ValueError:
        return ""


def normalize_name(name: str) -> str:
    """Return a name in its normal form. Raises ValueError if it is not a name of any kind."""
    if not name or not name.isprintable():
        raise ValueError(f"{name[:_SHOWN_CHARACTERS]!r} is not a name of a certificate")
    match classify_name(name):
        case CertificateNameKind.SUBJECT:
            return format_subject(_parse_subject(name))
        case CertificateNameKind.DNS:
            return name.lower()
        case CertificateNameKind.EMAIL:  # The local part may be case-sensitive.
            local_part, _, host = name.rpartition("@")
            return f"{local_part}@{host.lower()}"
    return name


def format_subject(levels: SubjectLevels) -> str:
    """Return a subject as text, in the order of these levels."""
    return ",".join(
        "+".join(sorted(f"{_short_type(key)}={_escape(value)}" for key, value in level))
        for level in levels
    )


def _short_type(key: str) -> str:
    return _SHORT_TYPES.get(key.upper(), key.upper())


def _escape(value: str) -> str:
    text = "".join("\\" + c if c in _ESCAPED else c for c in value)
    if text[:1] in ("#", " "):
        text = "\\" + text
    return text[:-1] + "\\ " if value.endswith(" ") and len(value) > 1 else text


def _parse_subject(text: str) -> list[list[tuple[str, str]]]:
    """Return the levels of a subject in the order of the text."""
    levels: list[list[tuple[str, str]]] = [[]]
    for part, separator in _split_parts(text):
        begin = _BEGINS_SUBJECT.match(part)
        if begin is None:
            raise ValueError(
                f"{text[:_SHOWN_CHARACTERS]!r} is not a subject: expected type=value, got "
                f"{part[:_SHOWN_CHARACTERS]!r}"
            )
        levels[-1].append((begin[1], _parse_value(part[begin.end() :])))
        if separator in (",", ";"):
            levels.append([])
    return levels


def _split_parts(text: str) -> Iterator[tuple[str, str]]:
    """Yield the parts of a subject and the separator behind each; "" behind the last."""
    start = 0
    for token in _TOKEN.finditer(text):
        if token[3]:
            yield text[start : token.start()], token[3]
            start = token.end()
    yield text[start:], ""


def _parse_value(escaped: str) -> str:
    """Return an unescaped value. Unescaped blanks around it are dropped."""
    escaped = escaped.lstrip(" ")
    if _DER_HEX.fullmatch(escaped.rstrip(" ")):
        return _decode_der_text(bytes.fromhex(escaped.rstrip(" ")[1:])) or escaped
    text, trimmed_length = bytearray(), 0
    for token in _TOKEN.finditer(escaped):
        text += bytes.fromhex(token[1]) if token[1] else (token[2] or token[4] or "").encode()
        if token[4] != " ":
            trimmed_length = len(text)
    try:
        return text[:trimmed_length].decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{escaped[:_SHOWN_CHARACTERS]!r} is not UTF-8: {error.reason}") from None


def _decode_der_text(raw: bytes) -> str:
    """Decode a DER string; empty for other types."""
    is_text = len(raw) > 1 and raw[0] in _DER_TEXT_TAGS and raw[1] == len(raw) - 2 < 128
    return raw[2:].decode(errors="replace") if is_text else ""
