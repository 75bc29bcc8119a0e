"""Tiny random models of any architecture that llama.cpp knows, made from a seed.

llama.cpp says itself which tensors an architecture has: it is given metadata without weights, calls back once per
tensor that it wants, and those are written with random values.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mamba": {
        "attention.head_count": 0, "ssm.conv_kernel": 4, "ssm.inner_size": 128, "ssm.state_size": 16,
        "ssm.time_step_rank": 4, "feed_forward_length": 0,
    },
    "lfm2": {"shortconv.l_cache": 3, "attention.head_count_kv": [0, 2, 0]},
    "gemma3": {"attention.sliding_window": 32},
}  # fmt: skip
"""Attention, recurrent, hybrid, sliding window."""

SPECIAL = ("<|end|>", "<|im_start|>", "<|im_end|>")
N_VOCAB = 256 + len(SPECIAL) + 1
BOS, EOS = 256, 258


def byte_tokens() -> list[str]:
    """The byte-level BPE alphabet of GPT-2: token i is byte i."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in printable]
    names = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(rest)}
    return [names[byte] for byte in range(256)]


def write_model(path: Path, arch: str = "llama", seed: int = 0, extra: dict[str, Any] | None = None) -> str:
    """Write a model of some 100 kB. extra: more metadata, full keys."""
    scratch = path.with_suffix(".meta")
    _writer(scratch, arch, extra).close_all()
    shapes = _wanted_tensors(scratch)
    scratch.unlink()
    writer = _writer(path, arch, extra)
    rng = np.random.default_rng(seed)
    for name, shape in shapes.items():
        if name.endswith((".scale", ".input_scale")) or (name.endswith(".bias") and "ssm" not in name):
            continue  # optional
        values = rng.normal(0, 0.5 if name.startswith("token_embd") else 0.2, shape).astype(np.float32)
        if "norm" in name:
            values = np.ones(shape, np.float32)
        if "ssm_a" in name:
            values = -np.abs(values) - 0.05
        writer.tensor(name, values)
    writer.close_all()
    return str(path)


class _writer:
    def __init__(self, path: Path, arch: str, extra: dict[str, Any] | None) -> None:
        import gguf

        self._gguf = gguf.GGUFWriter(str(path), arch)
        w, head_dim = self._gguf, 16
        values: dict[str, Any] = {
            "context_length": 512, "embedding_length": 64, "block_count": 3, "feed_forward_length": 96,
            "attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": head_dim,
            "attention.value_length": head_dim, "rope.dimension_count": head_dim, "vocab_size": N_VOCAB,
            "attention.layer_norm_rms_epsilon": 1e-5,
        }  # fmt: skip
        values |= ARCHITECTURES[arch]
        for name, value in [(f"{arch}.{name}", value) for name, value in values.items()] + list((extra or {}).items()):
            if isinstance(value, bool):
                w.add_bool(name, value)
            elif isinstance(value, int):
                w.add_uint32(name, value)
            elif isinstance(value, float):
                w.add_float32(name, value)
            elif isinstance(value, str):
                w.add_string(name, value)
            else:
                w.add_array(name, value)
        w.add_name(f"tiny {arch}")
        w.add_tokenizer_model("gpt2")
        w.add_tokenizer_pre("gpt-2")
        w.add_token_list([*byte_tokens(), *SPECIAL, "Ġt"])
        w.add_token_types([1] * 256 + [3] * len(SPECIAL) + [1])
        w.add_token_merges(["Ġ t"])
        w.add_bos_token_id(BOS)
        w.add_eos_token_id(EOS)
        if "tokenizer.ggml.add_bos_token" not in (extra or {}):
            w.add_add_bos_token(False)

    def tensor(self, name: str, values: np.ndarray) -> None:
        self._gguf.add_tensor(name, values)

    def close_all(self) -> None:
        self._gguf.write_header_to_file()
        self._gguf.write_kv_data_to_file()
        self._gguf.write_tensors_to_file()
        self._gguf.close()


class _InitParams(ctypes.Structure):
    _fields_ = (("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p))


def _wanted_tensors(path: Path) -> dict[str, tuple[int, ...]]:
    """Name -> numpy shape of every tensor that llama.cpp asks for."""
    from headrace_gguf.llama import library

    c = library().c
    ggml = ctypes.CDLL(str(next((Path(c.__file__).parent / "lib").glob("libggml-base.*"))))
    ggml.gguf_init_from_file.restype = ctypes.c_void_p
    ggml.gguf_init_from_file.argtypes = [ctypes.c_char_p, _InitParams]
    ggml.ggml_get_name.restype, ggml.ggml_get_name.argtypes = ctypes.c_char_p, [ctypes.c_void_p]
    ggml.ggml_nbytes.restype, ggml.ggml_nbytes.argtypes = ctypes.c_size_t, [ctypes.c_void_p]
    ggml.ggml_n_dims.argtypes = [ctypes.c_void_p]
    ggml.ggml_backend_tensor_set.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]
    metadata = ggml.gguf_init_from_file(str(path).encode(), _InitParams(True, None))
    shapes: dict[str, tuple[int, ...]] = {}

    @c.llama_model_set_tensor_data_t
    def wanted(tensor: int, _: Any) -> None:
        dims = (ctypes.c_int64 * 4).from_address(tensor + 16)  # ggml_tensor.ne
        n_dims = max(1, ggml.ggml_n_dims(tensor))
        shapes[ggml.ggml_get_name(tensor).decode()] = tuple(reversed(dims[:n_dims]))
        zeros = (ctypes.c_char * ggml.ggml_nbytes(tensor))()
        ggml.ggml_backend_tensor_set(tensor, zeros, 0, len(zeros))

    model = c.llama_model_init_from_user(metadata, wanted, None, c.llama_model_default_params())
    assert model, f"llama.cpp refuses the metadata of {path}"
    c.llama_model_free(model)
    return shapes
