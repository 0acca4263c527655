"""Settings of the replicas that contradict each other, or that nothing would read, are refused with a way out."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_parallel.data_parallel.compression.build_wire import make_codec
from hf_parallel.errors import ConfigError
from hf_parallel.settings.config import HFParallelConfig
from hf_parallel.settings.replica_sections import GradientCompressionConfig


REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"gradient_compression": {"density": 0.5}},
        r"gradient_compression\.density=0\.5: expected .*above 0 up to 0\.25",
    ),
    (
        {"gradient_compression": {"density": 0.02}},
        r"density=0\.02 with gradient_compression\.method=none has no effect",
    ),
    (
        {"gradient_compression": {"method": "int8", "density": 0.02}},
        r"density=0\.02 .*method=int8 has no effect: topk use it",
    ),
    (
        {"gradient_compression": {"method": "int8", "block_size": 100}},
        r"block_size=100: it is a multiple of 8 up to 65536\. Set it to 96",
    ),
    ({"gradient_compression": {"method": "int8", "block_size": 131072}}, r"Set it to 65536"),
    (
        {"gradient_compression": {"method": "topk", "error_feedback": False}},
        r"error_feedback=false .*method=topk.*allow_biased to true",
    ),
    ({"gradient_compression": {"method": "int8", "allow_biased": True}}, r"allow_biased=true has no effect"),
    ({"gradient_compression": {"method": "int8", "residual_dtype": "bf16"}}, r"residual_dtype=bf16 has no effect"),
    ({"gradient_compression": {"method": "int9"}}, r"gradient_compression\.method='int9': expected 'none' or a codec"),
    ({"gradient_compression": {"methd": "int8"}}, r"gradient_compression\.methd: unknown key\. Did you mean method\?"),
    (
        {"gradient_compression": {"method": "topk"}, "zero": {"stage": 1}},
        r"method=topk with zero\.stage=1: error feedback.*int8",
    ),
    ({"gradient_compression": {"method": "powersgd"}, "zero": {"stage": 2}}, r"method=powersgd with zero\.stage=2"),
    (
        {"gradient_compression": {"method": "int8"}, "zero": {"stage": 1, "dp_shard_size": 2}},
        r"method=int8 with zero\.dp_shard_size=2 is not available yet",
    ),
    (
        {"gradient_compression": {"method": "int8", "topology": "hierarchical"}, "zero": {"stage": 1}},
        r"topology=hierarchical with zero\.stage=1",
    ),
    ({"zero": {"engine": "native"}}, r"zero\.engine='native' with zero\.stage=0 has no effect"),
    ({"zero": {"dp_shard_size": 2}}, r"zero\.dp_shard_size=2 with zero\.stage=0 has no effect"),
    ({"zero": {"stage": 4}}, r"zero\.stage=4: expected an integer from 0 to 3"),
    ({"local_sgd": {"outer_lr": 0.7}}, r"local_sgd\.outer_lr=0\.7 with local_sgd\.sync_every=1 has no effect"),
    ({"local_sgd": {"sync_every": 4}, "zero": {"stage": 1}}, r"local_sgd\.sync_every=4 with zero\.stage=1"),
    (
        {"local_sgd": {"sync_every": 4}, "gradient_compression": {"method": "int8"}},
        r"sync_every=4 with gradient_compression\.method=int8.*Move the settings to local_sgd\.compression",
    ),
    (
        {"local_sgd": {"sync_every": 4, "compression": {"method": "int5"}}},
        r"local_sgd\.compression\.method='int5': expected 'none' or a codec",
    ),
    (
        {"local_sgd": {"sync_every": 4, "compression": {"method": "int4", "warmup_ratio": 0.1}}},
        r"local_sgd\.compression\.warmup_ratio=0\.1 has no effect",
    ),
    ({"zero": {"stage": 3, "engine": "native"}}, r"engine=native with zero\.stage=3.*auto or fsdp2"),
    ({"zero": {"stage": 1, "engine": "fsdp2"}}, r"engine=fsdp2 with zero\.stage=1.*stage to 2 or 3"),
    ({"zero": {"stage": 3}, "pp_size": 2}, r"zero\.stage=3 with pp_size=2: .*every microbatch.*stage to 1"),
    ({"zero": {"stage": 2, "engine": "fsdp2"}, "pp_size": 2}, r"zero\.engine=fsdp2 with pp_size=2"),
    ({"zero": {"stage": 3, "overlap_gather": True}}, r"overlap_gather=true with zero\.stage=3 has no effect"),
    (
        {"zero": {"stage": 3}, "data_parallel": {"overlap": False}},
        r"data_parallel\.overlap=false with zero\.stage=3 has no effect",
    ),
    (
        {"zero": {"stage": 3, "offload_param": "cpu"}},
        r"offload_param=cpu without the other: .*both to cpu, or both to",
    ),
    ({"zero": {"stage": 3, "offload_optimizer": "cpu"}}, r"zero\.offload_optimizer=cpu without the other"),
    (
        {"zero": {"stage": 2, "offload_param": "cpu"}},
        r"offload_param=cpu with zero\.stage=2 of the native engine: .*stage to 3, or zero\.engine to fsdp2",
    ),
    ({"zero": {"stage": 1, "pin_memory": False}}, r"zero\.pin_memory=false has no effect: .*offload_optimizer to cpu"),
    ({"zero": {"offload_param": "cpu"}}, r"zero\.offload_param='cpu' with zero\.stage=0 has no effect"),
    (
        {"zero": {"stage": 3}, "gradient_compression": {"method": "int4", "error_feedback": False}},
        r"method=int4 with zero\.stage=3: its reduce-scatter carries fp16, bf16 or int8",
    ),
    (
        {"zero": {"stage": 3}, "gradient_compression": {"method": "topk"}},
        r"method=topk with zero\.stage=3: error feedback",
    ),
    (
        {"zero": {"stage": 3}, "gradient_compression": {"method": "int8", "warmup_ratio": 0.1}},
        r"gradient_compression\.warmup_ratio=0\.1 with zero\.stage=3 has no effect",
    ),
    ({"zero": {"stage": 3}, "local_sgd": {"sync_every": 4}}, r"local_sgd\.sync_every=4 with zero\.stage=3"),
    ({"data_parallel": {"bucket_cap_mb": 0}}, r"data_parallel\.bucket_cap_mb=0: expected MiB"),
    ({"data_parallel": {"reduce_dtype": "float16"}}, r"data_parallel\.reduce_dtype='float16': expected dtype"),
    (
        {"data_parallel": {"reduce_dtype": "bfloat16"}, "gradient_compression": {"method": "int8"}},
        r"reduce_dtype='?bfloat16'? with gradient_compression\.method=int8 has no effect.*Remove",
    ),
    (
        {"data_parallel": {"reduce_dtype": "bfloat16"}, "local_sgd": {"sync_every": 4}},
        r"reduce_dtype='?bfloat16'? with local_sgd\.sync_every=4 has no effect",
    ),
    (
        {"data_parallel": {"reduce_dtype": "bfloat16"}, "zero": {"stage": 2, "engine": "deepspeed"}},
        r"reduce_dtype='?bfloat16'? with zero\.engine=deepspeed has no effect",
    ),
    (
        {"data_parallel": {"reduce_dtype": "bfloat16"}, "zero": {"stage": 3}},
        r"reduce_dtype='?bfloat16'? with zero\.stage=3 has no effect",
    ),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED, ids=lambda value: str(value)[:60])
def test_what_would_have_no_effect_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        HFParallelConfig.from_mapping(settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"gradient_compression": {"method": "int8"}},
        {"zero": {"stage": 1}},
        {"local_sgd": {"sync_every": 2}},
        {"data_parallel": {"reduce_dtype": "bfloat16"}},
    ],
    ids=str,
)
def test_one_replica_has_nobody_to_share_with(settings: dict[str, Any]) -> None:
    config = HFParallelConfig.from_mapping({"pp_size": 2, **settings})
    with pytest.raises(ConfigError, match=r"there is one replica.*num_processes to 4"):
        config.dp_size(2)
    assert config.dp_size(4) == 2
    assert HFParallelConfig.from_mapping(settings).dp_size(1) == 1  # one process: a trial run


def test_a_shard_size_divides_the_replicas() -> None:
    config = HFParallelConfig.from_mapping({"zero": {"stage": 1, "dp_shard_size": 3}})
    with pytest.raises(ConfigError, match=r"zero\.dp_shard_size=3 with 4 replicas: it is a divisor of 4"):
        config.dp_size(4)
    assert config.dp_size(6) == 6


@pytest.mark.parametrize("method", ["fp16", "bf16", "int8", "int4", "topk", "onebit"])
def test_every_method_has_a_codec_and_says_what_it_feeds_back(method: str) -> None:
    settings = GradientCompressionConfig(method=method)  # type: ignore[arg-type]
    codec = make_codec(settings)
    assert codec is not None
    x = torch.randn(2 * codec.block)
    assert codec.decode(codec.encode(x)).shape == x.shape
    assert settings.feeds_back == (method in ("int4", "topk", "onebit"))
    assert settings.warmup == (0.1 if method in ("topk", "onebit") else 0.0)
