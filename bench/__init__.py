"""Benchmarks and the trainer of k3-nano. Importing streamer sets how kernel threads wait and where kernels lie."""

import streamer  # noqa: F401 - what a run of the engine sets, a benchmark of its kernels must set too
