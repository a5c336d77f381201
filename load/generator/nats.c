/* NATS: core publish and subscribe (nothing acknowledged), and JetStream with a push consumer.
 *
 * Core messages have no number, so each whole `MSG`, or `HMSG` with --header, is compared byte for
 * byte with the next expected one. JetStream's reply subject contains the stream's sequence, which
 * must increase by one. load/jetstream.py creates and removes streams and consumers.
 */
#include "load.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void put_connect(Peer *peer) {
    bytes_format(&peer->out,
                 "CONNECT {\"verbose\":false,\"pedantic\":false,\"lang\":\"c\",\"version\":\"1\","
                 "\"name\":\"load\",\"protocol\":0,\"headers\":%s}\r\n",
                 peer->options->header || peer->options->name ? "true" : "false");
}

/* Sends queued data and a PING, and reads until the PONG: all earlier commands are processed. */
static void finish_handshake(Peer *peer) {
    Bytes line = {0};
    bytes_append(&peer->out, "PING\r\n", 6);
    send_all(peer);
    for (;;) {
        if (!read_line(peer, &line))
            fail(EXIT_CONNECTION, "the broker closed the connection during the handshake");
        if (strcmp((char *)line.data, "PONG") == 0) break;
        if (strncmp((char *)line.data, "INFO", 4) != 0 && strcmp((char *)line.data, "+OK") != 0)
            fail(EXIT_DEVIATION, "received %s in the handshake", shown(line.data, line.end));
    }
    free(line.data);
}

/* Consumes one line that is not a message; 0 if it is incomplete. Sets `pong` for a PONG. */
static size_t handle_line(Peer *peer, const uint8_t *data, size_t size, bool *pong) {
    const uint8_t *end = memchr(data, '\n', size);
    if (!end) return 0;
    size_t taken = (size_t)(end - data) + 1;
    if (taken == 6 && memcmp(data, "PING\r\n", 6) == 0)
        bytes_append(&peer->out, "PONG\r\n", 6);
    else if (taken == 6 && memcmp(data, "PONG\r\n", 6) == 0)
        *pong = true;
    else if (memcmp(data, "INFO", taken < 4 ? taken : 4) != 0)
        fail(EXIT_DEVIATION, "received %s after %llu messages", shown(data, taken),
             (unsigned long long)peer->verified);
    return taken;
}

/* ---- core ---- */

/* Appends a message. Its subject is that of its class, or the next random one of `draws`, followed
 * by `more`. With a header, the verb begins with H. */
static void put_message(Bytes *out, const Options *options, const char *verb, size_t index,
                        const char *more, uint64_t *draws, const uint8_t *payload, size_t size) {
    const char *header = options->header, *value = header ? strchr(header, '=') : NULL;
    if (header && !value) fail(EXIT_USAGE, "the header %s is not NAME=VALUE", header);
    bytes_format(out, "%s%s load.%u", header ? "H" : "", verb, options->classes[index]);
    if (options->subjects > 0)
        bytes_format(out, ".%u", (unsigned)(next_random(draws) % options->subjects));
    if (header) {
        size_t block = strlen("NATS/1.0\r\n: \r\n\r\n") + strlen(header) - 1; /* Without the '='. */
        bytes_format(out, "%s %zu %zu\r\nNATS/1.0\r\n%.*s: %s\r\n\r\n", more, block, block + size,
                     (int)(value - header), header, value + 1);
    } else {
        bytes_format(out, "%s %zu\r\n", more, size);
    }
    bytes_append(out, payload, size);
    bytes_append(out, "\r\n", 2);
}

static void encode(Bytes *out, const Options *options, size_t index, const uint8_t *payload,
                   size_t size) {
    static uint64_t draws;
    if (out->end == 0) draws = options->seed; /* The block begins. */
    put_message(out, options, "PUB", index, "", &draws, payload, size);
}

static void expect(Peer *peer) {
    const Options *options = peer->options;
    uint64_t draws = options->seed;
    Bytes *out = &peer->expected.bytes;
    pieces_start(&peer->expected);
    for (size_t i = 0; i < peer->block->count; i++) {
        size_t index = i % options->class_count;
        char sid[24];
        snprintf(sid, sizeof sid, " %zu", options->subjects > 0 ? 1 : index + 1);
        put_message(out, options, "MSG", index, sid, &draws, piece(peer->block, i),
                    piece_size(peer->block, i));
        pieces_close(&peer->expected);
    }
}

static void open_peer(Peer *peer, Role role) {
    const Options *options = peer->options;
    put_connect(peer);
    if (role == SUBSCRIBER) {
        if (options->subjects > 0) bytes_format(&peer->out, "SUB > 1\r\n");
        for (size_t i = 0; i < options->class_count && options->subjects == 0; i++)
            bytes_format(&peer->out, "SUB load.%u %zu\r\n", options->classes[i], i + 1);
        expect(peer);
    }
    finish_handshake(peer);
}

static size_t handle_reply(Peer *peer, const uint8_t *data, size_t size) {
    size_t at = 0, taken;
    bool pong = false;
    while ((taken = handle_line(peer, data + at, size - at, &pong)) > 0) at += taken;
    if (pong) peer->confirmed = peer->options->count;
    return at;
}

static size_t handle_message(Peer *peer, const uint8_t *data, size_t size) {
    size_t at = 0, taken;
    bool deviates, pong;
    for (;; at += taken) {
        at += take_expected(peer, data + at, size - at, &deviates);
        if (!deviates) return at;
        if (data[at] == 'M' || data[at] == 'H') fail_expected(peer, data + at, size - at);
        taken = handle_line(peer, data + at, size - at, &pong);
        if (taken == 0) return at;
    }
}

static void queue_acks(Peer *peer, bool last) { (void)peer, (void)last; }

static void finish(Peer *peer) { bytes_append(&peer->out, "PING\r\n", 6); }

const Protocol nats_protocol = {
    .name = "nats",
    .encode = encode,
    .open = open_peer,
    .handle_reply = handle_reply,
    .handle_message = handle_message,
    .queue_acks = queue_acks,
    .finish = finish,
};

/* ---- JetStream ---- */

typedef struct {
    char reply[256];   /* Reply subject of the last message that waits for an ack. */
    size_t reply_size;
    uint64_t waiting;  /* Messages since the last ack. */
} JetState;

enum { ID_DIGITS = 10 };
static const char id_header[] = "NATS/1.0\r\nNats-Msg-Id: ";

static void jet_encode(Bytes *out, const Options *options, size_t index, const uint8_t *payload,
                       size_t size) {
    unsigned class_id = options->classes[index];
    if (options->name) {
        size_t block = strlen(id_header) + strlen(options->name) + 1 + ID_DIGITS + 4;
        bytes_format(out, "HPUB load.js.%u _INBOX.load.%u %zu %zu\r\n", class_id, class_id, block,
                     block + size);
        bytes_format(out, "%s%s:%0*d\r\n\r\n", id_header, options->name, ID_DIGITS, 0);
    } else {
        bytes_format(out, "PUB load.js.%u _INBOX.load.%u %zu\r\n", class_id, class_id, size);
    }
    bytes_append(out, payload, size);
    bytes_append(out, "\r\n", 2);
}

/* Writes the number of a message at the end of its id, if it has an id. */
static void jet_number_frame(const Peer *peer, uint8_t *frame, uint64_t n) {
    const char *name = peer->options->name;
    if (!name) return;
    uint8_t *at = (uint8_t *)strstr((char *)frame, id_header);
    if (!at) fail(EXIT_USAGE, "message %llu has no id", (unsigned long long)n);
    at += strlen(id_header) + strlen(name) + 1 + ID_DIGITS;
    for (int i = 0; i < ID_DIGITS; i++, n /= 10) *--at = (uint8_t)('0' + n % 10);
}

static void jet_open(Peer *peer, Role role) {
    const Options *options = peer->options;
    peer->state = allocate(sizeof(JetState));
    put_connect(peer);
    if (role == PUBLISHER)
        bytes_format(&peer->out, "SUB _INBOX.load.* 1\r\n");
    else
        bytes_format(&peer->out, "SUB %s 1\r\n", options->deliver);
    finish_handshake(peer);
}

/* `MSG subject sid [reply] size`, then the payload; or `HMSG subject sid reply headers size`, then
 * headers and payload. All fields are NULL or 0 if it is incomplete. */
typedef struct {
    const uint8_t *reply, *payload;
    size_t reply_size, size, taken;
} Message;

static size_t size_in(const uint8_t *digits, size_t count) {
    size_t size = 0;
    for (size_t i = 0; i < count; i++) size = size * 10 + (size_t)(digits[i] - '0');
    return size;
}

static Message parse_message(const uint8_t *data, size_t size) {
    Message none = {0}, message = {0};
    const uint8_t *end = memchr(data, '\n', size), *word[6];
    if (!end) return none;
    size_t words = 0, length[6], line = (size_t)(end - data) - 1;
    for (size_t i = 0; i < line && words < 6; words++) {
        word[words] = data + i;
        while (i < line && data[i] != ' ') i++;
        length[words] = (size_t)(data + i - word[words]);
        i++;
    }
    bool has_headers = words == 6 && memcmp(data, "HMSG ", 5) == 0;
    if (!has_headers && ((words != 4 && words != 5) || memcmp(data, "MSG ", 4) != 0))
        fail(EXIT_DEVIATION, "received %s, expected a MSG", shown(data, line));
    size_t headers = has_headers ? size_in(word[4], length[4]) : 0;
    message.size = size_in(word[words - 1], length[words - 1]);
    message.taken = line + 2 + message.size + 2;
    if (size < message.taken) return none;
    message.payload = end + 1 + headers;
    message.size -= headers;
    message.reply = words > 4 ? word[3] : NULL;
    message.reply_size = words > 4 ? length[3] : 0;
    return message;
}

static size_t jet_handle_reply(Peer *peer, const uint8_t *data, size_t size) {
    size_t at = 0;
    bool pong;
    while (at < size) {
        size_t taken;
        if (data[at] == 'M') {
            Message message = parse_message(data + at, size - at);
            taken = message.taken;
            if (taken == 0) break;
            if (message.size < 10 || memcmp(message.payload, "{\"stream\"", 9) != 0)
                fail(EXIT_DEVIATION, "received the reply to publish number %llu as %s",
                     (unsigned long long)peer->confirmed, shown(message.payload, message.size));
            peer->confirmed += 1;
        } else {
            taken = handle_line(peer, data + at, size - at, &pong);
            if (taken == 0) break;
        }
        at += taken;
    }
    return at;
}

/* $JS.ACK.<stream>.<consumer>.<delivered>.<stream sequence>....: the numbers after dots 4 and 5. */
static uint64_t jet_number(const Message *message, size_t dots) {
    uint64_t value = 0;
    for (size_t i = 0; i < message->reply_size && (dots > 0 || message->reply[i] != '.'); i++) {
        if (message->reply[i] == '.')
            dots -= 1;
        else if (dots == 0)
            value = value * 10 + (uint64_t)(message->reply[i] - '0');
    }
    return value;
}

static void jet_ack(Peer *peer, const char *reply, size_t size) {
    bytes_append(&peer->out, "PUB ", 4);
    bytes_append(&peer->out, reply, size);
    bytes_append(&peer->out, " 4\r\n+ACK\r\n", 10);
    peer->acks += 1;
}

static void jet_queue_acks(Peer *peer, bool last) {
    JetState *state = peer->state;
    if (state->waiting == 0 || (!last && state->waiting < peer->options->ack_every)) return;
    jet_ack(peer, state->reply, state->reply_size);
    peer->acked = peer->verified;
    state->waiting = 0;
}

static void count_redelivery(Peer *peer, uint64_t n) {
    size_t stride = peer->options->class_count;
    peer->duplicates += 1;
    trace_redelivery(peer->options, n % stride, n / stride);
}

static size_t jet_handle_message(Peer *peer, const uint8_t *data, size_t size) {
    JetState *state = peer->state;
    size_t at = 0, taken;
    bool pong;
    for (; at < size; at += taken) {
        if (data[at] != 'M' && data[at] != 'H') {
            taken = handle_line(peer, data + at, size - at, &pong);
            if (taken == 0) break;
            continue;
        }
        Message message = parse_message(data + at, size - at);
        taken = message.taken;
        if (taken == 0) break;
        if (message.reply_size == 0 || message.reply_size > sizeof state->reply)
            fail(EXIT_DEVIATION, "message %llu has no usable reply subject: %s",
                 (unsigned long long)peer->verified, shown(data + at, taken));
        uint64_t n = jet_number(&message, 5) - 1, expected_n = peer->verified;
        size_t i = n % peer->block->count;
        if (n > expected_n || (n == expected_n && all_received(peer)))
            fail(EXIT_DEVIATION, "message number %llu has sequence %llu, expected %llu: a gap",
                 (unsigned long long)expected_n, (unsigned long long)n + 1,
                 (unsigned long long)expected_n + 1);
        if (message.size != piece_size(peer->block, i) ||
            memcmp(message.payload, piece(peer->block, i), message.size) != 0)
            fail(EXIT_DEVIATION, "received message number %llu as %s, expected %s", (unsigned long long)n,
                 shown(message.payload, message.size),
                 shown(piece(peer->block, i), piece_size(peer->block, i)));
        if (n < expected_n)
            count_redelivery(peer, n);
        else
            peer->verified += 1;
        memcpy(state->reply, message.reply, message.reply_size);
        state->reply_size = message.reply_size;
        state->waiting += 1;
        jet_queue_acks(peer, false);
    }
    return at;
}

static void jet_finish(Peer *peer) { (void)peer; }

const Protocol jetstream_protocol = {
    .name = "nats-jetstream",
    .encode = jet_encode,
    .number = jet_number_frame,
    .open = jet_open,
    .handle_reply = jet_handle_reply,
    .handle_message = jet_handle_message,
    .queue_acks = jet_queue_acks,
    .finish = jet_finish,
    .windowed = true,
};
