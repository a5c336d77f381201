/* Shared by all files of the load generator: options, block, connection, protocol.
 *
 * Each wire format has its own file and implements `Protocol`. flow.c alone decides what is measured,
 * for every protocol.
 */
#ifndef LOAD_H
#define LOAD_H

#define _GNU_SOURCE /* For memmem. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    BLOCK_FRAMES_MAX = 4096,    /* Different frames, after which the block is repeated. */
    BLOCK_BYTES_MAX = 1 << 18,  /* Payload bytes of a block: it should stay in the cache. */
    BLOCK_FRAMES_MIN = 64,
    CLASSES_MAX = 16,
    READ_BYTES = 1 << 18,       /* Size of one read. */
    WRITE_BYTES = 1 << 18,      /* Maximum size of one write. */
    PACE_MS = 1,                /* Interval at which a paced publisher checks for due messages. */
    HELD_FLUSH_MS = 100,        /* Silence after which acks held for shuffling are sent. */
};

enum { EXIT_DEVIATION = 1, EXIT_USAGE = 2, EXIT_TIMEOUT = 3, EXIT_CONNECTION = 4 };

typedef enum { ACK_RANGES, ACK_SINGLE, ACK_RANDOM, ACK_NONE } AckMode;
typedef enum { PUBLISHER, SUBSCRIBER } Role;
typedef enum { SENT, CONFIRMED, DELIVERED, ACKED, REDELIVERED } TraceKind;

typedef struct {
    const char *host;
    int port;
    uint64_t count;        /* Messages in the whole run, over all classes. */
    size_t size_bytes;     /* Payload size; ignored when `mixed`. */
    bool mixed;            /* Payloads of 1 to 300 bytes. */
    bool angle;            /* One '<' in every payload. */
    uint64_t seed;
    unsigned classes[CLASSES_MAX];
    size_t class_count;
    unsigned subjects;     /* NATS: number of random subjects; 0 = the subject of the class. */
    unsigned echo_class;   /* Class of this subscriber alone, to detect its subscription; 0 = none. */
    AckMode acks;
    size_t shuffle;        /* Window of ACK_RANDOM, in messages. */
    uint64_t ack_every;    /* JetStream: messages per ack. */
    uint64_t pace;         /* Publisher: messages per second at an even pace; 0 = no limit. */
    uint64_t window;       /* JetStream: limit of unconfirmed messages of a publisher. */
    const char *deliver;   /* JetStream: the push consumer's deliver subject. */
    const char *channel;   /* simplebus-2: messages are Envelopes with this channel; NULL = plain. */
    const char *header;    /* simplebus-2, nats: each has this header, NAME=VALUE; NULL = none. */
    const char *name;      /* simplebus-2, JetStream: publisher name, for deduplication; NULL = none. */
    const char *binding;   /* simplebus-2: the subscriber's pattern of channels; NULL = all. */
    const char *trace;     /* File for the trace; NULL = no trace. */
    size_t trace_records;  /* Maximum number of its records. */
    double timeout_s;
} Options;

/* A growing array of bytes with a read position. Invariant: start <= end <= capacity. */
typedef struct {
    uint8_t *data;
    size_t start, end, capacity;
} Bytes;

/* Pieces back to back: piece i is bytes.data[offset[i] .. offset[i + 1]]. */
typedef struct {
    Bytes bytes;
    size_t count;
    size_t offset[BLOCK_FRAMES_MAX + 1];
} Pieces;

typedef struct Protocol Protocol;

/* Connection and its counters. */
typedef struct {
    const Options *options;
    const Protocol *protocol;
    const Pieces *block;   /* The payloads. */
    Pieces expected;       /* Expected bytes of a subscriber, made by the protocol from the block. */
    int socket;
    Bytes in, out;
    uint64_t verified;     /* Messages received once, in order, byte for byte as published. */
    uint64_t duplicates;   /* Redelivered messages. */
    uint64_t begun;        /* Publisher: start time in nanoseconds. */
    uint64_t numbered;     /* Publisher: messages marked with a number. */
    uint64_t sent;         /* Publisher: messages that the socket has accepted completely. */
    uint64_t confirmed;    /* Publisher: messages that the broker has confirmed. */
    uint64_t credit_bytes; /* Publisher: limit of unconfirmed bytes; 0 = none. */
    uint64_t acks;         /* Ack frames or commands written. */
    uint64_t acked;        /* Messages in these acks, if `progress` is NULL. */
    void *state;           /* State of the protocol. */
} Peer;

/* True if all messages are verified. Further new messages are errors. */
static inline bool all_received(const Peer *peer) { return peer->verified >= peer->options->count; }

/* A wire format. `handle_*` consume complete units from the front of the data and return the bytes. */
struct Protocol {
    const char *name;
    void (*encode)(Bytes *out, const Options *options, size_t index, const uint8_t *payload,
                   size_t size);
    void (*open)(Peer *peer, Role role);
    void (*number)(const Peer *peer, uint8_t *frame, uint64_t n); /* Marks message n; NULL = no. */
    size_t (*handle_reply)(Peer *peer, const uint8_t *data, size_t size);
    size_t (*handle_message)(Peer *peer, const uint8_t *data, size_t size);
    void (*queue_acks)(Peer *peer, bool last);  /* Queues the acks that are due; all of them if `last`. */
    bool (*holds)(const Peer *peer);        /* Whether acks wait for more messages; NULL = never. */
    void (*finish)(Peer *peer);           /* Publisher, all sent: ask for the last confirmation. */
    uint64_t (*progress)(const Peer *peer, TraceKind kind, size_t index); /* Messages of a class
                                               DELIVERED or ACKED; NULL = they arrive in flow order. */
    bool windowed;                          /* The publisher has the limit options->window. */
    bool eof_confirms;                      /* The broker's orderly close confirms a publisher. */
};

extern const Protocol simplebus_protocol, version2_protocol, nats_protocol, jetstream_protocol;
extern const Protocol redis_protocol, redis_stream_protocol, raw_protocol;

/* block.c */
uint64_t next_random(uint64_t *state);
void block_build(Pieces *block, const Options *options);
void pieces_start(Pieces *pieces);
void pieces_close(Pieces *pieces); /* Ends the piece whose bytes were appended last. */
static inline const uint8_t *piece(const Pieces *p, size_t i) { return p->bytes.data + p->offset[i]; }
static inline size_t piece_size(const Pieces *p, size_t i) { return p->offset[i + 1] - p->offset[i]; }

/* net.c */
_Noreturn void fail(int status, const char *format, ...) __attribute__((format(printf, 2, 3)));
uint64_t clock_ns(void);
double clock_s(void);
const char *shown(const uint8_t *data, size_t size); /* Bytes as printable text, for error messages. */
void deadline_start(double seconds);
int deadline_ms(int at_most); /* Remaining time for poll(); fails if none is left. -1 = no cap. */
void *allocate(size_t bytes);
void bytes_reserve(Bytes *bytes, size_t more);
void bytes_append(Bytes *bytes, const void *data, size_t size);
void bytes_format(Bytes *bytes, const char *format, ...) __attribute__((format(printf, 2, 3)));
int connect_to(const Options *options);
ptrdiff_t receive_some(Peer *peer, bool block); /* Bytes read; 0 = end of stream, -1 = none now. */
bool send_some(Peer *peer);                   /* Without blocking; whether the out-buffer is empty. */
void send_all(Peer *peer);                    /* Blocking; for handshakes and single messages. */
void wait_until_ready(Peer *peer, bool to_write, int at_most_ms);
bool read_line(Peer *peer, Bytes *line);      /* Handshakes: one CR LF line, without its end. */

/* flow.c */
void run_block(const Options *options);
void run_publish(const Options *options, const Protocol *protocol);
void run_subscribe(const Options *options, const Protocol *protocol);
void run_latency(const Options *options, const Protocol *protocol);
void run_confirm(const Options *options, const Protocol *protocol);

/* trace.c: has no effect without the option `trace`. `upto`: all messages below this number. */
void trace_start(const Options *options);
void trace_flow(const Options *options, TraceKind kind, uint64_t at, uint64_t upto);
void trace_class(const Options *options, TraceKind kind, uint64_t at, size_t index, uint64_t upto);
void trace_progress(const Peer *peer, TraceKind kind, uint64_t at); /* DELIVERED or ACKED. */
void trace_redelivery(const Options *options, size_t index, uint64_t n); /* Message n of the class. */
void trace_end(const Options *options);

/* expect.c: for protocols whose messages have no message number. */
size_t take_expected(Peer *peer, const uint8_t *data, size_t size, bool *deviates);
_Noreturn void fail_expected(const Peer *peer, const uint8_t *data, size_t size);
size_t handle_expected(Peer *peer, const uint8_t *data, size_t size);

/* version1.c */
void run_probe(const Options *options);

#endif
