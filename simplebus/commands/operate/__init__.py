"""Commands that inspect and repair a running server.

- `top`: the dashboard.
- `explain`: which messages wait for which subscription.
- `messages`: `peek` and `purge`.
- `dlq`: dead letters.
- `forget`: removes durables.
- `admin`: `disconnect`, `reload` and `drain`, by the HTTP API.
- `http_client`: HTTP client of `top` and `admin`.
- `message_text`: messages as text and JSON.

May import what `commands` may import.
"""
