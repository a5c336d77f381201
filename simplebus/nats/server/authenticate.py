"""Who a client is, and what it may do therefore.

Rule 1: what a client says of itself is compared here and nowhere else.
Rule 2: one that is not let in learns that, and not why.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence

from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.session.admission import ConnectionLimits
from simplebus.core.users.permissions import Grants as Rights
from simplebus.nats.errors import NatsError
from simplebus.nats.protocol import handshake
from simplebus.nats.protocol.handshake import PROTOCOLS, Options
from simplebus.nats.server.class_permissions import BoundClasses, ClassGrants, GuestRights
from simplebus.nats.server.permissions import Grants, Permissions
from simplebus.nats.server.session import NatsSession
from simplebus.nats.server.subject_table import SubjectTable
from simplebus.nats.server.users import NatsAuth, NatsUser, is_signed

_NONCE_BYTES = 12
_SHOWN_CHARACTERS = 400


class Gate:
    """Of one front."""

    def __init__(
        self,
        auth: NatsAuth,
        table: SubjectTable,
        secret: bytes,
        classes: BoundClasses | None = None,
    ) -> None:
        """`secret` is what nonces are made of: nobody else may know it."""
        self.auth = auth
        self._table = table
        self._secret = secret
        self._grants: dict[tuple[str, bool], Grants] = {}
        """By the user's name or key, and whether it is one of all doors."""
        self._guest_rights: dict[str, Rights] = {}
        """Of users of this door alone, likewise."""
        self._classes = classes or BoundClasses()
        self._classes.may_speak = self._may_speak
        self._has_keys = auth.uses_keys
        self.silent_user = auth.silent_user()
        self.asks = auth.required and self.silent_user is None
        """Whether everybody has to say CONNECT."""

    def _may_speak(self, name: str, subject: bytes) -> bool:
        """Whether a user of all doors may publish on a subject."""
        grants = self.grants(self.auth.at_this_door(name))
        return grants is None or grants.publishing.one(subject)

    def with_auth(self, auth: NatsAuth) -> Gate:
        """One that lets others in, with the same nonces."""
        return Gate(auth, self._table, self._secret, self._classes)

    def nonce(self, client_id: int) -> str:
        """What a client has to sign who has a key; empty if nobody has."""
        if not self._has_keys:
            return ""
        digest = hashlib.blake2b(
            client_id.to_bytes(8, "little"), key=self._secret[:64], digest_size=_NONCE_BYTES
        )
        return base64.urlsafe_b64encode(digest.digest()).decode()

    def hear(self, session: NatsSession, said: bytes) -> tuple[Options, NatsUser | None]:
        """What a CONNECT says, and who says it; None where nobody is asked. Raises NatsError when
        it is not let in."""
        options = handshake.options(said, session.options)
        is_other = session.is_connected and options.words != session.options.words
        try:
            if session.admission_error is not None:
                raise session.admission_error
            if is_other and self.auth.required:
                session.hear_again(options.words)
        except RemoteProtocolError as error:
            raise NatsError(
                error.reason,
                error.sentence,
                error_text="Too Many Authentication Attempts",
                closed_reason="Authentication Failure",
            ) from None
        user = self.admit(
            options,
            session.info.nonce,
            certified=session.certified,
            names=session.certificate_names,
            address=session.address,
        )
        return options, user

    def admit(
        self,
        options: Options,
        nonce: str,
        *,
        certified: str = "",
        names: Sequence[str] = (),
        address: str = "",
    ) -> NatsUser | None:
        """Who says this of itself; None where nobody is asked.

        `certified` is the user whose certificate it showed, `names` are what that calls its holder,
        `address` is where it comes from. Raises NatsError when it is not let in.
        """
        user = None
        if self.auth.required:
            user = self._shared(options, nonce, names, address)
            user = user or self._user(options, nonce, certified, names)
        if options.account or options.new_account:
            raise violation("it asks for an account, and there are none")
        if options.protocol not in PROTOCOLS:
            raise NatsError(
                Reason.BAD_CONNECT,
                f"it speaks protocol {options.protocol}, expected one of {PROTOCOLS}",
                error_text="invalid client protocol",
                closed_reason="Protocol Violation",
            )
        if options.no_responders and not options.headers:
            raise NatsError(
                Reason.BAD_CONNECT,
                "it wants to hear that nobody is there to answer, without headers",
                error_text="no responders requires headers support",
                closed_reason="No Responders Requires Headers",
            )
        return user

    def _shared(
        self, options: Options, nonce: str, names: Sequence[str], address: str
    ) -> NatsUser | None:
        """The same of users of all doors; None for none of these."""
        auth = options.words
        nkey = options.nkey
        if nkey and not is_signed(nkey, options.sig, nonce.encode()):
            return None
        return self.auth.at_all_doors(auth, nkey, certified=names, address=address)

    def _user(
        self, options: Options, nonce: str, certified: str, names: Sequence[str]
    ) -> NatsUser | None:
        auth = self.auth
        if certified:
            found = auth.named(certified)
        elif auth.token:
            if auth.has_token(options.auth_token):
                return None
            raise violation("it does not know the token")
        elif not auth.users:
            found = None
        elif options.nkey:
            found = auth.holder(options.nkey, options.sig, nonce.encode())
        elif options.is_silent:
            found = self.silent_user
        else:
            found = auth.user(options.user, options.password)
        if found is None and names and (certified or options.is_silent):
            shown = ", ".join(map(repr, names))[:_SHOWN_CHARACTERS]
            raise violation(f"its certificate calls it {shown}, which is nobody here")
        if found is None:
            nkey = options.nkey if options.nkey.startswith("U") else options.nkey and "an nkey"
            who = nkey or options.user or certified or "nobody"  # A seed is nobody's name.
            raise violation(f"it says to be {who!r}, and could not show it")
        return found

    def grants(self, user: NatsUser | None) -> Grants | None:
        """What this user may do; None for everything."""
        permissions = self.auth.permissions(user) if user else None
        rights = self.rights(user)
        if user is None or (permissions is None and rights is None):
            return None
        key = (user.name or user.nkey, user.shared is not None)
        found = self._grants.get(key)
        if found is None:
            if rights is None:
                found = Grants(permissions or Permissions(), self._table)
            else:
                found = ClassGrants(permissions, self._table, rights, self._classes)
            self._grants[key] = found
        return found

    def guest_rights(self, user: NatsUser | None) -> Rights | None:
        """What this user may do as a guest of the broker; None for everything."""
        grants = self.grants(user)
        if user is None or user.shared is not None or grants is None:
            return self.rights(user)
        key = user.name or user.nkey
        found = self._guest_rights.get(key)
        if found is None:
            found = self._guest_rights[key] = GuestRights(grants, self._classes)
        return found

    def rights(self, user: NatsUser | None) -> Rights | None:
        """What a user of all doors may do with classes; None for everything."""
        if user is None or user.shared is None or self.auth.shared is None:
            return None
        return self.auth.shared.grants(user.shared)


def connections_of(sessions: Mapping[int, NatsSession], name: str) -> int:
    """How many a user of all doors has at this one."""
    users = (session.user for session in sessions.values())
    return sum(1 for user in users if user is not None and user.shared and user.name == name)


def is_same(one: NatsUser | None, other: NatsUser | None) -> bool:
    """Whether these are one user: of this door alone, or of all doors, whose limits may be others
    meanwhile."""
    if one is None or other is None:
        return one is other
    return one == other if one.shared is None else bool(other.shared) and one.name == other.name


def check_visits(visits: ConnectionLimits, user: NatsUser | None) -> None:
    """Raises NatsError when a user of all doors has as many connections as it may."""
    if user is not None and user.shared is not None:
        try:
            visits.check_user(user.shared)
        except RemoteProtocolError as error:
            raise NatsError(
                error.reason,
                error.sentence,
                error_text="maximum connections for user exceeded",
                closed_reason="Maximum Connections Exceeded",
            ) from None


def violation(sentence: str) -> NatsError:
    """What a client is told that is not let in."""
    return NatsError(
        Reason.UNAUTHORIZED,
        sentence,
        error_text="Authorization Violation",
        closed_reason="Authentication Failure",
    )
