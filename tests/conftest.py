"""What all tests share."""

from __future__ import annotations

import os

from hypothesis import settings

# Before torch is loaded: on the tiny tensors of tests its threads do nothing but wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile("headrace", deadline=None)  # a busy machine is no failure
settings.load_profile("headrace")
