"""Authentication of NATS clients.

Credentials are compared only here. The error for a refused client contains no reason.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Mapping, Sequence

from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.protocol.requests import Auth
from simplebus.core.session.admission import ConnectionLimits
from simplebus.core.users.nkeys import verify_signature
from simplebus.core.users.permissions import Grants
from simplebus.core.users.subject_permissions import SubjectPermissions
from simplebus.core.users.users import User, Users
from simplebus.nats.errors import NatsError
from simplebus.nats.protocol import handshake
from simplebus.nats.protocol.handshake import SUPPORTED_PROTOCOLS, ConnectOptions
from simplebus.nats.protocol.subject_table import SubjectTable
from simplebus.nats.server.class_permissions import (
    ClassSubjectGrants,
    LocalSessionGrants,
    SubjectClasses,
)
from simplebus.nats.server.permissions import SubjectGrants, ignore_cost
from simplebus.nats.server.session import NatsSession

_NONCE_BYTES = 12
_QUOTED_CHARACTERS_MAX = 400


class Authenticator:
    """Checks CONNECT and provides the permissions of users."""

    def __init__(
        self,
        users: Users | None,
        table: SubjectTable,
        secret: bytes,
        classes: SubjectClasses | None = None,
        add_cost: Callable[[int], None] = ignore_cost,
    ) -> None:
        """Create an authenticator.

        Args:
            users: The users; None without authentication.
            table: The numbers of subjects.
            secret: Secret key of the nonces.
            classes: Lookup of the classes of a subject.
            add_cost: Called with the cost of each new decision about a subject, in bytes of output.
        """
        self.users = users
        self._table = table
        self._add_cost = add_cost
        self._secret = secret
        self._subject_grants: dict[str, SubjectGrants] = {}
        """Grants by the name of the user."""
        self._local_session_grants: dict[str, Grants] = {}
        """Grants of local sessions, for users with subject permissions only."""
        classes = self._classes = classes or SubjectClasses()
        classes.can_publish = self._can_publish
        if users is not None:
            users.resolve_class_name = lambda name: classes.find_dead_letter_sources(name)
        self._has_nkeys = users is not None and any(user.nkey for user in users.users)
        self.requires_connect = users is not None and users.anonymous_user is None
        """True if every client must send CONNECT."""

    def _can_publish(self, name: str, subject: bytes) -> bool:
        """Return True if a user may publish on a subject."""
        user = self.users.find_by_name(name) if self.users is not None else None
        grants = self.subject_grants(user)
        return grants is None or grants.publish_cache.get(subject)

    def with_users(self, users: Users | None) -> Authenticator:
        """Return an authenticator with other users and the same nonces."""
        return Authenticator(users, self._table, self._secret, self._classes, self._add_cost)

    def make_nonce(self, client_id: int) -> str:
        """Return the nonce that a client signs with its nkey; empty if no user has an nkey."""
        if not self._has_nkeys:
            return ""
        digest = hashlib.blake2b(
            client_id.to_bytes(8, "little"), key=self._secret[:64], digest_size=_NONCE_BYTES
        )
        return base64.urlsafe_b64encode(digest.digest()).decode()

    def handle_connect(
        self, session: NatsSession, options_json: bytes
    ) -> tuple[ConnectOptions, User | None]:
        """Parse and check a CONNECT.

        Returns:
            The options, and the user; None without authentication.

        Raises:
            NatsError: The client is refused.
        """
        options = handshake.parse_connect(options_json, session.options)
        has_other_credentials = session.is_identified and options.auth != session.options.auth
        try:
            if session.admission_error is not None:
                raise session.admission_error
            if has_other_credentials and self.users is not None:
                session.on_repeated_connect(options.auth)
        except RemoteProtocolError as error:
            raise NatsError(
                error.reason,
                error.sentence,
                error_text="Too Many Authentication Attempts",
                closed_reason="Authentication Failure",
            ) from None
        user = self.authenticate(
            options,
            session.info.nonce,
            certificate_names=session.certificate_names,
            address=session.address,
        )
        return options, user

    def authenticate(
        self,
        options: ConnectOptions,
        nonce: str,
        *,
        certificate_names: Sequence[str] = (),
        address: str = "",
    ) -> User | None:
        """Return the user of a client; None without authentication.

        Args:
            options: CONNECT of the client.
            nonce: Nonce that was sent in INFO.
            certificate_names: Names in the client's certificate.
            address: Address of the client.

        Raises:
            NatsError: The client is refused.
        """
        user = None
        if self.users is not None:
            user = self._find_user(self.users, options, nonce, certificate_names, address)
        if options.account or options.new_account:
            raise authorization_violation("CONNECT names an account, and there are no accounts")
        if options.protocol not in SUPPORTED_PROTOCOLS:
            raise NatsError(
                Reason.BAD_CONNECT,
                f"CONNECT has protocol {options.protocol}, expected one of {SUPPORTED_PROTOCOLS}",
                error_text="invalid client protocol",
                closed_reason="Protocol Violation",
            )
        if options.no_responders and not options.headers:
            raise NatsError(
                Reason.BAD_CONNECT,
                "CONNECT has no_responders without headers, expected both",
                error_text="no responders requires headers support",
                closed_reason="No Responders Requires Headers",
            )
        return user

    def _find_user(
        self,
        users: Users,
        options: ConnectOptions,
        nonce: str,
        certificate_names: Sequence[str],
        address: str,
    ) -> User:
        """Return the user of a client. Raises NatsError if no user matches."""
        if options.nkey:
            # Only a public key is logged: the client may have sent a seed by mistake.
            claimed_name = options.nkey if options.nkey.startswith("U") else "an nkey"
            if verify_signature(options.nkey, options.sig, nonce.encode()):
                user = users.find_by_nkey(options.nkey)
                if user is not None:
                    return user
        else:
            user = self.find_user_by(
                options.auth, certificate_names=certificate_names, address=address
            )
            if user is not None:
                return user
            claimed_name = options.user or ("a token" if options.auth_token else "nobody")
            if certificate_names and options.has_no_credentials:
                shown = ", ".join(map(repr, certificate_names))[:_QUOTED_CHARACTERS_MAX]
                raise authorization_violation(f"no user matches the certificate names {shown}")
        raise authorization_violation(f"wrong or missing credentials of user {claimed_name!r}")

    def find_user_by(
        self, auth: Auth | None, *, certificate_names: Sequence[str], address: str
    ) -> User | None:
        """Return the user with a password or token, certificate name or address, or the anonymous
        user; None if no user matches.
        """
        if self.users is None:
            return None
        try:
            return self.users.authenticate(
                auth, certified=certificate_names, address=address, version=1
            )
        except RemoteProtocolError:
            return None

    def subject_grants(self, user: User | None) -> SubjectGrants | None:
        """Return the subject permissions of a user; None for all."""
        if user is None:
            return None
        permissions, class_grants = user.subject_permissions, self.class_grants(user)
        if permissions is None and class_grants is None:
            return None
        grants = self._subject_grants.get(user.name)
        if grants is None:
            if class_grants is None:
                grants = SubjectGrants(
                    permissions or SubjectPermissions(), self._table, self._add_cost
                )
            else:
                grants = ClassSubjectGrants(
                    permissions, self._table, class_grants, self._classes, self._add_cost
                )
            self._subject_grants[user.name] = grants
        return grants

    def local_session_grants(self, user: User | None) -> Grants | None:
        """Return the class permissions of a user's local session; None for all."""
        class_grants, grants = self.class_grants(user), self.subject_grants(user)
        if user is None or class_grants is not None or grants is None:
            return class_grants
        local_grants = self._local_session_grants.get(user.name)
        if local_grants is None:
            local_grants = self._local_session_grants[user.name] = LocalSessionGrants(
                grants, self._classes
            )
        return local_grants

    def class_grants(self, user: User | None) -> Grants | None:
        """Return the class permissions of a user; None for all."""
        return None if user is None or self.users is None else self.users.get_grants(user)


def count_user_connections(sessions: Mapping[int, NatsSession], name: str) -> int:
    """Count the NATS connections of a user."""
    users = (session.user for session in sessions.values())
    return sum(1 for user in users if user is not None and user.name == name)


def is_same_user(user: User | None, other_user: User | None) -> bool:
    """Return True if both are the same user, by name, because limits may change."""
    if user is None or other_user is None:
        return user is other_user
    return user.name == other_user.name


def check_user_connections(connection_limits: ConnectionLimits, user: User | None) -> None:
    """Raise NatsError if a user has reached its connection limit."""
    if user is not None:
        try:
            connection_limits.check_user(user)
        except RemoteProtocolError as error:
            raise NatsError(
                error.reason,
                error.sentence,
                error_text="maximum connections for user exceeded",
                closed_reason="Maximum Connections Exceeded",
            ) from None


def authorization_violation(sentence: str) -> NatsError:
    """Return the error for a client that is refused."""
    return NatsError(
        Reason.UNAUTHORIZED,
        sentence,
        error_text="Authorization Violation",
        closed_reason="Authentication Failure",
    )
