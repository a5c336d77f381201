/* Sockets, buffers, the clock and error messages.
 *
 * One deadline of the whole process bounds every wait, and ends it with an error. Sockets are
 * blocking; a call that must not block uses MSG_DONTWAIT.
 */
#include "load.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

static double deadline;

void fail(int status, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    fputs("generator: ", stderr);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    va_end(arguments);
    fflush(stdout);
    _exit(status);
}

const char *shown(const uint8_t *data, size_t size) {
    static char texts[4][256]; /* Room for four texts in one message. */
    static unsigned turn;
    char *text = texts[turn++ % 4];
    size_t at = 0;
    text[at++] = '"';
    for (size_t i = 0; i < size && at < sizeof texts[0] - 8; i++) {
        if (data[i] >= ' ' && data[i] < 127)
            text[at++] = (char)data[i];
        else
            at += (size_t)sprintf(text + at, "\\x%02x", data[i]);
    }
    text[at++] = '"';
    text[at] = 0;
    return text;
}

uint64_t clock_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

double clock_s(void) { return (double)clock_ns() * 1e-9; }

/* Ends a process that is busy after its deadline, without a wait that could end it. */
static void handle_alarm(int number) {
    static const char text[] = "generator: timed out while busy\n";
    (void)number;
    if (write(STDERR_FILENO, text, sizeof text - 1) < 0) _exit(EXIT_CONNECTION);
    _exit(EXIT_TIMEOUT);
}

void deadline_start(double seconds) {
    deadline = clock_s() + seconds;
    signal(SIGALRM, handle_alarm);
    alarm((unsigned)seconds + 3);
}

int deadline_ms(int at_most) {
    double left = (deadline - clock_s()) * 1e3;
    if (left <= 0) return 0;
    return at_most >= 0 && left > at_most ? at_most : (int)left + 1;
}

void *allocate(size_t bytes) {
    void *memory = calloc(1, bytes);
    if (!memory) fail(EXIT_CONNECTION, "cannot allocate %zu bytes", bytes);
    return memory;
}

void bytes_reserve(Bytes *bytes, size_t more) {
    if (bytes->start > 0 && bytes->start == bytes->end) bytes->start = bytes->end = 0;
    if (bytes->capacity - bytes->end >= more) return;
    if (bytes->start > 0) { /* Move unread bytes to the start. */
        memmove(bytes->data, bytes->data + bytes->start, bytes->end - bytes->start);
        bytes->end -= bytes->start;
        bytes->start = 0;
        if (bytes->capacity - bytes->end >= more) return;
    }
    bytes->capacity = (bytes->end + more) * 2;
    bytes->data = realloc(bytes->data, bytes->capacity);
    if (!bytes->data) fail(EXIT_CONNECTION, "cannot allocate a buffer of %zu bytes", bytes->capacity);
}

void bytes_append(Bytes *bytes, const void *data, size_t size) {
    bytes_reserve(bytes, size);
    memcpy(bytes->data + bytes->end, data, size);
    bytes->end += size;
}

void bytes_format(Bytes *bytes, const char *format, ...) {
    va_list arguments;
    char text[1024];
    va_start(arguments, format);
    int size = vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    if (size < 0 || (size_t)size >= sizeof text) fail(EXIT_USAGE, "a name or option is too long");
    bytes_append(bytes, text, (size_t)size);
}

int connect_to(const Options *options) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)options->port)};
    if (inet_pton(AF_INET, options->host, &address.sin_addr) != 1)
        fail(EXIT_USAGE, "--host must be an IPv4 address, not %s", options->host);
    int handle = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (handle < 0 || connect(handle, (struct sockaddr *)&address, sizeof address) != 0)
        fail(EXIT_CONNECTION, "cannot connect to %s:%d: %s", options->host, options->port,
             strerror(errno));
    int one = 1;
    setsockopt(handle, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    struct timeval patience = {.tv_sec = deadline_ms(-1) / 1000 + 1};
    setsockopt(handle, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    setsockopt(handle, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
    return handle;
}

/* A write may fail before a read sees the end: a broken pipe and a reset are closed connections. */
static _Noreturn void fail_broken(const Peer *peer) {
    unsigned long long verified = peer->verified, count = peer->options->count;
    if (errno == EPIPE || errno == ECONNRESET)
        fail(EXIT_CONNECTION, "the broker closed the connection: %llu of %llu messages verified",
             verified, count);
    fail(EXIT_CONNECTION, "the connection was lost after %llu of %llu verified messages: %s", verified,
         count, strerror(errno));
}

ptrdiff_t receive_some(Peer *peer, bool block) {
    Bytes *in = &peer->in;
    bytes_reserve(in, READ_BYTES);
    for (;;) {
        ssize_t got = recv(peer->socket, in->data + in->end, READ_BYTES, block ? 0 : MSG_DONTWAIT);
        if (got >= 0) {
            in->end += (size_t)got;
            return got;
        }
        if (errno == EINTR) continue;
        if (errno != EAGAIN && errno != EWOULDBLOCK) fail_broken(peer);
        if (!block) return -1;
        wait_until_ready(peer, false, 0); /* The receive timeout: reports the error. */
    }
}

bool send_some(Peer *peer) {
    Bytes *out = &peer->out;
    while (out->start < out->end) {
        ssize_t sent = send(peer->socket, out->data + out->start, out->end - out->start,
                            MSG_DONTWAIT | MSG_NOSIGNAL);
        if (sent < 0 && errno == EINTR) continue;
        if (sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return false;
        if (sent < 0) fail_broken(peer);
        out->start += (size_t)sent;
    }
    out->start = out->end = 0;
    return true;
}

void send_all(Peer *peer) {
    while (!send_some(peer)) wait_until_ready(peer, true, -1);
}

void wait_until_ready(Peer *peer, bool to_write, int at_most_ms) {
    struct pollfd wish = {.fd = peer->socket, .events = POLLIN};
    if (to_write) wish.events |= POLLOUT;
    int left = deadline_ms(at_most_ms > 0 ? at_most_ms : -1);
    if (left > 0 && poll(&wish, 1, left) != 0) return;
    if (deadline_ms(-1) > 0) return; /* Only the caller's shorter timeout is over. */
    const Options *options = peer->options;
    fail(EXIT_TIMEOUT, "timed out after %g s: %llu of %llu messages verified, %llu confirmed",
         options->timeout_s, (unsigned long long)peer->verified, (unsigned long long)options->count,
         (unsigned long long)peer->confirmed);
}

bool read_line(Peer *peer, Bytes *line) {
    Bytes *in = &peer->in;
    for (;;) {
        uint8_t *begin = in->data + in->start;
        uint8_t *end = in->end > in->start ? memchr(begin, '\n', in->end - in->start) : NULL;
        if (end) {
            line->start = line->end = 0;
            size_t size = (size_t)(end - begin);
            bytes_append(line, begin, size > 0 && end[-1] == '\r' ? size - 1 : size);
            bytes_append(line, "", 1); /* Text functions may read it. */
            line->end -= 1;
            in->start += size + 1;
            return true;
        }
        if (receive_some(peer, true) == 0) return false;
    }
}
