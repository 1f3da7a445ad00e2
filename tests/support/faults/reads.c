// Preloaded (LD_PRELOAD) into a program: makes positioned reads of one file fail, or return short.
//
// KT_READ_FAULTS names a file of five int64, which the test and this library both map:
//   good      reads that still succeed before the first fault; counts down
//   faulty    faults that are still to come, each once `good` is 0; counts down
//   error     errno of a fault, or 0: half of what was asked for is read, down to whole 512-byte sectors
//   reads     reads of the file so far; counts up
//   faults    faults so far; counts up
// KT_READ_FAULTS_PATH names the file that reads are counted of, by its real path.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

struct Control { _Atomic int64_t good, faulty, error, reads, faults; };

static struct Control* control;
static const char* wanted;

__attribute__((constructor)) static void begin(void) {
  const char* path = getenv("KT_READ_FAULTS");
  wanted = getenv("KT_READ_FAULTS_PATH");
  int fd = path && wanted ? open(path, O_RDWR | O_CLOEXEC) : -1;
  void* mapped = fd < 0 ? MAP_FAILED : mmap(NULL, sizeof(struct Control), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (mapped == MAP_FAILED) {
    fprintf(stderr, "reads.c: KT_READ_FAULTS names no file that can be mapped\n");
    abort();
  }
  close(fd);
  control = mapped;
}

// A deleted file goes on having its path, with a word behind it.
static int is_wanted(int fd) {
  char link[64], path[4096];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t length = readlink(link, path, sizeof path - 1);
  if (length < 0) return 0;
  path[length] = '\0';
  size_t size = strlen(wanted);
  return strncmp(path, wanted, size) == 0 && (path[size] == '\0' || strcmp(path + size, " (deleted)") == 0);
}

static int takes_one(_Atomic int64_t* count) {
  int64_t now = atomic_load(count);
  while (now > 0)
    if (atomic_compare_exchange_weak(count, &now, now - 1)) return 1;
  return 0;
}

// What becomes of a read: -1, it fails with errno set; 0, it goes on; 1, it is to be short.
static int fate(int fd) {
  int before = errno;
  if (!control || !is_wanted(fd)) {
    errno = before;
    return 0;
  }
  atomic_fetch_add(&control->reads, 1);
  errno = before;
  if (takes_one(&control->good) || !takes_one(&control->faulty)) return 0;
  atomic_fetch_add(&control->faults, 1);
  int error = (int)atomic_load(&control->error);
  if (error) errno = error;
  return error ? -1 : 1;
}

static size_t half(size_t size) { return size / 2 / 512 * 512; }

#define PREAD(name)                                                      \
  ssize_t name(int fd, void* to, size_t size, off_t at) {                \
    static __typeof__(&name) real;                                       \
    if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name);        \
    int found = fate(fd);                                                \
    return found < 0 ? -1 : real(fd, to, found ? half(size) : size, at); \
  }

// A short one fills its first part only, which is enough for readers that have one.
#define PREADV(name, more, flags)                                             \
  ssize_t name(int fd, const struct iovec* parts, int count, off_t at more) { \
    static __typeof__(&name) real;                                            \
    if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name);             \
    int found = fate(fd);                                                     \
    if (found < 0) return -1;                                                 \
    if (!found || !count) return real(fd, parts, count, at flags);            \
    struct iovec first = {parts[0].iov_base, half(parts[0].iov_len)};         \
    return real(fd, &first, 1, at flags);                                     \
  }
#define COMMA ,

PREAD(pread)
PREAD(pread64)
PREADV(preadv, , )
PREADV(preadv64, , )
PREADV(preadv2, COMMA int flags, COMMA flags)
PREADV(preadv64v2, COMMA int flags, COMMA flags)
