"""What all tests share."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("headrace", deadline=None)  # a busy machine is no failure
settings.load_profile("headrace")
