/* Messages without a number: each must be, byte for byte, the one that comes next.
 *
 * Rule 1: the expected bytes are made before the clock starts; a message costs one comparison.
 * Rule 2: what differs is refused as soon as it differs, not when its end has come.
 */
#include "load.h"

#include <string.h>

/* Takes the whole messages at the front that are as expected. `deviates`: the next bytes are not. */
size_t take_expected(Peer *peer, const uint8_t *data, size_t size, bool *deviates) {
    const Pieces *expected = &peer->expected;
    size_t at = 0, i = peer->verified % expected->count;
    *deviates = false;
    while (at < size) {
        size_t need = piece_size(expected, i), have = size - at < need ? size - at : need;
        *deviates = memcmp(data + at, piece(expected, i), have) != 0;
        if (*deviates || have < need) break;
        if (all_heard(peer))
            fail(EXIT_DEVIATION, "a message %s came after the last", shown(data + at, need));
        at += need;
        peer->verified += 1;
        if (++i == expected->count) i = 0;
    }
    return at;
}

void fail_expected(const Peer *peer, const uint8_t *data, size_t size) {
    size_t i = peer->verified % peer->expected.count, need = piece_size(&peer->expected, i);
    fail(EXIT_DEVIATION, "message number %llu came as %s, expected %s",
         (unsigned long long)peer->verified, shown(data, size < need ? size : need),
         shown(piece(&peer->expected, i), need));
}

size_t hear_expected(Peer *peer, const uint8_t *data, size_t size) {
    bool deviates;
    size_t taken = take_expected(peer, data, size, &deviates);
    if (deviates) fail_expected(peer, data + taken, size - taken);
    return taken;
}
