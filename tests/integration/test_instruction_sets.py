"""The same bits on every instruction set: the bundled model compiled for this CPU and for one without AVX-512."""

import hashlib
import os
import subprocess
import sys

import pytest

PROGRAM = """
import hashlib, sys
from streamer import LLM, SamplingParams
digest = hashlib.sha256()
with LLM() as llm:
    greedy = SamplingParams(temperature=0.0, max_tokens=12)
    for _ in llm.stream("It is a truth universally acknowledged", greedy, lambda _, x: digest.update(x.tobytes())):
        pass
print(digest.hexdigest())
"""


def _digest(cpu: str | None) -> str:
    """SHA-256 of all logits of a short run, computed by a process of its own."""
    environment = {name: value for name, value in os.environ.items() if name != "NUMBA_CPU_NAME"}
    if cpu:
        environment["NUMBA_CPU_NAME"] = cpu
    run = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True)
    assert len(run.stdout.strip()) == hashlib.sha256().digest_size * 2
    return run.stdout.strip()


@pytest.mark.slow
def test_logits_do_not_depend_on_the_instruction_set() -> None:
    assert _digest("haswell") == _digest(None)
