"""Kernels that tests compile go to the user's kernel cache, keyed by all kernel sources, not beside a stale file."""

import streamer  # noqa: F401 - importing it names the cache before a kernel is imported
