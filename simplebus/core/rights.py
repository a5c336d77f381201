"""What a session may do beyond publishing and subscribing.

Rule 1: whoever serves such a request asks here first, and nowhere else.
"""

from __future__ import annotations

import enum

from simplebus.core.session import Session


class Right(enum.Enum):
    """What is not everybody's business."""

    INQUIRE = "inquire"
    """To be told what others do."""
    PURGE = "purge"
    """To take away what others have published."""


def check_right(session: Session, right: Right) -> None:
    """Raise RemoteProtocolError (unauthorized) when this session may not.

    There are no users at this door yet: whoever is connected may do everything.
    """
