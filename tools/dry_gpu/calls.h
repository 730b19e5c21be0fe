// Each call of a stub is counted and logged.
#pragma once

// Of a stub with this number; build.py numbers them. Returns 0: success, in CUDA's libraries.
long dry_called(int id);

// Of a function that is written here, and that build.py numbers, too.
#define CALLED(name)                \
  do {                              \
    extern const int dry_id_##name; \
    dry_called(dry_id_##name);      \
  } while (0)
