"""Options of the `toy` backend. What is not set here comes from the `toy://` URI, then from the defaults."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from headrace.options import Options


class ToyOptions(Options):
    kv: Literal["paged", "slots"] | None = None
    """How KV is kept; default paged."""
    blocks: int | None = Field(None, ge=1)
    """Number of KV blocks (paged); default 16384 tokens' worth."""
    block_tokens: int | None = Field(None, ge=1)
    """Tokens per block (paged); default: engine.block_tokens."""
    slots: int | None = Field(None, ge=1)
    """Number of slots; default: engine.max_sequences."""
    slot_tokens: int | None = Field(None, ge=2)
    """Tokens per slot; default: the model's context."""
    partial_trim: bool | None = None
    """Slots accept any trim; false imitates recurrent memory."""
    fork: bool | None = None
    """Slots can be forked; default true."""
