"""What an option says is what llama.cpp is told: each one, seen where it crosses into the library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

from headrace_gguf.llama import KV_TYPES, library

pytestmark = pytest.mark.gguf

DEFAULT: dict[str, Any] = {"slots": 2, "context_tokens": 256, "batch_tokens": 64, "threads": 1}

# options -> fields of llama.cpp's parameters
CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"n_ctx": 512, "n_seq_max": 2, "n_batch": 64, "n_ubatch": 64, "n_threads": 1, "n_threads_batch": 1}),
    ({"slots": 3, "context_tokens": 300}, {"n_ctx": 1536, "n_seq_max": 3}),
    ({"threads": 2, "batch_threads": 3}, {"n_threads": 2, "n_threads_batch": 3}),
    ({"ubatch_tokens": 32}, {"n_ubatch": 32, "n_batch": 64}),
    ({"kv_type": "bf16"}, {"type_k": KV_TYPES["bf16"], "type_v": KV_TYPES["bf16"]}),
    ({"kv_type": "f32", "kv_type_v": "bf16"}, {"type_k": KV_TYPES["f32"], "type_v": KV_TYPES["bf16"]}),
    ({"flash_attention": "auto"}, {"flash_attn_type": -1}),
    ({"flash_attention": "off"}, {"flash_attn_type": 0}),
    ({"flash_attention": "on"}, {"flash_attn_type": 1}),
    ({"gpu_layers": 0}, {"n_gpu_layers": 0}),
    ({"mmap": True, "mlock": False}, {"load_mode": 1}),
    ({"mmap": False, "mlock": False}, {"load_mode": 0}),
    ({"mmap": True, "mlock": True}, {"load_mode": 3}),
]


@pytest.mark.parametrize(("options", "told"), CASES)
def test_parameters(
    tiny: Callable[..., str], opened: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, options: Any, told: Any
) -> None:
    c, seen = library().c, {}

    def record(name: str) -> None:
        real = getattr(c, name)

        def call(first: Any, params: Any) -> Any:
            seen.update({field: getattr(params, field) for field, *_ in params._fields_})
            return real(first, params)

        monkeypatch.setattr(c, name, call)

    record("llama_model_load_from_file")
    record("llama_init_from_model")
    opened(tiny(), **{**DEFAULT, **options})
    assert {name: seen[name] for name in told} == told
