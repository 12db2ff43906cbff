"""Which kernels this CPU can run. Asked before one is defined: LLVM aborts the process over a missing feature."""

import llvmlite.binding
from numba import config

_VNNI = frozenset(("avx512f", "avx512bw", "avx512vnni"))
_WITH_AVX2 = ("haswell", "x86-64-v3")  # names that a user may compile for and that are known here


def _features() -> frozenset[str]:
    """Features that numba compiles for: the host's, unless the user named another CPU or other features."""
    features, name = getattr(config, "CPU_FEATURES", None), getattr(config, "CPU_NAME", None)
    if features is not None:
        return frozenset(feature[1:] for feature in features.split(",") if feature.startswith("+"))
    if name is not None:
        return frozenset(("avx2",)) if name in _WITH_AVX2 else frozenset()
    return frozenset(feature for feature, present in llvmlite.binding.get_host_cpu_features().items() if present)


HAS_VNNI = _features() >= _VNNI
HAS_AVX2 = "avx2" in _features()
