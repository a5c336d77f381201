/* What the files of this library share. Its law is in sync.c. */
#ifndef DISK_H
#define DISK_H

#define _GNU_SOURCE
#include <stddef.h>
#include <sys/types.h>

/* In front of a sync of this file, or folder: what is in it is what will be safe. */
void cut_before_sync(int file);
/* Behind one that went well. */
void cut_after_sync(int file);
/* Bytes from `first` up to `last` of this file are in doubt, until it is synced. */
void cut_note(int file, off_t first, off_t last);

#endif
