"""HTTP listener for monitoring and administration.

- `server`: `HttpServer` answers GET and HEAD requests of `monitor` handlers
- `stream`: `HttpStream`, the bytes of one connection, with or without TLS
- `auth`: users, permissions and host names of requests
- `api`: checks of requests for administration
- `api_operations`: the operations with their routes, each a client inside the server
- `api_routes`: `ApiRoutes`, also as OpenAPI description
- `api_types`: parameters and results
- `facts`: `FactsCollector` reads the state of the server; the modules below only format it
- `server_metrics`: the metrics of /metrics
- `server_monitor`: `ServerMonitor` makes the tiles, tables and notes of the page
- `varz`: endpoints in the format of nats-server's monitoring

May import: client, core, logs, monitor, nats, net.
"""
