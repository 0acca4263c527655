"""What a codec loses, how many bytes it takes, and that nothing infinite is ever hidden by it."""

from __future__ import annotations

import pytest
import torch

from hf_parallel.data_parallel.compression.codecs import (
    BlockQuantizer,
    CastCompressor,
    GradientCompressor,
    OneBitCompressor,
    TopKCompressor,
)


CODECS: dict[str, GradientCompressor] = {
    "fp16": CastCompressor(torch.float16),
    "bf16": CastCompressor(torch.bfloat16),
    "int8": BlockQuantizer(8, 256),
    "int4": BlockQuantizer(4, 128),
    "onebit": OneBitCompressor(2048),
    "topk": TopKCompressor(0.01, 1024),
    "topk_int8": TopKCompressor(3 / 256, 256, "int8"),
    "topk_wide": TopKCompressor(0.01, 65536),
}
RATIOS = {"fp16": 1.9995, "bf16": 2.0, "int8": 3.93, "int4": 7.5, "onebit": 31.5, "topk": 102, "topk_int8": 102}
# Largest relative L2 error on normal noise; None where little is kept.
ERRORS = {"fp16": 5e-4, "bf16": 3e-3, "int8": 8e-3, "int4": 0.16, "onebit": 0.61}


def noise(length: int) -> torch.Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", CODECS)
def test_every_block_has_the_bytes_it_says(name: str) -> None:
    codec = CODECS[name]
    payload = codec.encode(noise(3 * codec.block))
    assert payload.dtype == torch.uint8
    assert payload.numel() == 3 * codec.bytes_per_block
    assert codec.decode(payload).shape == (3 * codec.block,)
    assert codec.ratio >= RATIOS.get(name, 1.0)


@pytest.mark.parametrize("name", ERRORS)
@pytest.mark.parametrize("magnitude", [1e-36, 1e-30, 1e-6, 1.0, 1e6, 1e30])
def test_the_error_is_relative_to_the_block_whatever_its_magnitude(name: str, magnitude: float) -> None:
    codec = CODECS[name]
    x = noise(4 * max(codec.block, 1024)) * magnitude
    back = codec.decode(codec.encode(x))
    assert float((back.double() - x.double()).norm() / x.double().norm()) <= ERRORS[name]


@pytest.mark.parametrize("name", ["topk", "topk_int8", "topk_wide"])
def test_topk_keeps_the_largest_and_nothing_else(name: str) -> None:
    codec = CODECS[name]
    assert isinstance(codec, TopKCompressor)
    x = noise(2 * codec.block)
    back = codec.decode(codec.encode(x)).view(2, -1)
    for mine, kept in zip(x.view(2, -1), back, strict=True):
        places = mine.abs().topk(codec.kept).indices
        assert int((kept != 0).sum()) <= codec.kept
        torch.testing.assert_close(kept[places], mine[places], rtol=1e-2, atol=0.02)


@pytest.mark.parametrize("name", CODECS)
def test_zeros_stay_zeros(name: str) -> None:
    codec = CODECS[name]
    assert not codec.decode(codec.encode(torch.zeros(2 * codec.block))).abs().any()


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite_is_seen_after_decoding(name: str, value: float) -> None:
    codec = CODECS[name]
    x = noise(2 * codec.block)
    x[codec.block // 2] = value
    back = codec.decode(codec.encode(x))
    assert not torch.isfinite(back[: codec.block].sum())
    assert torch.isfinite(back[codec.block :]).all()


@pytest.mark.parametrize("blocks", [0, 1, 2])
@pytest.mark.parametrize("density", [0.01, 0.02, 0.05])
@pytest.mark.parametrize("kind", ["bf16", "int8"])
def test_topk_takes_any_number_of_blocks(kind: str, density: float, blocks: int) -> None:
    for block in (256, 1024):
        codec = TopKCompressor(density, block, kind)
        sent = noise(blocks * block)
        found = codec.decode(codec.encode(sent))
        assert found.shape == sent.shape
        kept = found != 0
        assert torch.allclose(found[kept], sent[kept], rtol=0.02, atol=0.02)


@pytest.mark.parametrize("blocks", [0, 1])
@pytest.mark.parametrize("name", CODECS)
def test_a_codec_takes_one_block_and_none(name: str, blocks: int) -> None:
    codec = CODECS[name]
    sent = noise(blocks * codec.block)
    assert codec.decode(codec.encode(sent)).shape == sent.shape
