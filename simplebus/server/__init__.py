"""The trio server: sockets, timers and signals around the broker.

The packages below and `jetstream` have no listeners; every socket, thread and clock of a server
process is handled here. Modules in reading order:

- `run`: starts and stops the whole server; `reload`, `shutdown` and `signals` are parts of it
- `server`: `Server` drives one broker and its binary connections
- `connection`: `Connection` moves bytes between one socket and one session
- `listeners`: listening sockets and the accept loop
- `nats_listener`: `NatsListener`, the NATS counterpart of `Server`
- `wrong_port`: explains to a client of another protocol which port it needs
- `local_client`: clients inside the server process, such as bridges
- `read_limit`: size of a connection's reads, adapted to the time of their processing
- `turns`: fair scheduling of slow requests, and of sending to many receivers
- `preauth`: limits and fair scheduling for connections that are not authenticated yet
- `tls`: certificates and handshakes
- `journal`: threads that write and read the journal
- `http`: monitoring and administration over HTTP
- `observability`: logs, message rates, latencies and the event loop watchdog
- `runtime`: garbage collection and free memory, without long pauses
- `process`, `systemd`: resources of the process, and the service manager

May import: client, console, core, jetstream, logs, monitor, nats, net, storage.
"""
