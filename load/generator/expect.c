/* Messages without a number: each must equal the next expected one, byte for byte.
 *
 * The expected bytes are generated before the clock starts, and compared in large pieces. A message
 * that differs is reported at its first wrong byte, before its end has arrived.
 */
#include "load.h"

#include <string.h>

/* Number of pieces from `first` on that fit into a number of bytes. */
static size_t pieces_within(const Pieces *pieces, size_t first, size_t size) {
    size_t low = first, high = pieces->count, end = pieces->offset[first] + size;
    while (low < high) {
        size_t middle = (low + high + 1) / 2;
        if (pieces->offset[middle] <= end) low = middle;
        else high = middle - 1;
    }
    return low - first;
}

/* Consumes all expected messages up to the end of the block at once. Returns the number of bytes; 0
 * if a message deviates or none is complete. */
static size_t take_block(Peer *peer, const uint8_t *data, size_t size) {
    const Pieces *expected = &peer->expected;
    size_t first = peer->verified % expected->count;
    size_t left = expected->bytes.end - expected->offset[first], have = size < left ? size : left;
    size_t count = pieces_within(expected, first, have);
    if (peer->verified + count > peer->options->count) return 0;
    size_t taken = expected->offset[first + count] - expected->offset[first];
    if (memcmp(data, piece(expected, first), taken) != 0) return 0;
    peer->verified += count;
    return taken;
}

/* Consumes the complete messages that are as expected. Sets `deviates` if the next bytes differ. */
size_t take_expected(Peer *peer, const uint8_t *data, size_t size, bool *deviates) {
    const Pieces *expected = &peer->expected;
    size_t at = 0, taken;
    *deviates = false;
    while ((taken = take_block(peer, data + at, size - at)) > 0) at += taken;
    while (at < size) {
        size_t i = peer->verified % expected->count;
        size_t need = piece_size(expected, i), have = size - at < need ? size - at : need;
        *deviates = memcmp(data + at, piece(expected, i), have) != 0;
        if (*deviates || have < need) break;
        if (all_received(peer))
            fail(EXIT_DEVIATION, "received an extra message %s after the last one",
                 shown(data + at, need));
        at += need;
        peer->verified += 1;
    }
    return at;
}

void fail_expected(const Peer *peer, const uint8_t *data, size_t size) {
    size_t i = peer->verified % peer->expected.count, need = piece_size(&peer->expected, i);
    fail(EXIT_DEVIATION, "received message number %llu as %s, expected %s",
         (unsigned long long)peer->verified, shown(data, size < need ? size : need),
         shown(piece(&peer->expected, i), need));
}

size_t handle_expected(Peer *peer, const uint8_t *data, size_t size) {
    bool deviates;
    size_t taken = take_expected(peer, data, size, &deviates);
    if (deviates) fail_expected(peer, data + taken, size - taken);
    return taken;
}
