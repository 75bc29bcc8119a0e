"""What exact kernels rely on in torch, and the building blocks for what torch doesn't give."""

from __future__ import annotations

from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch", reason="the reference kernels need torch")

from headrace_plugins.reference.kernels import rowwise  # noqa: E402

SIZES = (1, 2, 3, 5, 7, 8, 9, 16, 45, 100)


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)), dtype=torch.float32)


def differs(f: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> list[str]:
    """Selections of the rows of x for which f gives a row other bits than among all rows."""
    whole, n = f(x), len(x)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(1))
    found = [] if torch.equal(f(x[order]), whole[order]) else ["permuted"]
    for size in SIZES:
        for start in {0, (n - size) // 2, n - size}:
            if not torch.equal(f(x[start : start + size].clone()), whole[start : start + size]):
                found.append(f"{start}:{start + size}")
    return found


SAFE = {
    "exp": torch.exp,
    "log1p": lambda x: torch.log1p(x.abs()),
    "cos": torch.cos,
    "sin": torch.sin,
    "rsqrt": lambda x: (x.abs() + 1e-6).rsqrt(),
    "softmax": lambda x: x.softmax(-1),
    "mean": lambda x: x.square().mean(-1),
    "sum": lambda x: x.sum(-1),
    "rms_norm": lambda x: torch.nn.functional.rms_norm(x, x.shape[-1:], None, 1e-20),
    "sum over streams": lambda x: x.unflatten(1, (3, -1)).sum(1),
    "mean over streams": lambda x: x.unflatten(1, (3, -1)).mean(1),
    "bfloat16": lambda x: x.bfloat16().float(),
    "sigmoid": rowwise.sigmoid,
    "silu": rowwise.silu,
    "softplus": rowwise.softplus,
}


@pytest.mark.parametrize("name", SAFE)
@pytest.mark.parametrize("width", [3, 24, 33, 96, 5121])
def test_rows_are_independent(name: str, width: int) -> None:
    assert not differs(SAFE[name], numbers(100, width) * 4)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (rowwise.sigmoid, torch.sigmoid),
        (rowwise.silu, torch.nn.functional.silu),
        (rowwise.softplus, torch.nn.functional.softplus),
    ],
)
def test_activations_agree_with_torch(ours: Callable[..., torch.Tensor], theirs: Callable[..., torch.Tensor]) -> None:
    x = torch.cat((numbers(1000) * 30, torch.tensor([0.0, -0.0, 1e-30, -1e-30, 88.0, -88.0, 200.0, -200.0])))
    torch.testing.assert_close(ours(x), theirs(x.double()).float(), rtol=1e-6, atol=1e-37)
    assert ours(torch.tensor([torch.nan])).isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("k", "m"), [(64, 24), (66, 8), (35, 2), (33, 17), (64, 5), (256, 312), (1280, 96)])
def test_tiled_products_are_exact(dtype: torch.dtype, k: int, m: int) -> None:
    weight, bias = numbers(m, k).to(dtype), numbers(m).to(dtype)
    x = numbers(100, k).to(dtype)
    assert not differs(lambda rows: rowwise.tiled(rows, weight, bias), x)
    y = rowwise.plain(x.double(), weight.double(), bias.double())
    worst = (rowwise.tiled(x, weight, bias).double() - y).abs().max() / y.abs().max()
    assert worst <= (1e-6 if dtype == torch.float32 else 2**-8)


@pytest.mark.parametrize("m", [5, 24])
@pytest.mark.parametrize("layout", ["slice", "transposed", "unaligned"])
def test_tiled_products_ignore_how_rows_lie_in_memory(layout: str, m: int) -> None:
    weight, x = numbers(m, 64), numbers(16, 64)
    if layout == "slice":
        strided = torch.cat((x, x), 1)[:, :64]
    elif layout == "transposed":
        strided = x.t().contiguous().t()
    else:
        strided = torch.cat((x.new_zeros(1), x.flatten()))[1:].view(16, 64)
        assert strided.data_ptr() % 16
    assert torch.equal(strided, x)
    assert torch.equal(rowwise.tiled(strided, weight), rowwise.tiled(x, weight))


def test_neighbours_that_are_not_numbers_stay_to_themselves() -> None:
    weight, x = numbers(24, 64), numbers(3, 64)
    spoilt = x.clone()
    spoilt[1] = torch.inf
    assert torch.equal(rowwise.tiled(spoilt, weight)[[0, 2]], rowwise.tiled(x, weight)[[0, 2]])


def test_products_of_no_rows() -> None:
    assert rowwise.tiled(numbers(0, 64), numbers(24, 64)).shape == (0, 24)
