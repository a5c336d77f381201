/* simplebus, protocol version 2: messages carry the publisher's numbers, and are confirmed.
 *
 * A publisher stays within its credit, and rejects a Confirm of unsent messages. A subscriber rejects
 * a Deliver of an unknown subscription; the messages after it must belong to the class of the
 * Deliver, and be new exactly if its attempt is 1. Every Error ends the measurement.
 */
#include "simplebus.h"

#include <stdlib.h>
#include <string.h>

enum {
    FIRST_SUBSCRIPTION = 101, /* Of the first class; distinct from all class ids. */
    CHANNEL_FIELD = 0x08,     /* Of an Envelope's fields. */
    HEADERS_FIELD = 0x20,
};

static bool is_envelope(const Options *options) { return options->channel || options->header; }

static void put_text(Bytes *out, const char *text, size_t size) {
    uint8_t length[2] = {(uint8_t)(size >> 8), (uint8_t)size};
    bytes_append(out, length, sizeof length);
    bytes_append(out, text, size);
}

/* Fields before the payload of an Envelope; none in a Message. */
static void put_head(Bytes *out, const Options *options) {
    if (!is_envelope(options)) return;
    const char *header = options->header, *value = header ? strchr(header, '=') : NULL;
    uint8_t fields = (options->channel ? CHANNEL_FIELD : 0) | (header ? HEADERS_FIELD : 0);
    bytes_append(out, &fields, 1);
    if (options->channel) put_text(out, options->channel, strlen(options->channel));
    if (!header) return;
    if (!value) fail(EXIT_USAGE, "the header %s is not NAME=VALUE", header);
    size_t size = strlen(header) - 1 + 4; /* Two lengths, without the '='. */
    uint8_t length[2] = {(uint8_t)(size >> 8), (uint8_t)size};
    bytes_append(out, length, sizeof length);
    put_text(out, header, (size_t)(value - header));
    put_text(out, value + 1, strlen(value + 1));
}

/* The block is printable, so no content contains the delimiter, and stuffing is not necessary. */
static void encode(Bytes *out, const Options *options, size_t index, const uint8_t *payload,
                   size_t size) {
    Bytes content = {0};
    put_head(&content, options);
    bytes_append(&content, payload, size);
    put_frame(out, is_envelope(options) ? '5' : '1', options->classes[index], 0, 0, content.data,
              content.end);
    free(content.data);
}

static void number(const Peer *peer, uint8_t *frame, uint64_t n) {
    const State *state = peer->state;
    write_u32(frame + 3, (uint32_t)((state->first_number + n) & (IDS - 1)));
}

static _Noreturn void fail_error(const uint8_t *frame, size_t whole) {
    fail(EXIT_DEVIATION, "the broker sent an Error: %s",
         shown(frame + HEADER, whole - HEADER - DELIMITER));
}

/* ---- received data ---- */

/* A Confirm is cumulative: everything below this number is stored. */
static void handle_confirm(Peer *peer, const uint8_t *frame) {
    const State *state = peer->state;
    uint64_t more = (read_u32(frame + 3) - state->first_number - peer->confirmed) & (IDS - 1);
    if (more > peer->sent - peer->confirmed)
        fail(EXIT_DEVIATION, "%llu messages sent, %llu confirmed; received a Confirm of number %u",
             (unsigned long long)peer->sent, (unsigned long long)peer->confirmed,
             read_u32(frame + 3));
    peer->confirmed += more;
}

static size_t handle_reply(Peer *peer, const uint8_t *data, size_t size) {
    size_t whole, at = 0;
    while ((whole = whole_frame(data + at, size - at)) > 0) {
        const uint8_t *frame = data + at;
        if (frame[0] == 'E') fail_error(frame, whole);
        if (frame[0] == '6') handle_confirm(peer, frame);
        else if (frame[0] != '0')
            fail(EXIT_DEVIATION, "the publisher received %s, expected Confirms", shown(frame, whole));
        at += whole;
    }
    return at;
}

static void handle_deliver(Peer *peer, const uint8_t *frame, size_t whole) {
    State *state = peer->state;
    unsigned class_id = read_u16(frame + 1), subscription = read_u16(frame + 7);
    size_t index = state->index_of[class_id];
    if (index == NO_CLASS || state->classes[index].ack_key != subscription ||
        whole != HEADER + DELIMITER)
        fail(EXIT_DEVIATION, "received a Deliver of class %u for subscription %u after %llu messages", class_id,
             subscription, (unsigned long long)peer->verified);
    state->fed_class = class_id;
    state->attempt = read_u32(frame + 3);
}

static size_t handle_other(Peer *peer, const uint8_t *frame, size_t whole) {
    State *state = peer->state;
    if (frame[0] == '7') handle_deliver(peer, frame, whole);
    else if (frame[0] == '2') state->granted += 1;
    else if (frame[0] == 'E') fail_error(frame, whole);
    else if (frame[0] != '0') fail_type(peer, frame);
    return whole;
}

/* ---- opening ---- */

/* The integer after `"key":` in a reply. */
static uint64_t reply_number(const uint8_t *reply, size_t size, const char *key) {
    const uint8_t *found = memmem(reply, size, key, strlen(key));
    if (!found) fail(EXIT_DEVIATION, "the reply has no %s: %s", key, shown(reply, size));
    uint64_t value = 0;
    for (found += strlen(key); found < reply + size && *found >= '0' && *found <= '9'; found++)
        value = value * 10 + (uint64_t)(*found - '0');
    return value;
}

static void send_connect(Peer *peer, const Options *options, Role role) {
    Bytes object = {0};
    bytes_format(&object, "{\"version\":2,\"client\":\"load\",");
    if (options->name && role == PUBLISHER) bytes_format(&object, "\"name\":\"%s\",", options->name);
    bytes_format(&object, "\"classes\":");
    for (size_t i = 0; i < options->class_count; i++)
        bytes_format(&object, "%s%u", i ? "," : "[", options->classes[i]);
    bytes_append(&object, "]}", 2);
    put_frame(&peer->out, '4', 0, 1, 0, object.data, object.end);
    send_all(peer);
    free(object.data);
    size_t size;
    const uint8_t *reply = next_frame(peer, &size);
    if (reply[0] != '4' || read_u32(reply + 3) != 1)
        fail(EXIT_DEVIATION, "received the reply to Connect as %s, expected type 4 and its request number",
             shown(reply, size));
    State *state = peer->state;
    state->first_number = (uint32_t)reply_number(reply, size, "\"next\":");
    peer->credit_bytes = reply_number(reply, size, "\"credit\":");
}

static void subscribe(Peer *peer, size_t index) {
    const Options *options = peer->options;
    State *state = peer->state;
    unsigned subscription = FIRST_SUBSCRIPTION + (unsigned)index;
    Bytes object = {0};
    if (options->binding) bytes_format(&object, "{\"channels\":[\"%s\"]}", options->binding);
    else bytes_append(&object, "{}", 2);
    put_frame(&peer->out, '2', options->classes[index], 2 + (uint32_t)index, subscription,
              object.data, object.end);
    state->classes[index].ack_key = subscription;
    free(object.data);
}

static void open_peer(Peer *peer, Role role) {
    const Options *options = peer->options;
    State *state = peer->state = new_state(options, is_envelope(options) ? '5' : '1');
    state->handle_other = handle_other;
    send_connect(peer, options, role);
    if (role == PUBLISHER) return;
    state->is_fed = true;
    state->fed_class = UINT32_MAX; /* No class: a message before the first Deliver belongs to no subscription. */
    Bytes before = {0};
    put_head(&before, options);
    expect_content(peer, before.data, before.end);
    free(before.data);
    for (size_t i = 0; i < options->class_count; i++) subscribe(peer, i);
    send_all(peer);
    while (state->granted < options->class_count) { /* Messages may arrive between the replies. */
        Bytes *in = &peer->in;
        in->start += handle_message(peer, in->data + in->start, in->end - in->start);
        if (state->granted < options->class_count && receive_some(peer, true) == 0)
            fail(EXIT_CONNECTION, "the broker closed the connection during the handshake");
    }
}

static void finish(Peer *peer) { (void)peer; } /* The last Confirm arrives without a request. */

const Protocol version2_protocol = {
    .name = "simplebus-2",
    .encode = encode,
    .open = open_peer,
    .number = number,
    .handle_reply = handle_reply,
    .handle_message = handle_message,
    .queue_acks = queue_acks,
    .holds = holds,
    .progress = progress,
    .finish = finish,
};
