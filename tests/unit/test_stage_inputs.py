"""Which batches a plan serves: sets of inputs and output flags, and the words for those it does not serve.

A failure here means a batch that takes another path through the model would train on, silently wrong.
"""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch
from stage_models import VOCAB, assert_same_gradients, batch, build, cut, summed, unsplit, zero_grad
from torch import Tensor, nn

from hf_parallel.errors import PlanError
from hf_parallel.model.samples import path_inputs, probe_samples
from hf_parallel.pipeline_parallel.plan.discover import discover_stages
from hf_parallel.pipeline_parallel.plan.verify_stages import run_stages
from hf_parallel.pipeline_parallel.run.stage import cut_stages
from hf_parallel.pipeline_parallel.stage_plan import PipelinePlan


BASE = frozenset({"input_ids", "attention_mask"})


def probed(model: nn.Module) -> PipelinePlan:
    return discover_stages(model, probe_samples(model, VOCAB))


def test_samples_follow_the_signature() -> None:
    names = [path_inputs(sample) for sample in probe_samples(build("gpt2_tied"), VOCAB)]
    extras = {"position_ids", "token_type_ids"}
    assert names[:2] == [BASE, BASE - {"attention_mask"}]
    assert set(names[2:]) == {BASE | {"position_ids"}, BASE | {"token_type_ids"}, BASE | extras}
    assert [path_inputs(sample) for sample in probe_samples(build("llama"), VOCAB)][2:] == [BASE | {"position_ids"}]
    adapted = tiny.lora(build("llama"))  # its own forward names neither
    assert [path_inputs(sample) for sample in probe_samples(adapted, VOCAB)][2:] == [BASE | {"position_ids"}]
    assert [path_inputs(sample) for sample in probe_samples(build("bloom"), VOCAB)][2:] == []


@pytest.mark.parametrize("name", ["llama", "gpt2_tied", "mixtral", "gemma3n", "opt"])
def test_common_inputs_are_covered_and_give_the_unsplit_result(name: str) -> None:
    model = build(name)
    samples = probe_samples(model, VOCAB)
    plan = probed(model)
    assert plan.inputs.covered == {path_inputs(sample) for sample in samples}
    assert not plan.inputs.uncovered
    stages = cut(model, [0, 2, plan.num_blocks], plan)
    for sample in samples:
        loss, expected = unsplit(model, sample)
        zero_grad(stages)
        torch.testing.assert_close(run_stages(stages, sample), loss, rtol=1e-6, atol=1e-6)
        assert_same_gradients(expected, summed(stages, list(expected)))


def test_inputs_without_tensors_and_those_of_the_loss_do_not_matter() -> None:
    stage = cut(build("llama"), [0, 2, 5])[0]
    inputs = batch()
    for changed in (
        {name: value for name, value in inputs.items() if name != "labels"},
        inputs | {"num_items_in_batch": torch.tensor(5)},
        inputs | {"shift_labels": inputs["labels"], "position_ids": None, "past_key_values": None},
    ):
        assert stage((), **changed)[0].shape == (2, 8, 32)


def test_inputs_that_no_sample_had_are_refused_by_name() -> None:
    model = build("llama")
    stage = cut(model, [0, 2, 5], discover_stages(model, batch()))[0]
    positions = torch.arange(8).expand(2, 8)
    with pytest.raises(
        PlanError,
        match=r"planned for the inputs \['attention_mask', 'input_ids'\].*\['position_ids'\] in this batch may take "
        r"another path.*plan with a batch of this kind",
    ):
        stage((), **batch(), position_ids=positions)
    without = {name: value for name, value in batch().items() if name != "attention_mask"}
    with pytest.raises(PlanError, match=r"\['attention_mask'\] is missing in this batch"):
        stage((), **without)
    probed_stage = cut(model, [0, 2, 5], probed(model))[0]
    assert probed_stage((), **without, position_ids=positions)[0].shape == (2, 8, 32)
    with pytest.raises(PlanError, match=r"with or without \['attention_mask', 'position_ids'\]; \['inputs_embeds'\]"):
        probed_stage((), **batch(), inputs_embeds=torch.ones(2, 8, 32))


class Branching(nn.Module):
    """With `extra` the head sees what block 0 made; with `broken` the forward fails."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, VOCAB)

    def forward(
        self, input_ids: Tensor, labels: Tensor, extra: Tensor | None = None, broken: Tensor | None = None
    ) -> Any:
        hidden = early = self.blocks[0](self.embed(input_ids))
        if broken is not None:
            raise IndexError("no such image")
        for block in list(self.blocks)[1:]:
            hidden = block(hidden)
        logits = self.head(hidden if extra is None else hidden + early)
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


def test_a_sample_that_leads_to_another_plan_is_not_covered_and_the_reason_is_kept() -> None:
    model = Branching()
    base = {"input_ids": batch()["input_ids"], "labels": batch()["labels"]}
    extra, broken = base | {"extra": torch.ones(1)}, base | {"broken": torch.ones(1)}
    plan = discover_stages(model, [base, extra, broken])
    assert plan.inputs.covered == {frozenset({"input_ids"})}
    assert discover_stages(model, extra).inputs.covered == {frozenset({"input_ids", "extra"})}
    stage = cut(model, [0, 1, 3], plan)[0]
    assert len(stage((), **base)) == 1
    for inputs, why in ((extra, "other tensors cross between"), (broken, "IndexError: no such image")):
        with pytest.raises(PlanError, match=f"tried: .*{why}"):
            stage((), **inputs)


@pytest.mark.parametrize(("flag", "value"), [("output_router_logits", False), ("use_cache", True)])
def test_an_output_flag_that_changed_since_planning_is_refused(flag: str, value: bool) -> None:
    model = build("mixtral")
    plan = discover_stages(model, batch())
    stage = cut_stages(model, plan, [0, 2, 5], (0,), model.forward)[0]
    assert stage((), **batch())
    with pytest.raises(PlanError, match=f"{flag} is {value} in this call and was {not value}"):
        stage((), **batch() | {flag: value})
    setattr(model.config, flag, value)
    if flag != "use_cache":  # the batch says it explicitly, which counts more
        with pytest.raises(PlanError, match=f"{flag} is {value} in this call"):
            stage((), **batch())
    else:
        assert stage((), **batch())


def test_output_flags_and_inputs_are_part_of_the_fingerprint() -> None:
    plain, silent = build("mixtral"), build("mixtral", output_router_logits=False)
    marks = [discover_stages(plain, batch()), discover_stages(silent, batch()), probed(plain)]
    llama = build("llama")
    marks += [discover_stages(llama, batch()), discover_stages(llama, batch() | {"output_attentions": True})]
    assert len({plan.fingerprint() for plan in marks}) == len(marks)
