"""Options that llama.cpp would take as another number, or end the process over, are refused before it sees them."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from headrace_gguf.options import GGUFOptions

BEYOND = 1 << 31


@pytest.mark.parametrize(
    "options",
    [
        {"threads": 513},
        {"batch_threads": 513},
        *({name: BEYOND} for name in ("context_tokens", "batch_tokens", "ubatch_tokens", "gpu_layers", "threads")),
        *({"sampler": "native", "native_sampler": {name: BEYOND - 1}} for name in ("penalty_last_n", "dry_last_n")),
        {"sampler": "native", "native_sampler": {"dry_allowed_length": BEYOND}},
    ],
)
def test_numbers_beyond_what_llama_cpp_counts(options: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="less than or equal"):
        GGUFOptions.model_validate(options)
