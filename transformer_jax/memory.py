"""How a process holds its memory on Linux: huge pages, and freed memory kept for the next step.

XLA's CPU backend asks the allocator for a step's buffers and gives them back at its end, hundreds of megabytes each
time. By default glibc returns them to the operating system, which hands them out again page by page, zeroed. See
docs/performance.md for what that costs. glibc reads these settings only when a process starts.
"""

from __future__ import annotations

import os
import sys

VARIABLE = "GLIBC_TUNABLES"
TUNABLES = ":".join(
    (
        "glibc.malloc.hugetlb=1",  # ask for transparent huge pages
        "glibc.malloc.trim_threshold=8000000000",  # bytes freed at the top before any go back
        "glibc.malloc.top_pad=268435456",  # bytes more than needed, whenever memory is asked for
        "glibc.malloc.mmap_max=0",  # no block is a mapping of its own, which would end with it
        "glibc.malloc.arena_max=1",  # one heap for all threads: those of others are small, and are given back
    )
)


def restart_with_huge_pages() -> None:
    """Starts this program anew, in the same process, with the settings above; does nothing the second time.

    For the first line of a program, before anything is imported that takes time. On other systems, and where the user
    has set GLIBC_TUNABLES, nothing happens.
    """
    if sys.platform != "linux" or VARIABLE in os.environ:
        return
    os.environ[VARIABLE] = TUNABLES
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
