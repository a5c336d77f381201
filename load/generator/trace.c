/* The trace: times at which messages were sent, confirmed, delivered and acknowledged.
 *
 *     "sbtrace1"   records   | at        first     last      class   kind   padding |  ...
 *     8 bytes      u64       | u64 ns    u64       u64       u16     u8     5 bytes |  all LE
 *
 * Each call (a write, a read, an ack) gives one record, so that its cost is small compared with that
 * of the call. `first` and `last` are numbers of messages within a class, half-open. The memory is
 * allocated before the clock starts, and the file is written after it has stopped. A full trace ends
 * the run with an error, because a missing end would look like lost messages. A message counts as
 * sent when the write of its last byte begins, and as delivered when all data of the same read is
 * verified, so that latencies are never too short.
 */
#include "load.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

typedef struct {
    uint64_t at, first, last;
    uint16_t class_id;
    uint8_t kind, padding[5];
} Record;

_Static_assert(sizeof(Record) == 32, "the file's layout");

static Record *records; /* NULL without a trace. */
static size_t used, capacity;
static bool is_redelivery_open; /* True if the last record may be extended by a duplicate after it. */
static uint64_t recorded[REDELIVERED + 1][CLASSES_MAX]; /* By kind and class: messages below are recorded. */

void trace_start(const Options *options) {
    if (!options->trace) return;
    capacity = options->trace_records;
    records = allocate(capacity * sizeof *records);
    memset(records, 1, capacity * sizeof *records); /* The kernel allocates the pages now. */
}

static void add(TraceKind kind, unsigned class_id, uint64_t at, uint64_t first, uint64_t last) {
    if (used == capacity)
        fail(EXIT_USAGE, "the trace is full after %zu records; increase --trace-records", capacity);
    records[used++] = (Record){at, first, last, (uint16_t)class_id, (uint8_t)kind, {0}};
    is_redelivery_open = false;
}

void trace_class(const Options *options, TraceKind kind, uint64_t at, size_t index, uint64_t upto) {
    uint64_t *from = &recorded[kind][index];
    if (!records || *from == upto) return;
    add(kind, options->classes[index], at, *from, upto);
    *from = upto;
}

void trace_flow(const Options *options, TraceKind kind, uint64_t at, uint64_t upto) {
    if (!records) return;
    size_t stride = options->class_count; /* Message n of the flow is of class n % stride. */
    for (size_t index = 0; index < stride; index++)
        trace_class(options, kind, at, index, (upto + stride - 1 - index) / stride);
}

void trace_redelivery(const Options *options, size_t index, uint64_t n) {
    if (!records) return;
    Record *record = used > 0 ? &records[used - 1] : NULL;
    if (is_redelivery_open && record->class_id == options->classes[index] && record->last == n) {
        record->last += 1;
        return;
    }
    add(REDELIVERED, options->classes[index], clock_ns(), n, n + 1);
    is_redelivery_open = true;
}

void trace_progress(const Peer *peer, TraceKind kind, uint64_t at) {
    if (!records) return;
    is_redelivery_open = false;
    const Protocol *protocol = peer->protocol;
    if (!protocol->progress) {
        trace_flow(peer->options, kind, at, kind == ACKED ? peer->acked : peer->verified);
        return;
    }
    for (size_t index = 0; index < peer->options->class_count; index++)
        trace_class(peer->options, kind, at, index, protocol->progress(peer, kind, index));
}

void trace_end(const Options *options) {
    if (!records) return;
    FILE *file = fopen(options->trace, "wb");
    uint64_t count = used;
    if (!file || fwrite("sbtrace1", 8, 1, file) != 1 || fwrite(&count, sizeof count, 1, file) != 1 ||
        fwrite(records, sizeof *records, used, file) != used || fclose(file) != 0)
        fail(EXIT_USAGE, "cannot write the trace to %s: %s", options->trace, strerror(errno));
}
