/* Shared by the files of this library. The rules are in sync.c. */
#ifndef DISK_H
#define DISK_H

#define _GNU_SOURCE
#include <stddef.h>
#include <sys/types.h>

/* Called before a sync of this file or folder: its present content will be safe. */
void cut_before_sync(int file);
/* Behind one that went well. */
void cut_after_sync(int file);
/* Bytes from `first` up to `last` of this file are in doubt, until it is synced. */
void cut_note(int file, off_t first, off_t last);

#endif
