/* Included before `echo.c`: its model takes its time between reading and writing.
 *
 * What it read is kept aside meanwhile, as any model does whose input is overwritten
 * under it, so that a late write shows whose it was. Once in four times it takes up to
 * 40 ms, by chance: the same request sent again may be done before the first one.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static void take_time(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  const uint64_t chance = (uint64_t)now.tv_nsec * 0x9E3779B97F4A7C15u >> 32;
  if (chance % 4 != 0) return;
  struct timespec rest = {0, (long)(chance / 4 % 40 + 1) * 1000000};
  while (nanosleep(&rest, &rest) != 0) {
  }
}

static void* slow_memmove(void* to, const void* from, size_t size) {
  void* read = malloc(size);
  if (read == NULL) abort();
  memcpy(read, from, size);
  take_time();
  memcpy(to, read, size);
  free(read);
  return to;
}

#define memmove slow_memmove
