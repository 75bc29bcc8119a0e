"""DeepSeek-V4.1 beside mlx-lm's own implementation, where that is installed (pip install "mlx[cpu]" mlx-lm).

It runs in a process of its own, on random checkpoints that this test writes. It knows no Engram, images or drafter, and
fills a selection with entries outside the candidate blocks when they hold too few: sizes here never let that happen.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the reference backend needs PyTorch")

from golden import ModelGolden, assert_rows, rel  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from v41_rig import make_rig, reference_ops  # noqa: E402

from headrace.modeling import ModelContext  # noqa: E402
from headrace_plugins.models.deepseek_v41.model import DeepseekV41  # noqa: E402

pytestmark = pytest.mark.skipif(
    find_spec("mlx") is None or find_spec("mlx_lm") is None, reason='needs mlx-lm: pip install "mlx[cpu]" mlx-lm'
)

TEXT: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 128, "num_hidden_layers": 5, "num_attention_heads": 4, "head_dim": 64,
    "qk_rope_head_dim": 16, "q_lora_rank": 64, "o_groups": 2, "o_lora_rank": 32, "moe_intermediate_size": 64,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "sliding_window": 8, "compress_ratios": [0, 2, 2, 1, 1],
    "kv_source_layer_ids": [1, 3], "index_source_layer_ids": [1, 3, 4], "index_n_heads": 4, "index_head_dim": 32,
    "index_topk": 4, "engram_layer_ids": [], "max_position_embeddings": 1024,
    "rope_scaling": {"type": "yarn", "factor": 2, "original_max_position_embeddings": 64},
}  # fmt: skip

SCRIPT = """
import json, sys, types, importlib.util
from pathlib import Path
for name in ("mlx_lm", "mlx_lm.models"):  # without what the packages themselves import, which is a lot
    package = types.ModuleType(name)
    package.__path__ = list(importlib.util.find_spec("mlx_lm").submodule_search_locations) if name == "mlx_lm" else [
        str(Path(path) / "models") for path in sys.modules["mlx_lm"].__path__]
    sys.modules[name] = package
import mlx.core as mx
from mlx_lm.models import deepseek_v41 as module

folder = Path(sys.argv[1])
mx.set_default_device(mx.cpu)
if sys.argv[2] == "plain":
    module._fake_quant_fp8 = lambda x, block_size=32: x
    module._fake_quant_fp4 = lambda x, **_: x
model = module.Model(module.ModelArgs.from_dict(json.loads((folder / "config.json").read_text())))
model.load_weights(list(model.sanitize(mx.load(str(folder / "model.safetensors"))).items()))
model.set_dtype(mx.float32)
inputs = mx.load(str(folder / "inputs.safetensors"))
ids = inputs["ids"][None]
cache, parts, start = model.make_cache(), [], 0
for count in inputs["chunks"].tolist():
    parts.append(model(ids[:, start : start + count], cache)[0])
    start += count
mx.save_safetensors(str(folder / "outputs.safetensors"), {
    "once": model(ids)[0], "decoded": mx.concatenate(parts)})
"""


def random_model(folder: Path, seed: int, **text: Any) -> ModelGolden:
    """A random checkpoint, numbers of bfloat16 in float32."""
    config = {"model_type": "deepseek_v41", "text_config": TEXT | text}
    generator = torch.Generator().manual_seed(seed)

    def number(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        values = torch.randn(shape, generator=generator)
        if name.endswith("norm.weight"):
            values = 1 + 0.1 * values
        elif name.endswith(("base", "scale", "sink", "bias", "bias_vl")):
            values = 0.3 * values
        elif name != "embed.weight":
            values = values / shape[-1] ** 0.5
        return values.bfloat16().float()

    model = DeepseekV41(config, reference_ops(), ModelContext(block_tokens=16, slack_tokens=5))
    save_file({spec.name: number(spec.name, spec.shape) for spec in model.tensors()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    ids = torch.randint(3, TEXT["vocab_size"], (46,), generator=generator)
    chunks = torch.tensor([11, 1, 1, 4, 1, 1, 1, 7] + [1] * 19)
    save_file({"ids": ids, "chunks": chunks}, folder / "inputs.safetensors")
    return ModelGolden(folder, {"ids": ids, "chunks": chunks}, {})


def mlx_logits(folder: Path, cache: str) -> dict[str, torch.Tensor]:
    subprocess.run([sys.executable, "-c", SCRIPT, str(folder), cache], check=True, timeout=300)
    return dict(load_file(folder / "outputs.safetensors"))


SEED = 1
CANDIDATES = {"candidate_source_layer_id": 3, "candidate_topk_blocks": 3, "candidate_block_size": 2}


@pytest.mark.parametrize("text", [{}, CANDIDATES], ids=["all entries", "candidates"])
@pytest.mark.parametrize("cache", ["plain", "quantised"])
def test_mlx_lm_computes_the_same(tmp_path: Path, cache: str, text: dict[str, Any]) -> None:
    """With rounded caches one number in a neighbouring bin moves a random model this small by percents; the seed is
    one without such a number."""
    made = random_model(tmp_path, SEED, **text)
    theirs = mlx_logits(tmp_path, cache)
    rig = make_rig(made, cache=cache)
    ids, chunks = made.expected["ids"].tolist(), made.expected["chunks"].tolist()
    once, decoded = rig.logits(ids), rig.logits(ids, chunks)
    if cache == "plain":
        assert rel(once, theirs["once"]) <= 1e-4
        assert rel(decoded, theirs["decoded"]) <= 1e-4
    else:
        assert_rows(once, theirs["once"])
        assert_rows(decoded, theirs["decoded"])
