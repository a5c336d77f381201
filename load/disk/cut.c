/* Copy of a directory as a power cut would leave it, updated beside it at each sync.
 *
 * Only two things survive a power cut: the content of a file at its last sync, and the names in a
 * folder at its last sync. The directory itself survives, with its content at the start of the
 * process.
 *
 *   SHADOW/ready             exists when the copy is complete
 *   SHADOW/files/KEY         a file, as of its last sync
 *   SHADOW/folders/PATH      a folder, as of its last sync: a line for each name in it, "KEY NAME" of
 *                            a file, "/ NAME" of a folder; PATH has '%' for '/', and begins with one
 *
 * A key is a file's inode number and time of birth, because inode numbers are reused. A file in no
 * folder is ignored; a file that a folder names but that is missing was never synced, and is empty.
 */
#include "disk.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { FILES_MAX = 4096, KEY_BYTES = 48, COPY_BYTES = 1 << 16 };

typedef struct {
    char key[KEY_BYTES];
    off_t first, last; /* Range that may be lost. */
    int is_known;      /* True if the shadow has the rest of the file. */
    off_t first_asked, last_asked; /* Range that the current sync makes safe. */
} dirty_file;

static char directory[PATH_MAX], shadow[PATH_MAX];
static dirty_file files[FILES_MAX];
static int file_count;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void fail(const char *what, const char *which) {
    fprintf(stderr, "cut: %s %s: %s\n", what, which, strerror(errno));
    abort();
}

static int write_whole(int file, const char *data, size_t size, off_t at) {
    while (size > 0) {
        ssize_t count = syscall(SYS_pwrite64, file, data, size, at);
        if (count < 0) return -1;
        data += count, at += count, size -= (size_t)count;
    }
    return 0;
}

/* Writes the key of the file at a path below an open folder; "" is the folder. Returns 0 or -1. */
static int key_at(int folder, const char *path, char *key) {
    struct statx found;
    unsigned wanted = STATX_INO | STATX_BTIME;
    if (statx(folder, path, AT_EMPTY_PATH | AT_SYMLINK_NOFOLLOW, wanted, &found)) return -1;
    snprintf(key, KEY_BYTES, "%llu-%lld.%09u", (unsigned long long)found.stx_ino,
             (long long)found.stx_btime.tv_sec, found.stx_btime.tv_nsec);
    return 0;
}

/* The same by path, for the Python program that simulates the power cut. */
int cut_key(const char *path, char *key) { return key_at(AT_FDCWD, path, key); }

/* Path of a descriptor below the directory: "" or "/..."; NULL if it is elsewhere. */
static const char *place_of(int file, char *path) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t size = readlink(link, path, PATH_MAX - 1);
    size_t above = strlen(directory);
    if (size < 0) return NULL;
    path[size] = 0;
    if (strncmp(path, directory, above) || (path[above] && path[above] != '/')) return NULL;
    return path + above;
}

static int is_ours(int file, mode_t kind) {
    struct stat found;
    char path[PATH_MAX];
    if (!shadow[0] || fstat(file, &found) || (found.st_mode & S_IFMT) != kind) return 0;
    return place_of(file, path) != NULL;
}

static dirty_file *entry_of(int file) {
    char key[KEY_BYTES];
    if (key_at(file, "", key)) fail("cannot get the metadata of", "a file");
    for (int i = 0; i < file_count; i++)
        if (!strcmp(files[i].key, key)) return &files[i];
    if (file_count == FILES_MAX) errno = ENOMEM, fail("too many", "files");
    dirty_file *made = &files[file_count++];
    memset(made, 0, sizeof *made);
    strcpy(made->key, key);
    return made;
}

void cut_note(int file, off_t first, off_t last) {
    if (!is_ours(file, S_IFREG)) return;
    pthread_mutex_lock(&lock);
    dirty_file *entry = entry_of(file);
    if (entry->first == entry->last) entry->first = first, entry->last = last;
    if (first < entry->first) entry->first = first;
    if (last > entry->last) entry->last = last;
    pthread_mutex_unlock(&lock);
}

/* Copy bytes first..last-1 of a file into the shadow, and its size. */
static void copy(const char *key, int file, off_t first, off_t last) {
    char path[2 * PATH_MAX], buffer[COPY_BYTES];
    struct stat found;
    snprintf(path, sizeof path, "%s/files/%s", shadow, key);
    int target = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
    if (target < 0 || fstat(file, &found)) fail("cannot write", path);
    /* A file opened for writing only is read by a second descriptor. */
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    int source = open(link, O_RDONLY | O_CLOEXEC);
    if (source < 0) fail("cannot read", link);
    while (first < last) {
        size_t wanted = last - first < COPY_BYTES ? (size_t)(last - first) : COPY_BYTES;
        ssize_t count = pread(source, buffer, wanted, first);
        if (count < 0) fail("cannot read", key);
        if (count == 0) break;
        if (write_whole(target, buffer, (size_t)count, first)) fail("cannot write", path);
        first += count;
    }
    if (syscall(SYS_ftruncate, target, found.st_size)) fail("cannot truncate", path);
    close(source);
    close(target);
}

/* Write the names in a folder, all of them or none. */
static void list(const char *place, const char *path) {
    char target[2 * PATH_MAX], draft[2 * PATH_MAX + 8], key[KEY_BYTES];
    int at = snprintf(target, sizeof target, "%s/folders/%%", shadow);
    for (const char *c = place + (*place == '/'); *c; c++) target[at++] = *c == '/' ? '%' : *c;
    target[at] = 0;
    snprintf(draft, sizeof draft, "%s.new", target);
    FILE *names = fopen(draft, "we");
    DIR *folder = opendir(path);
    if (!names || !folder) fail("cannot list", path);
    for (struct dirent *each; (each = readdir(folder));) {
        struct stat found;
        if (!strcmp(each->d_name, ".") || !strcmp(each->d_name, "..")) continue;
        if (fstatat(dirfd(folder), each->d_name, &found, AT_SYMLINK_NOFOLLOW)) continue;
        if (S_ISDIR(found.st_mode)) fprintf(names, "/ %s\n", each->d_name);
        else if (!key_at(dirfd(folder), each->d_name, key))
            fprintf(names, "%s %s\n", key, each->d_name);
    }
    closedir(folder);
    if (fclose(names) || rename(draft, target)) fail("cannot write", target);
}

void cut_before_sync(int file) {
    if (!is_ours(file, S_IFREG)) return;
    pthread_mutex_lock(&lock);
    dirty_file *entry = entry_of(file);
    if (entry->first_asked == entry->last_asked)
        entry->first_asked = entry->first, entry->last_asked = entry->last;
    if (entry->first < entry->first_asked) entry->first_asked = entry->first;
    if (entry->last > entry->last_asked) entry->last_asked = entry->last;
    entry->first = entry->last = 0;
    pthread_mutex_unlock(&lock);
}

void cut_after_sync(int file) {
    char path[PATH_MAX];
    if (is_ours(file, S_IFREG)) {
        pthread_mutex_lock(&lock);
        dirty_file *entry = entry_of(file);
        off_t last = entry->is_known ? entry->last_asked : LONG_MAX;
        copy(entry->key, file, entry->is_known ? entry->first_asked : 0, last);
        entry->is_known = 1;
        entry->first_asked = entry->last_asked = 0;
        pthread_mutex_unlock(&lock);
    } else if (is_ours(file, S_IFDIR)) {
        const char *place = place_of(file, path);
        pthread_mutex_lock(&lock);
        if (place) list(place, path);
        pthread_mutex_unlock(&lock);
    }
}

/* Copies a file or folder that exists at the start, whose content counts as synced. */
static int seed(const char *path, const struct stat *found, int kind, struct FTW *where) {
    (void)where;
    if (kind == FTW_D) list(path + strlen(directory), path);
    if (kind == FTW_F && S_ISREG(found->st_mode)) {
        int file = open(path, O_RDONLY | O_CLOEXEC);
        if (file < 0) fail("cannot read", path);
        dirty_file *entry = entry_of(file);
        copy(entry->key, file, 0, found->st_size);
        entry->is_known = 1;
        close(file);
    }
    return 0;
}

static void make(const char *name) {
    char path[2 * PATH_MAX];
    snprintf(path, sizeof path, "%s%s", shadow, name);
    if (mkdir(path, 0700) && errno != EEXIST) fail("cannot create", path);
}

__attribute__((constructor)) static void begin(void) {
    const char *watched = getenv("CUT_DIRECTORY"), *kept = getenv("CUT_SHADOW");
    char ready[2 * PATH_MAX];
    if (!watched || !kept) return;
    snprintf(directory, sizeof directory, "%s", watched);
    snprintf(shadow, sizeof shadow, "%s", kept);
    snprintf(ready, sizeof ready, "%s/ready", shadow);
    if (!access(ready, F_OK)) return; /* The process was killed without a power cut. */
    make("");
    make("/files");
    make("/folders");
    if (!access(directory, F_OK) && nftw(directory, seed, 16, FTW_PHYS)) fail("cannot read", directory);
    int file = open(ready, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
    if (file < 0) fail("cannot write", ready);
    close(file);
}
