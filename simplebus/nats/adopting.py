"""Other settings for a front that has clients.

Rule 1: clients stay, and are served by what they were told when they came; but whose user is not as
it was, or is no user any more, is cut off.
"""

from __future__ import annotations

from simplebus.core.limits import Limits
from simplebus.nats.auth import NatsAuth
from simplebus.nats.front import Front
from simplebus.nats.gate import violation
from simplebus.nats.interest import limit_of
from simplebus.nats.session import NatsSession
from simplebus.nats.settings import NatsSettings


def adopt(front: Front, settings: NatsSettings) -> None:
    """Have a front behave like this from now on."""
    before, now = front.gate.auth, settings.auth
    bus = front.classes.broker.settings.limits if front.classes is not None else Limits()
    front.settings = settings
    front.pace.adopt(settings.limits, total=bus.total_pending_bytes)
    front.routes.interest.limit = limit_of(bus)
    if before == now:
        return
    front.gate = front.gate.with_auth(now)
    for session in list(front.sessions.values()):
        if not session.is_cut and session.is_connected and not _may_stay(session, before, now):
            front.cut(session, violation("its user is not as it was"))


def _may_stay(session: NatsSession, before: NatsAuth, now: NatsAuth) -> bool:
    user = session.user
    if user is not None and user.shared is not None:
        name = user.name
        return (
            now.shared is not None
            and now.shared.still_has(user.shared)
            and before.shared_permissions.get(name) == now.shared_permissions.get(name)
        )
    if user is not None:
        return user in now.users and before.permissions(user) == now.permissions(user)
    return not now.required or (bool(now.token) and now.token == before.token)
