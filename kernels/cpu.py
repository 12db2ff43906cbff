"""Which kernels this CPU can run. Asked before one is defined: LLVM aborts the process over a missing feature."""

import llvmlite.binding
from numba import config

_VNNI = ("avx512f", "avx512bw", "avx512vnni")


def _features() -> frozenset[str]:
    """Features that numba compiles for: the host's, unless the user named another CPU or other features."""
    features, name = getattr(config, "CPU_FEATURES", None), getattr(config, "CPU_NAME", None)
    if features is not None:
        return frozenset(feature[1:] for feature in features.split(",") if feature.startswith("+"))
    if name is not None:
        return frozenset()  # what that CPU has only LLVM knows; take the path that runs everywhere
    return frozenset(feature for feature, present in llvmlite.binding.get_host_cpu_features().items() if present)


HAS_VNNI = all(feature in _features() for feature in _VNNI)
