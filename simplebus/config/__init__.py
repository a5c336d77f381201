"""Configuration: option values, the TOML file, the environment, and their error messages.

Modules in reading order:

- `parse`: parsers of values, and declarations of command-line options.
- `errors`: `ConfigError`, the collector of several errors, and texts for typer's and tomllib's.
- `toml_lines`: line numbers of the keys of a TOML file.
- `setting`: declaration of a setting, from which its option, variable and key are derived.
- `server_schema`: all settings of the server.
- `environment`: environment variables that nothing reads.
- `schema`: msgspec tables of users and their permissions.
- `nats_users`: deprecated users of the `[nats]` table.
- `users`: msgspec tables of users, and the users file.
- `bridges`: msgspec tables of bridges.
- `file`: the configuration file of `serve`.
- `configuration`: values of all settings, where they are set, and their names in errors.
- `server_settings`: core settings from the values of all settings.
- `changed_values`: descriptions of values that differ after a reload.
- `sample`: a sample configuration file.

May import `core`, `client`, `nats`, `bridge.settings`, `bridge.build` and `console`.
"""
