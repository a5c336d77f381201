/* Redis: PUBLISH and SUBSCRIBE (nothing acknowledged), and streams with XREADGROUP and XACK.
 *
 * Commands are pipelined and every reply is read; an error reply ends the run. The ids of stream
 * entries are assigned by Redis, so the order is verified by content only.
 */
#include "load.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { READ_COUNT = 1000, BLOCK_MS = 1000 };

static void put_bulk(Bytes *out, const void *data, size_t size) {
    bytes_format(out, "$%zu\r\n", size);
    bytes_append(out, data, size);
    bytes_append(out, "\r\n", 2);
}

static void put_word(Bytes *out, const char *word) { put_bulk(out, word, strlen(word)); }

static void put_key(Bytes *out, const Options *options, size_t index) {
    char key[32];
    snprintf(key, sizeof key, "load.%u", options->classes[index]);
    put_word(out, key);
}

/* Number of a line such as `*3` or `$16`, and its size with CR LF; size 0 if it is incomplete. */
typedef struct {
    char kind;
    long value;
    size_t taken;
} Line;

static Line parse_line(const uint8_t *data, size_t size) {
    Line line = {0};
    const uint8_t *end = size ? memchr(data, '\n', size) : NULL;
    if (!end) return line;
    line.taken = (size_t)(end - data) + 1;
    line.kind = (char)data[0];
    if (line.kind == '-') fail(EXIT_DEVIATION, "redis replied %s", shown(data, line.taken - 2));
    if (line.kind != '+') line.value = strtol((const char *)data + 1, NULL, 10);
    return line;
}

/* A bulk string; `taken` is 0 if it is incomplete. */
typedef struct {
    const uint8_t *data;
    size_t size, taken;
} Bulk;

static Bulk parse_bulk(const uint8_t *data, size_t size) {
    Bulk none = {0};
    Line line = parse_line(data, size);
    if (line.taken == 0) return none;
    if (line.kind != '$' || line.value < 0)
        fail(EXIT_DEVIATION, "received %s, expected a string", shown(data, line.taken));
    Bulk bulk = {data + line.taken, (size_t)line.value, line.taken + (size_t)line.value + 2};
    return size < bulk.taken ? none : bulk;
}

static void ask(Peer *peer, Bytes *answer) { /* Sends the commands in `out`, and reads one line. */
    send_all(peer);
    if (!read_line(peer, answer)) fail(EXIT_CONNECTION, "redis closed the connection");
    if (answer->end > 0 && answer->data[0] == '-')
        fail(EXIT_DEVIATION, "redis replied %s", shown(answer->data, answer->end));
}

static void finish_nothing(Peer *peer) { (void)peer; }

/* ---- publish and subscribe ---- */

static void encode(Bytes *out, const Options *options, size_t index, const uint8_t *payload,
                   size_t size) {
    bytes_format(out, "*3\r\n");
    put_word(out, "PUBLISH");
    put_key(out, options, index);
    put_bulk(out, payload, size);
}

static void open_peer(Peer *peer, Role role) {
    const Options *options = peer->options;
    if (role == PUBLISHER) return;
    pieces_start(&peer->expected);
    for (size_t i = 0; i < peer->block->count; i++) {
        bytes_format(&peer->expected.bytes, "*3\r\n");
        put_word(&peer->expected.bytes, "message");
        put_key(&peer->expected.bytes, options, i % options->class_count);
        put_bulk(&peer->expected.bytes, piece(peer->block, i), piece_size(peer->block, i));
        pieces_close(&peer->expected);
    }
    Bytes answer = {0};
    for (size_t i = 0; i < options->class_count; i++) {
        bytes_format(&peer->out, "*2\r\n");
        put_word(&peer->out, "SUBSCRIBE");
        put_key(&peer->out, options, i);
        ask(peer, &answer); /* *3, $9, subscribe, $n, load.n, :count */
        for (int lines = 0; lines < 5; lines++) read_line(peer, &answer);
    }
    free(answer.data);
}

static size_t handle_reply(Peer *peer, const uint8_t *data, size_t size) {
    size_t at = 0;
    for (Line line; (line = parse_line(data + at, size - at)).taken > 0; at += line.taken) {
        if (line.kind != ':' || line.value < 1)
            fail(EXIT_DEVIATION, "received the reply to PUBLISH number %llu as %s",
                 (unsigned long long)peer->confirmed, shown(data + at, line.taken));
        peer->confirmed += 1;
    }
    return at;
}

static void queue_acks(Peer *peer, bool last) { (void)peer, (void)last; }

const Protocol redis_protocol = {
    .name = "redis",
    .encode = encode,
    .open = open_peer,
    .handle_reply = handle_reply,
    .handle_message = handle_expected,
    .queue_acks = queue_acks,
    .finish = finish_nothing,
};

/* ---- streams ---- */

typedef struct {
    long entries;     /* Entries of the current reply that have not arrived. */
    long acked;       /* Entries acknowledged by the XACK whose reply is due; 0 = none is due. */
    Bytes ids;        /* Their ids, as bulk strings, for the next XACK. */
    long ids_count;
    bool reading;     /* Whether an XREADGROUP waits for its reply. */
} StreamState;

static void stream_encode(Bytes *out, const Options *options, size_t index, const uint8_t *payload,
                          size_t size) {
    bytes_format(out, "*5\r\n");
    put_word(out, "XADD");
    put_key(out, options, index);
    put_word(out, "*");
    put_word(out, "d");
    put_bulk(out, payload, size);
}

static void ask_for_more(Peer *peer) {
    StreamState *state = peer->state;
    char number[16];
    bytes_format(&peer->out, "*11\r\n");
    const char *words[] = {"XREADGROUP", "GROUP", "load", "one", "COUNT"};
    for (size_t i = 0; i < sizeof words / sizeof *words; i++) put_word(&peer->out, words[i]);
    snprintf(number, sizeof number, "%d", READ_COUNT);
    put_word(&peer->out, number);
    put_word(&peer->out, "BLOCK");
    snprintf(number, sizeof number, "%d", BLOCK_MS);
    put_word(&peer->out, number);
    put_word(&peer->out, "STREAMS");
    put_key(&peer->out, peer->options, 0);
    put_word(&peer->out, ">");
    state->reading = true;
}

static void stream_open(Peer *peer, Role role) {
    if (peer->options->class_count != 1) fail(EXIT_USAGE, "redis-stream supports one class only");
    if (role == PUBLISHER) return;
    peer->state = allocate(sizeof(StreamState));
    Bytes answer = {0};
    bytes_format(&peer->out, "*2\r\n");
    put_word(&peer->out, "DEL");
    put_key(&peer->out, peer->options, 0);
    ask(peer, &answer);
    bytes_format(&peer->out, "*6\r\n");
    put_word(&peer->out, "XGROUP");
    put_word(&peer->out, "CREATE");
    put_key(&peer->out, peer->options, 0);
    put_word(&peer->out, "load");
    put_word(&peer->out, "0");
    put_word(&peer->out, "MKSTREAM");
    ask(peer, &answer);
    ask_for_more(peer);
    send_all(peer);
    free(answer.data);
}

static size_t stream_handle_reply(Peer *peer, const uint8_t *data, size_t size) {
    size_t at = 0;
    for (Bulk id; (id = parse_bulk(data + at, size - at)).taken > 0; at += id.taken)
        peer->confirmed += 1;
    return at;
}

/* One entry: `*2`, its id, `*2`, "d", the payload. Returns its bytes; 0 if it is incomplete. */
static size_t handle_entry(Peer *peer, const uint8_t *data, size_t size) {
    StreamState *state = peer->state;
    Line pair = parse_line(data, size);
    if (pair.taken == 0) return 0;
    size_t at = pair.taken;
    Bulk id = parse_bulk(data + at, size - at);
    if (id.taken == 0) return 0;
    const uint8_t *id_text = data + at;
    at += id.taken;
    Line fields = parse_line(data + at, size - at);
    if (fields.taken == 0) return 0;
    at += fields.taken;
    Bulk name = parse_bulk(data + at, size - at);
    if (name.taken == 0) return 0;
    at += name.taken;
    Bulk payload = parse_bulk(data + at, size - at);
    if (payload.taken == 0) return 0;
    size_t i = peer->verified % peer->block->count;
    if (all_received(peer)) fail(EXIT_DEVIATION, "received an extra message after the last one");
    if (payload.size != piece_size(peer->block, i) ||
        memcmp(payload.data, piece(peer->block, i), payload.size) != 0)
        fail(EXIT_DEVIATION, "received message number %llu as %s, expected %s",
             (unsigned long long)peer->verified, shown(payload.data, payload.size),
             shown(piece(peer->block, i), piece_size(peer->block, i)));
    bytes_append(&state->ids, id_text, id.taken);
    state->ids_count += 1;
    peer->verified += 1;
    return at + payload.taken;
}

/* The start of a reply: `*-1` or `*1 *2 $key *n`. Returns its bytes; 0 if it is incomplete. */
static size_t handle_front(Peer *peer, const uint8_t *data, size_t size) {
    StreamState *state = peer->state;
    Line outer = parse_line(data, size);
    if (outer.taken == 0) return 0;
    if (outer.kind == ':') { /* The reply to XACK precedes the next entries. */
        if (outer.value != state->acked)
            fail(EXIT_DEVIATION, "the reply to XACK of %ld entries is %ld", state->acked, outer.value);
        state->acked = 0;
        return outer.taken;
    }
    if (outer.value < 1) { /* No entry within BLOCK_MS. */
        state->reading = false;
        return outer.taken;
    }
    size_t at = outer.taken;
    Line stream = parse_line(data + at, size - at);
    if (stream.taken == 0) return 0;
    at += stream.taken;
    Bulk key = parse_bulk(data + at, size - at);
    if (key.taken == 0) return 0;
    at += key.taken;
    Line entries = parse_line(data + at, size - at);
    if (entries.taken == 0) return 0;
    state->entries = entries.value;
    return at + entries.taken;
}

static size_t stream_handle_message(Peer *peer, const uint8_t *data, size_t size) {
    StreamState *state = peer->state;
    size_t at = 0, taken;
    for (; at < size; at += taken) {
        if (state->entries == 0) {
            taken = handle_front(peer, data + at, size - at);
            if (taken == 0) break;
            continue;
        }
        taken = handle_entry(peer, data + at, size - at);
        if (taken == 0) break;
        if (--state->entries == 0) state->reading = false;
    }
    return at;
}

static void stream_queue_acks(Peer *peer, bool last) {
    StreamState *state = peer->state;
    if (state->reading) return; /* The whole reply is acknowledged at once. */
    if (state->ids_count > 0) {
        bytes_format(&peer->out, "*%ld\r\n", 3 + state->ids_count);
        put_word(&peer->out, "XACK");
        put_key(&peer->out, peer->options, 0);
        put_word(&peer->out, "load");
        bytes_append(&peer->out, state->ids.data, state->ids.end);
        peer->acks += 1;
        state->acked = state->ids_count;
        peer->acked = peer->verified;
        state->ids.start = state->ids.end = 0;
        state->ids_count = 0;
    }
    if (!last && peer->verified < peer->options->count) ask_for_more(peer);
}

const Protocol redis_stream_protocol = {
    .name = "redis-stream",
    .encode = stream_encode,
    .open = stream_open,
    .handle_reply = stream_handle_reply,
    .handle_message = stream_handle_message,
    .queue_acks = stream_queue_acks,
    .finish = finish_nothing,
};
