"""Optimizer state by name: read back exactly, whoever holds what, and never taken for that of other parameters.

If these fail, a resumed run steps with the moments of other parameters, or with those of another rule.
"""

from __future__ import annotations

import dataclasses
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from tp_models import ledger_of

from hf_parallel.checkpoints.state.dcp import TensorIndex, save_pieces
from hf_parallel.checkpoints.state.groups import OWN, match_groups, of_these_groups, put_together
from hf_parallel.checkpoints.state.optimizer import OptimizerView, state_pieces
from hf_parallel.checkpoints.state.pieces import Piece
from hf_parallel.checkpoints.state.restore import SavedState
from hf_parallel.checkpoints.state.training_state import (
    DESCRIPTION,
    TENSORS,
    Holdings,
    load_training_state,
    read_description,
    rng_source,
    snapshot,
    write_snapshot,
)
from hf_parallel.errors import CheckpointError
from hf_parallel.mesh.groups import Mesh
from hf_parallel.mesh.shape import MeshShape
from hf_parallel.tensor_parallel.layout import ShardSpec


ALONE = Mesh.build(MeshShape(1, 1, 1), timeout=timedelta(seconds=5))


def model() -> nn.ParameterDict:
    generator = torch.Generator().manual_seed(0)
    return nn.ParameterDict({name: nn.Parameter(torch.randn(3, 2, generator=generator)) for name in ("a", "b", "c")})


def adamw(parameters: nn.ParameterDict, **options: Any) -> torch.optim.Optimizer:
    groups = [{"params": [parameters["a"], parameters["b"]]}, {"params": [parameters["c"]], "lr": 0.3}]
    return torch.optim.AdamW(groups, lr=0.1, **options)


def trained(kind: Any = adamw) -> tuple[torch.optim.Optimizer, nn.ParameterDict]:
    parameters = model()
    optimizer = kind(parameters)
    for parameter in parameters.values():
        parameter.grad = torch.randn(3, 2, generator=torch.Generator().manual_seed(1))
    optimizer.step()
    return optimizer, parameters


def holdings(parameters: nn.ParameterDict) -> Holdings:
    return Holdings(ledger_of(parameters), ALONE, dict(parameters.items()), {})


def save(folder: Path, optimizer: torch.optim.Optimizer, parameters: nn.ParameterDict) -> None:
    held = holdings(parameters)
    folder.mkdir(exist_ok=True)
    write_snapshot(folder, snapshot(folder, held, optimizer), held.mesh)


def assert_equal(
    optimizer: torch.optim.Optimizer, other: torch.optim.Optimizer, names: nn.ParameterDict, others: nn.ParameterDict
) -> None:
    for name, parameter in names.items():
        mine, theirs = optimizer.state[parameter], other.state[others[name]]
        assert mine.keys() == theirs.keys()
        for key, value in mine.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(theirs[key])), key


@pytest.mark.parametrize(
    "kind",
    [
        adamw,
        lambda named: torch.optim.AdamW(named.values(), lr=0.1, amsgrad=True),
        lambda named: torch.optim.SGD(named.values(), lr=0.1, momentum=0.9),
        lambda named: torch.optim.Adafactor(named.values(), lr=0.1),
    ],
    ids=["adamw", "amsgrad", "sgd", "adafactor"],
)
def test_state_is_read_back_exactly(kind: Any, tmp_path: Path) -> None:
    optimizer, parameters = trained(kind)
    save(tmp_path, optimizer, parameters)
    others = model()
    fresh = kind(others)
    for group in fresh.param_groups:
        group["lr"] = 5.0
    load_training_state(tmp_path, holdings(others), fresh)
    assert_equal(optimizer, fresh, parameters, others)
    assert [group["lr"] for group in fresh.param_groups] == [group["lr"] for group in optimizer.param_groups]


def test_groups_are_matched_by_name(tmp_path: Path) -> None:
    optimizer, parameters = trained()
    save(tmp_path, optimizer, parameters)
    others = model()
    fresh = torch.optim.AdamW([{"params": [others["c"]]}, {"params": [others["b"], others["a"]]}], lr=5.0)
    assert load_training_state(tmp_path, holdings(others), fresh).order == [1, 0]
    assert_equal(optimizer, fresh, parameters, others)
    assert [group["lr"] for group in fresh.param_groups] == [0.3, 0.1]


def groups_of(view: OptimizerView) -> list[dict[str, Any]]:
    """As a checkpoint has them: their rates differ."""
    return [
        {"lr": group["lr"], "params": names}
        for group, names in zip(view.optimizer.param_groups, view.group_names, strict=True)
    ]


def test_other_groups_are_refused_by_name() -> None:
    optimizer, parameters = trained()
    saved = groups_of(OptimizerView(optimizer, dict(parameters.items())))

    def matched(*groups: list[str]) -> list[int]:
        made = torch.optim.AdamW([{"params": [parameters[name] for name in group]} for group in groups])
        return match_groups(saved, OptimizerView(made, dict(parameters.items())))

    assert matched(["a", "b"], ["c"]) == [0, 1]
    with pytest.raises(CheckpointError, match=r"has 2 parameter groups, this run's AdamW has 1\."):
        matched(["a", "b", "c"])
    with pytest.raises(
        CheckpointError, match=r"group 1 of this run's AdamW \(with b\) is not one of the checkpoint's"
    ):
        matched(["a"], ["b", "c"])
    with pytest.raises(CheckpointError, match=r"b is not trained now and was when the checkpoint was saved"):
        matched(["a"], ["c"])
    saved[0]["params"].remove("a")
    with pytest.raises(CheckpointError, match=r"a is trained now and was not when the checkpoint was saved"):
        matched(["a", "b"], ["c"])


def test_groups_that_each_stage_has_for_itself_are_all_kept_in_the_order_of_the_model() -> None:
    stages = [
        [{"lr": 1.0, "params": ["a"]}, {"lr": 2.0, "params": ["b"]}],
        [{"lr": 2.0, "params": ["d"]}, {"lr": 1.0, "params": ["c"]}, {"lr": 1.0, "params": []}],
    ]
    found = put_together([*stages, *stages], "abcd")  # of two replicas
    assert [group["params"] for group in found.saved] == [["a"], ["b"], ["c"], ["d"]]
    assert [group["lr"] for group in found.saved] == [1.0, 2.0, 1.0, 2.0]
    assert found.sources == [(0, 0), (0, 1), (1, 1), (1, 0)]


def test_groups_of_the_whole_model_stay_one_over_the_stages() -> None:
    stages = [
        [{"lr": 1.0, "params": ["a"]}, {"lr": 2.0, "params": []}],
        [{"lr": 1.0, "params": ["c"]}, {"lr": 2.0, "params": ["b"]}],
    ]
    found = put_together(stages, "abc")
    assert [group["params"] for group in found.saved] == [["a", "c"], ["b"]]
    assert found.sources is None


def test_groups_with_the_same_settings_may_be_cut_and_joined() -> None:
    parameters = model()
    named = dict(parameters.items())

    def matched(saved: list[dict[str, Any]], *groups: tuple[float, list[str]]) -> list[int]:
        made = torch.optim.SGD([{"params": [named[name] for name in names], "lr": rate} for rate, names in groups])
        return match_groups(saved, OptimizerView(made, named))

    stages = [{"lr": 1.0, "params": ["a"]}, {"lr": 2.0, "params": ["b"]}, {"lr": 1.0, "params": ["c"]}]
    assert matched(stages, (1.0, ["a", "c"]), (2.0, ["b"])) == [0, 1]
    assert matched(stages, (1.0, ["c"]), (1.0, []), (1.0, ["a"]), (2.0, ["b"])) == [2, OWN, 0, 1]
    whole = [{"lr": 1.0, "params": ["a", "b", "c"]}]
    assert matched(whole, (1.0, ["a"]), (1.0, ["b", "c"])) == [0, 0]
    with pytest.raises(CheckpointError, match=r"has 1 parameter groups, this run's SGD has 2\."):
        matched(whole, (1.0, ["a"]), (2.0, ["b", "c"]))
    with pytest.raises(CheckpointError, match=r"group 0 of this run's SGD \(with a\) is not one of the checkpoint's"):
        matched(stages, (1.0, ["a", "b"]), (1.0, ["c"]), (1.0, []))


def test_a_scheduler_has_an_entry_for_each_group_of_this_rank() -> None:
    saved = {"base_lrs": [1.0, 2.0, 3.0], "last_epoch": 4}
    found = of_these_groups(saved, [2, OWN, 0], {"base_lrs": [7.0, 8.0, 9.0]})
    assert found == {"base_lrs": [3.0, 8.0, 1.0], "last_epoch": 4}


def test_another_optimizer_is_refused(tmp_path: Path) -> None:
    optimizer, parameters = trained()
    save(tmp_path, optimizer, parameters)
    with pytest.raises(CheckpointError, match=r"the state is that of AdamW, this run uses SGD"):
        load_training_state(tmp_path, holdings(parameters), torch.optim.SGD(parameters.values()))


def test_a_tensor_of_another_shape_is_refused(tmp_path: Path) -> None:
    optimizer, parameters = trained()
    save(tmp_path, optimizer, parameters)
    other = nn.ParameterDict({name: nn.Parameter(torch.zeros(3, 4)) for name in ("a", "b", "c")})
    with pytest.raises(CheckpointError, match=r"optimizer::a::exp_avg has shape \(3, 2\), the model needs \(3, 4\)"):
        load_training_state(tmp_path, holdings(other), adamw(other))


def test_statistics_of_a_shard_fit_that_shard_only(tmp_path: Path) -> None:
    def adafactor(named: nn.ParameterDict) -> torch.optim.Optimizer:
        return torch.optim.Adafactor(named.values(), lr=0.1)

    def at(parameters: nn.ParameterDict, tp_size: int, tp_rank: int) -> Holdings:
        whole = nn.ParameterDict({name: nn.Parameter(torch.zeros(3 * tp_size, 2)) for name in "abc"})
        mesh = dataclasses.replace(ALONE, shape=MeshShape(1, 1, tp_size), rank=tp_rank)
        specs = dict.fromkeys("abc", ShardSpec.contiguous(0, 3 * tp_size))
        return Holdings(ledger_of(whole, specs), mesh, dict(parameters.items()), {})

    optimizer, parameters = trained(adafactor)
    view = OptimizerView(optimizer, dict(parameters.items()))
    pieces: list[Piece] = []
    for tp_rank in range(2):
        pieces += state_pieces(view, at(parameters, 2, tp_rank).place())[0]
    assert {piece.label for piece in pieces if "row_var" in piece.label and "::a::" in piece.label} == {
        "optimizer::a::row_var@tp0of2",
        "optimizer::a::row_var@tp1of2",
    }
    save_pieces(tmp_path / TENSORS, pieces)
    index = TensorIndex(tmp_path / TENSORS)
    others, filling = SavedState(index, {}, at(parameters, 2, 1).place()).others("a")
    index.read(filling)
    assert torch.equal(others["row_var"], optimizer.state[parameters["a"]]["row_var"])
    with pytest.raises(CheckpointError, match=r"row_var of a is a statistic of another tensor-parallel shard"):
        SavedState(index, {}, at(parameters, 1, 0).place()).others("a")


def test_a_tensor_that_is_no_parameter_of_the_model_is_refused(tmp_path: Path) -> None:
    parameters = model()
    optimizer = torch.optim.SGD([*parameters.values(), torch.zeros(2, requires_grad=True)])
    with pytest.raises(CheckpointError, match=r"SGD updates a tensor that is no parameter of the model"):
        snapshot(tmp_path, holdings(parameters), optimizer)


@pytest.mark.parametrize("content", ["", "{", "[]", "{}"])
def test_a_damaged_description_is_named(content: str, tmp_path: Path) -> None:
    (tmp_path / DESCRIPTION).write_text(content)
    with pytest.raises(CheckpointError, match=r"training_state\.json cannot be read: .*truncated or damaged"):
        read_description(tmp_path)


def test_a_missing_description_and_another_format_are_explained(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"training_state\.json does not exist: .*weights only"):
        read_description(tmp_path)
    (tmp_path / DESCRIPTION).write_text('{"format": 9}')
    with pytest.raises(CheckpointError, match=r"has format 9, this version reads 1"):
        read_description(tmp_path)


def test_a_missing_tensor_file_is_named(tmp_path: Path) -> None:
    optimizer, parameters = trained()
    save(tmp_path, optimizer, parameters)
    next((tmp_path / TENSORS).glob("*.distcp")).unlink()
    with pytest.raises(
        CheckpointError, match=r"__0_0\.distcp: optimizer::a::exp_avg cannot be read: FileNotFoundError"
    ):
        load_training_state(tmp_path, holdings(parameters), optimizer)


def test_ranks_of_a_model_copy_take_one_random_state() -> None:
    saved = MeshShape(2, 1, 2)
    assert [rng_source(saved, dataclasses.replace(ALONE, shape=saved, rank=rank)) for rank in range(4)] == [0, 1, 2, 3]
    for shape, sources in (
        (MeshShape(1, 4, 1), [0, 0, 0, 0]),
        (MeshShape(4, 1, 1), [0, 2, 0, 2]),
        (MeshShape(2, 2, 1), [0, 0, 2, 2]),
        (MeshShape(1, 1, 1), [0]),
    ):
        here = [dataclasses.replace(ALONE, shape=shape, rank=rank) for rank in range(shape.world_size)]
        assert [rng_source(saved, mesh) for mesh in here] == sources
