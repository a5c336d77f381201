"""Parameters, results and errors of the administration over HTTP."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from simplebus.core.errors import BusError
from simplebus.core.limits import CLASS_ID_MAX, SEQUENCE_MAX
from simplebus.core.protocol.inquiry import ClassOverview

PEEKED_MESSAGES_MAX = 100
PEEKED_BYTES_MAX = 64 * 1024
"""Bytes of one payload that a reply contains."""
HANDLED_LETTERS_MAX = 1000
"""Dead letters that one request requeues or drops."""

ClassReference = Annotated[str, Meta(min_length=1, max_length=256)]
Sequence_ = Annotated[int, Meta(ge=0, le=SEQUENCE_MAX)]
PayloadFormat = Literal["json", "text", "hex"]


class ApiError(BusError):
    """A request cannot be answered; the message says why."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class ApiParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base class of the parameters of a request."""


class NoParameters(ApiParameters, frozen=True):
    """Parameters of a request without any."""


class PeekParameters(ApiParameters, frozen=True):
    """Parameters of a request for messages."""

    class_: ClassReference = msgspec.field(name="class")
    first: Sequence_ = 0
    """First sequence."""
    count: Annotated[int, Meta(ge=1, le=PEEKED_MESSAGES_MAX)] = 20
    bytes: Annotated[int, Meta(ge=0, le=PEEKED_BYTES_MAX)] = 1024
    """Bytes of each payload."""
    format: PayloadFormat = "json"
    """Preferred format. A payload that is not JSON is shown as text, or as hexadecimal if it is not
    UTF-8.
    """


class LettersParameters(PeekParameters, frozen=True):
    """Parameters of a request for dead letters."""

    reason: str | None = None
    subscription: str | None = None


class LetterSelection(ApiParameters, frozen=True):
    """Selects dead letters; `all` or another criterion is required."""

    class_: ClassReference = msgspec.field(name="class")
    sequences: Annotated[list[Sequence_], Meta(max_length=HANDLED_LETTERS_MAX)] = []
    reason: str | None = None
    subscription: str | None = None
    all: bool = False
    first: Sequence_ = 0


class PurgeParameters(ApiParameters, frozen=True):
    """Parameters of a purge of the sequences first..last-1."""

    class_: ClassReference = msgspec.field(name="class")
    last: Sequence_
    first: Sequence_ = 0


class ForgetParameters(ApiParameters, frozen=True):
    """Durable to remove."""

    class_: ClassReference = msgspec.field(name="class")
    durable: Annotated[str, Meta(min_length=1, max_length=256)]


class DisconnectParameters(ApiParameters, frozen=True):
    """Session to disconnect."""

    session: Annotated[int, Meta(ge=0)]


class ApiResult(msgspec.Struct, frozen=True):
    """Base class of the results of a request."""

    def describe(self) -> str:
        """Return the result for the log."""
        return "done"


class ClassList(ApiResult, frozen=True):
    """Classes of the bus."""

    classes: list[ClassOverview]
    left_out: int


class PeekedMessage(msgspec.Struct, frozen=True):
    """One stored message, with the beginning of its payload."""

    sequence: int
    channel: str
    key: str
    headers: list[tuple[str, str]]
    payload: Any
    format: PayloadFormat
    payload_bytes: int
    """Size of the whole payload."""
    is_truncated: bool


class MessageList(ApiResult, frozen=True):
    """Messages of a class, oldest first."""

    class_id: int
    class_: str = msgspec.field(name="class")
    messages: list[PeekedMessage]
    next: int | None
    """First sequence of the next request; None at the end."""


class PeekedLetter(PeekedMessage, frozen=True):
    """One dead letter, with the headers of its publisher."""

    reason: str
    source_class: str
    source_sequence: str
    attempts: str
    subscription: str
    time: str
    """Seconds since 1970."""
    error: str
    """Error from the last nack; empty without a nack or an error."""


class LetterList(ApiResult, frozen=True):
    """Dead letters of a class, oldest first."""

    class_id: int
    class_: str = msgspec.field(name="class")
    letters: list[PeekedLetter]
    next: int | None
    """First sequence of the next request; None at the end."""


class RefusedLetter(msgspec.Struct, frozen=True):
    """Dead letter that was not requeued."""

    sequence: int
    error: str


class LettersResult(ApiResult, frozen=True):
    """Result for selected dead letters."""

    count: int
    """Dead letters that were requeued or dropped."""
    refused: list[RefusedLetter] = []
    next: int | None = None
    """`first` of the next request, if there may be more dead letters; None at the end."""

    def describe(self) -> str:
        return f"{self.count} done, {len(self.refused)} refused"


class CountResult(ApiResult, frozen=True):
    """Result of a purge."""

    count: int

    def describe(self) -> str:
        return f"{self.count} done"


class ActionResult(ApiResult, frozen=True):
    """Result of an action without a count."""

    result: str

    def describe(self) -> str:
        return self.result


class ErrorBody(msgspec.Struct, frozen=True):
    """Body of every reply with a status of 400 or more."""

    error: str


def parse_class_reference(text: str) -> int | str:
    """Return a class id or class name. Raises ApiError."""
    if not (text.isascii() and text.isdigit()):
        return text
    if len(text) > len(str(CLASS_ID_MAX)) or int(text) > CLASS_ID_MAX:
        raise ApiError(400, f"a class id is from 0 to {CLASS_ID_MAX}, got {text[:40]}")
    return int(text)
