/* Preloaded library that makes the connection of a load generator use TLS 1.3 (load/run.py tls).
 *
 * The system calls keep their meaning: a call that would block fails with EAGAIN, and accepted data
 * is sent. LOAD_TLS_CA is the file of the trusted authorities; without it nothing changes.
 */
#define _GNU_SOURCE

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <openssl/ssl.h>
#include <poll.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>

enum { WRITE_MAX = 1 << 16, BUFFER = 1 << 18, TIMEOUT_MS = 60000 };

static SSL *tls;
static int tls_socket = -1;
static bool has_unread; /* True if decrypted data may be pending while the socket has none. */

#define REAL(name) ((typeof(&name))dlsym(RTLD_NEXT, #name))

static void fail(const char *what) {
    fprintf(stderr, "generator: TLS: %s\n", what);
    exit(4);
}

static void begin(int fd, const char *ca) {
    SSL_CTX *context = SSL_CTX_new(TLS_client_method());
    if (!context || !SSL_CTX_set_min_proto_version(context, TLS1_3_VERSION)) fail("cannot create a TLS context");
    if (!SSL_CTX_load_verify_locations(context, ca, NULL)) fail("cannot read the authorities in LOAD_TLS_CA");
    SSL_CTX_set_verify(context, SSL_VERIFY_PEER, NULL);
    SSL_CTX_set_mode(context, SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
    SSL_CTX_set_read_ahead(context, 1);
    SSL_CTX_set_default_read_buffer_len(context, BUFFER);
    tls = SSL_new(context);
    if (!tls || !SSL_set_fd(tls, fd) || !SSL_set_tlsext_host_name(tls, "localhost") ||
        !SSL_set1_host(tls, "localhost"))
        fail("cannot configure the connection");
    if (SSL_connect(tls) != 1) fail("the handshake failed");
    fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
    tls_socket = fd;
}

int connect(int fd, const struct sockaddr *address, socklen_t size) {
    int done = REAL(connect)(fd, address, size);
    const char *ca = getenv("LOAD_TLS_CA");
    if (done == 0 && ca && !tls && address->sa_family == AF_INET) begin(fd, ca);
    return done;
}

/* Converts a result of SSL to that of a system call: -1 with errno, or 0 at the end. */
static ssize_t to_system_result(int result) {
    switch (SSL_get_error(tls, result)) {
    case SSL_ERROR_WANT_READ:
    case SSL_ERROR_WANT_WRITE: errno = EAGAIN; return -1;
    case SSL_ERROR_ZERO_RETURN: return 0;
    default:
        if (result == 0 || errno == 0) return 0;
        return -1;
    }
}

ssize_t recv(int fd, void *data, size_t size, int flags) {
    if (fd != tls_socket) return REAL(recv)(fd, data, size, flags);
    size_t received = 0;
    for (;;) {
        errno = 0;
        int count = SSL_read(tls, (char *)data + received, (int)(size - received));
        if (count > 0) {
            received += (size_t)count;
            has_unread = received == size;
            if (has_unread) return (ssize_t)received;
            continue;
        }
        has_unread = false;
        ssize_t end = to_system_result(count);
        if (received) return (ssize_t)received;
        if (end == 0 || errno != EAGAIN || (flags & MSG_DONTWAIT)) return end;
        struct pollfd request = {.fd = fd, .events = POLLIN};
        if (REAL(poll)(&request, 1, TIMEOUT_MS) == 0) return errno = EAGAIN, -1;
    }
}

ssize_t send(int fd, const void *data, size_t size, int flags) {
    if (fd != tls_socket) return REAL(send)(fd, data, size, flags);
    errno = 0;
    int count = SSL_write(tls, data, (int)(size < WRITE_MAX ? size : WRITE_MAX));
    return count > 0 ? count : to_system_result(count);
}

ssize_t sendmsg(int fd, const struct msghdr *message, int flags) {
    if (fd != tls_socket) return REAL(sendmsg)(fd, message, flags);
    ssize_t taken = 0;
    for (size_t i = 0; i < message->msg_iovlen; i++) {
        const char *data = message->msg_iov[i].iov_base;
        size_t left = message->msg_iov[i].iov_len;
        while (left > 0) {
            ssize_t count = send(fd, data, left, flags);
            if (count < 0) return taken > 0 ? taken : count;
            taken += count, data += count, left -= (size_t)count;
        }
    }
    return taken;
}

int poll(struct pollfd *requests, nfds_t count, int timeout) {
    if (count == 1 && requests->fd == tls_socket && has_unread && (requests->events & POLLIN)) {
        requests->revents = POLLIN;
        return 1;
    }
    return REAL(poll)(requests, count, timeout);
}

int shutdown(int fd, int how) {
    if (fd == tls_socket) SSL_shutdown(tls);
    return REAL(shutdown)(fd, how);
}
