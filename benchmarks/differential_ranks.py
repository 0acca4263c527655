"""Run drawn scripts on ranks, and judge what they did; see `differential`."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
import os
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import rank_runner
import torch
from differential_cases import Setup, script
from differential_parts import MODELS
from rank_runner import RankError, run_ranks
from safetensors.torch import load_file, save_file
from trainer_cases import ENV, zero_gradients
from transformers import TrainerCallback

from hf_parallel.mesh.shape import MeshShape


TOLERANCE = 1e-5
HANG_S = 45.0
GRACE_S = 20.0  # the other ranks have this long to say why they ended too
KINDS = {"gemma3_text": "gemma3"}  # where they live
KEYS = ("loss", "grad_norm", "eval_loss", "eval_accuracy", "eval_rows", "learning_rate")


@dataclass(frozen=True)
class Job:
    """A script on a number of processes.

    Args:
        name: Of its folder.
        setup: What it is made from.
        parallel: Whether hf_parallel drives it; else it is a reference.
        source: Its text, if it is not the set-up's own (planted bugs).
    """

    name: str
    setup: Setup
    parallel: bool
    source: str = ""

    @property
    def processes(self) -> int:
        return self.setup.world_size if self.parallel else self.setup.references


class Watch(TrainerCallback):
    """Writes the gradients of the first step whole, and counts the updates of a Trainer: a second one may be refused at its start."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.updates = folder, 0
        self.accelerator: Any = None

    def __call__(self, trainer: Any, model: Any = None) -> None:
        """A Trainer before it trains, or an accelerator and its model before the first update."""
        if model is None:
            self.accelerator, self.updates = trainer.accelerator, 0
            trainer.add_callback(self)
        else:
            self.accelerator = trainer
            self.write(model, trainer.is_main_process)
            self.updates += 1

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step == 0:
            self.write(model, args.should_save)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.updates += 1

    def write(self, model: Any, writes: bool) -> None:
        held = whole_gradients(self.accelerator, model)
        if held and writes:
            save_file({name: tensor.clone() for name, tensor in held.items()}, self.folder / "gradients.safetensors")


def plain(gradient: Any) -> torch.Tensor:
    """The tensor behind a view of the whole model's gradient."""
    found: torch.Tensor = gradient.plain() if hasattr(gradient, "plain") else gradient
    return found


def whole_gradients(accelerator: Any, model: Any) -> dict[str, torch.Tensor]:
    """Every gradient by name, whole on rank 0; collective."""
    session = getattr(accelerator, "hf_parallel", None)
    if session is None:
        bare = accelerator.unwrap_model(model)
        return {name: p.grad for name, p in bare.named_parameters() if p.grad is not None}
    from hf_parallel.checkpoints.weights.gather import gather_tensors

    attachment = session.engine.attachment
    held = {name: plain(p.grad) for name, p in attachment.parameters.items() if p.grad is not None}
    zero = session.engine.gradients.replicas.zero
    if (
        zero is not None and not held
    ):  # the optimizer's parts have them; parameters have views where callbacks may edit
        held = zero_gradients(zero)
    names: list[list[str]] = [[] for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather_object(names, sorted(held))
    present = {name for some in names for name in some}  # a rank cannot know which of another stage are frozen
    return gather_tensors(
        attachment.ledger, held, session.mesh, wanted=lambda entry: entry.kind == "param" and entry.name in present
    )


def digest(model: Any) -> str:
    """Of what this rank holds."""
    found = hashlib.sha256()
    for name, parameter in model.named_parameters():
        if parameter.device.type != "meta" and not hasattr(parameter, "full_tensor"):
            found.update(name.encode() + parameter.detach().float().contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


def run_one(job: Job, folder: Path, rank: int) -> dict[str, Any]:
    """Run the script as a module of its own; what it did on this rank."""
    from accelerate.state import AcceleratorState, GradientState

    from hf_parallel.errors import ParallelError, RankFailure

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    place = folder / job.name
    (place / "out").mkdir(parents=True, exist_ok=True)
    watch = Watch(place)
    kept: list[Any] = []

    def seen(first: Any, model: Any = None) -> None:
        kept.append(first)
        watch(first, model)

    facts: dict[str, Any] = {}
    try:
        specification = importlib.util.spec_from_file_location(f"case_{os.urandom(4).hex()}", place / "case.py")
        assert specification is not None
        assert specification.loader is not None
        module = importlib.util.module_from_spec(specification)
        specification.loader.exec_module(module)
        torch.manual_seed(0)
        settings = {**job.setup.parallel, "hang_timeout_s": HANG_S} if job.parallel else None
        history = module.run(str(place / "out"), job.processes, settings, seen)
        facts["history"] = [{key: entry[key] for key in KEYS if key in entry} for entry in history]
        model = kept[-1].model if hasattr(kept[-1], "model") else kept[-1]._models[-1]
        facts["digest"] = digest(model)
    except BaseException as error:
        own = isinstance(error, ParallelError)
        kind = "failure" if isinstance(error, RankFailure) else "refused" if own else "crashed"
        trace = traceback.format_exc()
        facts |= {"error": kind, "type": type(error).__name__, "message": str(error), "trace": trace[-6000:]}
    for one in kept:
        session = getattr(getattr(one, "accelerator", one), "hf_parallel", None)
        if session is not None:
            session.watchdog.stop()
    facts["updates"] = watch.updates
    (place / f"rank-{rank}.json").write_text(json.dumps(facts))
    return facts


def jobs_main(rank: int, world_size: int, jobs: list[Job], folder: str) -> None:
    for job in jobs:
        with (Path(folder) / job.name / f"rank-{rank}.log").open("w") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        facts = run_one(job, Path(folder), rank)
        if "error" in facts:
            raise RuntimeError(f"{job.name}: {facts['message']}")  # nothing of a broken run may reach the next one


def preload(places: list[Path]) -> None:
    """Import once, in the server that ranks are forked from, what every launch needs."""
    os.environ["PYTHONPATH"] = os.pathsep.join([*map(str, places), os.environ.get("PYTHONPATH", "")])
    kinds = sorted({KINDS.get(kind, kind) for kind, _ in MODELS.values()})
    models = [f"transformers.models.{kind}.modeling_{kind}" for kind in kinds]
    more = ["deepspeed", "hf_parallel", "hf_parallel.trainer.callback", "trainer_cases", "differential_ranks", *models]
    rank_runner.PRELOAD[:] = [*dict.fromkeys([*rank_runner.PRELOAD, *more])]


def run_jobs(jobs: list[Job], folder: Path, timeout_s: float, together: int = 12) -> None:
    """Run jobs, several of one world size in a launch; a launch that ends early is followed by one with the rest."""
    for job in jobs:
        (folder / job.name).mkdir(parents=True, exist_ok=True)
        (folder / job.name / "case.py").write_text(job.source or script(job.setup))
    for processes in sorted({job.processes for job in jobs}):
        queue = [job for job in jobs if job.processes == processes]
        while queue:
            batch, rest = queue[:together], queue[together:]
            try:
                run_ranks(
                    jobs_main,
                    processes,
                    batch,
                    str(folder),
                    tmp_path=folder,
                    timeout=timeout_s * (1 + len(batch) / 4),
                    init_group=processes > 1,
                    env=ENV,
                    grace=GRACE_S,
                )
                done = len(batch)
            except RankError as error:
                begun = [index for index, job in enumerate(batch) if any((folder / job.name).glob("rank-*.json"))]
                done = max(begun, default=0) + 1
                whole = all((folder / batch[done - 1].name / f"rank-{r}.json").exists() for r in range(processes))
                fine = whole and not any("error" in facts for facts in facts_of(batch[done - 1], folder))
                done += fine and done < len(batch)  # the next one broke before any rank could say a word
                (folder / batch[done - 1].name / "launch.txt").write_text(str(error))
            queue = batch[done:] + rest


def facts_of(job: Job, folder: Path) -> list[dict[str, Any]]:
    found = []
    for rank in range(job.processes):
        path = folder / job.name / f"rank-{rank}.json"
        found.append(
            json.loads(path.read_text()) if path.exists() else {"error": "silent", "message": "", "updates": 0}
        )
    return found


# -- the verdict -----------------------------------------------------------------------------------------------------


@dataclass
class Verdict:
    """What became of one set-up.

    Args:
        word: `equal`, `refused`, `differs`, `crashed`, `hung`, or `no reference`.
        text: Where it differs, or the message.
        difference: Largest relative difference.
    """

    word: str
    text: str = ""
    difference: float = 0.0
    trace: str = field(default="", repr=False)

    @property
    def bad(self) -> bool:
        return self.word in ("differs", "crashed", "hung")


CHANGES = ("FreezeLater", "Unfreeze")  # callbacks that change what is trained after the first update


def broken(facts: list[dict[str, Any]], launch: str, right: int = 0) -> Verdict | None:
    """The verdict on a run in which a rank did not finish; `right` updates come before what may be refused."""
    errors = [one for one in facts if "error" in one]
    if not errors:
        return None
    crashed = [one for one in errors if one["error"] == "crashed"]
    refused = [one for one in errors if one["error"] == "refused"]
    if crashed:
        crashed.sort(key=lambda one: "gloo" in one["message"] or "Connection" in one["message"])  # effects last
        return Verdict("crashed", f"{crashed[0]['type']}: {crashed[0]['message'][:400]}", trace=crashed[0]["trace"])
    updates = max(one["updates"] for one in facts)
    if any(one["error"] == "silent" for one in errors) or len(errors) < len(facts):
        said = f"one rank says: {refused[0]['message'][:300]}" if refused else launch[-1500:]
        return Verdict("hung", f"{len(facts) - len(refused)} of {len(facts)} ranks do not end; {said}", trace=launch)
    message = (refused or errors)[0]["message"]
    if updates > right or not refused:
        return Verdict("crashed", f"refused after {updates} updates: {message[:400]}", trace=errors[0]["trace"])
    return Verdict("refused", message[:600])


def relative(mine: torch.Tensor, other: torch.Tensor, floor: float) -> float:
    """Difference by the norm of the tensor, or by what is usual for so many elements of this model if that is more."""
    if mine.shape != other.shape or bool(torch.isfinite(mine).all()) != bool(torch.isfinite(other).all()):
        return math.inf
    found = float((mine.double() - other.double()).norm() / max(float(other.double().norm()), floor, 1e-30))
    return 0.0 if math.isnan(found) else found


def compare_tensors(
    mine: dict[str, torch.Tensor], other: dict[str, torch.Tensor], what: str, without: frozenset[str] = frozenset()
) -> tuple[float, str]:
    """The largest difference, and where it is; `without` some tensors."""
    if mine.keys() != other.keys():
        return math.inf, f"{what}: {sorted(mine.keys() ^ other.keys())[:4]} on one side only"
    found = differences(mine, other, what)
    worst = max(((size, name) for name, size in found.items() if name not in without), default=(0.0, ""))
    return worst[0], f"{what} of {worst[1]}: {worst[0]:.1e} relative" if worst[1] else ""


def differences(mine: dict[str, torch.Tensor], other: dict[str, torch.Tensor], what: str) -> dict[str, float]:
    """Relative, of tensors of the same names."""
    elements = sum(tensor.numel() for tensor in other.values()) or 1
    share = 1.0 if what == "parameters" else 0.1  # a bias that began at zero is nothing but updates
    usual = math.sqrt(sum(float(t.double().norm()) ** 2 for t in other.values()) / elements)
    return {
        name: relative(mine[name], tensor, share * usual * math.sqrt(tensor.numel())) for name, tensor in other.items()
    }


def compare_histories(
    mine: list[dict[str, float]], other: list[dict[str, float]], without: frozenset[str] = frozenset()
) -> tuple[float, str]:
    """The largest difference of what was logged, and where it is; `without` some figures."""
    if [sorted(entry) for entry in mine] != [sorted(entry) for entry in other]:
        return math.inf, f"logs differ: {mine} and {other}"[:500]
    worst = (0.0, "")
    for index, (here, there) in enumerate(zip(mine, other, strict=True)):
        for key, value in there.items():
            if key in without:
                continue
            if math.isnan(value) and math.isnan(here[key]):
                continue
            found = abs(here[key] - value) / max(abs(value), 1e-3)
            found = math.inf if math.isnan(found) else found
            worst = max(worst, (found, f"{key} of log {index}: {here[key]:.7g} instead of {value:.7g}"))
    return worst


def tensors_of(place: Path, what: str) -> dict[str, torch.Tensor]:
    if what == "gradients":
        path = place / "gradients.safetensors"
        return load_file(path) if path.exists() else {}
    if (place / "out" / "final.pt").exists():
        found = torch.load(place / "out" / "final.pt", weights_only=True)
        kept: dict[int, str] = {}
        return {name: t for name, t in found.items() if kept.setdefault(t.data_ptr(), name) == name}
    return {k: v for path in (place / "out" / "final").glob("*.safetensors") for k, v in load_file(path).items()}


def tensors_of_both(job: Job, reference: Job, folder: Path, what: str) -> list[dict[str, torch.Tensor]]:
    """Gradients or parameters of two finished runs."""
    here, there = (tensors_of(folder / one.name, what) for one in (job, reference))
    if what == "parameters":  # a tied tensor may be written under one name or several
        here = {name: tensor for name, tensor in here.items() if name in there} if len(here) > len(there) else here
        there = {name: tensor for name, tensor in there.items() if name in here} if len(there) > len(here) else there
    return [here, there]


def names_apart(job: Job, reference: Job, folder: Path, limit: float) -> frozenset[str]:
    """Names of the tensors in which two finished runs differ by more than a limit."""
    pairs = [(what, tensors_of_both(job, reference, folder, what)) for what in ("gradients", "parameters")]
    found = [differences(*pair, what) for what, pair in pairs if pair[0].keys() == pair[1].keys()]
    return frozenset(name for sizes in found for name, size in sizes.items() if size > limit)


def difference_of(job: Job, reference: Job, folder: Path, without: frozenset[str] = frozenset()) -> tuple[float, str]:
    """The largest difference of two finished runs, and where it is; `without` some tensors."""
    mine, other = facts_of(job, folder), facts_of(reference, folder)
    # A group for each parameter: rank 0 logs the rate of its own first one, of which the model has others before it.
    own_groups = job.setup.optimizer == "RatesByAttribute" and job.setup.pp > 1 and bool(job.setup.frozen)
    logged = frozenset({"learning_rate"} if own_groups else ())
    found = [compare_histories(mine[0]["history"], other[0]["history"], logged)]
    for what in ("gradients", "parameters"):
        found.append(compare_tensors(*tensors_of_both(job, reference, folder, what), what, without))
    # The first place where it goes wrong says more than the largest figure behind it.
    first = next((one for one in found if one[0] > TOLERANCE), max(found))
    return max(max(found)[0], first[0]), first[1]


def place_of(setup: Setup, processes: int, rank: int) -> tuple[int, ...]:
    """What of a model a rank holds: its stage, its shard, its experts."""
    sp, ep = setup.parallel.get("sp_size", 1), setup.parallel.get("ep_size", 1)
    inside = setup.parallel.get("topology", {}).get("dp_inside", 1)
    shape = MeshShape(processes // (setup.pp * setup.tp * sp), setup.pp, setup.tp, sp, ep, inside)
    dp_rank, pp_rank, tp_rank, _ = shape.coordinates(rank)
    return pp_rank, tp_rank, dp_rank % ep


def copies_differ(job: Job, facts: list[dict[str, Any]]) -> str:
    """Ranks of one place in the model hold the same, unless parameters are shared out."""
    zero = job.setup.parallel.get("zero", {})
    if zero.get("stage") == 3 or zero.get("engine") == "fsdp2" or job.setup.resume is not None:
        return ""
    first: dict[tuple[int, ...], int] = {}
    for rank, one in enumerate(facts):
        other = first.setdefault(place_of(job.setup, len(facts), rank), rank)
        if one["digest"] != facts[other]["digest"]:
            return f"rank {rank} holds other parameters than rank {other}, its replica"
    return ""


def judge(
    job: Job, reference: Job, folder: Path, noise: float = 0.0, without: frozenset[str] = frozenset()
) -> Verdict:
    """The verdict on a run.

    Args:
        job: It.
        reference: What it must equal.
        folder: Of both.
        noise: Difference that is allowed beside `TOLERANCE`: that of the reference with its batches cut in another way.
        without: Names of tensors that are nothing but rounding.
    """
    facts, expected = facts_of(job, folder), facts_of(reference, folder)
    note = folder / job.name / "launch.txt"
    if any("error" in one for one in expected):
        errors = [one for one in expected if "error" in one]
        return Verdict("no reference", f"{errors[0].get('type')}: {errors[0]['message'][:300]}")
    right = int(job.setup.callback in CHANGES)
    steps = [entry for entry in expected[0]["history"] if "loss" in entry]
    # A Trainer that filters NaN logs the mean of the losses since the last log in its place: 0 if it is the only one.
    unlabelled = [i for i, entry in enumerate(steps) if entry["loss"] == 0 or any(map(math.isnan, entry.values()))]
    right = max([right, *unlabelled[:1]])  # a step without a label is refused when it comes
    ended = broken(facts, note.read_text() if note.exists() else "", right)
    if ended is not None:
        return ended
    if any(one["history"] != facts[0]["history"] for one in facts[1:]) and job.setup.driver != "trainer":
        return Verdict("differs", "ranks report different losses or norms", math.inf)
    found, where = difference_of(job, reference, folder, without)
    apart = copies_differ(job, facts)
    if apart:
        return Verdict("differs", apart, math.inf)
    return Verdict("equal" if found <= max(TOLERANCE, noise) else "differs", where, found)
