/* A library, preloaded into a server, that slows disk syncs or simulates power cuts.
 *
 * Without these environment variables it changes nothing. The copy for a power cut is written before
 * the sync returns, and contains exactly the data that this sync makes safe.
 *
 *   SLOW_SYNC_US    delay of every sync in microseconds. A disk with a write cache syncs within a
 *                   few microseconds, unlike a disk without one.
 *   CUT_DIRECTORY   the directory of the power cut, an absolute path without symbolic links,
 *   CUT_SHADOW      and the directory for the copy of its synced data: see cut.c.
 */
#include "disk.h"

#include <fcntl.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static void take_longer(void) {
    const char *text = getenv("SLOW_SYNC_US");
    long us = text ? atol(text) : 0;
    struct timespec pause = {us / 1000000, us % 1000000 * 1000};
    if (us) clock_nanosleep(CLOCK_MONOTONIC, 0, &pause, NULL);
}

static int synced(long call, int file) {
    take_longer();
    cut_before_sync(file);
    int status = (int)syscall(call, file);
    if (status == 0) cut_after_sync(file);
    return status;
}

int fdatasync(int file) { return synced(SYS_fdatasync, file); }

int fsync(int file) { return synced(SYS_fsync, file); }

static ssize_t written(int file, ssize_t count, off_t first) {
    if (count > 0) cut_note(file, first, first + count);
    return count;
}

ssize_t pwrite64(int file, const void *data, size_t size, off64_t at) {
    return written(file, syscall(SYS_pwrite64, file, data, size, at), at);
}

ssize_t pwrite(int file, const void *data, size_t size, off_t at) {
    return pwrite64(file, data, size, at);
}

/* The kernel expects the offset in two halves; on 64 bits the second one is 0. */
ssize_t pwritev64(int file, const struct iovec *pieces, int count, off64_t at) {
    return written(file, syscall(SYS_pwritev, file, pieces, count, at, 0), at);
}

ssize_t pwritev(int file, const struct iovec *pieces, int count, off_t at) {
    return pwritev64(file, pieces, count, at);
}

ssize_t pwritev64v2(int file, const struct iovec *pieces, int count, off64_t at, int flags) {
    return written(file, syscall(SYS_pwritev2, file, pieces, count, at, 0, flags), at);
}

ssize_t pwritev2(int file, const struct iovec *pieces, int count, off_t at, int flags) {
    return pwritev64v2(file, pieces, count, at, flags);
}

static ssize_t appended(int file, ssize_t count) {
    if (count <= 0) return count;
    off_t at = lseek(file, 0, SEEK_CUR);
    return at < 0 ? count : written(file, count, at - count);
}

ssize_t write(int file, const void *data, size_t size) {
    return appended(file, syscall(SYS_write, file, data, size));
}

ssize_t writev(int file, const struct iovec *pieces, int count) {
    return appended(file, syscall(SYS_writev, file, pieces, count));
}

int ftruncate64(int file, off64_t size) {
    int status = (int)syscall(SYS_ftruncate, file, size);
    if (status == 0) cut_note(file, size, size);
    return status;
}

int ftruncate(int file, off_t size) { return ftruncate64(file, size); }
