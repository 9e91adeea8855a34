/* SPDX-License-Identifier: Apache-2.0 */
/* Preloaded into a server: makes its disk slow. The file $SLOW_DISK holds three signed 64-bit
   integers: microseconds that each fsync and fdatasync takes longer, the same for each pwrite, and
   how many calls were delayed so far. SQLite writes and syncs its files with these functions. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

struct state {
    volatile int64_t sync, write;
    int64_t delayed;
};

static struct state *state;

__attribute__((constructor)) static void start(void)
{
    const char *path = getenv("SLOW_DISK");
    int file = path == NULL ? -1 : open(path, O_RDWR | O_CLOEXEC);
    if (file < 0)
        return;
    void *mapped =
        mmap(NULL, sizeof(struct state), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (mapped != MAP_FAILED)
        state = mapped;
    close(file);
}

static void delay(int64_t microseconds)
{
    if (microseconds <= 0)
        return;
    struct timespec left = {microseconds / 1000000, microseconds % 1000000 * 1000};
    while (nanosleep(&left, &left) != 0)
        ;
    __atomic_add_fetch(&state->delayed, 1, __ATOMIC_RELAXED);
}

/* Calls the function of the C library. */
#define REAL(name, ...) \
    static __typeof__(&name) real; \
    if (real == NULL) \
        real = (__typeof__(&name))dlsym(RTLD_NEXT, #name); \
    return real(__VA_ARGS__)

int fsync(int file)
{
    delay(state == NULL ? 0 : state->sync);
    REAL(fsync, file);
}

int fdatasync(int file)
{
    delay(state == NULL ? 0 : state->sync);
    REAL(fdatasync, file);
}

ssize_t pwrite(int file, const void *data, size_t size, off_t at)
{
    delay(state == NULL ? 0 : state->write);
    REAL(pwrite, file, data, size, at);
}

ssize_t pwrite64(int file, const void *data, size_t size, off64_t at)
{
    delay(state == NULL ? 0 : state->write);
    REAL(pwrite64, file, data, size, at);
}
