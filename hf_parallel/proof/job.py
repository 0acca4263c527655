"""A job: the model, the layout and the batches of a few optimizer steps that are trained twice."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from hf_parallel.errors import ConfigError
from hf_parallel.settings.config import HFParallelConfig
from hf_parallel.settings.schedule_names import ASYNCHRONOUS
from hf_parallel.settings.values import spelled


DTYPES: Final = ("fp32", "bf16", "fp16")
LOSSY: Final = "by design it trains otherwise than one process does. Verify without it"


@dataclass(frozen=True)
class Job:
    """A verification: what to train, how long, and in which layout.

    Args:
        model: A `config.json`, a folder with one and perhaps weights, or a name; empty with a script.
        settings: Settings of hf_parallel, as in the `hf_parallel` section of a recipe.
        processes: Ranks of the layout.
        steps: Optimizer steps, 1 or more.
        rows: Rows of a batch of each replica, 1 or more.
        length: Tokens of a row, 4 or more.
        accumulation: Batches of an optimizer step, 1 or more.
        dtype: Dtype of the products: fp32, or bf16 or fp16 (mixed precision).
        layers: Number of blocks of the model; None: all.
        random_weights: Whether weights are drawn instead of read.
        seed: Seed of weights and data.
        tamper: `module:function`, called with the Trainer of every rank of the layout before its first step: a bug to be found.
        script: A training script that is run instead; it makes model, data and Trainer.
        arguments: Arguments of the script.
        home: The folder that the ranks run in, so that relative paths mean what they mean to the user.
        trace: Whether what passes through the modules in the last step is noted, and that step is not clipped.
    """

    model: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    processes: int = 1
    steps: int = 3
    rows: int = 4
    length: int = 16
    accumulation: int = 1
    dtype: str = "fp32"
    layers: int | None = None
    random_weights: bool = False
    seed: int = 0
    tamper: str | None = None
    script: str | None = None
    arguments: Sequence[str] = ()
    home: str | None = None
    trace: bool = False

    def __post_init__(self) -> None:
        problems = [
            f"{name}={spelled(value)}: it is an integer of {least} or more."
            for name, least in {
                "processes": 1,
                "steps": 1,
                "rows": 1,
                "length": 4,
                "accumulation": 1,
                "layers": 1,
            }.items()
            if (value := getattr(self, name)) is not None and (type(value) is not int or value < least)
        ]
        if self.dtype not in DTYPES:
            problems.append(f"dtype={spelled(self.dtype)}: expected one of {', '.join(DTYPES)}.")
        if problems:
            raise ConfigError("\n".join(problems))
        problems = list(self._of_layout())
        if problems:
            raise ConfigError("\n".join(problems))

    def _of_script(self) -> list[str]:
        """Arguments that the script decides."""
        fields = {each.name: each.default for each in dataclasses.fields(self)}
        return [
            f"{name}={spelled(value)} beside script: the script says it. Leave it out."
            for name in ("rows", "length", "accumulation", "dtype", "layers", "random_weights")
            if self.script is not None and not self.trace and (value := getattr(self, name)) != fields[name]
        ]

    def _of_layout(self) -> list[str]:
        config, problems = self.config, self._of_script()
        shards = config.model_parallel_size
        if self.processes % shards:
            sizes = {"tp_size": config.tp_size, "pp_size": config.pp_size, "sp_size": config.sp_size}
            named = [name for name, size in sizes.items() if size > 1 or name != "sp_size"]
            problems.append(
                f"processes={self.processes}: it is a multiple of {' * '.join(named)} = "
                f"{' * '.join(str(sizes[name]) for name in named)} = {shards}."
            )
        elif self.replicas % config.ep_size:
            problems.append(
                f"processes={self.processes} with ep_size={config.ep_size}: {config.ep_size} replicas of {shards} ranks share the "
                f"experts, so it is a multiple of {shards * config.ep_size}."
            )
        if config.layout == "auto":
            problems.append("layout=auto: name the layout that is to be verified (tp_size, pp_size, zero.stage).")
        if config.zero.engine == "deepspeed":
            problems.append("zero.engine=deepspeed: DeepSpeed trains with code of its own. Set it to native or fsdp2.")
        if config.gradient_compression.method != "none":
            problems.append(f"gradient_compression.method={config.gradient_compression.method}: {LOSSY} (none).")
        if config.local_sgd.sync_every > 1:
            problems.append(f"local_sgd.sync_every={config.local_sgd.sync_every}: {LOSSY} (1).")
        if config.pipeline.schedule in ASYNCHRONOUS:
            problems.append(f"pipeline.schedule={config.pipeline.schedule}: {LOSSY} (1f1b).")
        return problems

    @property
    def config(self) -> HFParallelConfig:
        """The settings, validated."""
        return HFParallelConfig.from_mapping({}, source="verify").with_overrides(**self.settings)

    @property
    def replicas(self) -> int:
        """Replicas of the layout."""
        return self.processes // self.config.model_parallel_size

    @property
    def microbatches(self) -> int:
        """Parts that the layout cuts the batch of a replica into."""
        config = self.config
        return 1 if config.pp_size == 1 else min(self.rows, config.pipeline.parts_of_batch(config.pp_size))

    @property
    def layout(self) -> str:
        """The layout in words that are used in tables, such as pp2xdp2."""
        config = self.config
        sizes = {
            "pp": config.pp_size,
            "tp": config.tp_size,
            "sp": config.sp_size,
            "dp": self.replicas,
            "ep": config.ep_size,
        }
        axes = "x".join(f"{name}{size}" for name, size in sizes.items() if size > 1) or "one process"
        zero = f" zero{config.zero.stage}" if config.zero.stage else ""
        return f"{axes}{zero}"

    @property
    def reference_key(self) -> str:
        """Key of a job, equal for jobs whose runs in one process are the same."""
        path = Path(self.model).expanduser()
        config = path / "config.json" if path.is_dir() else path
        model = config.read_text() if self.random_weights and config.is_file() else str(path.absolute())
        rest = (
            self.steps,
            self.replicas,
            self.rows,
            self.microbatches,
            self.length,
            self.accumulation,
            self.dtype,
            self.layers,
            self.config.sp_size if self.trace else 1,
        )
        text = json.dumps([model, *rest, self.random_weights, self.seed, self.trace, self.script, self.arguments])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def dump(self, path: Path) -> None:
        """Write it for another process."""
        path.write_text(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def load(cls, path: Path) -> Job:
        """The inverse of `dump`."""
        return cls(**json.loads(path.read_text()))
