/* The load generator: one process that publishes, subscribes or measures round trips.
 *
 *     generator MODE PROTOCOL --port N --count N [options]
 *
 * The subscriber compares every whole message with the next expected one. At the first difference it
 * ends with an error that names the message, its content and the expected content. The generator is
 * written in C so that it is faster than the measured broker. It prints `ready` when it is
 * subscribed, and one JSON line at the end.
 *
 * Exit status: 1 unexpected message, 2 invalid arguments, 3 timeout, 4 lost connection.
 */
#include "load.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char usage[] =
    "usage: generator MODE PROTOCOL --port N --count N [options]\n"
    "  MODE      publish | subscribe | latency | confirm | block (the payloads, to stdout)\n"
    "            | probe (simplebus: checks that no message is in flight)\n"
    "  PROTOCOL  simplebus | simplebus-2 | nats | nats-jetstream | redis | redis-stream | raw\n"
    "  --host A        127.0.0.1\n"
    "  --size N        payload bytes (16)\n"
    "  --mixed         payloads of 1 to 300 bytes instead\n"
    "  --angle         one '<' in every payload\n"
    "  --seed N        seed of the payloads; the same for publisher and subscriber (1)\n"
    "  --classes A,B   classes, which messages use in turn (1)\n"
    "  --subjects N    nats: number of random subjects; the subscriber subscribes to `>`\n"
    "  --echo-class N  simplebus: an unused class, to detect that the subscription is active\n"
    "  --channel NAME  simplebus-2: messages are Envelopes with this channel\n"
    "  --header N=V    simplebus-2, nats: messages have this header\n"
    "  --name NAME     simplebus-2: publisher name; JetStream: prefix of message ids\n"
    "  --binding P     simplebus-2: pattern of the subscribed channels (all)\n"
    "  --acks MODE     simplebus: ranges | single | random | none\n"
    "  --shuffle N     messages whose acks are shuffled together (4096)\n"
    "  --ack-every N   JetStream: number of messages per ack (1)\n"
    "  --pace N        messages a second; 0 = no limit (0)\n"
    "  --window N      JetStream: maximum number of unconfirmed messages (4096)\n"
    "  --deliver S     JetStream: the consumer's deliver subject (load.deliver)\n"
    "  --trace FILE    record the times of sent, delivered and acked messages (trace.c)\n"
    "  --trace-records N  maximum number of records (1048576)\n"
    "  --timeout S     timeout of the run, in seconds (60)\n";

static _Noreturn void misuse(const char *what, const char *value) {
    fprintf(stderr, "generator: %s %s\n%s", what, value, usage);
    exit(EXIT_USAGE);
}

static uint64_t number(const char *name, const char *text, uint64_t least, uint64_t most) {
    char *end;
    unsigned long long value = strtoull(text, &end, 10);
    if (*text < '0' || *text > '9' || *end || value < least || value > most) misuse(name, text);
    return value;
}

static void parse_classes(Options *options, const char *text) {
    options->class_count = 0;
    for (char *end; ; text = end + 1) {
        unsigned long value = strtoul(text, &end, 10);
        if (end == text || value > 65535 || options->class_count == CLASSES_MAX)
            misuse("--classes", text);
        options->classes[options->class_count++] = (unsigned)value;
        if (*end == 0) return;
        if (*end != ',') misuse("--classes", text);
    }
}

static AckMode parse_acks(const char *text) {
    static const char *names[] = {"ranges", "single", "random", "none"};
    for (int i = 0; i < 4; i++)
        if (strcmp(text, names[i]) == 0) return (AckMode)i;
    misuse("--acks", text);
}

static bool parse_flag(Options *options, const char *name) {
    if (strcmp(name, "--mixed") == 0) return options->mixed = true;
    if (strcmp(name, "--angle") == 0) return options->angle = true;
    return false;
}

static void parse_option(Options *options, const char *name, const char *value) {
    if (!value) misuse("missing value after", name);
    if (!strcmp(name, "--host")) options->host = value;
    else if (!strcmp(name, "--port")) options->port = (int)number(name, value, 1, 65535);
    else if (!strcmp(name, "--count")) options->count = number(name, value, 1, 1ull << 40);
    else if (!strcmp(name, "--size")) options->size_bytes = number(name, value, 0, 1 << 20);
    else if (!strcmp(name, "--seed")) options->seed = number(name, value, 0, UINT64_MAX - 1);
    else if (!strcmp(name, "--classes")) parse_classes(options, value);
    else if (!strcmp(name, "--subjects")) options->subjects = (unsigned)number(name, value, 1, 1 << 20);
    else if (!strcmp(name, "--echo-class")) options->echo_class = (unsigned)number(name, value, 1, 65535);
    else if (!strcmp(name, "--acks")) options->acks = parse_acks(value);
    else if (!strcmp(name, "--shuffle")) options->shuffle = number(name, value, 1, 1 << 20);
    else if (!strcmp(name, "--ack-every")) options->ack_every = number(name, value, 1, 1 << 20);
    else if (!strcmp(name, "--pace")) options->pace = number(name, value, 0, 1000000000);
    else if (!strcmp(name, "--window")) options->window = number(name, value, 1, 1 << 20);
    else if (!strcmp(name, "--deliver")) options->deliver = value;
    else if (!strcmp(name, "--channel")) options->channel = value;
    else if (!strcmp(name, "--header")) options->header = value;
    else if (!strcmp(name, "--name")) options->name = value;
    else if (!strcmp(name, "--binding")) options->binding = value;
    else if (!strcmp(name, "--trace")) options->trace = value;
    else if (!strcmp(name, "--trace-records")) options->trace_records = number(name, value, 1, 1 << 26);
    else if (!strcmp(name, "--timeout")) options->timeout_s = (double)number(name, value, 1, 3600);
    else misuse("unknown option", name);
}

static const Protocol *find_protocol(const char *name) {
    static const Protocol *all[] = {&simplebus_protocol, &version2_protocol, &nats_protocol,
                                    &jetstream_protocol, &redis_protocol, &redis_stream_protocol,
                                    &raw_protocol};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (strcmp(name, all[i]->name) == 0) return all[i];
    misuse("unknown protocol", name);
}

int main(int count, char **words) {
    static Options options = {
        .host = "127.0.0.1", .size_bytes = 16, .seed = 1, .classes = {1}, .class_count = 1,
        .shuffle = 4096, .window = 4096, .ack_every = 1, .deliver = "load.deliver", .trace_records = 1 << 20,
        .timeout_s = 60,
    };
    if (count < 3) misuse("too few arguments:", "expected MODE and PROTOCOL");
    const char *mode = words[1];
    const Protocol *protocol = find_protocol(words[2]);
    for (int i = 3; i < count; i++) {
        if (parse_flag(&options, words[i])) continue;
        parse_option(&options, words[i], i + 1 < count ? words[i + 1] : NULL);
        i += 1;
    }
    if (strcmp(mode, "block") == 0) {
        run_block(&options);
        return 0;
    }
    if (options.port == 0) misuse("missing:", "--port");
    signal(SIGPIPE, SIG_IGN);
    deadline_start(options.timeout_s);
    if (strcmp(mode, "probe") == 0 && protocol == &simplebus_protocol) {
        run_probe(&options);
        return 0;
    }
    if (options.count == 0) misuse("missing:", "--count");
    trace_start(&options);
    if (strcmp(mode, "publish") == 0) run_publish(&options, protocol);
    else if (strcmp(mode, "subscribe") == 0) run_subscribe(&options, protocol);
    else if (strcmp(mode, "latency") == 0) run_latency(&options, protocol);
    else if (strcmp(mode, "confirm") == 0) run_confirm(&options, protocol);
    else misuse("unknown mode", mode);
    trace_end(&options);
    return 0;
}
