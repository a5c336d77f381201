"""The `serve` command.

- `command`: its options, which come from the schema of settings, and the run of the server.
- `tls_options`, `nats_options`, `jetstream_options`: settings of a listener or of the cluster.
- `user_options`: users of all listeners.
- `settings`: complete server settings, and their changes after a reload.
- `http_options`: port of the HTTP listener, and the option `--http` of other programs.
- `stable_read`: reading files that may be written at this moment, for a reload.

May import `config`, `console`, `logs` and, when the command runs, `server`, `nats` and `jetstream`.
"""
