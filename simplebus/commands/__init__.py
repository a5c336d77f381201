"""Commands of the `simplebus` command line, one module each.

- `serve`: the server; a package.
- `pubsub`: `pub` and `sub`.
- `bridge`, `gateway`: programs that connect buses and modules.
- `operate`: inspection and repair of a running server, from `top` to `drain`; a package.
- `journal`, `backup`: inspection, backup and restoring of a data directory.
- `check_config`: `check-config` and `config sample`.
- `user`: the users file.
- `systemd_unit`: units for systemd.
- `deploy`: files for containers, Kubernetes, Prometheus and Grafana; a package.
- `sbom`: list of the installed packages.
- `client_options`: options of every command that connects to a server.
- `http_option`: the option `--http` of bridges and gateways.

Commands import their implementation when they run, so that `--help` is fast. May import every
package but `testing`.
"""
