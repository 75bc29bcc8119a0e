"""The torch kernels are held to the class that third parties use, with plain formulas in float64 beside them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest

torch = pytest.importorskip("torch", reason="the reference kernels need torch")

from kernel_caches import make_cache, make_paged  # noqa: E402

from headrace.modeling import CacheFormat, Quantised  # noqa: E402
from headrace.ops import KernelContext  # noqa: E402
from headrace.testing.conformance import KernelConformance  # noqa: E402
from headrace_plugins.reference import specs  # noqa: E402
from headrace_plugins.reference.kernels import formats  # noqa: E402


class TorchKernel(KernelConformance):
    """One of our kernels, by the name of its record."""

    name: ClassVar[str] = "torch"
    context: ClassVar[KernelContext] = KernelContext(device="cpu")

    def make(self, context: KernelContext) -> Callable[..., Any]:
        from importlib import import_module

        (spec,) = (each for each in specs.kernels() if (each.op, each.name) == (self.op, self.name))
        assert spec.exact is self.exact
        module, _, attribute = spec.factory.partition(":")
        kernel: Callable[..., Any] = getattr(import_module(module), attribute)(context)
        return kernel

    def array(self, value: Any) -> Any:
        return (value.float() if value.dtype == torch.bfloat16 else value).numpy()

    def numbers(self, *shape: int) -> Any:
        random = torch.Generator().manual_seed(sum(shape))
        return torch.randn(*shape, generator=random).to(getattr(torch, self.context.compute))


class Bfloat16:
    """Results are rounded to 8 bits once; a sum that the reference rounds the other way is one step away."""

    context = KernelContext(device="cpu", compute="bfloat16")
    rtol, atol = 2**-7, 2**-7


class TestNorm(TorchKernel):
    op, exact = "norm.rms", True

    def inputs(self, n: int) -> dict[str, Any]:
        return {"x": self.numbers(n, 64), "weight": self.numbers(64), "eps": 1e-6}

    def reference(self, x: Any, weight: Any, eps: float) -> Any:
        x = x.double()
        return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight).float()


class TestNormBfloat16(Bfloat16, TestNorm):
    pass


class TestRotation(TorchKernel):
    op, exact = "rope.apply", True

    def inputs(self, n: int) -> dict[str, Any]:
        angles = self.numbers(n, 8).float()
        return {"x": self.numbers(n, 3, 24), "cos": angles.cos(), "sin": angles.sin(), "layout": "halves"}

    def reference(self, x: Any, cos: Any, sin: Any, layout: str) -> Any:
        out = x.double().clone()
        for i in range(8):
            a, b, c, s = x[..., 8 + i].double(), x[..., 16 + i].double(), cos[:, None, i], sin[:, None, i]
            out[..., 8 + i], out[..., 16 + i] = a * c - b * s, b * c + a * s
        return out.float()


class TestRotationBfloat16(Bfloat16, TestRotation):
    pass


class TestDense(TorchKernel):
    op = "linear.dense"
    atol = 1e-5  # sums of about a hundred products up to 10

    def inputs(self, n: int) -> dict[str, Any]:
        return {"x": self.numbers(n, 160), "weight": self.numbers(33, 160) / 8, "bias": self.numbers(33), "wide": True}

    def reference(self, x: Any, weight: Any, bias: Any, wide: bool) -> Any:
        return (x.double() @ weight.double().T + bias.double()).float()


class TestDenseTiled(TestDense):
    name, exact = "torch-tiled", True


class TestDenseTiledBfloat16(TestDenseTiled):
    context = KernelContext(device="cpu", compute="bfloat16")


class TestDensePacked(TestDenseTiled):
    """fp8 codes in blocks of 32 by 32."""

    def inputs(self, n: int) -> dict[str, Any]:
        codes, scales = formats.quantise_fp8_block(self.numbers(64, 96))
        return {"x": self.numbers(n, 96), "weight": Quantised(codes, scales, "fp8_block", (64, 96))}

    def reference(self, x: Any, weight: Quantised) -> Any:
        codes = weight.codes.view(torch.float8_e4m3fn).double()
        scales = (weight.scales.view(torch.uint8).double() - 127).exp2()  # ue8m0
        return (x.double() @ (codes * scales.repeat_interleave(32, 0).repeat_interleave(32, 1)).T).float()


class TestRoute(TorchKernel):
    op, exact = "moe.route", True

    def inputs(self, n: int) -> dict[str, Any]:
        return {"logits": self.numbers(n, 24) * 3, "bias": self.numbers(24), "top": 4, "scale": 1.5}

    def reference(self, logits: Any, bias: Any, top: int, scale: float) -> Any:
        scores = torch.nn.functional.softplus(logits.double()).sqrt()
        ids = [sorted(range(24), key=lambda e, row=row: (-float(row[e]), e))[:top] for row in scores + bias]
        chosen = scores.gather(1, torch.tensor(ids))
        return torch.tensor(ids), (scale * chosen / (chosen.sum(-1, keepdim=True) + 1e-20)).float()


class TestExperts(TorchKernel):
    op = "moe.experts"
    atol = 1e-5  # the same

    def inputs(self, n: int) -> dict[str, Any]:
        w1, w3 = ([self.numbers(24, 32).roll(i, 0) / 4 for i in range(j, j + 6)] for j in (0, 7))
        ids = torch.stack([torch.randperm(6, generator=torch.Generator().manual_seed(i))[:3] for i in range(n)])
        return {"x": self.numbers(n, 32), "ids": ids, "weights": self.numbers(n, 3).float().abs(), "w1": w1, "w3": w3,
                "w2": [each.T.contiguous() for each in w1], "limit": 2.0}  # fmt: skip

    def reference(self, x: Any, ids: Any, weights: Any, w1: Any, w3: Any, w2: Any, limit: float) -> Any:
        out = torch.zeros(len(x), 32, dtype=torch.float64)
        for i, row in enumerate(x.double()):
            for expert, weight in zip(ids[i].tolist(), weights[i].double(), strict=True):
                gate = (w1[expert].double() @ row).clamp(max=limit)
                up = (w3[expert].double() @ row).clamp(-limit, limit)
                out[i] += w2[expert].double() @ (torch.nn.functional.silu(gate) * up * weight)
        return out.float()


class TestExpertsTiled(TestExperts):
    name, exact = "torch-tiled", True


class TestStore(TorchKernel):
    op, exact = "kv.store", True

    def inputs(self, n: int) -> dict[str, Any]:
        slots = torch.randint(-1, 64, (n,), generator=torch.Generator().manual_seed(n))
        return {"cache": make_cache(CacheFormat("float32", 8), 4, 16), "slots": slots, "values": self.numbers(n, 8)}

    def reference(self, cache: Any, slots: Any, values: Any) -> None:
        for slot, value in zip(slots.tolist(), values, strict=True):
            if slot >= 0:
                at = slot % 16 * 32
                cache.pool[slot // 16, at : at + 32] = value.view(torch.uint8)

    def outcome(self, result: Any, arguments: dict[str, Any]) -> tuple[Any, ...]:
        return (arguments["cache"].pool,)


class Paged(TorchKernel):
    """Rows of three sequences over paged entries."""

    lengths: ClassVar = (5, 70, 131)

    def places(self, n: int) -> tuple[Any, Any]:
        """(row, length that the token sees), [n] each."""
        row = torch.arange(n) * 7 % 3
        return row, torch.tensor([1 + i * 11 % self.lengths[r] for i, r in enumerate(row.tolist())])


class TestScore(Paged):
    op = "index.score"
    atol = 1e-5

    def inputs(self, n: int) -> dict[str, Any]:
        keys = make_paged(CacheFormat("float32", 32), list(self.lengths), 16)
        row, visible = self.places(n)
        return {"q": self.numbers(n, 4, 32), "weights": self.numbers(n, 4), "keys": keys.cache, "table": keys.table,
                "row": row, "visible": visible}  # fmt: skip

    def reference(self, q: Any, weights: Any, keys: Any, table: Any, row: Any, visible: Any) -> Any:
        values = make_paged(CacheFormat("float32", 32), list(self.lengths), 16).values
        out = torch.full((len(q), max(self.lengths)), -torch.inf)
        for i, (r, m) in enumerate(zip(row.tolist(), visible.tolist(), strict=True)):
            products = (q[i].double() @ values[r][:m].double().T).relu()
            out[i, :m] = (weights[i].double() @ products).float()
        return out

    def outcome(self, result: Any, arguments: dict[str, Any]) -> tuple[Any, ...]:
        """As many columns as the longest row has anywhere."""
        most = max(self.lengths)
        fill = torch.full((len(result), max(0, most - result.shape[1])), -torch.inf)
        return (torch.cat([result[:, :most], fill], 1),)


class TestScoreTiled(TestScore):
    name, exact = "torch-tiled", True


class TestPagedAttention(Paged):
    op = "attn.paged"

    def inputs(self, n: int) -> dict[str, Any]:
        keys, values = (make_paged(CacheFormat("float32", 2 * 16), list(self.lengths), 16, seed) for seed in (0, 0))
        row, visible = self.places(n)
        return {"q": self.numbers(n, 4, 16), "keys": keys.cache, "values": values.cache, "table": keys.table,
                "row": row, "positions": visible - 1, "scale": 0.25}  # fmt: skip

    def reference(self, q: Any, keys: Any, values: Any, table: Any, row: Any, positions: Any, scale: float) -> Any:
        stored = make_paged(CacheFormat("float32", 2 * 16), list(self.lengths), 16).values
        out = torch.zeros(len(q), 4, 16, dtype=torch.float64)
        for i, (r, p) in enumerate(zip(row.tolist(), positions.tolist(), strict=True)):
            for head in range(4):
                kv = stored[r][: p + 1].double().unflatten(-1, (2, 16))[:, head // 2]
                out[i, head] = torch.softmax(kv @ q[i, head].double() * scale, 0) @ kv
        return out.float()


class TestPagedAttentionTiled(TestPagedAttention):
    name, exact = "torch-tiled", True


def test_the_quick_kernels_are_not_exact(varying_products: None) -> None:
    """What the class finds when one of them claims to be."""

    class Claims(TestDense):
        exact = True

        def make(self, context: KernelContext) -> Callable[..., Any]:
            return TestDense().make(context)

    checks = Claims()
    with pytest.raises(AssertionError, match="numbers differ"):
        checks.test_rows_in_other_company(checks.make(checks.context), 1)
