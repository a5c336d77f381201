/* simplebus on the wire: shared by both versions of its protocol.
 *
 *     type    class      message id   timer index   content   delimiter
 *     1 byte  u16 BE     i32 BE       u16 BE        ...       < CR LF >
 *
 * version1.c and version2.c open a connection and handle the frames that are not messages;
 * simplebus.c verifies and acknowledges messages for both.
 */
#ifndef SIMPLEBUS_H
#define SIMPLEBUS_H

#include "load.h"

enum { HEADER = 9, DELIMITER = 4, NO_CLASS = 255 };

#define IDS (1ull << 31) /* Message ids, and a publisher's numbers, wrap here. */

/* Consecutive messages of one class and one timer index. Empty when first == last. */
typedef struct {
    uint32_t first;
    uint64_t last; /* Half-open; 2^31 when the run ends at the wrap. */
    uint16_t timer;
} Run;

typedef struct {
    unsigned ack_key; /* Key of an ack: the class, or the subscription number. */
    bool started;     /* Whether the first message has determined the first id. */
    uint32_t next_id; /* The id the next new message must have. */
    uint64_t count;   /* New messages verified. */
    uint64_t released; /* ACK_RANDOM: verified messages whose acks were written. */
    size_t frame;     /* Index in the block of the next message. */
    Run run;          /* Messages received since the last range ack. */
} ClassState;

typedef struct {
    unsigned ack_key;
    uint32_t id;
    uint16_t timer;
} Held;

typedef struct {
    uint8_t index_of[1 << 16]; /* Class id to index; NO_CLASS = not subscribed. */
    ClassState classes[CLASSES_MAX];
    uint8_t type;              /* Of the frames that carry messages. */
    size_t (*handle_other)(Peer *peer, const uint8_t *frame, size_t whole); /* A frame of another type. */
    bool is_fed;               /* Version 2: Deliver frames name the class of the messages after them. */
    unsigned fed_class;        /* Class of the last Deliver frame. */
    unsigned attempt;
    size_t granted;            /* Version 2: subscriptions whose reply was received. */
    uint32_t first_number;     /* Version 2: of the publisher's first message. */
    Held *held;                /* ACK_RANDOM: acks that wait for the window to fill. */
    size_t held_count;
    uint64_t shuffle_state;
} State;

State *new_state(const Options *options, char type);
uint16_t read_u16(const uint8_t *at);
uint32_t read_u32(const uint8_t *at);
void write_u32(uint8_t *at, uint32_t value);
void put_header(Bytes *out, char type, unsigned key, uint32_t id, unsigned last);
void put_frame(Bytes *out, char type, unsigned key, uint32_t id, unsigned last,
               const void *content, size_t size);
void put_ack(Peer *peer, unsigned key, unsigned timer, uint64_t first, uint64_t last);
size_t whole_frame(const uint8_t *data, size_t size); /* Size of the first frame; 0 if it is incomplete. */
const uint8_t *next_frame(Peer *peer, size_t *size);  /* Handshakes; valid until the next read. */
_Noreturn void fail_type(const Peer *peer, const uint8_t *frame);

/* Shared by both versions; their state holds the differences. */
void expect_content(Peer *peer, const void *before, size_t size); /* Bytes before each payload. */
size_t handle_message(Peer *peer, const uint8_t *data, size_t size);
void queue_acks(Peer *peer, bool last);
bool holds(const Peer *peer);
uint64_t progress(const Peer *peer, TraceKind kind, size_t index);

#endif
