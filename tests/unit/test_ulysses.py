"""What `sp_size` is combined with, refused with, and what it leaves of a batch to each rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn
from transformers.utils.generic import ModelOutput

from hf_parallel.errors import ConfigError, UnsupportedError
from hf_parallel.settings.config import HFParallelConfig
from hf_parallel.settings.recipes import check_accelerate
from hf_parallel.settings.sequence_rules import method_of
from hf_parallel.ulysses import blocks
from hf_parallel.ulysses.attention import Shared
from hf_parallel.ulysses.exchange import repeats_for
from hf_parallel.ulysses.forward import Part, refuse_odd_inputs, share_forward
from hf_parallel.ulysses.ring import Ring, Route
from hf_parallel.ulysses.whole import Place, WholeRows


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"zero": {"stage": 1, "engine": "deepspeed"}}, "zero.engine=deepspeed"),
    ({"gradient_compression": {"method": "int8"}}, "gradient_compression.method=int8"),
    ({"local_sgd": {"sync_every": 8}}, "local_sgd.sync_every=8"),
    ({"tp_size": 2, "tensor_parallel": {"sequence_parallel": True}}, "tensor_parallel.sequence_parallel=true"),
    ({"pipeline": {"compile_blocks": "inductor"}}, "pipeline.compile_blocks=inductor"),
    ({"chunked_loss": True}, "chunked_loss=true"),
    ({"ep_size": 2}, "ep_size=2"),
    ({"pp_size": 2, "pipeline": {"schedule": "pipedream_2bw"}}, "pipeline.schedule=pipedream_2bw"),
]


@pytest.mark.parametrize(("settings", "named"), REFUSED, ids=[named for _, named in REFUSED])
def test_what_is_not_exact_with_a_shared_sequence_is_refused_by_name(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=f"sp_size=2 with {named} is not available.*or sp_size to 1"):
        HFParallelConfig(sp_size=2, **settings)


def test_the_processes_of_a_copy_are_counted_with_those_of_a_sequence() -> None:
    config = HFParallelConfig(tp_size=2, sp_size=2)
    assert config.dp_size(8) == 2
    with pytest.raises(
        ConfigError, match=r"tp_size \* pp_size \* sp_size = 2 \* 1 \* 2 = 4.*or lower tp_size, pp_size"
    ):
        config.dp_size(6)


def test_zero_partitions_over_a_sequence_without_replicas() -> None:
    assert HFParallelConfig(sp_size=2, zero={"stage": 1}).dp_size(2) == 1
    with pytest.raises(ConfigError, match=r"zero\.stage=1 .*there is one replica"):
        HFParallelConfig(tp_size=2, zero={"stage": 1}).dp_size(2)


def test_a_kind_of_attention_without_a_shared_sequence_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"sp_attention=ring with sp_size=1 has no effect.*Set sp_size to 2"):
        HFParallelConfig(sp_attention="ring")


WANTED = [("auto", 4, "ulysses"), ("auto", 3, "ring"), ("auto", None, "ulysses"), ("ring", 8, "ring")]


@pytest.mark.parametrize(("wanted", "heads", "method"), [*WANTED, ("ulysses", 1, "ulysses")])
def test_the_ring_is_taken_where_heads_run_out(wanted: str, heads: int | None, method: str) -> None:
    assert method_of(wanted, heads, 4) == method


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"dropout": 0.1}, r"dropout=0\.1 of attention weights"),
        ({"softcap": 30.0}, r"softcap=30\.0"),
        ({"s_aux": torch.zeros(4)}, "the tensor s_aux"),
        ({}, "sinks, a number for each head"),
        ({"mask": torch.ones(1, 1, 3, 3)}, r"a mask of shape \(1, 1, 3, 3\)"),
    ],
)
def test_what_a_ring_does_not_compute_is_refused_by_name(given: dict[str, Any], named: str) -> None:
    ring, module = Ring(cast(Any, SimpleNamespace(size=2, rank=0, meet=lambda device: None))), nn.Module()
    if not given:
        module.sinks = nn.Parameter(torch.zeros(4))
    states = (torch.zeros(1, 4, 3, 2), torch.zeros(1, 2, 3, 2), torch.zeros(1, 2, 3, 2))
    with pytest.raises(
        UnsupportedError, match=rf"{named}.* in ring attention with sp_size=2.*Set sp_attention to ulysses"
    ):
        ring.attention(module, states, given.pop("mask", None), given)


def test_keys_move_on_until_the_last_rank_that_sees_them() -> None:
    causal = Route([[part <= rank for part in range(4)] for rank in range(4)])
    assert [causal.reach(part) for part in range(4)] == [3, 2, 1, 0]
    window = Route([[rank - 1 <= part <= rank for part in range(4)] for rank in range(4)])
    assert [window.reach(part) for part in range(4)] == [1, 1, 1, 0]
    assert [Route([[True] * 4] * 4).reach(part) for part in range(4)] == [3] * 4
    assert Route([[False, False]] * 2).reach(0) == 0


@pytest.mark.parametrize("tile", [1, 50, 2**25])
def test_blocks_in_tiles_merge_to_attention_of_all_keys(tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "TILE", tile)
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, heads, 6, 4, dtype=torch.float64) for heads in (4, 2, 2))
    places, mask = torch.arange(6), torch.rand(1, 1, 6, 3) < 0.5
    causal = (places[:3] <= places[:, None]).expand(1, 1, 6, 3)
    parts = [blocks.Block(key[:, :, :3], value[:, :, :3], None, True, 0.5)]
    parts += [blocks.Block(key[:, :, 3:], value[:, :, 3:], mask, False, 0.5)]
    output, sums = blocks.merged(*(blocks.attend(query, part) for part in parts))
    leaves = [x.clone().requires_grad_() for x in (query, key, value)]
    repeated = [x.repeat_interleave(2, 1) for x in leaves[1:]]
    both = torch.cat([causal, mask], -1)
    expected = torch.nn.functional.scaled_dot_product_attention(leaves[0], *repeated, attn_mask=both, scale=0.5)
    assert torch.allclose(output, expected)
    grad = torch.randn_like(output)
    wanted = torch.autograd.grad(expected, leaves, grad)
    found = [blocks.attend_backward(query, part, grad, sums, (output * grad).sum(-1)) for part in parts]
    assert torch.allclose(found[0][0] + found[1][0], wanted[0])
    for place in (1, 2):
        assert torch.allclose(torch.cat([part[place] for part in found], 2), wanted[place])


@pytest.mark.parametrize("key", ["parallelism_config_sp_size", "parallelism_config_cp_size"])
def test_sizes_of_accelerate_are_refused_with_ours_named(key: str) -> None:
    section = {key: 2, "hf_parallel": {"sp_size": 2}}
    with pytest.raises(ConfigError, match=rf"{key}=2 beside.*set parallelism_config\.hf_parallel\.sp_size"):
        check_accelerate(
            HFParallelConfig(sp_size=2),
            {"distributed_type": "MULTI_GPU", "num_processes": 2, "parallelism_config": section},
        )


def test_a_name_that_other_programs_have_for_it_is_answered() -> None:
    with pytest.raises(ConfigError, match=r"context_parallel_size: .*Did you mean sp_size\?"):
        HFParallelConfig(context_parallel_size=2)


@pytest.mark.parametrize("name", ["cu_seq_lens_q", "pixel_values"])
def test_an_input_that_is_not_known_to_be_shared_is_refused(name: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"argument {name}.* with sp_size=2.*or set sp_size to 1"):
        refuse_odd_inputs({"input_ids": torch.zeros(1, 4), name: torch.zeros(3)}, 2)


def test_what_a_collator_of_packed_rows_gives_says_where_it_comes_from() -> None:
    with pytest.raises(
        UnsupportedError, match=r"argument cu_seq_lens_q \(a collator that packs rows gives it: padding_free"
    ):
        refuse_odd_inputs({"input_ids": torch.zeros(1, 4), "cu_seq_lens_q": torch.zeros(3)}, 2)


@pytest.mark.parametrize("length", [1, 5, 8])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_parts_are_the_row_filled_up_at_its_end(length: int, size: int) -> None:
    row, each = torch.arange(2 * length).view(2, length), -(-length // size)
    parts = [Part(length, rank * each, each).of(row, fill=-100) for rank in range(size)]
    whole = torch.cat(parts, dim=1)
    assert whole.shape == (2, size * each)
    assert torch.equal(whole[:, :length], row)
    assert bool((whole[:, length:] == -100).all())


def test_a_row_is_filled_up_with_its_last_token() -> None:
    row = torch.arange(5).view(1, 5)
    assert Part(5, 4, 2).of(row).tolist() == [[4, 4]]
    assert Part(2, 4, 2).of(row[:, :2]).tolist() == [[1, 1]]


@pytest.mark.parametrize(
    ("length", "positions", "mask"), [(62, [*range(42, 63)], None), (64, [*range(44, 64), 63, 63], [1] * 64)]
)
def test_what_fills_up_a_row_has_positions_that_the_model_has(
    length: int, positions: list[int], mask: list[int] | None
) -> None:
    """Of the last of three ranks. Positions that stand still would begin a document, but for the mask."""
    model, seen = nn.Module().eval(), {}
    model.config = cast(Any, SimpleNamespace(max_position_embeddings=64))

    def forward(input_ids: Any = None, attention_mask: Any = None, position_ids: Any = None) -> ModelOutput:
        seen.update(mask=attention_mask, positions=position_ids)
        return ModelOutput()

    shared = Shared(cast(Any, SimpleNamespace(size=3, rank=2)))
    share_forward(model, forward, shared)(input_ids=torch.zeros(1, length, dtype=torch.long))
    assert seen["positions"].tolist() == [positions]
    assert (seen["mask"] if mask is None else seen["mask"].tolist()) == (mask and [mask])


class Counts(nn.Module):
    """Counts positions by the shape of its ids, and reads a table of them before it goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.went_on = nn.Embedding(8, 2), 0

    def forward(self, input_ids: torch.Tensor) -> ModelOutput:
        made = self.table(torch.arange(input_ids.shape[1]))
        self.went_on += 1
        return ModelOutput(made=made)


def test_a_module_that_sees_whole_rows_gives_the_part_of_a_rank_and_the_model_goes_on_once() -> None:
    model, whole = Counts(), WholeRows({"table": Place(calls=1, dim=0)})
    undo = whole.install(model)
    ids, part = torch.zeros(1, 6, dtype=torch.long), Part(6, 3, 3)
    whole.begin(model.forward, {"input_ids": ids})
    with whole.seen(part.of):
        made = model(part.of(ids))["made"]
    assert model.went_on == 1
    assert torch.equal(made, model.table.weight[3:6])
    assert made.requires_grad
    undo()
    assert torch.equal(model(part.of(ids))["made"], model.table.weight[:3])


class Angles(nn.Module):
    """Two tables of positions, which depend on the last one."""

    def forward(
        self, x: torch.Tensor, position_ids: torch.Tensor, kind: str = ""
    ) -> tuple[torch.Tensor, torch.Tensor]:
        made = (position_ids * position_ids.max())[..., None].float()
        return made, -made


def test_a_table_of_positions_sees_those_of_whole_rows() -> None:
    """As they are, or as a view for all rows; other numbers stay."""
    model = nn.ModuleDict({"rotary": Angles()})
    whole = WholeRows(tables=("rotary",))
    whole.install(model)
    x, positions, part = torch.zeros(2, 3, 1), torch.arange(6)[None], Part(6, 0, 3)
    local = positions[:, :3] + 0
    with whole.seen(part.of):
        whole.positions = local, positions
        cos, sin = model["rotary"](x, position_ids=local, kind="full")
        assert cos[..., 0].tolist() == [[0, 5, 10]] == (-sin[..., 0]).tolist()
        assert model["rotary"](x, local.expand(2, -1))[0][..., 0].tolist() == [[0, 5, 10]] * 2
        assert model["rotary"](x, torch.arange(3)[None])[0][..., 0].tolist() == [[0, 2, 4]]
    assert model["rotary"](x, local)[0][..., 0].tolist() == [[0, 2, 4]]


@pytest.mark.parametrize(("kv_heads", "size", "times"), [(2, 2, 1), (1, 2, 2), (2, 4, 2), (8, 4, 1), (2, 3, 3)])
def test_key_value_heads_are_repeated_until_the_ranks_divide_them(kv_heads: int, size: int, times: int) -> None:
    assert repeats_for(kv_heads, size) == times
    assert kv_heads * times % size == 0
