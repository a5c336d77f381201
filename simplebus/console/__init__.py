"""Helpers of command line programs.

    errors        exit statuses, and printing of errors
    installation  the installed version, and conflicts with another package
    line_writer   writes lines to a descriptor without blocking the caller
    stdin_lines   reads lines from standard input or another stream
    workers       starts and stops the worker processes of demo and bench

May import: core.
"""
