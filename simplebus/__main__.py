"""Command line: `python -m simplebus`."""

from simplebus.cli import main

main()
