"""The `serve` command.

- `command`: option declarations, and the call that runs the server.
- `settings`: complete server settings, and their changes after a reload.
- `option_values`: conversion of option values for every typer version.
- `tls_options`, `nats_options`, `http_options`, `jetstream_options`, `log_options`: options by
topic.

May import `config`, `console` and, when the command runs, `server`, `nats` and `jetstream`.
"""
