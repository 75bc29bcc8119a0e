"""Without a seed output repeats, from one process to the next too; a random one is asked for."""

from __future__ import annotations

import os
import subprocess
import sys

SCRIPT = """
from headrace.llm import LLM
with LLM("toy://vocab=300,seed=3,eos_rate=0.0") as llm:
    for params in ({}, {"n": 3}, {"seed": "random"}):
        output = llm.generate("hello", {"temperature": 1.5, "top_p": 1.0, "max_tokens": 24, **params})
        print([completion.token_ids for completion in output.completions])
"""


def generated(hash_seed: str) -> list[str]:
    env = os.environ | {"PYTHONHASHSEED": hash_seed}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.splitlines()


def test_two_processes_say_the_same_unless_the_seed_is_random() -> None:
    one, two = generated("1"), generated("2")
    assert one[0] == two[0], "no seed"
    assert one[1] == two[1], "no seed, three samples"
    assert one[2] != two[2], "a random seed"
    assert one[2] != one[0]
