/* SPDX-License-Identifier: Apache-2.0 */
/* Preloaded into the processes that use the store $DISK_STORE: appends what they do with its files
   to $DISK_RECORD, in order and with contents, and lets calls fail as the rules in $DISK_FAULTS say.
   recorded_disk.py writes the rules and reads the record. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum kind { UNRELATED, DATABASE, LOG, OTHER, FOLDER };

static struct { enum kind kind; ino_t inode; } files[1 << 16];

/* Of `thread`, 1 is the main thread of a process, 2 any other one. A call that fails kills the
   process before it returns (`kill` is 1), or a later call does. */
static volatile struct rule {
    int64_t kind, call, thread, skip, every, times, delay, kill, full, calls, failed;
} *rules;
enum { RULES = 4 };

static const char *store;
static int record_file = -1;
static int64_t calls_to_live;

__attribute__((constructor)) static void start(void)
{
    const char *record = getenv("DISK_RECORD"), *faults = getenv("DISK_FAULTS");
    store = getenv("DISK_STORE");
    if (store == NULL || record == NULL || faults == NULL)
        return;
    int file = open(faults, O_RDWR | O_CLOEXEC);
    rules = mmap(NULL, RULES * sizeof *rules, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    record_file = open(record, O_WRONLY | O_APPEND | O_CLOEXEC);
    if (file < 0 || rules == MAP_FAILED || record_file < 0)
        abort();
    close(file);
}

static void note(char call, int result, int64_t file, int64_t offset, const char *name,
                 const void *data, size_t size)
{
    struct { char call; char pad[3]; int32_t result; int64_t file, offset; uint32_t name, size; }
        head = {call, {0}, result, file, offset, name == NULL ? 0 : strlen(name), size};
    struct iovec parts[] = {{&head, sizeof head}, {(void *)name, head.name}, {(void *)data, size}};
    int error = errno;
    if (writev(record_file, parts, 3) != (ssize_t)(sizeof head + head.name + size))
        abort();
    errno = error;
}

static enum kind kind_of_path(const char *path)
{
    if (record_file < 0)
        return UNRELATED;
    size_t length = strlen(store), folder = strrchr(store, '/') - store;
    if (strncmp(path, store, length) == 0) {
        const char *end = path + length;
        if (strcmp(end, "-shm") == 0 || strncmp(end, "-writer", 7) == 0)
            return UNRELATED;
        return *end == 0 ? DATABASE : strcmp(end, "-wal") == 0 ? LOG : OTHER;
    }
    return strncmp(path, store, folder) == 0 && path[folder] == 0 ? FOLDER : UNRELATED;
}

/* A descriptor may have been closed since, and be of another file. */
static enum kind kind_of(int fd)
{
    struct stat now;
    if (fd < 0 || fd >= 1 << 16 || files[fd].kind == UNRELATED)
        return UNRELATED;
    return fstat(fd, &now) == 0 && now.st_ino == files[fd].inode ? files[fd].kind : UNRELATED;
}

/* Return the error with which a call fails, or 0. */
static int fails(enum kind kind, char call)
{
    if (calls_to_live > 0 && --calls_to_live == 0)
        kill(getpid(), SIGKILL);
    for (volatile struct rule *rule = rules; rule < rules + RULES; rule++) {
        int thread = gettid() == getpid() ? 1 : 2;
        if (rule->kind != kind || rule->call != call || (rule->thread && rule->thread != thread))
            continue;
        if (rule->delay)
            usleep(rule->delay);
        int64_t number = __atomic_fetch_add(&rule->calls, 1, __ATOMIC_SEQ_CST) - rule->skip;
        if (number < 0 || rule->failed >= rule->times || number % rule->every != 0)
            continue;
        __atomic_fetch_add(&rule->failed, 1, __ATOMIC_SEQ_CST);
        calls_to_live = rule->kill;
        return rule->full ? ENOSPC : EIO;
    }
    return 0;
}

static int failed(int error)
{
    if (calls_to_live == 1)
        kill(getpid(), SIGKILL);
    errno = error;
    return -1;
}

static int open_file(const char *path, int flags, mode_t mode)
{
    enum kind kind = kind_of_path(path);
    int existed = kind == UNRELATED || access(path, F_OK) == 0;
    int fd = syscall(SYS_openat, AT_FDCWD, path, flags, mode);
    struct stat now;
    if (kind == UNRELATED || fd < 0 || fd >= 1 << 16 || fstat(fd, &now) != 0)
        return fd;
    files[fd].kind = kind;
    files[fd].inode = now.st_ino;
    if (!existed)
        note('c', 0, now.st_ino, 0, path, NULL, 0);
    else if (flags & O_TRUNC)
        note('t', 0, now.st_ino, 0, NULL, NULL, 0);
    return fd;
}

int open(const char *path, int flags, ...)
{
    va_list more;
    va_start(more, flags);
    mode_t mode = flags & O_CREAT || (flags & O_TMPFILE) == O_TMPFILE ? va_arg(more, mode_t) : 0;
    va_end(more);
    return open_file(path, flags, mode);
}

int open64(const char *path, int flags, ...) __attribute__((alias("open")));

/* At the position of the descriptor if `offset` is negative. */
static ssize_t write_file(int fd, const void *data, size_t size, off_t offset)
{
    enum kind kind = kind_of(fd);
    int error = kind == UNRELATED ? 0 : fails(kind, 'w');
    if (error)
        return failed(error);
    ssize_t written = offset < 0 ? syscall(SYS_write, fd, data, size)
                                 : syscall(SYS_pwrite64, fd, data, size, offset);
    if (kind != UNRELATED && written > 0) {
        off_t begin = offset < 0 ? lseek(fd, 0, SEEK_CUR) - written : offset;
        note('w', 0, files[fd].inode, begin, NULL, data, written);
    }
    return written;
}

ssize_t write(int fd, const void *data, size_t size) { return write_file(fd, data, size, -1); }

ssize_t pwrite(int fd, const void *data, size_t size, off_t offset)
{
    return write_file(fd, data, size, offset);
}

ssize_t pwrite64(int, const void *, size_t, off64_t) __attribute__((alias("pwrite")));

int ftruncate(int fd, off_t size)
{
    enum kind kind = kind_of(fd);
    int status = syscall(SYS_ftruncate, fd, size);
    if (kind != UNRELATED && status == 0)
        note('t', 0, files[fd].inode, size, NULL, NULL, 0);
    return status;
}

int ftruncate64(int, off64_t) __attribute__((alias("ftruncate")));

static int sync_file(int fd, long number)
{
    enum kind kind = kind_of(fd);
    if (kind == UNRELATED)
        return syscall(number, fd);
    /* The thread connects the end to the begin: it makes one such call at a time. */
    note('s', 0, files[fd].inode, gettid(), NULL, NULL, 0);
    int error = fails(kind, 's'), status = error ? -1 : syscall(number, fd);
    note(kind == FOLDER ? 'F' : 'S', status, files[fd].inode, gettid(), NULL, NULL, 0);
    return error ? failed(error) : status;
}

int fsync(int fd) { return sync_file(fd, SYS_fsync); }
int fdatasync(int fd) { return sync_file(fd, SYS_fdatasync); }

int rename(const char *from, const char *to)
{
    int status = syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, 0);
    if (status == 0 && kind_of_path(from) != UNRELATED)
        note('r', 0, 0, 0, from, to, strlen(to));
    return status;
}

int unlink(const char *path)
{
    int status = syscall(SYS_unlinkat, AT_FDCWD, path, 0);
    if (status == 0 && kind_of_path(path) != UNRELATED)
        note('u', 0, 0, 0, path, NULL, 0);
    return status;
}
