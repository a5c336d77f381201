/* A disk that takes longer: preloaded, it lets every sync of a file take SLOW_SYNC_US microseconds
 * more. Machines whose disk is a cache of another one answer within a few microseconds, which tells
 * little of machines that have a disk.
 */
#define _GNU_SOURCE

#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static void take_longer(void) {
    const char *text = getenv("SLOW_SYNC_US");
    long us = text ? atol(text) : 0;
    struct timespec pause = {us / 1000000, us % 1000000 * 1000};
    clock_nanosleep(CLOCK_MONOTONIC, 0, &pause, NULL);
}

int fdatasync(int file) {
    take_longer();
    return (int)syscall(SYS_fdatasync, file);
}

int fsync(int file) {
    take_longer();
    return (int)syscall(SYS_fsync, file);
}
