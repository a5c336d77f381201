"""Configuration: option values, the TOML file, the environment, and their error messages.

Modules in reading order:

- `parse`: parsers and declarations of command-line options.
- `errors`: `ConfigError`, the collector of several errors, and texts for typer's and tomllib's.
- `toml_lines`: line numbers of the keys of a TOML file.
- `environment`: environment variables that begin with `SIMPLEBUS_`.
- `option_names`: option names in error messages, as the user wrote them.
- `schema`: msgspec tables of NATS users and classes.
- `users`: msgspec tables of users, and the users file.
- `bridges`: msgspec tables of bridges.
- `server_settings`: core settings from the options of `serve`.
- `file`: the configuration file of `serve`.
- `changed_values`: descriptions of values that differ after a reload.
- `sample`: a sample configuration file.
- `stable_read`: reading files that may be written at this moment.

May import `core`, `client`, `nats`, `bridge.settings`, `bridge.build` and `console`.
"""
