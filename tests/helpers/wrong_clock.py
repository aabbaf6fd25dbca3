"""A wall clock that is wrong, for one process and its children, and can be set while they run."""

from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path

import pytest

_SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>

static volatile double *offset;

__attribute__((constructor)) static void begin(void) {
  int file = open(getenv("WRONG_CLOCK"), O_RDONLY);
  void *there = file < 0 ? MAP_FAILED : mmap(0, sizeof(double), PROT_READ, MAP_SHARED, file, 0);
  if (there != MAP_FAILED) offset = there;
}

int clock_gettime(clockid_t clock, struct timespec *at) {
  static int (*real)(clockid_t, struct timespec *);
  if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
  int result = real(clock, at);
  int wall = clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE;
  if (!result && offset && wall) at->tv_sec += (long)*offset;
  return result;
}

int gettimeofday(struct timeval *at, void *zone) {
  struct timespec exact;
  int result = clock_gettime(CLOCK_REALTIME, &exact);
  at->tv_sec = exact.tv_sec;
  at->tv_usec = exact.tv_nsec / 1000;
  return result;
}

time_t time(time_t *at) {
  struct timespec exact;
  clock_gettime(CLOCK_REALTIME, &exact);
  if (at) *at = exact.tv_sec;
  return exact.tv_sec;
}
"""


class WrongClock:
    """Give `env` to a process; `set` moves its wall clock, and no monotonic one."""

    def __init__(self, directory: Path) -> None:
        if (compiler := shutil.which("cc")) is None:
            pytest.skip("no C compiler (cc), with which a wrong clock is made")
        self._file = directory / "clock"
        self.set(0)
        source, library = directory / "clock.c", directory / "clock.so"
        source.write_text(_SHIM)
        subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
        self.env = {"LD_PRELOAD": str(library), "WRONG_CLOCK": str(self._file)}

    def set(self, seconds: float) -> None:
        """How far it is ahead (behind: negative); whole seconds."""
        with self._file.open("r+b" if self._file.exists() else "wb") as file:
            file.write(struct.pack("d", seconds))
