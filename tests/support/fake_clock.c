/* SPDX-License-Identifier: Apache-2.0 */
/* Preloaded into a server: sets its system's clock. The clocks that cannot be set stay as they are.
   The file $FAKE_CLOCK holds the seconds to add, as a signed 64-bit integer. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile int64_t *seconds;

__attribute__((constructor)) static void start(void)
{
    const char *path = getenv("FAKE_CLOCK");
    int file = path == NULL ? -1 : open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0)
        return;
    void *mapped = mmap(NULL, sizeof(int64_t), PROT_READ, MAP_SHARED, file, 0);
    if (mapped != MAP_FAILED)
        seconds = mapped;
    close(file);
}

static int64_t added(void)
{
    return seconds == NULL ? 0 : *seconds;
}

int clock_gettime(clockid_t clock, struct timespec *result)
{
    int status = syscall(SYS_clock_gettime, clock, result);
    if (status == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        result->tv_sec += added();
    return status;
}

int gettimeofday(struct timeval *restrict result, void *restrict zone)
{
    struct timespec now;
    int status = clock_gettime(CLOCK_REALTIME, &now);
    (void)zone;
    result->tv_sec = now.tv_sec;
    result->tv_usec = now.tv_nsec / 1000;
    return status;
}

time_t time(time_t *result)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (result != NULL)
        *result = now.tv_sec;
    return now.tv_sec;
}
