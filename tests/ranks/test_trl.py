"""TRL's trainers, unchanged but for the callback, train on a mesh as on one process.

They patch the model's forward after the Trainer's constructor, read the head's weight themselves and count tokens with
`accelerator.gather`.
"""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from rank_runner import run_ranks
from safetensors.torch import load_file
from thinning import chosen, slow_if, thinned
from trainer_cases import ENV


pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

LAYOUTS: dict[str, tuple[int, dict[str, Any] | None]] = {
    "one": (1, None),
    "ddp2": (2, None),
    "tp2": (2, {"tp_size": 2}),
    "dp2": (2, {}),
    "zero1": (2, {"zero": {"stage": 1}}),
    "zero3": (2, {"zero": {"stage": 3}}),
    "pp2": (2, {"pp_size": 2, "num_microbatches": 2}),
    "pp2_dp2": (4, {"pp_size": 2, "num_microbatches": 2}),
    "pp2_tp2": (4, {"pp_size": 2, "tp_size": 2, "num_microbatches": 2}),
}
# Name -> trainer, model, data and settings.
CASES: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "sft_llama": ("sft", "llama", "sft", {}),
    "sft_gpt2": ("sft", "gpt2", "sft", {}),
    "packed": ("sft", "llama", "sft", {"packing": True, "max_length": 32}),
    "sft_adapter": ("sft", "gpt2", "completions", {"adapter": True}),
    "dpo_llama": ("dpo", "llama", "dpo", {"precompute_ref_log_probs": True}),
}
EVALUATED = {"eval_strategy": "steps", "eval_steps": 2}
# Losses that are no multiple of the model's own, and metrics of evaluations; for stages.
STAGES: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "completions": ("sft", "llama", "completions", EVALUATED),
    "dft": ("sft", "gpt2", "completions", {"loss_type": "dft"}),
    "smoothed": ("sft", "llama", "sft", {"label_smoothing_factor": 0.1}),
    "counted_alone": ("sft", "llama", "sft", {"average_tokens_across_devices": False}),
}
# With a reference beside the model: another one, or the model without its adapter. And those without a reference.
PREFERENCES: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "dpo_reference": ("dpo", "gpt2", "dpo", {"reference": True, **EVALUATED}),
    "dpo_adapter": ("dpo", "llama", "dpo", {"adapter": True, **EVALUATED, "gradient_checkpointing": True}),
    "kto_reference": ("kto", "llama", "kto", {"reference": True}),
    "kto_adapter": ("kto", "gpt2", "kto", {"adapter": True}),
    "cpo": ("cpo", "llama", "dpo", {}),
    "cpo_adapter": ("cpo", "llama", "dpo", {"adapter": True}),  # called by place, and PEFT's forward names no argument
    "orpo": ("orpo", "gpt2", "dpo", {}),
}
REFERENCES = {name: case for name, case in PREFERENCES.items() if "reference" in case[3]}

# A classifier, whose loss is of pairs of rows: those of the first half of a batch and those of the second.
SCORED: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "reward": ("reward", "scorer", "dpo", {"center_rewards_coefficient": 0.01, **EVALUATED}),
    "reward_margin": ("reward", "scorer", "margin", {}),
    "reward_adapter": ("reward", "scorer", "dpo", {"adapter": True, "gradient_checkpointing": True}),
}


# On stages and replicas at once: a case of each way in which a trainer counts its rows and tokens over them.
COUNTED = ("packed", "sft_adapter", "completions", "counted_alone", "dpo_adapter", "kto_reference", "reward")
UNEVEN = ("packed",)  # its rows are no multiple of a batch: replicas repeat some at the end of an epoch
UNCOMPARED = re.compile(
    r"^monitor/|runtime|step_time|per_second|total_flos|epoch|^step$|^train_"
)  # times, and what stock counts by rank


# Noise, of which stages draw other numbers than one process: losses are close, and no check takes it for a mistake.
NOISY: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "neftune": ("sft", "llama", "sft", {"neftune_noise_alpha": 5.0}),
}
ALL = CASES | STAGES | PREFERENCES | SCORED | NOISY
AVERAGED = ("completions", "counted_alone", *PREFERENCES, *SCORED, *UNEVEN)  # losses that replicas average


def reference_of(name: str, layout: str) -> str:
    """Of an evaluation, and without counts over all replicas, the loss is the mean of theirs, as under stock DDP."""
    return "ddp2" if layout in ("dp2", "zero1", "zero3", "pp2_dp2") and name in AVERAGED else "one"


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(tiny.VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="w0", eos_token="w98", bos_token="w97", unk_token="w0"
    )


def write_data(folder: Path) -> None:
    """Folders that all ranks share, as with data that was loaded: TRL lets one rank write what the others read."""
    from datasets import Dataset

    rows = tiny.rows(48, True)

    def text(ids: list[int]) -> str:
        return " ".join(f"w{token}" for token in ids)

    pairs = [
        {"prompt": text(ids[:4]), "chosen": text(ids[4:]), "rejected": text(ids[4:][::-1])}
        for ids in (row["input_ids"] for row in rows)
    ]
    Dataset.from_list([{"input_ids": row["input_ids"]} for row in rows]).save_to_disk(folder / "sft")
    Dataset.from_list(pairs).save_to_disk(folder / "dpo")
    margins = [{**pair, "margin": 0.1 * (index % 3)} for index, pair in enumerate(pairs)]
    Dataset.from_list(margins).save_to_disk(folder / "margin")
    completions = [{"prompt": pair["prompt"], "completion": pair["chosen"]} for pair in pairs]
    Dataset.from_list(completions).save_to_disk(folder / "completions")
    judged = [{**row, "label": index % 3 > 0} for index, row in enumerate(completions)]
    Dataset.from_list(judged).save_to_disk(folder / "kto")


def trainer_of(kind: str) -> tuple[Any, Any]:
    """A trainer of TRL and its settings."""
    import trl

    if kind in ("cpo", "orpo"):
        trl = importlib.import_module(f"trl.experimental.{kind}")
    name = "Reward" if kind == "reward" else kind.upper()
    return getattr(trl, f"{name}Trainer"), getattr(trl, f"{name}Config")


def scorer() -> Any:
    from transformers import LlamaConfig, LlamaForSequenceClassification

    torch.manual_seed(0)
    sizes = {"intermediate_size": 64, "num_hidden_layers": 2, "num_labels": 1, "pad_token_id": 0}
    return LlamaForSequenceClassification(LlamaConfig(**tiny.SMALL, **sizes))


def model_of(name: str) -> Any:
    return scorer() if name == "scorer" else tiny.MODELS[name]()


def runs_main(
    rank: int, world_size: int, names: list[str], parallel: dict[str, Any] | None, data: str, folder: str
) -> dict[str, Any]:
    from datasets import load_from_disk
    from peft import LoraConfig

    from hf_parallel import HFParallelCallback

    sizes = parallel or {}
    replicas = world_size // (sizes.get("tp_size", 1) * sizes.get("pp_size", 1))
    found = {}
    for name in names:
        kind, model, rows, more = ALL[name]
        trainer_kind, settings = trainer_of(kind)
        more = dict(more)
        options: dict[str, Any] = {}
        if more.pop("reference", False):
            # Not an equal one: rounding would decide which row has the higher reward.
            options["ref_model"] = tiny.moved(model_of(model), 0.01)
        if more.pop("adapter", False):
            # Another seed: what the adapter begins as is drawn here.
            task: dict[str, Any] = {"task_type": "SEQ_CLS", "modules_to_save": ["score"]} if kind == "reward" else {}
            options["peft_config"] = LoraConfig(
                r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=True, **task
            )
            torch.manual_seed(5)
        arguments = settings(
            output_dir=f"{folder}/{name}",
            per_device_train_batch_size=4 // replicas,
            per_device_eval_batch_size=4 // replicas,
            gradient_accumulation_steps=2,
            max_steps=5 if name in UNEVEN else 3,  # past the end of an epoch
            logging_steps=1,
            learning_rate=1e-3,
            adam_epsilon=1e-4,
            report_to=[],
            use_cpu=True,
            bf16=False,
            disable_tqdm=True,
            save_strategy="no",
            **{"gradient_checkpointing": False, **more},
        )
        dataset = load_from_disk(f"{data}/{rows}")
        whole = tiny.bytes_here(options["ref_model"]) if "ref_model" in options else 0
        trainer = trainer_kind(
            model=model_of(model),
            args=arguments,
            train_dataset=dataset,
            eval_dataset=dataset.select(range(16)) if "eval_strategy" in more else None,
            processing_class=tokenizer(),
            **options,
            callbacks=[] if parallel is None else [HFParallelCallback({}, **parallel)],
        )
        in_parts = {"pp_size", "tp_size"} & sizes.keys() or sizes.get("zero") == {"stage": 3}
        if (
            in_parts and "ref_model" in options
        ):  # tied, or 4 blocks of a few thousand numbers: stages are not equally large
            assert tiny.bytes_here(trainer.ref_model) <= 0.8 * whole, name
        trainer.train()
        trainer.save_model(f"{folder}/{name}/final")
        steps = [
            {key: value for key, value in entry.items() if not UNCOMPARED.search(key)}
            for entry in trainer.state.log_history
        ]
        found[name] = [step for step in steps if step]
        if parallel is not None:
            trainer.hf_parallel_session.watchdog.stop()
    return found


@pytest.fixture(scope="module")
def run_of(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[dict[str, Any], Path]]:
    """What a layout's runs logged, and where their models are."""
    cases = chosen(request, [(name, layout) for name in ALL for layout in LAYOUTS])
    cases += [(name, reference_of(name, layout)) for name, layout in cases]

    @functools.cache
    def run(name: str) -> tuple[dict[str, Any], Path]:
        world, parallel = LAYOUTS[name]
        data, folder = (tmp_path_factory.mktemp(f"{what}_{name}") for what in ("data", "out"))
        write_data(data)
        results = run_ranks(
            runs_main,
            world,
            list(dict.fromkeys(case for case, layout in cases if layout == name)),
            parallel,
            str(data),
            str(folder),
            tmp_path=folder,
            timeout=240,
            init_group=world > 1,
            env=ENV,
        )
        return results[0], folder

    return run


def compare(name: str, layout: str, run_of: Callable[[str], tuple[dict[str, Any], Path]]) -> None:
    (mine, here), (stock, there) = run_of(layout), run_of(reference_of(name, layout))
    assert len(stock[name]) >= 3
    for step, (found, expected) in enumerate(zip(mine[name], stock[name], strict=True)):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            # What KTO calls so is a mean of differences of sums of log-probabilities, and much smaller than these.
            size = abs(expected["logps/chosen"]) if key == "kl" else 0.1
            assert found[key] == pytest.approx(value, rel=1e-5, abs=1e-5 * size), f"{key} of entry {step}"
    file = "adapter_model.safetensors" if name.endswith("_adapter") else "model.safetensors"
    weights = [load_file(folder / name / "final" / file) for folder in (here, there)]
    assert weights[0].keys() == weights[1].keys()
    for key, value in weights[1].items():
        assert (weights[0][key] - value).norm() <= 1e-5 * value.norm(), key


# Layouts and trainers meet in turns: those with a reference, an adapter or neither meet shards, copies and parts of them.
TURNS = (("tp2", "dp2", "zero1"), ("zero3", "pp2_tp2"))
SCORED_TURNS = (("dp2", "zero1"), ("zero3", "tp2"))


@pytest.mark.parametrize(
    ("name", "layout"),
    thinned([(name, layout) for name in (*CASES, *PREFERENCES) for layout in ("tp2", "dp2", "zero1")], TURNS),
)
def test_trl_trains_on_a_mesh_as_on_one_process(name: str, layout: str, run_of: Any) -> None:
    compare(name, layout, run_of)


@pytest.mark.parametrize(
    ("name", "layout"), thinned([(name, layout) for name in REFERENCES for layout in ("pp2_tp2", "zero3")], TURNS)
)
def test_a_reference_model_is_in_parts_like_the_trained_one(name: str, layout: str, run_of: Any) -> None:
    compare(name, layout, run_of)


@pytest.mark.parametrize(("name", "layout"), [(name, "zero3") for name in ("dpo_adapter", "kto_adapter")])
def test_the_model_without_its_adapter_is_a_reference_in_parts(name: str, layout: str, run_of: Any) -> None:
    compare(name, layout, run_of)


@pytest.mark.parametrize(
    ("name", "layout"),
    thinned([(name, layout) for name in SCORED for layout in ("dp2", "zero1", "zero3", "tp2")], SCORED_TURNS),
)
def test_a_classifier_trains_on_shards_and_replicas_as_in_stock(name: str, layout: str, run_of: Any) -> None:
    compare(name, layout, run_of)


@pytest.mark.parametrize(("name", "layout"), [("reward", "pp2_tp2")])
def test_a_classifier_trains_on_stages_of_shards_as_in_stock(name: str, layout: str, run_of: Any) -> None:
    compare(name, layout, run_of)


# What another case of the same trainer shows on stages: CPO beside ORPO, a margin in the loss of one kind of classifier, plain
# text beside completions and other losses. What is counted on stages and replicas at once is on stages there.
SHOWN = ("cpo", "reward_margin", "sft_llama", "sft_gpt2", *COUNTED)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *(pytest.param(name, "pp2", marks=slow_if(name, SHOWN)) for name in (*CASES, *STAGES, *PREFERENCES, *SCORED)),
        *((name, "pp2_dp2") for name in COUNTED),
    ],
)
def test_trl_trains_on_stages_as_on_one_process(name: str, layout: str, run_of: Any) -> None:
    compare(name, layout, run_of)


@pytest.mark.parametrize(("name", "layout"), [(name, layout) for name in NOISY for layout in ("pp2", "tp2")])
def test_noise_is_not_taken_for_a_mistake(name: str, layout: str, run_of: Any) -> None:
    found, expected = ([step["loss"] for step in run_of(one)[0][name] if "loss" in step] for one in (layout, "one"))
    assert found == pytest.approx(expected, rel=0.02 if layout == "pp2" else 1e-5)


def generating_main(rank: int, world_size: int, layouts: list[str], base: str, data: str) -> dict[str, Any]:
    """What trainers log that sample text from the model in every step."""
    from datasets import load_from_disk
    from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

    from hf_parallel import HFParallelCallback

    def reward(completions: list[str], **kwargs: Any) -> list[float]:
        return [float(len(set(text.split()))) for text in completions]

    found = {}
    for layout in layouts:
        for kind, settings in ((GRPOTrainer, GRPOConfig), (RLOOTrainer, RLOOConfig)):
            arguments = settings(
                output_dir=f"{data}/out",
                per_device_train_batch_size=4,
                num_generations=4,
                max_completion_length=8,
                beta=0.0,
                max_steps=3,
                logging_steps=1,
                learning_rate=1e-3,
                adam_epsilon=1e-4,
                report_to=[],
                use_cpu=True,
                bf16=False,
                disable_tqdm=True,
                save_strategy="no",
                gradient_checkpointing=False,
            )
            parallel = LAYOUTS[layout][1]
            trainer = kind(
                model=base,
                reward_funcs=reward,
                args=arguments,
                train_dataset=load_from_disk(f"{data}/dpo"),
                processing_class=tokenizer(),
                callbacks=[] if parallel is None else [HFParallelCallback({}, **parallel)],
            )
            trainer.train()
            found[f"{layout} {kind.__name__}"] = [
                {key: value for key, value in entry.items() if not UNCOMPARED.search(key)}
                for entry in trainer.state.log_history
            ]
            if parallel is not None:
                trainer.hf_parallel_session.watchdog.stop()
    return found


def test_trainers_that_generate_train_on_replicas_as_on_stock_ones(tmp_path: Path) -> None:
    write_data(tmp_path)
    tiny.llama().save_pretrained(tmp_path / "base")
    arguments = (str(tmp_path / "base"), str(tmp_path))
    stock, mine = (
        run_ranks(generating_main, 2, layouts, *arguments, tmp_path=tmp_path, timeout=150, env=ENV)[0]
        for layouts in (["ddp2"], ["dp2", "zero1"])
    )
    for name, steps in mine.items():
        reference = stock[f"ddp2 {name.split()[1]}"]
        assert len(reference) >= 3
        for found, expected in zip(steps, reference, strict=True):
            assert found == pytest.approx(expected, rel=1e-5, abs=1e-6), name


def refusals_main(rank: int, world_size: int, data: str) -> dict[str, str]:
    """What is refused in the constructor; nothing has been trained then."""
    from datasets import load_from_disk
    from peft import LoraConfig, get_peft_model
    from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

    from hf_parallel import HFParallelCallback
    from hf_parallel.errors import ParallelError

    found: dict[str, str] = {}
    plain: dict[str, Any] = {"report_to": [], "use_cpu": True, "bf16": False, "save_strategy": "no"}
    rows = load_from_disk(f"{data}/dpo")

    def refused(name: str, kind: Any, settings: Any, model: Any, **options: Any) -> None:
        try:
            kind(
                model=model,
                args=settings,
                train_dataset=rows,
                processing_class=tokenizer(),
                callbacks=[HFParallelCallback({}, **LAYOUTS["pp2"][1])],  # type: ignore[arg-type]
                **options,
            )
        except ParallelError as error:
            found[name] = f"{type(error).__name__}: {error}"

    def reward(completions: list[Any], **kwargs: Any) -> list[float]:
        return [0.0] * len(completions)

    for name, kind, settings in (("grpo", GRPOTrainer, GRPOConfig), ("rloo", RLOOTrainer, RLOOConfig)):
        made = settings("out", per_device_train_batch_size=4, num_generations=2, **plain)
        refused(name, kind, made, tiny.llama(), reward_funcs=reward)
    dpo, config = trainer_of("dpo")
    adapted = get_peft_model(tiny.llama(), LoraConfig(task_type="CAUSAL_LM"))
    refused("adapters", dpo, config("out", **plain), adapted)
    model, sharing = tiny.llama(), tiny.llama()
    sharing.model.layers[3] = model.model.layers[3]
    refused("sharing", dpo, config("out", **plain), model, ref_model=sharing)
    refused("synced", dpo, config("out", sync_ref_model=True, **plain), tiny.llama(), ref_model=tiny.llama())
    return found


def test_what_stages_cannot_serve_is_refused_in_the_constructor(tmp_path: Path) -> None:
    write_data(tmp_path)
    for found in run_ranks(refusals_main, 2, str(tmp_path), tmp_path=tmp_path, env=ENV):
        for name, kind in (("grpo", "GRPOTrainer"), ("rloo", "RLOOTrainer")):
            assert f"ConfigError: {kind} with pp_size=2, tp_size=1: it is not known to be exact" in found[name]
            assert "Set pp_size and tp_size to 1" in found[name]
        assert "2 adapters (default, ref)" in found["adapters"]
        assert "peft_config=LoraConfig(...)" in found["adapters"]
        assert "ConfigError: sync_ref_model=True with pp_size=2" in found["synced"]
        assert "9 parameters) belongs to the model that is trained and to one for inference" in found["sharing"]
