/* simplebus, protocol version 1: 9-byte header, payload, delimiter; every message acknowledged.
 *
 *     type    class      message id   timer index   payload   delimiter
 *     1 byte  u16 BE     i32 BE       u16 BE        ...       < CR LF >
 *
 * Rule 1: a subscriber believes nothing. Type, class, id, length and content of every message are
 * compared with what must come; ids follow each other modulo 2^31 in each class.
 * Rule 2: an ack names ids that came, with the timer index they came with: `first-last`, half-open.
 */
#include "load.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

enum { HEADER = 9, DELIMITER = 4, NO_CLASS = 255 };

static const uint8_t delimiter[DELIMITER] = "<\r\n>";
static const uint64_t IDS = 1ull << 31; /* Ids wrap here. */

/* Consecutive messages of one class and one timer index. Empty when first == last. */
typedef struct {
    uint32_t first;
    uint64_t last; /* Half-open; 2^31 when the run ends at the wrap. */
    uint16_t timer;
} Run;

typedef struct {
    bool started;     /* Whether a first message has fixed where the ids begin. */
    uint32_t next_id; /* The id the next new message must have. */
    uint64_t count;   /* New messages verified. */
    size_t frame;     /* Their content: the block's frame of the next one. */
    Run run;          /* What came since the last ack of a range. */
} ClassState;

typedef struct {
    unsigned class_id;
    uint32_t id;
    uint16_t timer;
} Held;

typedef struct {
    uint8_t index_of[1 << 16]; /* Class id to index; NO_CLASS = not ours. */
    ClassState classes[CLASSES_MAX];
    Held *held;                /* ACK_RANDOM: acks that wait for the window to fill. */
    size_t held_count;
    uint64_t shuffle_state;
} State;

static uint16_t read_u16(const uint8_t *at) { return (uint16_t)(at[0] << 8 | at[1]); }

static uint32_t read_u32(const uint8_t *at) {
    uint32_t value;
    memcpy(&value, at, 4);
    return __builtin_bswap32(value);
}

static void put_header(Bytes *out, char type, unsigned class_id, uint32_t id, unsigned timer) {
    uint8_t header[HEADER] = {(uint8_t)type,         (uint8_t)(class_id >> 8), (uint8_t)class_id,
                              (uint8_t)(id >> 24),   (uint8_t)(id >> 16),      (uint8_t)(id >> 8),
                              (uint8_t)id,           (uint8_t)(timer >> 8),    (uint8_t)timer};
    bytes_append(out, header, HEADER);
}

static void put_frame(Bytes *out, char type, unsigned class_id, const void *content, size_t size) {
    put_header(out, type, class_id, 0, 0);
    bytes_append(out, content, size);
    bytes_append(out, delimiter, DELIMITER);
}

static void encode(Bytes *out, const Options *options, size_t index, const uint8_t *payload,
                   size_t size) {
    put_frame(out, '1', options->classes[index], payload, size);
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

static void put_ack(Peer *peer, unsigned class_id, unsigned timer, uint64_t first, uint64_t last) {
    bytes_reserve(&peer->out, 64);
    put_header(&peer->out, '3', class_id, 0, timer);
    uint8_t *at = peer->out.data + peer->out.end;
    size_t size = put_decimal(at, first);
    at[size++] = '-';
    size += put_decimal(at + size, last);
    memcpy(at + size, delimiter, DELIMITER);
    peer->out.end += size + DELIMITER;
    peer->acks += 1;
}

static void end_run(Peer *peer, unsigned class_id, Run *run) {
    if (run->last > run->first) put_ack(peer, class_id, run->timer, run->first, run->last);
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
        put_ack(peer, one->class_id, one->timer, one->id, (uint64_t)one->id + 1);
    }
    state->held_count = 0;
}

static inline void came(Peer *peer, State *state, ClassState *class, unsigned class_id, uint32_t id,
                        uint16_t timer) {
    switch (peer->options->acks) {
    case ACK_RANGES:
        if (class->run.last != id || class->run.timer != timer || class->run.first == class->run.last) {
            end_run(peer, class_id, &class->run);
            class->run = (Run){.first = id, .last = id, .timer = timer};
        }
        class->run.last = (uint64_t)id + 1;
        break;
    case ACK_SINGLE:
        put_ack(peer, class_id, timer, id, (uint64_t)id + 1);
        break;
    case ACK_RANDOM:
        state->held[state->held_count++] = (Held){class_id, id, timer};
        if (state->held_count == peer->options->shuffle) release_held(peer, state);
        break;
    case ACK_NONE:
        break;
    }
}

static void settle(Peer *peer, bool last) {
    State *state = peer->state;
    for (size_t i = 0; i < peer->options->class_count; i++)
        end_run(peer, peer->options->classes[i], &state->classes[i].run);
    if (last) release_held(peer, state);
}

static bool holds(const Peer *peer) { return ((const State *)peer->state)->held_count > 0; }

/* ---- hearing ---- */

/* The size of the whole frame at the front, 0 when its end has not come yet. */
static size_t whole_frame(const uint8_t *data, size_t size) {
    if (size < HEADER + DELIMITER) return 0;
    const uint8_t *end = memmem(data + HEADER, size - HEADER, delimiter, DELIMITER);
    return end ? (size_t)(end - data) + DELIMITER : 0;
}

/* Which of the class's messages this id is; fails when it is none that may come now. */
static uint64_t number_of(const Peer *peer, ClassState *class, unsigned class_id, uint32_t id) {
    if (!class->started) {
        class->started = true;
        class->next_id = id;
    }
    uint64_t behind = (class->next_id - id) & (IDS - 1);
    if (behind == 0 && all_heard(peer))
        fail(EXIT_DEVIATION, "class %u: a message %u came after the last, which was number %llu",
             class_id, id, (unsigned long long)class->count);
    if (behind > class->count)
        fail(EXIT_DEVIATION, "class %u: message number %llu has id %u, expected id %u: a gap",
             class_id, (unsigned long long)class->count, id, class->next_id);
    return class->count - behind;
}

static _Noreturn void fail_content(const uint8_t *data, size_t size, unsigned class_id, uint64_t n,
                                   const uint8_t *expected, size_t expected_size) {
    size_t whole = whole_frame(data, size);
    fail(EXIT_DEVIATION, "class %u: message number %llu (id %u) came as %s, expected %s", class_id,
         (unsigned long long)n, read_u32(data + 3),
         shown(data + HEADER, (whole ? whole : size) - HEADER), shown(expected, expected_size));
}

static size_t hear_message(Peer *peer, const uint8_t *data, size_t size) {
    State *state = peer->state;
    const Pieces *expected = &peer->expected;
    size_t at = 0, stride = peer->options->class_count;
    while (size - at >= HEADER + DELIMITER) {
        const uint8_t *frame = data + at;
        if (frame[0] == '0') { /* A heartbeat. */
            size_t whole = whole_frame(frame, size - at);
            if (whole == 0) break;
            at += whole;
            continue;
        }
        if (frame[0] != '1')
            fail(EXIT_DEVIATION, "after %llu messages a frame of type %s came, expected a message",
                 (unsigned long long)peer->verified, shown(frame, 1));
        unsigned class_id = read_u16(frame + 1);
        uint32_t id = read_u32(frame + 3);
        size_t index = state->index_of[class_id];
        if (index == NO_CLASS)
            fail(EXIT_DEVIATION, "after %llu messages one of class %u came, which nobody asked for",
                 (unsigned long long)peer->verified, class_id);
        ClassState *class = &state->classes[index];
        bool new = class->started && id == class->next_id && !all_heard(peer);
        uint64_t n = new ? class->count : number_of(peer, class, class_id, id);
        size_t i = new ? class->frame : (n * stride + index) % expected->count;
        size_t need = HEADER + piece_size(expected, i), have = size - at < need ? size - at : need;
        if (memcmp(frame + HEADER, piece(expected, i), have - HEADER) != 0)
            fail_content(frame, size - at, class_id, n, piece(expected, i), piece_size(expected, i));
        if (have < need) break;
        came(peer, state, class, class_id, id, read_u16(frame + 7));
        at += need;
        if (n < class->count) {
            peer->duplicates += 1;
            continue;
        }
        class->next_id = (uint32_t)((id + 1) & (IDS - 1));
        class->count += 1;
        class->frame += stride;
        if (class->frame >= expected->count) class->frame -= expected->count;
        peer->verified += 1;
    }
    return at;
}

static size_t hear_reply(Peer *peer, const uint8_t *data, size_t size) {
    (void)peer;
    size_t whole, at = 0;
    while ((whole = whole_frame(data + at, size - at)) > 0) {
        if (data[at] != '0')
            fail(EXIT_DEVIATION, "the publisher was sent %s, expected nothing", shown(data + at, whole));
        at += whole;
    }
    return at;
}

/* ---- opening and closing ---- */

/* The next whole frame of a handshake; it stays valid until the next read. */
static const uint8_t *next_frame(Peer *peer, size_t *size) {
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

static void say_connect(Peer *peer, const Options *options, unsigned extra_class) {
    Bytes list = {0};
    for (size_t i = 0; i < options->class_count; i++)
        bytes_format(&list, "%s%u", i ? "," : "[", options->classes[i]);
    if (extra_class) bytes_format(&list, ",%u", extra_class);
    bytes_append(&list, "]", 1);
    put_frame(&peer->out, '4', 0, list.data, list.end);
    send_all(peer);
    size_t size;
    const uint8_t *reply = next_frame(peer, &size);
    if (reply[0] != '4' || size != HEADER + 4 + DELIMITER)
        fail(EXIT_DEVIATION, "Connect was answered with %s, expected type 4 and 4 bytes",
             shown(reply, size));
    free(list.data);
}

/* v1 does not answer Subscribe. A message to a class of our own that comes back says: all is read. */
static void hear_own_echo(Peer *peer, unsigned class_id) {
    put_frame(&peer->out, '2', class_id, "", 0);
    put_frame(&peer->out, '1', class_id, "subscribed?", 11);
    send_all(peer);
    size_t size;
    const uint8_t *frame = next_frame(peer, &size);
    if (frame[0] != '1' || read_u16(frame + 1) != class_id)
        fail(EXIT_DEVIATION, "before anything was published %s came: another run left it unacknowledged",
             shown(frame, size));
    put_ack(peer, class_id, read_u16(frame + 7), read_u32(frame + 3), (uint64_t)read_u32(frame + 3) + 1);
    send_all(peer);
    peer->acks = 0;
}

static State *new_state(const Options *options) {
    State *state = allocate(sizeof *state);
    memset(state->index_of, NO_CLASS, sizeof state->index_of);
    for (size_t i = 0; i < options->class_count; i++) {
        state->index_of[options->classes[i]] = (uint8_t)i;
        state->classes[i].frame = i;
    }
    state->held = allocate(options->shuffle * sizeof *state->held);
    state->shuffle_state = options->seed;
    return state;
}

static void open_peer(Peer *peer, Role role) {
    const Options *options = peer->options;
    peer->state = new_state(options);
    say_connect(peer, options, role == SUBSCRIBER ? options->echo_class : 0);
    if (role == PUBLISHER) return;
    pieces_start(&peer->expected);
    for (size_t i = 0; i < peer->block->count; i++) {
        bytes_append(&peer->expected.bytes, piece(peer->block, i), piece_size(peer->block, i));
        bytes_append(&peer->expected.bytes, delimiter, DELIMITER);
        pieces_close(&peer->expected);
    }
    for (size_t i = 0; i < options->class_count; i++)
        put_frame(&peer->out, '2', options->classes[i], "", 0);
    send_all(peer);
    if (options->echo_class) hear_own_echo(peer, options->echo_class);
}

/* v1 confirms nothing; the broker's own close, after it read to the end, is what there is. */
static void farewell(Peer *peer) { shutdown(peer->socket, SHUT_WR); }

const Protocol simplebus_protocol = {
    .name = "simplebus",
    .encode = encode,
    .open = open_peer,
    .hear_reply = hear_reply,
    .hear_message = hear_message,
    .settle = settle,
    .holds = holds,
    .farewell = farewell,
    .eof_confirms = true,
};

/* ---- probe ---- */

/* Shows that nothing is left in flight: the first message of each class is the one published here. */
void run_probe(const Options *options) {
    static Peer peer;
    peer = (Peer){.options = options, .protocol = &simplebus_protocol, .socket = connect_to(options)};
    say_connect(&peer, options, 0);
    for (size_t i = 0; i < options->class_count; i++) {
        unsigned class_id = options->classes[i];
        put_frame(&peer.out, '2', class_id, "", 0);
        put_frame(&peer.out, '1', class_id, "probe", 5);
        send_all(&peer);
        size_t size;
        const uint8_t *frame = next_frame(&peer, &size);
        if (size != HEADER + 5 + DELIMITER || memcmp(frame + HEADER, "probe", 5) != 0)
            fail(EXIT_DEVIATION, "class %u still held a message that nobody acknowledged: %s", class_id,
                 shown(frame, size));
        uint32_t id = read_u32(frame + 3);
        put_ack(&peer, class_id, read_u16(frame + 7), id, (uint64_t)id + 1);
    }
    send_all(&peer);
    shutdown(peer.socket, SHUT_WR);
    while (receive_some(&peer, true) > 0) continue;
    printf("{\"mode\": \"probe\", \"protocol\": \"simplebus\", \"in_flight\": 0}\n");
}
