"""What a cut leaves of a model, what a plan keeps, and what is refused, with which words."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
import transformers
from stage_models import BLOCKS, VOCAB, assert_same_gradients, batch, build, cut, summed, unsplit
from torch import Tensor, nn

from hf_parallel.compat.torch_tools import stored_bytes
from hf_parallel.errors import PlanError
from hf_parallel.pipeline_parallel.plan.costs import block_costs
from hf_parallel.pipeline_parallel.plan.discover import discover_stages
from hf_parallel.pipeline_parallel.plan.verify_stages import run_stages
from hf_parallel.pipeline_parallel.run.cut import Running, Uncopyable, drop
from hf_parallel.pipeline_parallel.run.intercept import StageExit
from hf_parallel.pipeline_parallel.run.stage import Stage, cut_stages
from hf_parallel.pipeline_parallel.stage_plan import Span, spans_of


def cut_in_place(name: str, bounds: list[int], index: int) -> tuple[nn.Module, Stage]:
    model = build(name)
    plan = discover_stages(model, batch())
    return model, cut_stages(model, plan, bounds, (index,), model.forward)[index]


def test_a_stage_lists_exactly_the_parameters_it_holds_under_their_own_names() -> None:
    for name in ("llama", "llama_tied", "gpt2_tied", "opt", "bloom", "gemma3n"):
        whole = build(name)
        plan = discover_stages(whole, batch())
        names = [n for n, _ in whole.named_parameters(remove_duplicate=False)]
        union: set[str] = set()
        for stage in cut(whole, [0, 2, plan.num_blocks], plan):
            held = {n for n in names if plan.holds(stage.part.span, n)}
            assert held <= stage.held
            real = dict(stage.model.named_parameters(remove_duplicate=False))
            assert held <= real.keys() <= set(names)
            for n, parameter in real.items():
                assert parameter.requires_grad == (n in stage.held), n
                torch.testing.assert_close(parameter, whole.get_parameter(n), rtol=0, atol=0)
            union |= stage.held
        assert union == set(names)


def test_llama_stages_share_only_what_both_read() -> None:
    plan = discover_stages(build("llama"), batch())
    positions = {"model.rotary_emb.inv_freq"}  # a buffer; every stage computes the position tables itself
    assert plan.readers(Span(0, 2, False)) == {"model.embed_tokens.weight"} | positions
    assert plan.readers(Span(2, 4, False)) == positions
    assert plan.readers(Span(2, 5, True)) == {"model.norm.weight", "lm_head.weight"} | positions
    tied = discover_stages(build("llama_tied"), batch())
    assert tied.readers(Span(0, 2, False)) == {"model.embed_tokens.weight", "lm_head.weight"} | positions
    assert tied.holds(Span(0, 2, False), "lm_head.weight")
    assert tied.holds(Span(2, 5, True), "model.embed_tokens.weight")
    assert not tied.holds(Span(2, 4, False), "model.embed_tokens.weight")
    assert not tied.holds(Span(2, 4, False), "model.norm.weight")
    assert tied.block_of("model.layers.3.mlp.up_proj.weight") == 3
    assert tied.block_of("lm_head.weight") is None


def test_dropped_weights_answer_questions_and_take_no_memory() -> None:
    model, _ = cut_in_place("llama", [0, 2, 5], 1)
    embedding, query = model.model.embed_tokens.weight, model.model.layers[0].self_attn.q_proj.weight
    assert (embedding.shape, query.shape) == ((VOCAB, 32), (32, 32))
    assert (query.dtype, query.device) == (torch.float32, torch.device("cpu"))
    assert embedding.untyped_storage().nbytes() == query.untyped_storage().nbytes() == 4
    assert not isinstance(query, nn.Parameter)


def test_a_hook_on_a_dropped_weight_is_left_to_the_stage_that_has_it() -> None:
    model, _ = cut_in_place("llama", [0, 2, 5], 1)
    embedding = model.model.embed_tokens.weight
    for register in (embedding.register_hook, embedding.register_post_accumulate_grad_hook):
        register(lambda gradient: None).remove()


class Packed(Tensor):
    """Values of 8 bits with a scale, as torchao keeps them: a tensor without a memory of its own that knows few operations."""

    def __new__(cls, codes: Tensor, scale: Tensor) -> Packed:
        made: Packed = Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype)  # type: ignore[attr-defined]
        made.codes, made.scale = codes, scale
        return made

    codes: Tensor
    scale: Tensor

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, Tensor], context: None, size: Any, stride: Any) -> Packed:
        return Packed(parts["codes"], parts["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return Packed(args[0].codes, args[0].scale)
        raise NotImplementedError(f"{func} of {cls.__name__}")


def test_packed_weights_are_dropped_as_plain_ones_and_count_with_what_they_keep() -> None:
    packed = Packed(torch.ones(6, 4, dtype=torch.int8), torch.ones(6, 1))
    assert stored_bytes(packed) == 6 * 4 + 6 * 4
    assert stored_bytes(torch.ones(6, 4)) == 96
    layer = nn.Linear(4, 6, bias=False)
    layer.weight = nn.Parameter(packed, requires_grad=False)
    drop(layer, "weight", "head.weight", Running())
    assert (layer.weight.shape, layer.weight.dtype, layer.weight.device.type) == ((6, 4), torch.float32, "cpu")
    assert layer.weight.untyped_storage().nbytes() == 4


def test_dropped_parameters_are_freed_and_kept_ones_are_the_same_objects() -> None:
    model = build("llama")
    dropped = weakref.ref(model.model.layers[0].mlp.up_proj.weight)
    kept = {n: p for n, p in model.named_parameters() if n.startswith(("model.layers.3", "lm_head"))}
    stage = cut_stages(model, discover_stages(model, batch()), [0, 2, 5], (1,), model.forward)[1]
    assert dropped() is None
    assert all(model.get_parameter(n) is p for n, p in kept.items())
    assert stage.held >= kept.keys()


@pytest.mark.parametrize("name", ["llama_tied", "mixtral", "gemma3n"])
def test_several_stages_of_one_rank_hold_the_union_of_what_each_needs(name: str) -> None:
    whole = build(name)
    plan = discover_stages(whole, batch())
    bounds = [0, 1, 2, 4, plan.num_blocks]
    apart = cut(whole, bounds, plan)
    for indices in ((0, 3), (1, 2), (0, 2), (0, 1, 2, 3)):
        model = copy.deepcopy(whole)
        stages = cut_stages(model, plan, bounds, indices, model.forward)
        assert tuple(stages) == indices
        assert all(stage.model is model and stage.stage_index == index for index, stage in stages.items())
        held = {n for n, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}
        assert held == frozenset().union(*(apart[index].held for index in indices)) == stages[indices[0]].held


def test_a_block_that_is_here_runs_its_own_code_outside_a_call_and_others_refuse() -> None:
    model, hidden = build("llama"), torch.randn(2, 8, 32)
    positions = model.model.rotary_emb(hidden, torch.arange(8)[None])
    expected = model.model.layers[3](hidden, position_embeddings=positions)
    cut_stages(model, discover_stages(model, batch()), [0, 1, 3, 4, 5], (0, 2), model.forward)
    got = model.model.layers[3](hidden, position_embeddings=positions)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
    with pytest.raises(PlanError, match="a block of another stage was called outside"):
        model.model.layers[1](hidden, position_embeddings=positions)


def test_two_stages_of_one_model_do_not_run_at_the_same_time() -> None:
    model = build("llama")
    stages: dict[int, Stage] = {}
    inside = model.model.layers[0].register_forward_pre_hook(lambda *_: stages[2]((torch.ones(2, 8, 32),), **batch()))
    plan = discover_stages(build("llama"), batch())
    stages |= cut_stages(model, plan, [0, 1, 3, 5], (0, 2), model.forward)
    with pytest.raises(PlanError, match="stage 2 was called while stage 0 of the same model runs"):
        stages[0]((), **batch())
    inside.remove()
    assert stages[0]((), **batch())[0].shape == (2, 8, 32)


def test_a_last_stage_may_have_the_tail_only() -> None:
    model = build("llama")
    plan = discover_stages(model, batch())
    *_, before, last = cut(model, [0, 2, 5, 5], plan)
    assert plan.crossings(5) == before.part.keys_out == last.part.keys_in
    assert last.held == {"model.norm.weight", "lm_head.weight"}
    assert before.held == {
        n for n, _ in model.named_parameters() if n.startswith(("model.layers.2", "model.layers.3", "model.layers.4"))
    }


def test_the_state_dict_keys_of_a_stage_are_keys_of_the_whole() -> None:
    whole = build("llama").state_dict().keys()
    for index in (0, 1):
        model, stage = cut_in_place("llama", [0, 2, 5], index)
        assert model.state_dict().keys() == stage.held
        assert stage.held < whole


def tensors_alive() -> dict[int, Tensor]:
    gc.collect()
    return {id(o): o for o in gc.get_objects() if issubclass(type(o), Tensor)}


def test_a_plan_keeps_no_tensor_alive() -> None:
    model = build("mixtral")
    discover_stages(model, batch())  # the first forward fills caches of its own
    before = tensors_alive()  # held, so that no new tensor gets the number of an old one
    plan = discover_stages(model, batch())
    assert not tensors_alive().keys() - before.keys()
    assert b"torch" not in pickle.dumps(plan._ops)


def test_a_stage_keeps_no_activation_alive_after_a_call() -> None:
    for index in (0, 1, 2):
        model, stage = cut_in_place("llama", [0, 1, 3, 5], index)
        seen: list[Any] = []
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.register_forward_hook(lambda m, a, out, seen=seen: seen.append(weakref.ref(out)))
        payload = () if stage.is_first else (torch.randn(2, 8, 32, requires_grad=True),)
        gc.collect()
        gc.disable()  # nothing may need the cycle collector: activations would pile up between its runs
        try:
            out = stage(payload, **batch())
            del out, payload
            assert seen
            assert not any(ref() is not None for ref in seen)
        finally:
            gc.enable()


def test_an_error_inside_the_model_leaves_the_stage_usable() -> None:
    model, stage = cut_in_place("llama", [0, 2, 5], 0)
    handle = model.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        stage((), **batch())
    handle.remove()
    assert stage((), **batch())[0].shape == (2, 8, 32)


def test_the_exit_never_leaves_a_stage_and_payloads_match_their_counts() -> None:
    model = build("mixtral")
    first, middle, last = cut(model, [0, 2, 4, 5])
    assert (first.is_first, first.is_last, last.is_last, middle.stage_index) == (True, False, True, 1)
    assert first.num_payload_in == len(last.part.keys_out) == 0
    sent = first((), **batch())
    assert len(sent) == len(first.part.keys_out) == middle.num_payload_in == 3
    assert not issubclass(StageExit, Exception)
    with pytest.raises(PlanError, match="stage 1 of MixtralForCausalLM takes 3 tensors, got 1"):
        middle(sent[:1], **batch())


def test_a_cut_model_cannot_be_copied_or_pickled() -> None:
    for index in (0, 1):
        model, stage = cut_in_place("llama", [0, 2, 5], index)
        for thing in (model, stage, model.model.layers):
            with pytest.raises(PlanError, match="cut into a pipeline stage cannot be copied"):
                copy.deepcopy(thing)
        with pytest.raises(PlanError, match="cannot be copied or pickled"):
            pickle.dumps(stage)
    assert issubclass(Stage, Uncopyable)


def test_one_stage_is_the_whole_model_uncut() -> None:
    _, stage = cut_in_place("llama", [0, 5], 0)
    assert stage.is_first
    assert stage.is_last
    torch.testing.assert_close(stage((), **batch()).loss, build("llama")(**batch()).loss, rtol=0, atol=0)


def test_a_stage_that_is_given_the_replaced_forward_says_so() -> None:
    model = build("llama")
    plan = discover_stages(model, batch())
    stage = cut_stages(model, plan, [0, 2, 5], (0,), lambda **kwargs: stage((), **kwargs))[0]
    with pytest.raises(PlanError, match="genuine forward"):
        stage((), **batch())


def test_discovery_changes_nothing() -> None:
    model = build("mixtral")
    model.lm_head.weight.grad = torch.ones_like(model.lm_head.weight)
    model.register_buffer("counter", torch.zeros(()))
    genuine = model.forward

    def counting(**inputs: Any) -> Any:
        model.counter += 1
        model.steps = torch.rand(2)
        return genuine(**inputs)

    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    state = {k: v.clone() for k, v in model.state_dict().items()}
    discover_stages(model, batch(), counting)
    torch.testing.assert_close(torch.rand(3), expected, rtol=0, atol=0)
    assert model.training
    assert not hasattr(model, "steps")
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert model.lm_head.weight.grad.eq(1).all()
    assert model.model.embed_tokens.weight.grad is None


def test_fingerprints_agree_for_equal_models_and_differ_for_others() -> None:
    marks = {name: discover_stages(build(name), batch()).fingerprint() for name in ("llama", "llama_tied", "mixtral")}
    assert len(set(marks.values())) == 3
    assert discover_stages(build("mixtral"), batch(3, 5)).fingerprint() == marks["mixtral"]


class Toy(nn.Module):
    """Embedding, four linear blocks, head; `order` is the order in which the blocks run."""

    def __init__(self, order: list[int], *, leak: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, VOCAB)
        self.order, self.leak = order, leak

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        hidden, extra = self.embed(input_ids), []
        for index in self.order:
            if self.leak:
                self.blocks[index].register_forward_hook(lambda m, a, out: extra.append(out.tanh()) or out)
            hidden = self.blocks[index](hidden)
        logits = self.head(hidden + sum(extra))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


def toy_batch() -> dict[str, Tensor]:
    return {name: batch()[name] for name in ("input_ids", "labels")}


@pytest.mark.parametrize(
    ("order", "message"),
    [
        (
            [0, 1, 2, 3] * 2,
            r"cannot pipeline Toy: its blocks 'blocks' run more than once per forward \(order 0,1,2,3,0,1",
        ),
        (
            [3],
            r"block 0 of 'blocks' did not run on this input \(blocks that ran: 3 of 4\); discover with the",
        ),
        ([1, 0, 2, 3], r"run in the order 1,0,2,3"),
    ],
)
def test_blocks_that_do_not_run_once_in_order_are_refused(order: list[int], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        discover_stages(Toy(order), toy_batch())


def test_a_model_that_is_no_transformers_model_can_be_cut() -> None:
    torch.manual_seed(0)
    model = Toy([0, 1, 2, 3])
    loss, _ = model(**toy_batch())
    plan = discover_stages(model, toy_batch())
    torch.testing.assert_close(run_stages(cut(model, [0, 1, 4], plan), toy_batch()), loss.detach())


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(PlanError, match=r"cannot pipeline Linear: it has no nn\.ModuleList"):
        discover_stages(nn.Linear(2, 2), {"input": torch.zeros(1, 2)})


class Leaky(Toy):
    """Block 1 leaves a tensor where nobody can address it, and block 3 picks it up."""

    def __init__(self) -> None:
        super().__init__([0, 1, 2, 3])
        shelf: list[Tensor] = []

        class Leaving(nn.Linear):
            def forward(self, given: Tensor) -> Tensor:
                shelf[:] = [given.exp()]
                return super().forward(given)

        class Taking(nn.Linear):
            def forward(self, given: Tensor) -> Tensor:
                return super().forward(given + shelf[0])

        self.blocks[1], self.blocks[3] = Leaving(8, 8), Taking(8, 8)


def test_a_tensor_without_an_address_is_refused_with_the_cuts_that_are_possible() -> None:
    plan = discover_stages(Leaky(), toy_batch())
    with pytest.raises(
        PlanError,
        match=r"cannot cut Leaky before block 2: a tensor made in block 1 by aten\.exp.*"
        r"allowed cuts: \[1, 4\]",
    ):
        plan.crossings(2)
    assert len(plan.crossings(1)) == 1


class Holder:
    """A state object of the model's own, as caches are."""

    def __init__(self) -> None:
        self.kept: dict[str, list[Tensor]] = {}


class Passing(Toy):
    """Block 0 stores a tensor in what it was handed, returns that too, and block 3 reads it."""

    def __init__(self, kind: type) -> None:
        super().__init__([0, 1, 2, 3])
        self.kind = kind
        self.seen: list[Any] = []

        class Block(nn.Linear):
            def forward(self, given: Tensor, state: Any, index: int) -> tuple[Tensor, Any]:
                store = state.kept if isinstance(state, Holder) else state
                if index == 0:
                    store["early"] = [given.tanh(), given.cos()]
                return super().forward(given) + (store["early"][0] if index == 3 else 0), state

        self.blocks = nn.ModuleList(Block(8, 8) for _ in range(4))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        hidden, state = self.embed(input_ids), self.kind()
        for index, block in enumerate(self.blocks):
            hidden, returned = block(hidden, state, index)
            self.seen.append(returned is state)
        logits = self.head(hidden)
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


@pytest.mark.parametrize("kind", [dict, Holder])
def test_a_container_that_blocks_hand_on_stays_one_object_on_every_stage(kind: type) -> None:
    torch.manual_seed(0)
    model = Passing(kind)
    loss, expected = unsplit(model, toy_batch())
    plan = discover_stages(model, toy_batch())
    assert [key.kind for key in plan.crossings(2)] == ["argument", "return"]
    stages = cut(model, [0, 1, 2, 4], plan)
    torch.testing.assert_close(run_stages(stages, toy_batch()), loss, rtol=1e-6, atol=1e-6)
    assert_same_gradients(expected, summed(stages, list(expected)))
    assert all(all(stage.model.seen) for stage in stages)


def test_bounds_that_do_not_fit_are_refused_before_anything_changes() -> None:
    model = build("llama")
    plan = discover_stages(model, batch())
    count = len(list(model.parameters()))
    for bounds in ([0, 5, 5, 5], [0, 2, 2, 5], [0, 2, 4], [1, 5], [0, 3, 2, 5], [0]):
        with pytest.raises(PlanError, match="do not partition the 5 blocks"):
            cut_stages(model, plan, bounds, (0,), model.forward)
    for indices in ((), (2,), (0, 0), (-1,)):
        with pytest.raises(PlanError, match=r"must be distinct, at least one, and lie in 0 \.\. 1"):
            cut_stages(model, plan, [0, 2, 5], indices, model.forward)
    with pytest.raises(PlanError, match="boundary=6 is not a cut"):
        plan.crossings(BLOCKS + 1)
    assert len(list(model.parameters())) == count


def test_another_path_through_the_model_is_reported() -> None:
    model = Toy([0, 1, 2, 3])
    plan = discover_stages(model, toy_batch())
    model.order = [0]
    stage = cut_stages(model, plan, [0, 2, 4], (0,), model.forward)[0]
    with pytest.raises(PlanError, match=r"took another path on stage 0.*discovered with \['input_ids', 'labels'\]"):
        stage((), **toy_batch())


def test_peers_of_transformers_blocks_without_checkpoint_support_are_found_by_what_runs() -> None:
    config = transformers.Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.tower = nn.ModuleList(nn.Linear(400, 400) for _ in range(3))  # larger, never called
    assert discover_stages(model, batch()).stack == "model.layers"


class Skipping(Toy):
    """Runs only `order` of its four blocks, with an op between them."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        hidden = self.embed(input_ids)
        for index in self.order:
            hidden = self.blocks[index](hidden) * 1.5
        logits = self.head(hidden)
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


@pytest.mark.parametrize("order", [[0, 1, 2], [0, 2, 3], [1, 3], [0, 3], [1, 2]])
def test_blocks_that_are_skipped_are_handed_through_empty(order: list[int]) -> None:
    torch.manual_seed(0)
    model = Skipping(order)
    loss, expected = unsplit(model, toy_batch())
    plan = discover_stages(model, toy_batch())
    assert plan.ran == tuple(order)
    tried = 0
    for bounds in ([0, 1, 4], [0, 2, 4], [0, 3, 4], [0, 1, 2, 3, 4], [0, 2, 3, 4], [0, 3, 4, 4], [0, 4, 4]):
        spans = spans_of(bounds)
        if any(not span.is_last and plan.last_block(span) is None for span in spans):
            with pytest.raises(PlanError, match=r"would run nothing: none of the blocks .* allowed cuts: \["):
                cut(model, bounds, plan)
            continue
        tried += 1
        for placement in (None, [tuple(range(len(bounds) - 1))]):
            stages = cut(model, bounds, plan, placement)
            torch.testing.assert_close(run_stages(stages, toy_batch()), loss, rtol=1e-6, atol=1e-6)
            got = summed(stages, list(expected))
            assert_same_gradients(expected, got)
        assert frozenset().union(*(stage.held for stage in stages)) == set(expected)
    assert tried


def test_a_stage_that_would_run_nothing_names_the_cuts_that_are_possible() -> None:
    model = Skipping([0, 3])
    plan = discover_stages(model, toy_batch())
    with pytest.raises(
        PlanError,
        match=r"stage 1 would run nothing: none of the blocks 1 to 2 of 'blocks' runs on this input \(blocks that run: "
        r"\[0, 3\]\); allowed cuts: \[1, 4\]",
    ):
        cut(model, [0, 1, 3, 4], plan)


def test_cuts_inside_skipped_blocks_are_the_same_cut_and_cost_nothing() -> None:
    model = Skipping([0, 3])
    plan = discover_stages(model, toy_batch())
    assert plan.crossings(1) == plan.crossings(2) == plan.crossings(3)
    assert [cost > 0 for cost in block_costs(model, plan).blocks] == [True, False, False, True]
    for boundary in (1, 2, 3):
        assert plan.readers(Span(0, boundary, False)) == {"embed.weight"}
        assert plan.readers(Span(boundary, 4, True)) == {"head.weight", "head.bias"}
