"""Exceptions of the journal."""

from __future__ import annotations

from simplebus.core.errors import BusError


class JournalError(BusError):
    """A directory or a file in it cannot be used as a journal."""


class JournalInUseError(JournalError):
    """Another server uses the directory."""
