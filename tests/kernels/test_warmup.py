"""warm_up compiles every kernel that there is, and reports its progress."""

import subprocess
import sys

PROGRAM = """
import importlib, pkgutil
import kernels
from kernels.cpu import HAS_AVX2, HAS_VNNI
from kernels.warmup import warm_up
from numba.core.registry import CPUDispatcher

progress = []
warm_up(lambda done, total: progress.append((done, total)))
total = progress[0][1]
assert progress == [(done, total) for done in range(total + 1)], progress
seen = {}
for info in pkgutil.iter_modules(kernels.__path__):
    module = importlib.import_module(f"kernels.{info.name}")
    for name, item in vars(module).items():
        if isinstance(item, CPUDispatcher) and item.targetoptions.get("nogil"):  # else a part of kernels
            seen[f"{item.__module__}.{name}"] = len(item.signatures)
# the path this CPU does not take
unused = "kernels.expert._expert" if HAS_AVX2 or HAS_VNNI else "kernels.expert_simd._expert"
print(*sorted(name for name, signatures in seen.items() if signatures != (name != unused)))
assert len(seen) >= 18, seen
"""


def test_every_kernel_is_compiled_for_one_signature() -> None:
    """In a process of its own: other tests compile kernels too. Two signatures would be two types of one argument."""
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == []
