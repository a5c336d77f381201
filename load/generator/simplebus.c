/* simplebus: verification and acknowledgement of messages, in both versions of the protocol.
 *
 * Type, class, id, length and content of every message are compared with the expected ones; ids
 * increase by one modulo 2^31 in each class. An ack contains received ids: `first-last`, half-open;
 * in version 1 with the timer index of these messages.
 */
#include "simplebus.h"

#include <string.h>

static const uint8_t delimiter[DELIMITER] = "<\r\n>";

uint16_t read_u16(const uint8_t *at) { return (uint16_t)(at[0] << 8 | at[1]); }

uint32_t read_u32(const uint8_t *at) {
    uint32_t value;
    memcpy(&value, at, 4);
    return __builtin_bswap32(value);
}

void write_u32(uint8_t *at, uint32_t value) {
    value = __builtin_bswap32(value);
    memcpy(at, &value, 4);
}

void put_header(Bytes *out, char type, unsigned key, uint32_t id, unsigned last) {
    uint8_t header[HEADER] = {(uint8_t)type,       (uint8_t)(key >> 8), (uint8_t)key,
                              (uint8_t)(id >> 24), (uint8_t)(id >> 16), (uint8_t)(id >> 8),
                              (uint8_t)id,         (uint8_t)(last >> 8), (uint8_t)last};
    bytes_append(out, header, HEADER);
}

void put_frame(Bytes *out, char type, unsigned key, uint32_t id, unsigned last,
               const void *content, size_t size) {
    put_header(out, type, key, id, last);
    bytes_append(out, content, size);
    bytes_append(out, delimiter, DELIMITER);
}

/* ---- acks ---- */

static size_t put_decimal(uint8_t *at, uint64_t value) {
    uint8_t digits[20];
    size_t count = 0;
    do digits[count++] = (uint8_t)('0' + value % 10);
    while (value /= 10);
    for (size_t i = 0; i < count; i++) at[i] = digits[count - 1 - i];
    return count;
}

void put_ack(Peer *peer, unsigned key, unsigned timer, uint64_t first, uint64_t last) {
    bytes_reserve(&peer->out, 64);
    put_header(&peer->out, '3', key, 0, timer);
    uint8_t *at = peer->out.data + peer->out.end;
    size_t size = put_decimal(at, first);
    at[size++] = '-';
    size += put_decimal(at + size, last);
    memcpy(at + size, delimiter, DELIMITER);
    peer->out.end += size + DELIMITER;
    peer->acks += 1;
}

static void end_run(Peer *peer, unsigned key, Run *run) {
    if (run->last > run->first) put_ack(peer, key, run->timer, run->first, run->last);
    run->last = run->first = 0;
}

static void release_held(Peer *peer, State *state) {
    for (size_t left = state->held_count; left > 1; left--) { /* Fisher and Yates. */
        state->shuffle_state = state->shuffle_state * 6364136223846793005u + 1442695040888963407u;
        size_t chosen = (size_t)(state->shuffle_state >> 33) % left;
        Held swapped = state->held[chosen];
        state->held[chosen] = state->held[left - 1];
        state->held[left - 1] = swapped;
    }
    for (size_t i = 0; i < state->held_count; i++) {
        Held *one = &state->held[i];
        put_ack(peer, one->ack_key, one->timer, one->id, (uint64_t)one->id + 1);
    }
    state->held_count = 0;
    for (size_t i = 0; i < peer->options->class_count; i++)
        state->classes[i].released = state->classes[i].count;
}

static inline void acknowledge(Peer *peer, State *state, ClassState *class, uint32_t id, uint16_t timer) {
    unsigned key = class->ack_key;
    switch (peer->options->acks) {
    case ACK_RANGES:
        if (class->run.last != id || class->run.timer != timer || class->run.first == class->run.last) {
            end_run(peer, key, &class->run);
            class->run = (Run){.first = id, .last = id, .timer = timer};
        }
        class->run.last = (uint64_t)id + 1;
        break;
    case ACK_SINGLE:
        put_ack(peer, key, timer, id, (uint64_t)id + 1);
        break;
    case ACK_RANDOM:
        state->held[state->held_count++] = (Held){key, id, timer};
        if (state->held_count == peer->options->shuffle) release_held(peer, state);
        break;
    case ACK_NONE:
        break;
    }
}

void queue_acks(Peer *peer, bool last) {
    State *state = peer->state;
    for (size_t i = 0; i < peer->options->class_count; i++)
        end_run(peer, state->classes[i].ack_key, &state->classes[i].run);
    if (last) release_held(peer, state);
}

/* After queue_acks() all received messages are acknowledged, except those to be shuffled. */
uint64_t progress(const Peer *peer, TraceKind kind, size_t index) {
    const ClassState *class = &((const State *)peer->state)->classes[index];
    if (kind == DELIVERED) return class->count;
    AckMode acks = peer->options->acks;
    return acks == ACK_NONE ? 0 : acks == ACK_RANDOM ? class->released : class->count;
}

bool holds(const Peer *peer) { return ((const State *)peer->state)->held_count > 0; }

/* ---- received data ---- */

size_t whole_frame(const uint8_t *data, size_t size) {
    if (size < HEADER + DELIMITER) return 0;
    const uint8_t *end = memmem(data + HEADER, size - HEADER, delimiter, DELIMITER);
    return end ? (size_t)(end - data) + DELIMITER : 0;
}

const uint8_t *next_frame(Peer *peer, size_t *size) {
    for (;;) {
        Bytes *in = &peer->in;
        *size = whole_frame(in->data + in->start, in->end - in->start);
        if (*size > 0) {
            in->start += *size;
            return in->data + in->start - *size;
        }
        if (receive_some(peer, true) == 0)
            fail(EXIT_CONNECTION, "the broker closed the connection during the handshake");
    }
}

void fail_type(const Peer *peer, const uint8_t *frame) {
    fail(EXIT_DEVIATION, "received a frame of type %s after %llu messages, expected a message",
         shown(frame, 1), (unsigned long long)peer->verified);
}

/* The number of the message in its class; fails if the id is neither expected nor a repetition. */
static uint64_t number_of(const Peer *peer, ClassState *class, unsigned class_id, uint32_t id) {
    if (!class->started) {
        class->started = true;
        class->next_id = id;
    }
    uint64_t behind = (class->next_id - id) & (IDS - 1);
    if (behind == 0 && all_received(peer))
        fail(EXIT_DEVIATION, "class %u: received message id %u after the last message, number %llu",
             class_id, id, (unsigned long long)class->count);
    if (behind > class->count)
        fail(EXIT_DEVIATION, "class %u: message number %llu has id %u, expected id %u: a gap",
             class_id, (unsigned long long)class->count, id, class->next_id);
    return class->count - behind;
}

/* Version 2: true if the last Deliver frame matches this message. */
static void check_feed(const State *state, unsigned class_id, uint64_t n, bool again) {
    if (class_id != state->fed_class)
        fail(EXIT_DEVIATION, "message number %llu has class %u, but its Deliver has class %u",
             (unsigned long long)n, class_id, state->fed_class);
    if (again == (state->attempt == 1))
        fail(EXIT_DEVIATION, "class %u: received message number %llu %s, but its Deliver has attempt %u",
             class_id, (unsigned long long)n, again ? "again" : "for the first time", state->attempt);
}

static _Noreturn void fail_content(const uint8_t *data, size_t size, unsigned class_id, uint64_t n,
                                   const uint8_t *expected, size_t expected_size) {
    size_t whole = whole_frame(data, size);
    fail(EXIT_DEVIATION, "class %u: received message number %llu (id %u) as %s, expected %s", class_id,
         (unsigned long long)n, read_u32(data + 3),
         shown(data + HEADER, (whole ? whole : size) - HEADER), shown(expected, expected_size));
}

size_t handle_message(Peer *peer, const uint8_t *data, size_t size) {
    State *state = peer->state;
    const Pieces *expected = &peer->expected;
    size_t at = 0, stride = peer->options->class_count;
    while (size - at >= HEADER + DELIMITER) {
        const uint8_t *frame = data + at;
        if (frame[0] != state->type) {
            size_t whole = whole_frame(frame, size - at);
            if (whole == 0) break;
            at += state->handle_other(peer, frame, whole);
            continue;
        }
        unsigned class_id = read_u16(frame + 1);
        uint32_t id = read_u32(frame + 3);
        size_t index = state->index_of[class_id];
        if (index == NO_CLASS)
            fail(EXIT_DEVIATION, "received a message of class %u without a subscription, after %llu messages",
                 class_id, (unsigned long long)peer->verified);
        ClassState *class = &state->classes[index];
        bool new = class->started && id == class->next_id && !all_received(peer);
        uint64_t n = new ? class->count : number_of(peer, class, class_id, id);
        size_t i = new ? class->frame : (n * stride + index) % expected->count;
        size_t need = HEADER + piece_size(expected, i), have = size - at < need ? size - at : need;
        if (memcmp(frame + HEADER, piece(expected, i), have - HEADER) != 0)
            fail_content(frame, size - at, class_id, n, piece(expected, i), piece_size(expected, i));
        if (have < need) break;
        if (state->is_fed) check_feed(state, class_id, n, n < class->count);
        uint16_t timer = state->is_fed ? 0 : read_u16(frame + 7);
        at += need;
        if (n < class->count) {
            peer->duplicates += 1;
            trace_redelivery(peer->options, index, n);
            acknowledge(peer, state, class, id, timer);
            continue;
        }
        class->next_id = (uint32_t)((id + 1) & (IDS - 1));
        class->count += 1;
        class->frame += stride;
        if (class->frame >= expected->count) class->frame -= expected->count;
        peer->verified += 1;
        acknowledge(peer, state, class, id, timer);
    }
    return at;
}

/* ---- opening ---- */

State *new_state(const Options *options, char type) {
    State *state = allocate(sizeof *state);
    memset(state->index_of, NO_CLASS, sizeof state->index_of);
    for (size_t i = 0; i < options->class_count; i++) {
        state->index_of[options->classes[i]] = (uint8_t)i;
        state->classes[i].frame = i;
        state->classes[i].ack_key = options->classes[i];
    }
    state->type = (uint8_t)type;
    state->held = allocate(options->shuffle * sizeof *state->held);
    state->shuffle_state = options->seed;
    return state;
}

void expect_content(Peer *peer, const void *before, size_t size) {
    Pieces *expected = &peer->expected;
    pieces_start(expected);
    for (size_t i = 0; i < peer->block->count; i++) {
        if (size > 0) bytes_append(&expected->bytes, before, size);
        bytes_append(&expected->bytes, piece(peer->block, i), piece_size(peer->block, i));
        bytes_append(&expected->bytes, delimiter, DELIMITER);
        pieces_close(expected);
    }
}
