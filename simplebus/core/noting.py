"""What a store does where what it holds is kept past the process.

Rule 1: a peer that is told what is stored is told when nothing can be kept; one that cannot be told
is not read from meanwhile, so nothing of it is lost.
"""

from __future__ import annotations

from simplebus.core import frames
from simplebus.core.errors import Reason
from simplebus.core.events import Refused
from simplebus.core.ledger import Ledger
from simplebus.core.publishers import Publishers
from simplebus.core.session import Session
from simplebus.core.version2 import Version2, publisher_of


def note(
    ledger: Ledger,
    session: Session | None,
    class_id: int,
    first: int,
    count: int,
    frames: bytes,
    now: float,
) -> None:
    """A session, or the bus itself, has had messages first..first+count-1 of a class stored."""
    if session is None:
        ledger.note(class_id, first, count, frames, "", now)
        return
    ledger.note(class_id, first, count, frames, publisher_of(session), now)
    session.kept_mark = ledger.mark
    if ledger.is_elsewhere and isinstance(session.dialect, Version2):
        session.dialect.publisher.owed[class_id] = session.kept_mark
    if ledger.is_behind and not isinstance(session.dialect, Version2):
        session.lags = True
        ledger.lagging[session] = None


def failure(ledger: Ledger | None, session: Session) -> tuple[Reason, str] | None:
    """Why nothing that this peer publishes can be kept, if it can be told."""
    if ledger is None or not isinstance(session.dialect, Version2):
        return None
    return ledger.failure


def refuse(
    ledger: Ledger | None, publishers: Publishers, session: Session, refused: Refused
) -> None:
    """A frame had no effect. If it was a message, its number is used up all the same, and its
    program is told again should it not have heard of that."""
    if refused.frame_type in (frames.MESSAGE, frames.ENVELOPE):
        dialect = session.dialect
        if isinstance(dialect, Version2) and dialect.publisher.key:
            publishers.refuse(dialect.publisher, refused)
            if ledger is not None:
                ledger.refuse(dialect.publisher.key, refused)
