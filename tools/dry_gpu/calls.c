// Counts the calls of CUDA's libraries and of MindSpore's own kernels, for Python (dry_gpu.py).
#include "calls.h"

#include <stdint.h>
#include <string.h>

#define MOST_STUBS 20000
#define MOST_LOGGED (1 << 20)

// Both are build.py's.
extern const char *dry_names[];
extern const int dry_number_of_names;

static int counts[MOST_STUBS];
static uint16_t log_of_calls[MOST_LOGGED];
static int logged;

long dry_called(int id) {
  __atomic_add_fetch(&counts[id], 1, __ATOMIC_RELAXED);
  int at = __atomic_fetch_add(&logged, 1, __ATOMIC_RELAXED);
  if (at < MOST_LOGGED) log_of_calls[at] = id;
  return 0;
}

void dry_reset(void) {
  memset(counts, 0, sizeof counts);
  logged = 0;
}

int dry_number_of_stubs(void) { return dry_number_of_names; }
const char *dry_name(int id) { return dry_names[id]; }
int dry_count(int id) { return counts[id]; }
int dry_logged(void) { return logged < MOST_LOGGED ? logged : MOST_LOGGED; }
int dry_logged_at(int at) { return log_of_calls[at]; }
