/* The measurements: publish, subscribe, latency. The code is the same for every protocol.
 *
 * A rate counts verified messages only. A subscriber must receive every message once and in order,
 * except marked redeliveries; otherwise it ends with an error and without figures. The publisher's
 * bytes are generated before the clock starts, so that only its send calls take time. A process that
 * waits to write also reads, and acks wait in a buffer, so that no deadlock is possible.
 */
#include "load.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

static void peer_start(Peer *peer, const Options *options, const Protocol *protocol,
                       const Pieces *block) {
    *peer = (Peer){.options = options, .protocol = protocol, .block = block};
    peer->socket = connect_to(options);
}

static void encode_block(Pieces *wire, const Peer *peer) {
    const Options *options = peer->options;
    pieces_start(wire);
    for (size_t i = 0; i < peer->block->count; i++) {
        peer->protocol->encode(&wire->bytes, options, i % options->class_count,
                               piece(peer->block, i), piece_size(peer->block, i));
        pieces_close(wire);
    }
}

static void handle_input(Peer *peer, size_t (*listener)(Peer *, const uint8_t *, size_t)) {
    Bytes *in = &peer->in;
    in->start += listener(peer, in->data + in->start, in->end - in->start);
}

/* Prints the payloads, for a client in another language that publishes or verifies them. */
void run_block(const Options *options) {
    static Pieces block;
    block_build(&block, options);
    if (fwrite(block.bytes.data, 1, block.bytes.end, stdout) != block.bytes.end || fflush(stdout))
        fail(EXIT_CONNECTION, "cannot write the block to standard output");
}

/* ---- publish ---- */

/* The stream position, in bytes, at which message n of an endlessly repeated block begins. */
static uint64_t position(const Pieces *wire, uint64_t n) {
    return n / wire->count * wire->bytes.end + wire->offset[n % wire->count];
}

/* Number of complete messages before this stream position. */
static uint64_t whole_before(const Pieces *wire, uint64_t at) {
    uint64_t period = wire->bytes.end, within = at % period;
    size_t low = 0, high = wire->count; /* offset[low] <= within < offset[high], or high at the end. */
    while (high - low > 1) {
        size_t middle = (low + high) / 2;
        if (wire->offset[middle] <= within) low = middle;
        else high = middle;
    }
    return at / period * wire->count + low;
}

/* The first frame boundary at or after this stream position, where a reply may be inserted. */
static uint64_t boundary(const Pieces *wire, uint64_t at) {
    uint64_t whole = whole_before(wire, at);
    return position(wire, whole) < at ? position(wire, whole + 1) : at;
}

/* Number of messages that may be sent before more of them are confirmed, or due. */
static uint64_t allowed(const Peer *peer, const Pieces *wire) {
    const Options *options = peer->options;
    uint64_t most = options->count, confirmed = peer->confirmed;
    if (peer->protocol->windowed && most > confirmed + options->window)
        most = confirmed + options->window;
    if (peer->credit_bytes > 0) {
        uint64_t within = whole_before(wire, position(wire, confirmed) + peer->credit_bytes);
        if (within == confirmed) within += 1; /* One message may always be in flight. */
        if (most > within) most = within;
    }
    if (options->pace > 0) {
        double due = (double)(clock_ns() - peer->begun) * 1e-9 * (double)options->pace;
        if (most > (uint64_t)due) most = (uint64_t)due;
    }
    return most;
}

/* Writes the numbers of the next messages, up to the free space of the wire buffer. */
static uint64_t number_ahead(Peer *peer, Pieces *wire, uint64_t sent, uint64_t most) {
    uint64_t room = whole_before(wire, sent) + wire->count;
    if (most > room) most = room;
    for (; peer->numbered < most; peer->numbered++) {
        uint8_t *frame = wire->bytes.data + wire->offset[peer->numbered % wire->count];
        peer->protocol->number(peer, frame, peer->numbered);
    }
    return most;
}

/* Writes the stream from `at` up to `end`; returns the bytes that the socket accepted, 0 if none. */
static uint64_t send_stream(const Peer *peer, const Pieces *wire, uint64_t at, uint64_t end) {
    struct iovec parts[16];
    struct msghdr message = {.msg_iov = parts};
    size_t period = wire->bytes.end, offered = 0;
    while (at + offered < end && offered < WRITE_BYTES && message.msg_iovlen < 16) {
        size_t from = (at + offered) % period, size = period - from;
        if (size > end - at - offered) size = end - at - offered;
        parts[message.msg_iovlen++] = (struct iovec){wire->bytes.data + from, size};
        offered += size;
    }
    for (;;) {
        ssize_t sent = sendmsg(peer->socket, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (sent >= 0) return (uint64_t)sent;
        if (errno == EAGAIN || errno == EWOULDBLOCK) return 0;
        if (errno != EINTR)
            fail(EXIT_CONNECTION, "the broker closed the publisher's connection: %s",
                 strerror(errno));
    }
}

static void note_confirmed(const Peer *peer) {
    trace_flow(peer->options, CONFIRMED, clock_ns(), peer->confirmed);
}

static void handle_replies(Peer *peer, bool all_sent) {
    ptrdiff_t got;
    while ((got = receive_some(peer, false)) > 0) handle_input(peer, peer->protocol->handle_reply);
    if (got < 0) return note_confirmed(peer);
    if (!all_sent || !peer->protocol->eof_confirms)
        fail(EXIT_CONNECTION, "the broker closed the publisher's connection, %llu confirmed",
             (unsigned long long)peer->confirmed);
    peer->confirmed = peer->options->count;
    note_confirmed(peer);
}

/* One write and one read, or a wait if neither transferred bytes. A reply that is due (PONG) is
 * written between two frames: until then, the stream ends at the next frame boundary. */
static uint64_t publish_once(Peer *peer, Pieces *wire, uint64_t sent) {
    uint64_t most = allowed(peer, wire), confirmed = peer->confirmed;
    if (peer->protocol->number) most = number_ahead(peer, wire, sent, most);
    size_t answers = peer->out.end - peer->out.start;
    uint64_t end = answers > 0 ? boundary(wire, sent) : position(wire, most);
    uint64_t begun = clock_ns();
    uint64_t took = sent < end ? send_stream(peer, wire, sent, end) : 0;
    peer->sent = whole_before(wire, sent + took);
    trace_flow(peer->options, SENT, begun, peer->sent);
    if (sent + took == end) send_some(peer);
    handle_replies(peer, false);
    size_t answers_left = peer->out.end - peer->out.start;
    if (took == 0 && peer->confirmed == confirmed && answers_left == answers)
        wait_until_ready(peer, sent < end || answers > 0, peer->options->pace > 0 ? PACE_MS : -1);
    return took;
}

void run_publish(const Options *options, const Protocol *protocol) {
    static Pieces block, wire;
    static Peer peer;
    block_build(&block, options);
    peer_start(&peer, options, protocol, &block);
    encode_block(&wire, &peer);
    protocol->open(&peer, PUBLISHER);

    uint64_t sent = 0, total = position(&wire, options->count);
    double started = clock_s();
    peer.begun = clock_ns();
    while (sent < total) sent += publish_once(&peer, &wire, sent);
    double last_sent = clock_s();
    protocol->finish(&peer);
    while (peer.confirmed < options->count) {
        send_some(&peer);
        wait_until_ready(&peer, peer.out.start < peer.out.end, -1);
        handle_replies(&peer, true);
    }
    printf("{\"mode\": \"publish\", \"protocol\": \"%s\", \"messages\": %llu, \"bytes\": %llu, "
           "\"started\": %.6f, \"sent\": %.6f, \"confirmed\": %.6f}\n",
           protocol->name, (unsigned long long)options->count, (unsigned long long)total, started,
           last_sent, clock_s());
}

/* ---- subscribe ---- */

typedef struct {
    double first, last, settled; /* First byte, last message verified, last ack accepted. */
    uint64_t reads, bytes;
} Timeline;

/* Counts acks when the socket has accepted them. Returns true if it has. */
static bool send_acks(Peer *peer) {
    bool has_acks = peer->out.end > peer->out.start, sent = send_some(peer);
    if (has_acks && sent) trace_progress(peer, ACKED, clock_ns());
    return sent;
}

/* One read, verified. Reading continues while acks wait to be written, so that it cannot deadlock. */
static void subscribe_once(Peer *peer, Timeline *timeline) {
    const Protocol *protocol = peer->protocol;
    bool unsent = !send_acks(peer), held = protocol->holds && protocol->holds(peer);
    ptrdiff_t got = receive_some(peer, !unsent && !held);
    if (got < 0) {
        wait_until_ready(peer, unsent, held ? HELD_FLUSH_MS : -1);
        got = receive_some(peer, false);
        if (got < 0 && held && !unsent) protocol->queue_acks(peer, true);
        if (got < 0) return;
    }
    if (got == 0)
        fail(EXIT_CONNECTION, "the broker closed the connection: %llu of %llu messages verified",
             (unsigned long long)peer->verified, (unsigned long long)peer->options->count);
    if (timeline->reads++ == 0) timeline->first = clock_s();
    timeline->bytes += (uint64_t)got;
    uint64_t before = peer->verified;
    handle_input(peer, protocol->handle_message);
    uint64_t now = clock_ns();
    if (peer->verified > before) timeline->last = (double)now * 1e-9;
    trace_progress(peer, DELIVERED, now);
    protocol->queue_acks(peer, false);
}

/* Sends the last acks and closes the connection; data that still arrives is verified, too. */
static void subscribe_end(Peer *peer) {
    peer->protocol->queue_acks(peer, true);
    while (!send_acks(peer)) {
        wait_until_ready(peer, true, -1);
        if (receive_some(peer, false) > 0) handle_input(peer, peer->protocol->handle_message);
    }
    shutdown(peer->socket, SHUT_WR);
    while (receive_some(peer, true) > 0) handle_input(peer, peer->protocol->handle_message);
    close(peer->socket);
}

static void print_subscribed(const Peer *peer, const Timeline *timeline) {
    double seconds = timeline->last - timeline->first;
    printf("{\"mode\": \"subscribe\", \"protocol\": \"%s\", \"messages\": %llu, "
           "\"duplicates\": %llu, \"acks\": %llu, \"reads\": %llu, \"bytes\": %llu, "
           "\"seconds\": %.6f, \"first\": %.6f, \"last\": %.6f, \"settled\": %.6f}\n",
           peer->protocol->name, (unsigned long long)peer->verified,
           (unsigned long long)peer->duplicates, (unsigned long long)peer->acks,
           (unsigned long long)timeline->reads, (unsigned long long)timeline->bytes, seconds,
           timeline->first, timeline->last, timeline->settled);
}

static void report_ready(void) {
    printf("ready\n");
    fflush(stdout);
}

void run_subscribe(const Options *options, const Protocol *protocol) {
    static Pieces block;
    static Peer peer;
    static Timeline timeline;
    block_build(&block, options);
    peer_start(&peer, options, protocol, &block);
    protocol->open(&peer, SUBSCRIBER);
    report_ready();
    timeline.first = clock_s();
    handle_input(&peer, protocol->handle_message); /* Data that arrived with the handshake. */
    trace_progress(&peer, DELIVERED, clock_ns());
    while (!all_received(&peer)) subscribe_once(&peer, &timeline);
    subscribe_end(&peer);
    uint64_t settled = clock_ns(); /* The broker closed after it had read all acks. */
    timeline.settled = (double)settled * 1e-9;
    if (peer.acks > 0) trace_flow(options, CONFIRMED, settled, options->count);
    print_subscribed(&peer, &timeline);
}

/* ---- latency ---- */

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

void run_latency(const Options *options, const Protocol *protocol) {
    static Pieces block, wire;
    static Peer publisher, subscriber;
    block_build(&block, options);
    peer_start(&subscriber, options, protocol, &block);
    peer_start(&publisher, options, protocol, &block);
    encode_block(&wire, &publisher);
    protocol->open(&subscriber, SUBSCRIBER);
    protocol->open(&publisher, PUBLISHER);
    report_ready();

    double *trips = allocate(options->count * sizeof *trips);
    for (uint64_t n = 0; n < options->count; n++) {
        uint64_t begun = clock_ns();
        if (protocol->number) number_ahead(&publisher, &wire, position(&wire, n), n + 1);
        bytes_append(&publisher.out, piece(&wire, n % wire.count), piece_size(&wire, n % wire.count));
        publisher.sent = n + 1;
        send_all(&publisher);
        while (subscriber.verified == n) {
            if (receive_some(&subscriber, true) == 0)
                fail(EXIT_CONNECTION, "the broker closed the connection at message %llu",
                     (unsigned long long)n);
            handle_input(&subscriber, protocol->handle_message);
        }
        uint64_t now = clock_ns();
        trips[n] = (double)(now - begun) * 1e-9;
        trace_flow(options, SENT, begun, n + 1);
        trace_progress(&subscriber, DELIVERED, now);
        protocol->queue_acks(&subscriber, n + 1 == options->count);
        while (!send_acks(&subscriber)) /* The ack is written before the next message. */
            wait_until_ready(&subscriber, true, -1);
        handle_replies(&publisher, false);
        send_all(&publisher);
    }
    subscribe_end(&subscriber);
    close(publisher.socket);
    qsort(trips, options->count, sizeof *trips, by_value);
    printf("{\"mode\": \"latency\", \"protocol\": \"%s\", \"messages\": %llu, \"duplicates\": %llu, "
           "\"p50_us\": %.2f, \"p99_us\": %.2f, \"max_us\": %.2f}\n",
           protocol->name, (unsigned long long)options->count,
           (unsigned long long)subscriber.duplicates, trips[options->count / 2] * 1e6,
           trips[options->count * 99 / 100] * 1e6, trips[options->count - 1] * 1e6);
    free(trips);
}

/* ---- confirm ---- */

/* Time from sending to confirm, one message at a time, without subscribers. */
void run_confirm(const Options *options, const Protocol *protocol) {
    static Pieces block, wire;
    static Peer publisher;
    block_build(&block, options);
    peer_start(&publisher, options, protocol, &block);
    encode_block(&wire, &publisher);
    protocol->open(&publisher, PUBLISHER);
    double *waits = allocate(options->count * sizeof *waits);
    for (uint64_t n = 0; n < options->count; n++) {
        uint64_t begun = clock_ns();
        if (protocol->number) number_ahead(&publisher, &wire, position(&wire, n), n + 1);
        bytes_append(&publisher.out, piece(&wire, n % wire.count), piece_size(&wire, n % wire.count));
        publisher.sent = n + 1;
        send_all(&publisher);
        while (publisher.confirmed == n) {
            if (receive_some(&publisher, true) == 0)
                fail(EXIT_CONNECTION, "the broker closed the connection, %llu confirmed",
                     (unsigned long long)n);
            handle_input(&publisher, protocol->handle_reply);
        }
        waits[n] = (double)(clock_ns() - begun) * 1e-9;
    }
    close(publisher.socket);
    qsort(waits, options->count, sizeof *waits, by_value);
    printf("{\"mode\": \"confirm\", \"protocol\": \"%s\", \"messages\": %llu, "
           "\"p50_us\": %.2f, \"p99_us\": %.2f, \"max_us\": %.2f}\n",
           protocol->name, (unsigned long long)options->count, waits[options->count / 2] * 1e6,
           waits[options->count * 99 / 100] * 1e6, waits[options->count - 1] * 1e6);
    free(waits);
}
