"""At which number a program goes on that comes under a name, here and at a door before a cluster.

Rule 1: what of its numbers is known here is the business of `publishers`; that doors do not tell
each other of numbers, of this file.
Rule 2: who has numbers of its own is known by them to the cluster alone: nothing is remembered here
that could take a message for another one.
"""

from __future__ import annotations

from simplebus.core.class_table import ClassTable
from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.publishers import Claim, Publishers
from simplebus.core.requests import ConnectRequest


def check_numbers(asked: ConnectRequest, table: ClassTable) -> None:
    """Raises RemoteProtocolError (bad_connect) where nobody would know a message by its number."""
    if asked.first is None:
        return
    if not table.is_remote:
        why = "this bus keeps its messages itself: only a door before a cluster takes such numbers"
    elif asked.name is None:
        why = "expected a name, too: it is part of what a message is known by"
    else:
        return
    raise RemoteProtocolError(Reason.BAD_CONNECT, f"first is {asked.first}; {why}")


def arrive(
    publishers: Publishers,
    claim: Claim,
    asked: ConnectRequest,
    table: ClassTable,
    now: float,
    identity: str,
) -> tuple[int, bool]:
    """Say where the program goes on. Returns how many confirmed messages are not stored, as far as
    that is known, and whether the journal is to know of it."""
    publisher = claim.publisher
    before = publisher.next, publisher.is_doubted
    is_elsewheres = bool(asked.bus) and asked.bus != identity
    lost = publishers.begin(claim, asked.unconfirmed, is_elsewheres=is_elsewheres)
    if table.first_number is not None and (asked.unconfirmed is None or is_elsewheres):
        publishers.begin_at(publisher, table.first_number(now))
    is_new_here = claim.is_another or not claim.is_known
    is_on_its_way = asked.unconfirmed is not None and not is_elsewheres
    if table.is_remote and is_new_here and is_on_its_way:
        # That nothing is known of it here is no reason to have it begin anew.
        publishers.begin_at(publisher, asked.unconfirmed or 0)
    if asked.first is not None:
        publishers.begin_at(publisher, asked.first)
    return lost, is_new_here or before != (publisher.next, publisher.is_doubted)
