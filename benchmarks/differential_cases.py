"""Random Trainer set-ups as data, and the script that each of them is; drawn and run by `differential`."""

from __future__ import annotations

import dataclasses
import inspect
import json
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import differential_parts
import differential_user
from differential_parts import HEADER, MODELS


@dataclasses.dataclass(frozen=True)
class Setup:
    """One set-up. Defaults are the plainest choice: shrinking goes back to them, field by field.

    Args:
        rows: Rows of a batch of each replica.
        settings: Settings of hf_parallel beside the sizes of its axes.
        resume: Settings of the layout that goes on from the checkpoint of step 2; None: no resuming.
        extra: One of `EXTRAS`: how the Trainer is called or fed.
        before: What is done to the model before the Trainer is made.
        driver: `trainer`, or a raw accelerate loop: `plain`, `half_twice`, `two_losses`, `by_hand`.
        delay: By how many updates the weights that gradients are made of are older (an asynchronous schedule): the reference
            does so by hand.
        stock: Whether the reference is stock DDP on as many processes as there are replicas, and not one process.
    """

    seed: int = 0
    driver: str = "trainer"
    extra: str = ""
    resume: dict[str, Any] | None = None
    callback: str = ""
    before: str = ""
    loss: str = ""
    optimizer: str = ""
    frozen: str = ""
    evaluate: bool = False
    bf16: bool = False
    recompute: str = ""
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    tp: int = 1
    pp: int = 1
    dp: int = 1
    accumulation: int = 1
    rows: int = 2
    padding: str = "right"
    variable: bool = False
    ignored: str = ""
    model: str = "llama"
    clip: float = 1.0
    scheduler: str = "linear"
    local_counts: bool = False
    ragged: bool = False
    steps: int = 3
    delay: int = 0

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp * int(self.settings.get("sp_size", 1))

    @property
    def parallel(self) -> dict[str, Any]:
        """The settings as keyword arguments of the callback."""
        sizes = {"tp_size": self.tp, "pp_size": self.pp}
        found: dict[str, Any] = {key: size for key, size in sizes.items() if size > 1} | self.settings
        if self.recompute not in ("", "stock"):
            found["activation_checkpointing"] = {
                "every": 1 if self.recompute == "block" else 2,
                "mode": self.recompute,
            }
        return found

    @property
    def stock(self) -> bool:
        nonlinear = self.loss not in ADDITIVE or self.evaluate or self.local_counts or self.ragged
        return self.dp > 1 and (nonlinear or self.driver != "trainer")

    @property
    def references(self) -> int:
        """Processes of the reference."""
        return self.dp if self.stock else 1

    def as_text(self) -> str:
        """The fields that are not at their defaults."""
        plain = Setup()
        changed = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return json.dumps({k: v for k, v in changed.items() if v != getattr(plain, k) or k == "seed"})

    def replaced(self, **changes: Any) -> Setup:
        return dataclasses.replace(self, **changes)


EXPERTS = frozenset({"mixtral", "gpt_oss", "deepseek_v3"})
WITHOUT_POSITIONS = frozenset({"mamba", "bloom"})
ADDITIVE = frozenset({"", "loss_sum", "loss_token_weights", "loss_focal", "smoothing"}) | frozenset(
    {"patched_token_weights", "patched_z_loss", "ScaledLoss", "EditedLabels", "NewInputs", "Embedded"}
)
LOSSES = (
    *("loss_sum", "loss_token_weights", "loss_focal", "loss_mean", "loss_row_mean", "loss_softmax_rows", "loss_pairs"),
    *("patched_token_weights", "patched_row_mean", "patched_z_loss", "smoothing"),
    *("LossOnLogits", "ScaledLoss", "RowWeights", "LossAndEntropy", "Temperature", "Regularised", "Embedded"),
    *("TwoForwards", "EditedLabels", "NewInputs"),
)
CALLBACKS = (
    *("Clamp", "Average", "Reload", "Rebind", "ClipNorm", "ClipValue", "ScaleGradients", "DropGradients"),
    *("DecayByHand", "Unfreeze", "FreezeLater", "Rate", "ResetMoments", "StopEarly", "ZeroAtBegin"),
)
BEFORE = (
    *("mask_rows", "halve_gradients", "louder_block", "rolled_ids", "scaled_logits", "wrapped_forward"),
    *("normalised_head", "uneven_weights"),
)
OPTIMIZERS = (
    *("sgd", "adafactor", "rmsprop", "user_adamw", "user_sgd", "user_groups", "user_lion", "user_normalised"),
    *("RatesByName", "RatesByAttribute"),
)
BLOCKS = 4  # of every model of the search
EVALUATING = ("metrics", "best", "plateau", "accuracy_only", "evaluate_first")
LOOPS = ("plain", "half_twice", "two_losses", "by_hand")
EXTRAS = (
    *("evaluate_first", "model_init", "iterable", "metrics", "twice", "second", "best", "callback_first", "encoding"),
    *("plateau", "mask_4d", "accuracy_only"),
)
FROZEN = ("embedding", "head", "first", "last", "vectors", "matrices")
SCHEDULES = ("1f1b", "gpipe", "interleaved_1f1b", "interleaved_zero_bubble", "zbv_zero_bubble")
LAYOUTS = ((1, 1, 2), (1, 2, 1), (2, 1, 1), (2, 2, 1), (1, 2, 2), (2, 1, 2), (1, 1, 4), (1, 4, 1), (1, 3, 1))


# -- drawing ---------------------------------------------------------------------------------------------------------


def draw(seed: int) -> Setup:
    """The set-up of a seed."""
    rng = random.Random(seed)
    tp, pp, dp = rng.choices(LAYOUTS, weights=(4, 4, 4, 1, 1, 1, 1, 1, 1))[0]

    def sometimes(share: float, choices: Any, other: Any) -> Any:
        chosen, picked = rng.random() < share, rng.choice(choices)
        return picked if chosen else other

    values: dict[str, Any] = {
        "seed": seed,
        "tp": tp,
        "pp": pp,
        "dp": dp,
        "model": rng.choice(sorted(MODELS)),
        "rows": rng.choice((1, 2, 3, 4)),
        "accumulation": rng.choice((1, 1, 2, 3, 4)),
        "padding": rng.choices(("right", "left", "bare", "packed"), weights=(6, 2, 1, 2))[0],
        "variable": rng.random() < 0.6,
        "ignored": sometimes(0.5, ("tokens", "rows", "prompt"), ""),
        "frozen": sometimes(0.25, FROZEN, ""),
        "loss": sometimes(0.4, LOSSES, ""),
        "callback": sometimes(0.35, CALLBACKS, ""),
        "before": sometimes(0.15, BEFORE, ""),
        "optimizer": sometimes(0.4, OPTIMIZERS, ""),
        "clip": rng.choice((1.0, 0.0, 0.1)),
        "scheduler": rng.choice(("linear", "cosine", "constant", "warmup")),
        "evaluate": rng.random() < 0.15,
        "bf16": rng.random() < 0.1,
        "recompute": sometimes(0.25, ("stock", "block", "alternate", "selective"), ""),
        "driver": sometimes(0.12, LOOPS, "trainer"),
        "local_counts": rng.random() < 0.08,
        "ragged": rng.random() < 0.1,
        "extra": sometimes(0.2, EXTRAS, ""),
    }
    values["settings"] = draw_settings(rng, tp, pp, dp)
    if rng.random() < 0.12:
        values["resume"] = draw_resume(rng, tp * pp * dp, dp, values["rows"], dict(values["settings"]), (tp, pp))
        values["steps"] = 4
    setup = Setup(**values)
    while consistent(setup) != setup:  # one choice rules out another, which may allow a third
        setup = consistent(setup)
    return with_nodes(with_delay(with_sequence(with_experts(setup))))


def with_experts(setup: Setup) -> Setup:
    """Experts on two replicas each, in most set-ups where that goes with the rest; drawn apart, so that seeds keep what they had."""
    zero = setup.settings.get("zero", {})
    fits = setup.model in EXPERTS and setup.tp == 1 and setup.dp % 2 == 0 and setup.resume is None
    fits = fits and zero.get("stage", 0) <= 1 and not zero.get("overlap_gather")
    if not fits or random.Random(f"experts {setup.seed}").random() < 0.3:
        return setup
    return setup.replaced(settings={**setup.settings, "ep_size": 2})


def with_sequence(setup: Setup) -> Setup:
    """Rows shared by two ranks, by heads or in a ring, in some small set-ups; drawn apart, as experts."""
    fits = setup.world_size <= 2 and setup.resume is None and setup.before not in ("mask_rows", "halve_gradients")
    fits = (
        fits and not setup.settings.keys() & {"ep_size", "sequence_parallel"} and setup.model not in WITHOUT_POSITIONS
    )
    rng = random.Random(f"sequence {setup.seed}")
    if not fits or rng.random() < 0.75:
        return setup
    ring = {"sp_attention": "ring"} if rng.random() < 0.5 else {}
    return setup.replaced(settings={**setup.settings, "sp_size": 2, **ring})


def with_delay(setup: Setup) -> Setup:
    """A pipeline that does not drain, in some set-ups where stock code alone handles batches; drawn apart, as experts."""
    rng = random.Random(f"delay {setup.seed}")
    fits = setup.pp > 1 and setup.driver == "trainer" and not setup.loss[:1].isupper() and setup.resume is None
    fits = fits and not setup.settings.keys() & {"sequence_parallel", "ep_size", "sp_size"} and not setup.ragged
    zero = setup.settings.get("zero", {"stage": 1})
    fits = fits and zero["stage"] == 1 and not zero.get("overlap_gather")
    fits = fits and setup.before not in ("mask_rows", "halve_gradients") and setup.extra not in ("twice", "second")
    if not fits or rng.random() < 0.6:
        return setup
    schedule = "pipedream" if setup.accumulation == 1 and rng.random() < 0.5 else "pipedream_2bw"
    parts = 1 if schedule == "pipedream" else setup.pp
    settings = {**setup.settings, "schedule": schedule, "num_microbatches": parts}
    if schedule == "pipedream" and rng.random() < 0.5:  # each stage steps by itself, so that no norm of all is known
        settings |= {"vertical_sync": False, "split": [(BLOCKS + rank) // setup.pp for rank in range(setup.pp)]}
        setup = setup.replaced(clip=0.0)
    return setup.replaced(settings=settings, rows=max(setup.rows, parts), delay=delay_of(settings, setup.pp))


def with_nodes(setup: Setup) -> Setup:
    """Two nodes of two ranks, with either order of stages and replicas, in most set-ups of four; drawn apart, as experts."""
    rng = random.Random(f"nodes {setup.seed}")
    if setup.world_size != 4 or setup.dp == 1 or rng.random() < 0.3:
        return setup
    inside = {"dp_inside": rng.choice((1, setup.dp))} if setup.pp > 1 else {}
    return setup.replaced(settings={**setup.settings, "topology": {"nodes": 2, "gpus_per_node": 2, **inside}})


def delay_of(settings: dict[str, Any], pp: int) -> int:
    return {"pipedream_2bw": 1, "pipedream": pp - 1}.get(settings.get("schedule", ""), 0)


def draw_settings(rng: random.Random, tp: int, pp: int, dp: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if pp > 1:
        found["num_microbatches"] = rng.choice((1, 2, 3, 4))
        schedule = rng.choice(SCHEDULES) if pp == 2 else rng.choice(SCHEDULES[:2])
        found["schedule"] = schedule
        if schedule == "interleaved_1f1b":
            found["num_microbatches"] = 2 * rng.choice((1, 2))
    if tp > 1 and rng.random() < 0.3:
        found["sequence_parallel"] = True
    if tp > 1 and rng.random() < 0.2:
        found["vocab_parallel_loss"] = False
    if dp > 1 and rng.random() < 0.6:
        found["zero"] = draw_zero(rng, pp)
    elif dp > 1 and rng.random() < 0.3:
        found["data_parallel"] = {"bucket_cap_mb": 0.01, "overlap": rng.random() < 0.5}
    return found


def draw_zero(rng: random.Random, pp: int) -> dict[str, Any]:
    stage = rng.choice((1, 1, 2, 3)) if pp == 1 else 1
    found: dict[str, Any] = {"stage": stage}
    if stage == 2:
        found["engine"] = "fsdp2"
    if rng.random() < 0.3:
        found["offload_optimizer"] = "cpu"
        if stage >= 2:
            found["offload_param"] = "cpu"
    elif stage == 1 and rng.random() < 0.2:
        found["overlap_gather"] = True
    return found


def draw_resume(
    rng: random.Random, world_size: int, dp: int, rows: int, own: dict[str, Any], sizes: tuple[int, int]
) -> dict[str, Any]:
    """The layout itself, or another one of as many processes with the same rows in a step."""
    possible = [(t, p, d) for t, p, d in LAYOUTS if t * p * d == world_size and rows * dp % d == 0]
    if rng.random() < 0.4:
        tp, pp = sizes
        return {"tp_size": tp, "pp_size": pp, **own}
    tp, pp, other = rng.choice(possible)
    return {"tp_size": tp, "pp_size": pp, **draw_settings(rng, tp, pp, other)}


def consistent(setup: Setup) -> Setup:
    """Without what means nothing together, or what has no reference."""
    changes: dict[str, Any] = {"delay": delay_of(setup.settings, setup.pp)}
    if setup.driver != "trainer":
        changes |= {"callback": "", "evaluate": False, "resume": None, "local_counts": False, "ragged": False}
        changes |= {"optimizer": setup.optimizer if setup.optimizer.startswith("user") else ""}
        changes |= {"loss": setup.loss if setup.loss.startswith("patched") else "", "recompute": "", "bf16": False}
        changes |= {"steps": 3, "extra": ""}
    if setup.extra in EVALUATING:
        changes |= {"evaluate": True}
    if setup.extra == "model_init":
        changes |= {"optimizer": "" if setup.optimizer.startswith("user") else setup.optimizer}
    if setup.extra == "mask_4d":
        changes |= {"extra": "" if setup.padding == "packed" or setup.model in WITHOUT_POSITIONS else "mask_4d"}
        changes |= {"padding": "right", "loss": "" if setup.loss == "Embedded" else setup.loss}
    if setup.extra in ("best", "twice", "second", "plateau", "model_init", "evaluate_first"):
        changes |= {"resume": None}
    if setup.extra == "iterable":
        changes |= {"ragged": False, "resume": None}
    if setup.padding in ("left", "packed") and (setup.model in WITHOUT_POSITIONS or setup.loss == "Embedded"):
        changes |= {"padding": "right"}
    elif setup.padding in ("packed", "bare"):
        changes |= {"variable": False}
    if setup.callback in ("Average", "Reload", "Unfreeze", "FreezeLater", "ResetMoments", "StopEarly", "ZeroAtBegin"):
        changes |= {"resume": None}
    if setup.callback == "Unfreeze":
        changes |= {"frozen": setup.frozen or "first"}
    if setup.before == "normalised_head" and setup.stock:
        # A tied head and the embedding are two parameters of one memory then: stock DDP parts them, one process does not.
        changes |= {"before": ""}
    if setup.bf16 and (setup.loss not in ADDITIVE or setup.ragged or setup.evaluate or setup.local_counts):
        changes |= {"bf16": False}
    if setup.resume is not None:  # data in the middle of an epoch, one process as the reference
        changes |= {"ragged": False, "evaluate": False}
    if setup.recompute == "stock" and "zero" in setup.settings:
        changes |= {"recompute": ""}
    changed = setup.replaced(**changes)
    if changed.stock and changed.extra == "evaluate_first":  # stock trains each process alone after that
        changed = changed.replaced(extra="")
    if changed.stock and changed.callback == "Unfreeze":  # stock never averages what it was not built with
        changed = changed.replaced(callback="")
    resumed = changed.resume is not None and (changed.stock or _regroups(changed))
    return changed.replaced(resume=None, steps=3) if resumed else changed


def _regroups(setup: Setup) -> bool:
    """Whether another number of replicas goes on with a loss that is a mean over the rows of a replica."""
    layout = setup.resume or {}
    parts = layout.get("tp_size", 1) * layout.get("pp_size", 1)
    return (setup.loss not in ADDITIVE or setup.local_counts) and setup.world_size // parts != setup.dp


# -- scripts ---------------------------------------------------------------------------------------------------------

PARTS: dict[str, Callable[..., Any] | type] = {
    name: part
    for module in (differential_parts, differential_user)
    for name, part in vars(module).items()
    if inspect.getmodule(part) is module
}
SOURCES = {name: inspect.getsource(part) for name, part in PARTS.items()}  # as they are now, whoever edits them later


def named_in(text: str) -> list[str]:
    """The parts that a text names."""
    words = set(re.findall(r"\w+", text))
    return [name for name in PARTS if name in words]


def script(setup: Setup) -> str:
    """The whole script of a set-up: `run(folder, processes, settings, watch)`, and a command line."""
    body = trainer_text(setup) if setup.driver == "trainer" else loop_text(setup)
    wanted = named_in(body)
    for name in tuple(wanted):
        wanted += [other for other in named_in(SOURCES[name]) if other not in wanted]
    texts = [SOURCES[name] for name in PARTS if name in wanted]
    lines = [f'"""{setup.as_text()}"""', "", "from __future__ import annotations", "", "from typing import Any", ""]
    settings = f"SETTINGS = {setup.parallel!r}\n"
    return "\n".join([*lines, HEADER, settings, *texts, body, main_text(setup)])


def main_text(setup: Setup) -> str:
    return f"""
if __name__ == "__main__":
    # torchrun --nproc_per_node {setup.world_size} THIS            the mesh
    # {f"torchrun --nproc_per_node {setup.references} THIS --stock" if setup.stock else "python THIS --stock"}    the reference
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    os.environ["ACCELERATE_USE_CPU"] = "true"
    for entry in run("/tmp/differential", processes, None if "--stock" in sys.argv else SETTINGS):
        if os.environ.get("RANK", "0") == "0":
            print(entry)
"""


def model_lines(setup: Setup) -> list[str]:
    kind, settings = MODELS[setup.model]
    lines = [f"model = make_model({kind!r}, {settings!r})"]
    if setup.frozen:
        lines.append(f"freeze(model, {setup.frozen!r})")
    if setup.loss.startswith("patched"):
        lines.append(f"model.loss_function = {setup.loss}")
    if setup.loss == "Temperature":
        lines.append("add_temperature(model)")
    if setup.optimizer == "RatesByAttribute":
        lines.append("tag_parameters(model)")
    if setup.before:
        lines.append(f"{setup.before}(model)")
    return lines


def data_text(setup: Setup) -> tuple[int, str, str]:
    """Rows in all, and the expressions of dataset and collator."""
    window = setup.rows * setup.dp * setup.accumulation
    count = window * (setup.steps - 1) + max(1, window // 2) if setup.ragged else window * (setup.steps + 1)
    data = f"make_rows({count}, {setup.seed}, {setup.variable}, {setup.ignored!r}, {setup.padding!r})"
    collator = f"Collator({setup.padding!r}, {setup.loss == 'RowWeights'})"
    if setup.extra == "encoding":
        return count, data, f"Encoding({collator})"
    return count, data, f"WholeMask({collator})" if setup.extra == "mask_4d" else collator


def argument_lines(setup: Setup) -> Iterator[str]:
    yield f"per_device_train_batch_size={setup.rows * setup.dp} // copies"
    yield f"per_device_eval_batch_size={setup.rows * setup.dp} // copies"
    yield f"gradient_accumulation_steps={setup.accumulation}"
    yield f"max_steps={setup.steps}"
    yield f"max_grad_norm={setup.clip}"
    names = {"warmup": "constant_with_warmup"}
    scheduler = "reduce_lr_on_plateau" if setup.extra == "plateau" else names.get(setup.scheduler, setup.scheduler)
    yield f"lr_scheduler_type={scheduler!r}"
    if setup.extra == "plateau":
        yield "lr_scheduler_kwargs={'patience': 0, 'threshold': 10.0, 'threshold_mode': 'abs'}"
    yield "learning_rate=2e-3, weight_decay=0.1, adam_epsilon=1e-5, logging_steps=1"
    yield "use_cpu=True, report_to=[], disable_tqdm=True, dataloader_pin_memory=False"
    if setup.extra == "best":
        yield "save_strategy='steps', save_steps=1, load_best_model_at_end=True, save_total_limit=1"
    else:
        yield "save_strategy='steps', save_steps=2" if setup.resume is not None else "save_strategy='no'"
    if setup.extra == "accuracy_only":
        yield "eval_accumulation_steps=1"
    if setup.scheduler == "warmup" and setup.extra != "plateau":
        yield "warmup_steps=2"
    if setup.evaluate:
        yield "eval_strategy='steps', eval_steps=1"
    if setup.bf16:
        yield "bf16=True"
    if setup.local_counts:
        yield "average_tokens_across_devices=False"
    if setup.loss == "smoothing":
        yield "label_smoothing_factor=0.1"
    if setup.recompute == "stock":
        yield "gradient_checkpointing=True, gradient_checkpointing_kwargs={'use_reentrant': False}"
    if setup.optimizer in ("sgd", "adafactor", "rmsprop"):
        yield f"optim={setup.optimizer!r}"
    if setup.optimizer == "sgd":
        yield "optim_args='momentum=0.9'"
    if setup.optimizer == "rmsprop":
        yield "optim_args='eps=1e-3'"
    if setup.loss == "RowWeights":
        yield "remove_unused_columns=False"


def kind_text(setup: Setup) -> tuple[str, str]:
    """The class of the Trainer, and the lines that make it where it is one of two classes at once."""
    classes = [name for name in (setup.loss, setup.optimizer) if name[:1].isupper()]
    if len(classes) < 2:
        return (classes or ["Trainer"])[0], ""
    return "Both", f"\n\nclass Both({', '.join(classes)}):\n    pass\n\n"


def option_lines(setup: Setup) -> list[str]:
    """What the Trainer is made of."""
    count, data, collator = data_text(setup)
    options = ["model_init=ready" if setup.extra == "model_init" else "model=model", "args=args"]
    options.append(f"train_dataset={f'Stream({data})' if setup.extra == 'iterable' else data}")
    options += [f"data_collator={collator}", "callbacks=callbacks"]
    if setup.evaluate:
        options.append(f"eval_dataset={data}[: {min(count, 2 * setup.rows * setup.dp)}]")
    if setup.extra in ("metrics", "accuracy_only"):
        options.append("compute_metrics=accuracy")
    if setup.extra == "accuracy_only":
        options.append("preprocess_logits_for_metrics=guesses")
    if setup.loss.startswith("loss_"):
        options.append(f"compute_loss_func={setup.loss}")
    if setup.optimizer.startswith("user_"):
        options.append(f"optimizers=({setup.optimizer}(model), None)")
    return options


def callback_lines(setup: Setup) -> list[str]:
    split = () if setup.settings.get("vertical_sync", True) else tuple(setup.settings["split"])
    alone = f"[Delayed({setup.delay}, {split})]" if setup.delay else "[]"
    lines = [f"callbacks = {alone} if settings is None else [HFParallelCallback({{}}, **settings)]"]
    if setup.callback:
        first = setup.extra == "callback_first"
        lines.append(f"callbacks.{'insert(0, ' if first else 'append('}{setup.callback}())")
    return lines


def trainer_text(setup: Setup) -> str:
    kind, more = kind_text(setup)
    lines = [
        f"def make_trainer(folder: str, processes: int, settings: Any{', resumed: bool = False' if setup.resume else ''}) -> Any:",
        "    def ready() -> Any:",
        *(f"        {line}" for line in model_lines(setup)),
        "        return model",
        "",
        "    model = ready()",
    ]
    if setup.resume:
        lines += [
            "    if resumed:",
            "        for parameter in model.parameters():",
            "            parameter.data.mul_(0.5)",
        ]
    lines += [
        "    sizes = [(settings or {}).get(name, 1) for name in ('pp_size', 'tp_size', 'sp_size')]",
        "    parts = sizes[0] * sizes[1] * sizes[2]",
        "    copies = processes // parts",
        "    args = TrainingArguments(",
        "        folder,",
        *(f"        {line}," for line in argument_lines(setup)),
        "    )",
        *(f"    {line}" for line in callback_lines(setup)),
        f"    return {kind}(",
        *(f"        {option}," for option in option_lines(setup)),
        "    )",
        "",
        "",
        "def run(folder: str, processes: int, settings: Any, watch: Any = lambda trainer: None) -> Any:",
        "    trainer = make_trainer(folder, processes, settings)",
        "    watch(trainer)",
        *(["    trainer.evaluate()"] if setup.extra == "evaluate_first" else []),
        "    trainer.train()",
        *(["    trainer.train()"] if setup.extra == "twice" else []),
        *ending_lines(setup),
    ]
    return more + "\n".join(lines)


def ending_lines(setup: Setup) -> list[str]:
    """Another Trainer after the first, and what is returned."""
    lines: list[str] = []
    if setup.resume is not None:
        lines += [
            "    if settings is not None:  # the reference is a run without interruption",
            f"        settings = {setup.resume!r}",
            "        trainer = make_trainer(folder, processes, settings, True)",
            "        watch(trainer)",
            "        trainer.train(resume_from_checkpoint=folder + '/checkpoint-2')",
        ]
    elif setup.extra == "second":
        lines += [
            "    trainer = make_trainer(folder, processes, settings)",
            "    watch(trainer)",
            "    trainer.train()",
        ]
    return [*lines, "    trainer.save_model(folder + '/final')", "    return trainer.state.log_history", ""]


BACKWARD = {
    "plain": ["accelerator.backward(loss)"],
    "half_twice": ["accelerator.backward(loss / 2, retain_graph=True)", "accelerator.backward(loss / 2)"],
    "two_losses": [
        "accelerator.backward(loss)",
        "again = model(**{**inputs, 'labels': inputs['labels'].roll(1, -1)}).loss * 0.5",
        "accelerator.backward(again)",
    ],
    "by_hand": ["accelerator.backward(loss)"],
}


def loop_text(setup: Setup) -> str:
    _, data, collator = data_text(setup)
    by_hand = setup.driver == "by_hand"
    optimizer = (
        f"{setup.optimizer}(model)" if setup.optimizer else "torch.optim.AdamW(model.parameters(), lr=2e-3, eps=1e-5)"
    )
    steps = 1 if by_hand else setup.accumulation
    lines = [
        "def run(folder: str, processes: int, settings: Any, watch: Any = None) -> Any:",
        "    from accelerate import Accelerator",
        "",
        "    more = {} if settings is None else {'parallelism_config': HFParallelPlugin({}, **settings)}",
        f"    accelerator = Accelerator(cpu=True, gradient_accumulation_steps={steps}, **more)",
        *(f"    {line}" for line in model_lines(setup)),
        f"    optimizer = {optimizer}",
        "    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))",
        f"    loader = torch.utils.data.DataLoader({data}, batch_size={setup.rows}, collate_fn={collator})",
        "    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)",
        "    model.train()",
        "    history = []",
        "    for index, inputs in enumerate(loader):",
    ]
    loss = f"model(**inputs).loss{f' / {setup.accumulation}' if by_hand and setup.accumulation > 1 else ''}"
    finish = [
        f"norm = accelerator.clip_grad_norm_(model.parameters(), {setup.clip or 1e9})",
        "if watch is not None and not history:",
        "    watch(accelerator, model)",
        "history.append({'loss': float(accelerator.reduce(loss.detach(), 'mean')), 'grad_norm': float(norm)})",
    ]
    update = ["optimizer.step()", "scheduler.step()", "optimizer.zero_grad()"]
    if by_hand:
        due = f"(index + 1) % {setup.accumulation} == 0"
        lines += [
            "        import contextlib",
            "",
            f"        with contextlib.nullcontext() if {due} else accelerator.no_sync(model):",
            f"            loss = {loss}",
            "            accelerator.backward(loss)",
            f"        if {due}:",
            *(f"            {line}" for line in [*finish, *update]),
        ]
    else:
        lines += [
            "        with accelerator.accumulate(model):",
            f"            loss = {loss}",
            *(f"            {line}" for line in BACKWARD[setup.driver]),
            "            if accelerator.sync_gradients:",
            *(f"                {line}" for line in finish),
            *(f"            {line}" for line in update),
        ]
    lines += [
        f"        if len(history) == {setup.steps}:",
        "            break",
        "    state = accelerator.get_state_dict(model)",
        "    if accelerator.is_main_process:",
        "        torch.save(dict(state), folder + '/final.pt')",
        "    return history",
        "",
    ]
    return "\n".join(lines)
