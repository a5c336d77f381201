/* Shared by the files of this library. See sync.c. */
#ifndef DISK_H
#define DISK_H

#define _GNU_SOURCE
#include <stddef.h>
#include <sys/types.h>

/* Called before a sync of this file or folder, which makes its current content safe. */
void cut_before_sync(int file);
/* Called after a successful sync. */
void cut_after_sync(int file);
/* Bytes from `first` up to `last` of this file may be lost until it is synced. */
void cut_note(int file, off_t first, off_t last);

#endif
