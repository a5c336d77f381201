"""`python -m simplebus` is the command line."""

from simplebus.cli import main

main()
