/* What is preloaded into commands: counts the calls that change something below a folder, and at
 * one of them kills the process, or lets the call fail, or be short. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

enum { COUNT, KILL, FAIL, SHORT, FULL };

static char below[PATH_MAX];
static size_t length; /* of it; 0: nothing is counted */
static long seen, target;
static int how, error, list = -1;

/* Begin to count. number: of the call that meets `what`; listed: where names of calls are written. */
void trust_arm(const char *folder, long number, int what, int errnumber, int listed)
{
    length = strlen(strncpy(below, folder, sizeof below - 1));
    seen = 0, target = number, how = what, error = errnumber, list = listed;
}

/* Tell whether a call fails, and errno says why. path: NULL for one of a descriptor; size: of what
 * is written, NULL if nothing is; makes: whether the call needs room on the disk. */
static int fails(const char *name, int at, const char *path, size_t *size, int makes)
{
    char of[PATH_MAX * 2], link[64];
    size_t end = 0;
    if (!length) return 0;
    if (path == NULL || path[0] != '/') {
        snprintf(link, sizeof link, at == AT_FDCWD ? "/proc/self/cwd" : "/proc/self/fd/%d", at);
        ssize_t found = readlink(link, of, PATH_MAX);
        if (found < 0) return 0;
        end = (size_t)found;
        if (path != NULL) of[end++] = '/';
    }
    snprintf(of + end, PATH_MAX, "%s", path == NULL ? "" : path);
    if (strncmp(of, below, length) != 0) return 0;
    long number = __atomic_add_fetch(&seen, 1, __ATOMIC_SEQ_CST);
    if (list >= 0) dprintf(list, "%s\n", name);
    if (how == FULL && number > target && makes) {
        errno = ENOSPC;
        return 1;
    }
    if (number != target) return 0;
    if (how == KILL) kill(getpid(), SIGKILL);
    if (how == FAIL) {
        errno = error;
        return 1;
    }
    if ((how == SHORT || how == FULL) && size != NULL && *size > 1) *size /= 2;
    return 0;
}

#define CALL(result, name, declared, given, at, path, size, makes)     \
    result name declared                                               \
    {                                                                  \
        static result (*real) declared;                                \
        if (real == NULL) real = dlsym(RTLD_NEXT, #name);              \
        return fails(#name, at, path, size, makes) ? -1 : real given;  \
    }

CALL(int, mkdir, (const char *path, mode_t mode), (path, mode), AT_FDCWD, path, NULL, 1)
CALL(int, mkdirat, (int at, const char *path, mode_t mode), (at, path, mode), at, path, NULL, 1)
CALL(ssize_t, write, (int file, const void *data, size_t size), (file, data, size), file, NULL, &size, 1)
CALL(ssize_t, pwrite, (int file, const void *data, size_t size, off_t to), (file, data, size, to), file, NULL, &size, 1)
CALL(ssize_t, pwrite64, (int file, const void *data, size_t size, off64_t to), (file, data, size, to), file, NULL, &size, 1)
CALL(int, fsync, (int file), (file), file, NULL, NULL, 0)
CALL(int, fdatasync, (int file), (file), file, NULL, NULL, 0)
CALL(int, ftruncate, (int file, off_t size), (file, size), file, NULL, NULL, 0)
CALL(int, ftruncate64, (int file, off64_t size), (file, size), file, NULL, NULL, 0)
CALL(int, rename, (const char *from, const char *to), (from, to), AT_FDCWD, to, NULL, 0)
CALL(int, renameat, (int at, const char *from, int there, const char *to), (at, from, there, to), there, to, NULL, 0)
CALL(int, renameat2, (int at, const char *from, int there, const char *to, unsigned int flags), (at, from, there, to, flags), there, to, NULL, 0)
CALL(int, link, (const char *from, const char *to), (from, to), AT_FDCWD, to, NULL, 0)
CALL(int, linkat, (int at, const char *from, int there, const char *to, int flags), (at, from, there, to, flags), there, to, NULL, 0)
CALL(int, unlink, (const char *path), (path), AT_FDCWD, path, NULL, 0)
CALL(int, unlinkat, (int at, const char *path, int flags), (at, path, flags), at, path, NULL, 0)
CALL(int, rmdir, (const char *path), (path), AT_FDCWD, path, NULL, 0)

#define OPEN(name, at, declared, given)                                                      \
    int name declared                                                                        \
    {                                                                                        \
        static int (*real) declared;                                                         \
        va_list more;                                                                        \
        if (real == NULL) real = dlsym(RTLD_NEXT, #name);                                    \
        va_start(more, flags);                                                               \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(more, mode_t) : 0;              \
        va_end(more);                                                                        \
        return flags & O_CREAT && fails("openat", at, path, NULL, 1) ? -1 : real given;      \
    }

OPEN(open, AT_FDCWD, (const char *path, int flags, ...), (path, flags, mode))
OPEN(open64, AT_FDCWD, (const char *path, int flags, ...), (path, flags, mode))
OPEN(openat, at, (int at, const char *path, int flags, ...), (at, path, flags, mode))
OPEN(openat64, at, (int at, const char *path, int flags, ...), (at, path, flags, mode))
