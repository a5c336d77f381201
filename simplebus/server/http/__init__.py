"""HTTP listener for monitoring.

- `server`: `HttpServer` answers GET and HEAD requests of `monitor` handlers
- `stream`: `HttpStream`, the bytes of one connection, with or without TLS
- `auth`: users, permissions and host names of requests
- `server_monitor`: `ServerMonitor` collects metrics, tables and notes of the server
- `varz`: endpoints in the format of nats-server's monitoring

May import: core, monitor, nats, net.
"""
