"""The `serve` command.

- `command`: its options, which come from the schema of settings, and the run of the server.
- `tls_options`, `listener_options`, `jetstream_options`: settings of the listeners, their users,
  and the cluster.
- `settings`: complete server settings, and all errors in them.
- `stable_read`: reading files that may be written at this moment, for a reload.

May import `config`, `console`, `logs` and, when the command runs, `server`, `nats` and `jetstream`.
"""
