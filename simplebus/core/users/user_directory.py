"""Current users of a bus. A reload of the configuration replaces them."""

from __future__ import annotations

from simplebus.core.users.permissions import Grants
from simplebus.core.users.users import User, Users


class UserDirectory:
    """Holder of the current users, for objects that outlive a reload."""

    def __init__(self) -> None:
        self.users: Users | None = None
        """None without authentication: all clients may do everything."""

    def replace_users(self, users: Users | None) -> None:
        """Replace the users."""
        self.users = users

    def find_by_name(self, name: str) -> User | None:
        """Return the user with this name, or None."""
        return None if self.users is None else self.users.find_by_name(name)

    def get_grants(self, name: str) -> Grants | None:
        """Return the permissions of the user with this name; None for all, or without the user."""
        user = self.find_by_name(name)
        return None if self.users is None or user is None else self.users.get_grants(user)
