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
    window: int | None = Field(None, ge=2)
    """Positions that are read from a ring beside the blocks, as sliding windows are (paged); default: no rings."""
    slack: int | None = Field(None, ge=0)
    """Positions that rings are longer than the window, for rejected drafts; default 8."""
    snapshots: int | None = Field(None, ge=0)
    """Copies of rings that are kept for prefix hits; default 32, or 0 with replay."""
    replay: int | None = Field(None, ge=0)
    """Tokens before a prefix hit that run again to rebuild rings, where there are no snapshots; default 0."""
