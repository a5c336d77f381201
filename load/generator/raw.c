/* No protocol: payloads back to back, through a relay without message boundaries.
 *
 * The rate is the physical limit of the machine, and shows that the generator is faster than the
 * measured brokers. The subscriber connects first; the relay sends it all bytes of the second
 * connection.
 */
#include "load.h"

#include <sys/socket.h>

static void encode(Bytes *out, const Options *options, size_t index, const uint8_t *payload,
                   size_t size) {
    (void)options, (void)index;
    bytes_append(out, payload, size);
}

static void open_peer(Peer *peer, Role role) {
    (void)role;
    peer->expected = *peer->block;
}

static size_t handle_reply(Peer *peer, const uint8_t *data, size_t size) {
    (void)peer, (void)data;
    return size;
}

static void queue_acks(Peer *peer, bool last) { (void)peer, (void)last; }

static void finish(Peer *peer) { shutdown(peer->socket, SHUT_WR); }

const Protocol raw_protocol = {
    .name = "raw",
    .encode = encode,
    .open = open_peer,
    .handle_reply = handle_reply,
    .handle_message = handle_expected,
    .queue_acks = queue_acks,
    .finish = finish,
    .eof_confirms = true,
};
