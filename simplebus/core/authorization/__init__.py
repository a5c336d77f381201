"""Authorization: permissions of sessions, owners of durables and groups, visible channels.

Modules in reading order:
    session_permissions    checks of requests and messages against a session's permissions
    visibility             channel filters restricted to what a user may see
    durable_owners         users who may resume, move or remove a durable or group

A request handler calls these checks before it changes anything.

Imports `message_class`, `group`, `subscription`, `session`, `users`, `channel` and `protocol`.
"""
