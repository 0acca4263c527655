"""What callbacks make of a stage's parameters: of one block it is right, of several it is refused; so is noise in a row."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from hf_parallel.errors import UnsupportedError
from hf_parallel.guards.calls.on_stages import Draws, OnStages, block_of
from hf_parallel.guards.weights.state_dicts import PartTensor


Weights = dict[str, nn.Parameter]
NAMES = ("embed.weight", "layers.0.up.weight", "layers.0.down.weight", "layers.1.up.weight", "norm.weight")


def run(change: Callable[[Weights], object], events: int = 1) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = {name: nn.Parameter(torch.randn(3, 4, generator=generator)) for name in NAMES}
    with torch.no_grad():
        called = OnStages(weights, 2).watch(change)
        for _ in range(events):
            called(weights)


def pruned(weights: Weights) -> None:
    limit = torch.quantile(torch.cat([p.abs().flatten() for p in weights.values()]), 0.2)
    for parameter in weights.values():
        parameter.mul_(parameter.abs() > limit)


def pruned_by_number(weights: Weights) -> None:
    limit = torch.quantile(torch.cat([p.abs().flatten() for p in weights.values()]), 0.2).item()
    for parameter in weights.values():
        parameter.data = parameter.masked_fill(parameter.abs() < limit, 0.0)


def pruned_data(weights: Weights) -> None:
    limit = torch.stack([p.data.abs().mean() for p in weights.values()]).mean()
    for parameter in weights.values():
        parameter.data = torch.where(parameter.abs() > limit, parameter, torch.zeros_like(parameter))


def normed(weights: Weights) -> None:
    total = sum(p.pow(2).sum() for p in weights.values()).sqrt()  # type: ignore[union-attr]
    for parameter in weights.values():
        parameter.div_(total)


def normed_foreach(weights: Weights) -> None:
    total = torch.nn.utils.get_total_norm(list(weights.values()))
    torch._foreach_mul_(list(weights.values()), 1 / total)


def vector(weights: Weights) -> None:
    values = parameters_to_vector(weights.values())
    vector_to_parameters(values.where(values.abs() > values.abs().median(), 0), weights.values())


def noise(weights: Weights) -> None:
    torch.manual_seed(3)
    for parameter in weights.values():
        parameter.add_(torch.randn_like(parameter) * 0.01)


def noise_in_place(weights: Weights) -> None:
    generator = torch.Generator().manual_seed(3)
    for parameter in weights.values():
        nn.init.normal_(parameter, generator=generator)


def noise_by_shape(weights: Weights) -> None:
    for parameter in weights.values():
        parameter.data += torch.rand(parameter.shape)


@pytest.mark.parametrize("change", [pruned, pruned_data, normed, normed_foreach, vector])
def test_numbers_of_several_blocks_are_refused(change: Callable[[Weights], None]) -> None:
    with pytest.raises(
        UnsupportedError, match=r"parameter \S+weight is changed .*made of the parameters of 4 blocks.*pp_size=2"
    ):
        run(change)


def summed(weights: Weights) -> float:
    return float(sum(p.detach().norm().item() ** 2 for p in weights.values()))


def stacked(weights: Weights) -> float:
    return float(torch.stack([p.norm() for p in weights.values()]).norm())


def through_numpy(weights: Weights) -> float:
    return sum(float((p.detach().numpy() ** 2).sum()) for p in weights.values())


def counted(weights: Weights) -> int:
    return sum(p.numel() for p in weights.values())


def of_states(weights: Weights) -> float:
    return sum(float(p.detach().as_subclass(PartTensor).norm()) for p in weights.values())


@pytest.mark.parametrize("read", [pruned_by_number, summed, stacked, through_numpy, counted, of_states])
def test_numbers_of_several_blocks_are_not_read(read: Callable[[Weights], object]) -> None:
    with pytest.raises(
        UnsupportedError, match=r"numbers of the parameters of several blocks.*pp_size=2.*get_state_dict"
    ):
        run(read)


@pytest.mark.parametrize("change", [noise, noise_in_place, noise_by_shape])
def test_noise_for_one_parameter_after_another_is_refused(change: Callable[[Weights], None]) -> None:
    with pytest.raises(
        UnsupportedError, match=r"written to embed\.weight and to layers\.0\.up\.weight with pp_size=2.*zlib"
    ):
        run(change)


def alone(weights: Weights) -> None:
    for parameter in weights.values():
        parameter.mul_((1 / parameter.norm()).clamp(max=1))
        parameter.sub_(parameter.mean()).clamp_(-0.1, 0.1)


def by_numbers(weights: Weights) -> None:
    for parameter in weights.values():
        limit = parameter.std().item()
        parameter.clamp_(-limit, limit).div_(parameter.numel())


def one_block(weights: Weights) -> float:
    found = [weights[name] for name in NAMES if "layers.0" in name]
    return sum(p.norm().item() for p in found) + sum(p.numel() for p in found)


def finite(weights: Weights) -> bool:
    return all(bool(torch.isfinite(p).all()) for p in weights.values())


def within_a_block(weights: Weights) -> None:
    up, down = weights["layers.0.up.weight"], weights["layers.0.down.weight"]
    mean = (up + down) / 2
    up.copy_(mean)
    down.mul_(up.norm() / down.norm())


def logged(weights: Weights) -> Tensor:
    for parameter in weights.values():
        parameter.mul_(0.5)
    return torch.stack([p.norm() for p in weights.values()]).norm()


def named_noise(weights: Weights) -> None:
    for name, parameter in weights.items():
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        parameter.add_(torch.randn(parameter.shape, generator=generator))
        parameter.mul_(torch.rand(parameter.shape, generator=generator) > 0.1)


def seeded_anew(weights: Weights) -> None:
    for parameter in weights.values():
        torch.manual_seed(5)
        parameter.add_(torch.randn_like(parameter))


def projected(weights: Weights) -> None:
    """Each gets new memory, and what it had may be that of a number of the next one."""
    for parameter in weights.values():
        kept = parameter.data.clone()
        parameter.data.add_(0.1 * parameter / parameter.norm())
        parameter.data = torch.min(torch.max(parameter.data, kept - 0.01), kept + 0.01)


class Averages:
    def __init__(self) -> None:
        self.means: list[Tensor] = []

    def __call__(self, weights: Weights) -> None:
        parameters = [parameter.detach() for parameter in weights.values()]
        self.means = self.means or [parameter.clone() for parameter in parameters]
        torch._foreach_lerp_(self.means, parameters, 0.1)
        buffer = torch.empty(3, 4)
        for mean, parameter in zip(self.means, parameters, strict=True):
            buffer.copy_(mean)
            parameter.copy_(buffer)


@pytest.mark.parametrize(
    "change",
    [alone, by_numbers, one_block, finite, within_a_block, logged, named_noise, seeded_anew, projected, Averages()],
)
def test_what_is_right_on_each_stage_is_left_alone(change: Callable[[Weights], object]) -> None:
    run(change, events=2)


def test_blocks_by_name() -> None:
    assert [block_of(name) for name in ("lm_head.weight", "m.layers.3.mlp.experts.5.w", "weight")] == [
        *("lm_head", "m.layers.3", "")
    ]


@pytest.mark.parametrize("join", [torch.stack, torch.cat])
def test_a_list_that_is_empty_on_a_stage_is_named(join: Callable[[list[Tensor]], Tensor]) -> None:
    with pytest.raises(UnsupportedError, match=r"joins an empty list of tensors .* with pp_size=2"):
        OnStages({}, 2).watch(lambda: join([]))()


def test_a_new_parameter_of_one_that_is_elsewhere_is_named() -> None:
    elsewhere = torch.zeros(3)  # of a stage it is no parameter
    with pytest.raises(
        UnsupportedError, match=r"makes a new parameter of one that another stage has .* with pp_size=2"
    ):
        OnStages({}, 2).watch(lambda: nn.Module().register_parameter("weight_orig", elsewhere))()  # type: ignore[arg-type]


def test_a_draw_on_a_device_without_an_index_is_one_of_the_current_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "default_generators", [torch.Generator().manual_seed(seed) for seed in (1, 2)])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    draws = Draws()
    assert draws.next(None, torch.device("cuda")) == 1
    torch.rand(2, generator=torch.cuda.default_generators[1])
    assert draws.next(torch.cuda.default_generators[1], torch.device("cuda", 1)) == 1
    assert draws.next(None, torch.device("cuda", 0)) == 2


def test_a_layer_with_adapters_outside_of_the_blocks_is_one_module() -> None:
    names = ("head.base_layer.weight", "head.lora_A.default.weight", "head.lora_B.default.weight", "norm.weight")
    weights = {name: nn.Parameter(torch.randn(3, 3)) for name in names}

    def merge(*given: str) -> None:
        weights[names[0]].data += weights[given[0]] @ weights[given[1]]

    with torch.no_grad():
        OnStages(weights, 2, layers=["head"]).watch(merge)(names[2], names[1])
        with pytest.raises(UnsupportedError, match="made of the parameters of 2 blocks or modules"):
            OnStages(weights, 2, layers=["head"]).watch(merge)(names[2], names[3])
        with pytest.raises(UnsupportedError, match="made of the parameters of 2 blocks or modules"):
            OnStages(weights, 2).watch(merge)(names[2], names[1])
