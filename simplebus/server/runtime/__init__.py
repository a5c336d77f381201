"""Runtime of the server process: memory without long pauses.

- `garbage_collection`: collections of Python
- `heap`: free memory of the C library

May import: trio, and `turns` of the parent package.
"""
