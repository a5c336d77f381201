"""What both clients know of asking the bus what waits for what: the question."""

from __future__ import annotations

from simplebus.client.registry import Registry
from simplebus.client.target import Target
from simplebus.core.channels import check_name
from simplebus.core.client.asking import Request
from simplebus.core.explained import (
    BusQuestion,
    BusSaid,
    ChannelQuestion,
    ChannelSaid,
    ClassQuestion,
    ClassSaid,
    Explained,
    Question,
    SessionQuestion,
    SessionSaid,
)


def question(
    what: object, channel: str | None, session: int | None, registry: Registry
) -> Question:
    """Raises ValueError for what makes no sense, UnboundTypeError for a type without a class."""
    named = None if what is None else _class(what, registry)
    if session is not None:
        if named is not None or channel is not None:
            raise ValueError("a session is asked about alone, without a class and a channel")
        return SessionQuestion(session)
    if channel is not None:
        return ChannelQuestion(check_name(channel), named)
    return BusQuestion() if named is None else ClassQuestion(named)


def _class(what: object, registry: Registry) -> int | str:
    """A class by its id or its name: it is not made, should it not be there."""
    of = Target.of(what, registry).what
    if isinstance(of, int | str):
        return of
    if of.name is not None:
        return of.name
    assert of.class_id is not None
    return of.class_id


def answer(request: Request) -> Explained:
    """What the bus has said."""
    assert isinstance(request.reply, BusSaid | ClassSaid | ChannelSaid | SessionSaid)
    return request.reply
