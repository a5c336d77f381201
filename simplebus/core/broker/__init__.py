"""Broker: applies the events of all sessions to the store, and answers their requests.

- `broker`: the facade that a driver calls.
- `subscription_manager`: Connect, Subscribe and Unsubscribe requests, and the ends of positions.
- `subscribe_options`: validation of a Subscribe request, and its delivery policy.
- `acknowledge`: acks, nacks, working and terminate.
- `fetch`: Fetch and Purge requests.
- `inquire`, `inquire_positions`, `inquire_channels`: Inquire requests.
- `wait_reasons`: explains what a position waits for.

May import everything of core except `checkpoint` and `restore`.
"""
