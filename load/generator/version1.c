/* simplebus, protocol version 1: Connect names classes; nothing else is negotiated.
 *
 * Version 1 has no reply to a Subscribe or a message. The subscription is active when a message to a
 * class of this subscriber returns. All messages are accepted when the broker closes the connection.
 */
#include "simplebus.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

static void encode(Bytes *out, const Options *options, size_t index, const uint8_t *payload,
                   size_t size) {
    put_frame(out, '1', options->classes[index], 0, 0, payload, size);
}

static size_t handle_other(Peer *peer, const uint8_t *frame, size_t whole) {
    if (frame[0] != '0') fail_type(peer, frame); /* '0' is a Heartbeat. */
    return whole;
}

static size_t handle_reply(Peer *peer, const uint8_t *data, size_t size) {
    (void)peer;
    size_t whole, at = 0;
    while ((whole = whole_frame(data + at, size - at)) > 0) {
        if (data[at] != '0')
            fail(EXIT_DEVIATION, "the publisher received %s, expected nothing", shown(data + at, whole));
        at += whole;
    }
    return at;
}

static void send_connect(Peer *peer, const Options *options, unsigned extra_class) {
    Bytes list = {0};
    for (size_t i = 0; i < options->class_count; i++)
        bytes_format(&list, "%s%u", i ? "," : "[", options->classes[i]);
    if (extra_class) bytes_format(&list, ",%u", extra_class);
    bytes_append(&list, "]", 1);
    put_frame(&peer->out, '4', 0, 0, 0, list.data, list.end);
    send_all(peer);
    size_t size;
    const uint8_t *reply = next_frame(peer, &size);
    if (reply[0] != '4' || size != HEADER + 4 + DELIMITER)
        fail(EXIT_DEVIATION, "received the reply to Connect as %s, expected type 4 and 4 bytes",
             shown(reply, size));
    free(list.data);
}

static void handle_own_echo(Peer *peer, unsigned class_id) {
    put_frame(&peer->out, '2', class_id, 0, 0, "", 0);
    put_frame(&peer->out, '1', class_id, 0, 0, "subscribed?", 11);
    send_all(peer);
    size_t size;
    const uint8_t *frame = next_frame(peer, &size);
    if (frame[0] != '1' || read_u16(frame + 1) != class_id)
        fail(EXIT_DEVIATION, "received %s before anything was published: an earlier run did not acknowledge it",
             shown(frame, size));
    put_ack(peer, class_id, read_u16(frame + 7), read_u32(frame + 3), (uint64_t)read_u32(frame + 3) + 1);
    send_all(peer);
    peer->acks = 0;
}

static void open_peer(Peer *peer, Role role) {
    const Options *options = peer->options;
    State *state = peer->state = new_state(options, '1');
    state->handle_other = handle_other;
    send_connect(peer, options, role == SUBSCRIBER ? options->echo_class : 0);
    if (role == PUBLISHER) return;
    expect_content(peer, NULL, 0);
    for (size_t i = 0; i < options->class_count; i++)
        put_frame(&peer->out, '2', options->classes[i], 0, 0, "", 0);
    send_all(peer);
    if (options->echo_class) handle_own_echo(peer, options->echo_class);
}

static void finish(Peer *peer) { shutdown(peer->socket, SHUT_WR); }

const Protocol simplebus_protocol = {
    .name = "simplebus",
    .encode = encode,
    .open = open_peer,
    .handle_reply = handle_reply,
    .handle_message = handle_message,
    .queue_acks = queue_acks,
    .holds = holds,
    .progress = progress,
    .finish = finish,
    .eof_confirms = true,
};

/* Checks that no message is in flight: the first message of each class is the one published here. */
void run_probe(const Options *options) {
    static Peer peer;
    peer = (Peer){.options = options, .protocol = &simplebus_protocol, .socket = connect_to(options)};
    send_connect(&peer, options, 0);
    for (size_t i = 0; i < options->class_count; i++) {
        unsigned class_id = options->classes[i];
        put_frame(&peer.out, '2', class_id, 0, 0, "", 0);
        put_frame(&peer.out, '1', class_id, 0, 0, "probe", 5);
        send_all(&peer);
        size_t size;
        const uint8_t *frame = next_frame(&peer, &size);
        if (size != HEADER + 5 + DELIMITER || memcmp(frame + HEADER, "probe", 5) != 0)
            fail(EXIT_DEVIATION, "class %u has an unacknowledged message: %s", class_id,
                 shown(frame, size));
        uint32_t id = read_u32(frame + 3);
        put_ack(&peer, class_id, read_u16(frame + 7), id, (uint64_t)id + 1);
    }
    send_all(&peer);
    shutdown(peer.socket, SHUT_WR);
    while (receive_some(&peer, true) > 0) continue;
    printf("{\"mode\": \"probe\", \"protocol\": \"simplebus\", \"in_flight\": 0}\n");
}
