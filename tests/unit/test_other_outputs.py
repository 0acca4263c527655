"""What is found out about a loss and the outputs that it is computed from."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.utils.generic import ModelOutput

from hf_parallel.compat.private_transformers import CACHES
from hf_parallel.engine.run.autograd_nodes import depends_only_on, outputs_node
from hf_parallel.engine.run.other_outputs import Caught, _deviation
from hf_parallel.guards.calls.outputs import MissingOutput, PipelineOutput, PipelineTrainingOutput
from hf_parallel.guards.gradients.aside import Made, together


def outputs() -> tuple[nn.Linear, torch.Tensor, torch.Tensor]:
    layer = nn.Linear(4, 3)
    hidden = layer(torch.randn(2, 4))
    return layer, hidden, hidden.log_softmax(-1)


def test_a_loss_on_an_output_depends_on_it_alone() -> None:
    _, hidden, scores = outputs()
    assert depends_only_on(-scores.sum() / 7, [scores])
    assert depends_only_on(scores, [scores])
    assert depends_only_on(scores.exp().sum(), [hidden])
    assert depends_only_on((scores * 2).sum() + scores.detach().sum(), [scores])


def test_other_ways_to_a_parameter_are_found() -> None:
    layer, hidden, scores = outputs()
    assert not depends_only_on(scores.sum() + 1e-9 * hidden.sum(), [scores])
    assert not depends_only_on(scores.sum() + layer.weight.norm(), [scores])
    assert not depends_only_on(scores.sum(), [hidden[0]])


def test_several_results_of_one_function_are_told_apart() -> None:
    _, hidden, _ = outputs()
    first, second = hidden.unbind()
    assert depends_only_on(first.sum(), [first])
    assert not depends_only_on(first.sum() + second.sum(), [first])


@pytest.mark.parametrize("microbatches", [1, 2])
def test_what_the_own_loss_gives_to_its_output(microbatches: int) -> None:
    caught = Caught(looks_at_loss=True)
    for index in range(microbatches):
        _, _, scores = outputs()
        loss = -scores.sum() / 10
        caught.note(index, ModelOutput(loss=loss, scores=scores, mask=scores.detach() < 0), loss)
        loss.backward()  # its graph is still there
    assert caught.gives == {"scores": True, "mask": False}
    assert caught.names == ("loss", "scores", "mask")
    name, own = caught.joined_own() or ("", torch.zeros(()))
    assert name == "scores"
    assert torch.equal(own, torch.full((2 * microbatches, 3), -0.1))
    assert caught.joined(["scores", "mask"])["mask"].shape == own.shape


def test_a_loss_of_two_outputs_has_no_own_one() -> None:
    caught = Caught(looks_at_loss=True)
    _, _, scores = outputs()
    other = scores.mean()
    loss = scores.sum() + other
    caught.note(0, ModelOutput(loss=loss, scores=scores, other=other), loss)
    assert caught.joined_own() is None


def test_outputs_of_unequal_shapes_are_not_joined() -> None:
    caught = Caught()
    for index, width in enumerate((3, 4)):
        caught.note(index, ModelOutput(scores=torch.zeros(2, width), sums=torch.zeros(2)))
    assert caught.joined(["scores", "sums", "unknown"]).keys() == {"sums"}


def test_infinities_hide_no_difference() -> None:
    first = torch.tensor([1.0, 2.0, -torch.inf, torch.nan])
    assert float(_deviation(first, first)) == 0.0
    assert float(_deviation(first * torch.tensor([1.0, 1.5, 1.0, 1.0]), first)) == pytest.approx(1 / 5**0.5)
    assert float(_deviation(torch.tensor([1.0, 2.0, 3.0, torch.nan]), first)) == torch.inf
    assert float(_deviation(torch.tensor([1.0, torch.nan, -torch.inf, torch.nan]), first)) == torch.inf


def test_outputs_that_the_loss_does_not_use_have_no_gradient() -> None:
    seen: list[dict[str, torch.Tensor]] = []
    anchor = torch.zeros((), requires_grad=True)
    nodes = outputs_node(anchor, {"a": torch.ones(2), "b": torch.ones(3)}, seen.append)
    (2 * nodes["b"]).sum().backward()
    assert [sorted(one) for one in seen] == [["b"]]
    assert torch.equal(seen[0]["b"], torch.full((3,), 2.0))
    assert outputs_node(anchor, {}, seen.append) == {}


def test_factors_of_the_same_gradients_add_up() -> None:
    one, other = Made(), Made()
    passed = together([(one, torch.tensor(2.0)), (other, torch.tensor(1.0)), (one, torch.tensor(0.5))])
    assert [(made is one, float(factor)) for made, factor in passed] == [(True, 2.5), (False, 1.0)]


def test_outputs_are_read_when_they_are_asked_for() -> None:
    asked = []

    def read() -> dict[str, torch.Tensor | str]:
        asked.append(1)
        return {"scores": torch.ones(2), "total": "it is one number."}

    for output in (PipelineOutput(loss=torch.zeros(())), PipelineTrainingOutput(loss=torch.zeros(()))):
        output.has_more(["scores", "total"], ["nothing"], read)
        before = len(asked)
        assert not hasattr(output, "unknown")
        assert output.nothing is None
        assert output.get("nothing", 3) == 3
        assert len(asked) == before
        assert output.scores.sum() == output["scores"].sum() == output.get("scores").sum() == 2
        with pytest.raises(MissingOutput, match=r"outputs\['total'\] with pp_size above 1: it is one number\."):
            _ = output.total
        with pytest.raises(MissingOutput, match="unknown"):
            output["unknown"]


def test_places_are_those_of_the_models_own_output() -> None:
    asked = []

    def read() -> dict[str, torch.Tensor | str]:
        asked.append(1)
        return {"scores": torch.ones(2), "parts": "stages have parts of it."}

    for kind in (PipelineOutput, PipelineTrainingOutput):
        output = kind(loss=torch.zeros(()))
        output.has_more(["scores", "parts"], [], read)
        output.lists(["loss", "scores"])
        assert list(output) == list(output.keys()) == ["loss", "scores"]
        assert (len(output), "scores" in output, "logits" in output) == (2, True, False)
        assert "scores" not in repr(output)
        assert not asked
        assert output[1].sum() == output[-1].sum() == output[1:][0].sum() == output.to_tuple()[1].sum() == 2
        assert dict(output).keys() == {"loss", "scores"}
        with pytest.raises(MissingOutput, match="2"):
            output[2]
        output.lists(["loss", "scores", "parts"])
        with pytest.raises(MissingOutput, match="stages have parts of it"):
            tuple(output.values())
        assert output["loss"] == 0
        asked.clear()


def test_places_of_an_output_that_lacks_something_are_refused() -> None:
    output = PipelineOutput(loss=None, logits=torch.zeros(1, 2, 3))
    assert output[0].shape == output.to_tuple()[0].shape == (1, 2, 3)
    output.lacks(["hidden_states"])
    for action in (lambda: output[0], lambda: output.to_tuple(), lambda: dict(output), lambda: len(output)):
        with pytest.raises(MissingOutput, match=r"the model's config asks for hidden_states too.*by name"):
            action()
    assert output.logits.shape == (1, 2, 3)
    assert "logits" in output
    output.lists_own()
    assert len(output) == 1


def test_a_cache_that_stages_do_not_keep_is_none_by_each_of_its_names() -> None:
    for output in (PipelineOutput(loss=torch.zeros(())), PipelineTrainingOutput(loss=torch.zeros(()))):
        assert [getattr(output, name) for name in CACHES] == [None] * len(CACHES)
        assert [output.get(name) for name in CACHES] == [None] * len(CACHES)
