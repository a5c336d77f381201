/* The block: the payloads that publisher and subscriber generate from the same seed.
 *
 * Message n has payload n modulo the block's length. Payloads are printable and random, so that a
 * lost, moved or damaged message differs from every other one. They contain no '<', or exactly one
 * with the option `angle`.
 */
#include "load.h"

#include <string.h>

uint64_t next_random(uint64_t *state) { /* splitmix64 */
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

void pieces_start(Pieces *pieces) { memset(pieces, 0, sizeof *pieces); }

void pieces_close(Pieces *pieces) {
    pieces->count += 1;
    pieces->offset[pieces->count] = pieces->bytes.end;
}

static size_t frames_for(const Options *options) {
    size_t average = options->mixed ? 150 : options->size_bytes ? options->size_bytes : 1;
    size_t frames = BLOCK_BYTES_MAX / average;
    if (frames > BLOCK_FRAMES_MAX || options->subjects > 0) frames = BLOCK_FRAMES_MAX;
    if (frames < BLOCK_FRAMES_MIN) frames = BLOCK_FRAMES_MIN;
    return frames - frames % options->class_count; /* Message n always belongs to class n % classes. */
}

void block_build(Pieces *block, const Options *options) {
    static const char letters[] =
        " !\"#$%&'()*+,-./0123456789:;=>?@ABCDEFGHIJKLMNOPQRSTUVWXYZ[\\]^_`"
        "abcdefghijklmnopqrstuvwxyz{|}~";
    uint64_t state = options->seed;
    pieces_start(block);
    for (size_t frames = frames_for(options); frames > 0; frames--) {
        size_t size = options->mixed ? 1 + next_random(&state) % 300 : options->size_bytes;
        bytes_reserve(&block->bytes, size + 1);
        uint8_t *payload = block->bytes.data + block->bytes.end;
        for (size_t i = 0; i < size; i++)
            payload[i] = (uint8_t)letters[next_random(&state) % (sizeof letters - 1)];
        if (options->angle && size > 0) payload[next_random(&state) % size] = '<';
        block->bytes.end += size;
        pieces_close(block);
    }
}
