"""Authentication of NATS clients.

Credentials are compared only here. A refused client is not told the reason.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence

from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.session.admission import ConnectionLimits
from simplebus.core.users.permissions import Grants
from simplebus.nats.errors import NatsError
from simplebus.nats.protocol import handshake
from simplebus.nats.protocol.handshake import SUPPORTED_PROTOCOLS, ConnectOptions
from simplebus.nats.protocol.subject_table import SubjectTable
from simplebus.nats.server.class_permissions import (
    ClassSubjectGrants,
    LocalSessionGrants,
    SubjectClasses,
)
from simplebus.nats.server.permissions import SubjectGrants
from simplebus.nats.server.session import NatsSession
from simplebus.nats.subject_permissions import SubjectPermissions
from simplebus.nats.users import NatsAuth, NatsUser, verify_signature

_NONCE_BYTES = 12
_QUOTED_CHARACTERS_MAX = 400


class Authenticator:
    """Checks CONNECT and provides the permissions of users."""

    def __init__(
        self,
        auth: NatsAuth,
        table: SubjectTable,
        secret: bytes,
        classes: SubjectClasses | None = None,
    ) -> None:
        """`secret` is the secret key of the nonces."""
        self.auth = auth
        self._table = table
        self._secret = secret
        self._subject_grants: dict[tuple[str, bool], SubjectGrants] = {}
        """Grants by (name or nkey of the user, True for a user of the whole server)."""
        self._local_session_grants: dict[str, Grants] = {}
        """Grants of local sessions, for users of the NATS listener only."""
        self._classes = classes or SubjectClasses()
        self._classes.can_publish = self._can_publish
        self._has_nkeys = auth.has_nkeys
        self.anonymous_user = auth.anonymous_user()
        self.requires_connect = auth.is_required and self.anonymous_user is None
        """True if every client must send CONNECT."""

    def _can_publish(self, name: str, subject: bytes) -> bool:
        """Return True if a user of the whole server may publish on a subject."""
        grants = self.subject_grants(self.auth.shared_user_named(name))
        return grants is None or grants.publish_cache.get(subject)

    def with_auth(self, auth: NatsAuth) -> Authenticator:
        """Return an authenticator with other users and the same nonces."""
        return Authenticator(auth, self._table, self._secret, self._classes)

    def make_nonce(self, client_id: int) -> str:
        """Return the nonce that a client signs with its nkey; empty if no user has one."""
        if not self._has_nkeys:
            return ""
        digest = hashlib.blake2b(
            client_id.to_bytes(8, "little"), key=self._secret[:64], digest_size=_NONCE_BYTES
        )
        return base64.urlsafe_b64encode(digest.digest()).decode()

    def handle_connect(
        self, session: NatsSession, options_json: bytes
    ) -> tuple[ConnectOptions, NatsUser | None]:
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
            if has_other_credentials and self.auth.is_required:
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
            certificate_user=session.certificate_user,
            certificate_names=session.certificate_names,
            address=session.address,
        )
        return options, user

    def authenticate(
        self,
        options: ConnectOptions,
        nonce: str,
        *,
        certificate_user: str = "",
        certificate_names: Sequence[str] = (),
        address: str = "",
    ) -> NatsUser | None:
        """Return the user of a client; None without authentication.

        Args:
            options: CONNECT of the client.
            nonce: Nonce that was sent in INFO.
            certificate_user: User that the client's certificate is mapped to.
            certificate_names: Names in the certificate.
            address: Address of the client.

        Raises:
            NatsError: The client is refused.
        """
        user = None
        if self.auth.is_required:
            user = self._find_shared_user(options, nonce, certificate_names, address)
            user = user or self._find_nats_user(options, nonce, certificate_user, certificate_names)
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

    def _find_shared_user(
        self, options: ConnectOptions, nonce: str, certificate_names: Sequence[str], address: str
    ) -> NatsUser | None:
        """Return the matching user of the whole server; None if there is none."""
        auth = options.auth
        nkey = options.nkey
        if nkey and not verify_signature(nkey, options.sig, nonce.encode()):
            return None
        return self.auth.find_shared_user(auth, nkey, certified=certificate_names, address=address)

    def _find_nats_user(
        self,
        options: ConnectOptions,
        nonce: str,
        certificate_user: str,
        certificate_names: Sequence[str],
    ) -> NatsUser | None:
        auth = self.auth
        if certificate_user:
            user = auth.user_named(certificate_user)
        elif auth.token:
            if auth.verify_token(options.auth_token):
                return None
            raise authorization_violation("the client sent no token or a wrong token")
        elif not auth.users:
            user = None
        elif options.nkey:
            user = auth.verify_nkey(options.nkey, options.sig, nonce.encode())
        elif options.has_no_credentials:
            user = self.anonymous_user
        else:
            user = auth.verify_password(options.user, options.password)
        if user is None and certificate_names and (certificate_user or options.has_no_credentials):
            shown = ", ".join(map(repr, certificate_names))[:_QUOTED_CHARACTERS_MAX]
            raise authorization_violation(f"no user matches the certificate names {shown}")
        if user is None:
            # Only a public key is logged: the client may have sent a seed by mistake.
            nkey = options.nkey if options.nkey.startswith("U") else options.nkey and "an nkey"
            claimed_name = nkey or options.user or certificate_user or "nobody"
            raise authorization_violation(f"wrong or missing credentials of user {claimed_name!r}")
        return user

    def subject_grants(self, user: NatsUser | None) -> SubjectGrants | None:
        """Return the subject permissions of a user; None for all."""
        permissions = self.auth.permissions_of(user) if user else None
        class_grants = self.class_grants(user)
        if user is None or (permissions is None and class_grants is None):
            return None
        key = (user.name or user.nkey, user.shared_user is not None)
        grants = self._subject_grants.get(key)
        if grants is None:
            if class_grants is None:
                grants = SubjectGrants(permissions or SubjectPermissions(), self._table)
            else:
                grants = ClassSubjectGrants(permissions, self._table, class_grants, self._classes)
            self._subject_grants[key] = grants
        return grants

    def local_session_grants(self, user: NatsUser | None) -> Grants | None:
        """Return the class permissions of a user's local session; None for all."""
        grants = self.subject_grants(user)
        if user is None or user.shared_user is not None or grants is None:
            return self.class_grants(user)
        key = user.name or user.nkey
        local_grants = self._local_session_grants.get(key)
        if local_grants is None:
            local_grants = self._local_session_grants[key] = LocalSessionGrants(
                grants, self._classes
            )
        return local_grants

    def class_grants(self, user: NatsUser | None) -> Grants | None:
        """Return the class permissions of a user of the whole server; None for all."""
        if user is None or user.shared_user is None or self.auth.shared_users is None:
            return None
        return self.auth.shared_users.get_grants(user.shared_user)


def count_user_connections(sessions: Mapping[int, NatsSession], name: str) -> int:
    """Count the NATS connections of a user of the whole server."""
    users = (session.user for session in sessions.values())
    return sum(1 for user in users if user is not None and user.shared_user and user.name == name)


def is_same_user(user: NatsUser | None, other: NatsUser | None) -> bool:
    """Return True if both are the same user. A user of the whole server is identified by name,
    because its limits may change.
    """
    if user is None or other is None:
        return user is other
    return (
        user == other
        if user.shared_user is None
        else bool(other.shared_user) and user.name == other.name
    )


def check_user_connections(connection_limits: ConnectionLimits, user: NatsUser | None) -> None:
    """Raise NatsError if a user of the whole server has reached its connection limit."""
    if user is not None and user.shared_user is not None:
        try:
            connection_limits.check_user(user.shared_user)
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
