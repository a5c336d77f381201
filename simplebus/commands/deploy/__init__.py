"""The command `simplebus deploy`.

- `command`: prints or writes the files of the folder `files`.
- `grafana_dashboard`: builds the dashboard of Grafana.

May import: console.
"""
