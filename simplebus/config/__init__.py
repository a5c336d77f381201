"""Configuration: option values, the TOML file, the environment, and their error messages.

Modules in reading order:

- `parse`: parsers of values, and declarations of command-line options.
- `errors`: `ConfigError`, the collector of several errors, and parts of their texts.
- `toml_document`: a TOML file, and the lines of its keys.
- `setting`: declaration of a setting, from which its option, variable and key are derived.
- `server_schema`: all settings of the server.
- `environment`: environment variables that nothing reads.
- `table_reader`: the values of declared tables in a file, and all errors in them.
- `users`: tables of users and their permissions, and the users file.
- `nats_users`: deprecated users of the `[nats]` table.
- `bridges`: tables of bridges.
- `file`: the configuration file of `serve`.
- `configuration`: values of all settings, where they are set, and their names in errors.
- `server_settings`: core settings from the values of all settings.
- `changed_values`: values that differ after a reload.
- `sample`: a sample configuration file.

May import `core`, `client`, `nats`, `bridge.settings`, `bridge.build` and `console`.
"""
