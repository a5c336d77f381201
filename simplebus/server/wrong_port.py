"""Explains to a client that it has connected to the wrong port, in its own protocol if possible."""

from __future__ import annotations

from simplebus.core.protocol.opening import Opening, WrongProtocolError, recognize_opening

_PORTS = {
    Opening.BUS_CONNECT: ("tcp", "the port for bus clients", "--port"),
    Opening.NATS_COMMAND: ("nats", "the port for NATS clients", "--nats-port"),
    Opening.HTTP_REQUEST: ("http", "the HTTP port", "--http-port"),
}
"""Listener, description and option, by the first data of its clients."""


class WrongPortCheck:
    """Compares the first data of connections with the protocols of the listeners of a server."""

    def __init__(self) -> None:
        self.ports: dict[str, int] = {}
        """Ports of the open listeners: tcp, nats and http. Empty if there is only one listener."""

    def find_error(
        self, data: bytes, expected: Opening, *, has_tls: bool, tls_option: str = "--tls-cert"
    ) -> WrongProtocolError | None:
        """Return the error for a client of another protocol, or None.

        Args:
            data: First data of the client.
            expected: First data of this listener's clients.
            has_tls: True if this listener requires TLS, and the data came without it.
            tls_option: Option that enables TLS for this listener.
        """
        opening = recognize_opening(data)
        if opening is None or (opening is expected and not has_tls):
            return None
        this_port = _PORTS[expected][1]
        if opening is Opening.TLS:
            hint = f"TLS is off for this port: connect without TLS, or enable it with {tls_option}"
            return None if has_tls else WrongProtocolError(f"got {opening} at {this_port}: {hint}")
        if opening is expected:
            sentence = f"got {opening} without TLS, but {this_port} requires TLS"
        elif opening in _PORTS and self.ports:
            listener, expected_port, option = _PORTS[opening]
            port = self.ports.get(listener)
            port_text = f"is {port}" if port else "is not open"
            sentence = f"got {opening} at {this_port}: {expected_port} {port_text} ({option})"
        else:
            sentence = f"got {opening} at {this_port}, expected {expected}"
        return WrongProtocolError(sentence, _encode_reply(opening, sentence))


def _encode_reply(opening: Opening, sentence: str) -> bytes:
    """Return the sentence, encoded in the protocol of the client."""
    if opening is Opening.NATS_COMMAND:
        return f"-ERR '{sentence}'\r\n".encode()
    if opening is not Opening.HTTP_REQUEST:
        return b""
    body = f"{sentence}\n"
    return (
        "HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain; charset=utf-8\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}"
    ).encode()
