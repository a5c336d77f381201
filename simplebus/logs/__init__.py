"""Log events with names and named values, for all processes and for programs that use the client.

- `event_logger`: the logger of all modules: one event name, one sentence, named values
- `sampling`: which of many equal failures are logged
- `rate_limit`: rate limit of the events of each kind
- `formatters`: lines for the console, for systemd's journal, and JSON
- `configure`: log output of a process to standard error, without blocking

May import: core, console.
"""
