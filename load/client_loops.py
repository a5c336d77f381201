"""The Python client, message by message: what a plain loop in a program gets.

Rule 1: a loop per message, as a user writes it; nothing is batched by hand.
"""

from __future__ import annotations

from load.processes import LoadError
from load.report import Row


def run(server_args: tuple[str, ...], quick: bool) -> list[Row]:
    raise LoadError("the Python client is not measured yet")
