"""The one schema of every setting: the `hf_parallel:` section of a YAML file, the Python API and the command line.

Pure (pydantic only, no torch): a bad config dies in milliseconds, with every problem in one message, before any process
group exists. The sections are in `sections`; what they mean together is checked here.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from hf_parallel.errors import ConfigError
from hf_parallel.mesh.shape import MeshShape
from hf_parallel.settings.problems import locate, rewritten, sections_of
from hf_parallel.settings.replica_sections import (
    DataParallelConfig,
    GradientCompressionConfig,
    LocalSgdConfig,
    ZeroConfig,
)
from hf_parallel.settings.sections import (
    ActivationCheckpointingConfig,
    CheckpointConfig,
    MonitorConfig,
    PipelineConfig,
    TensorParallelConfig,
)
from hf_parallel.settings.together import problems_together
from hf_parallel.settings.topology import TopologyConfig, auto_or_keys
from hf_parallel.settings.values import Count, Section, Size, number, spelled


def _section(model: type[Section], or_else: str = "") -> Any:
    return Field(description=f"{or_else}a mapping with the keys {', '.join(model.model_fields) or '(none yet)'}")


class HFParallelConfig(Section):
    """Every setting of hf_parallel.

    Args:
        tp_size: Ranks that share each layer, 1 or more.
        pp_size: Pipeline stages, 1 or more. The rest of the world is data parallel: `dp = world / (tp * pp * sp)`.
        sp_size: Ranks that share the sequence of each row, 1 or more; each holds the weights of all.
        sp_attention: Way in which attention reaches the whole of such a row: "ulysses" exchanges heads for sequence, "ring"
            passes keys and values round, "auto" is the ring where a rank has fewer than `sp_size` query heads.
        ep_size: Neighbouring replicas that share the experts of their stage, 1 or more; a divisor of dp.
        layout: "given" by the other settings, or "auto": planned when training starts, for the machines that run; then only
            topology, checkpoint and monitor may be given besides.
        gradient_accumulation_steps: Batches of an optimizer step, 1 or more; 'auto' is what the Trainer or Accelerator was
            given.
        global_batch_size: Rows of an optimizer step, 1 or more, whatever the number of replicas: batches are accumulated so that
            there are as many. None: as many as rows per device, replicas and accumulation give.
        chunked_loss: Compute the loss from hidden states, a few tokens at a time, so that logits never exist as a whole: "auto"
            where ranks share the model and a trial shows that it is exact, True there or an error, False never.
        pipeline: Stages, microbatches and schedule.
        tensor_parallel: Sharding of the layers.
        data_parallel: Messages between the data-parallel replicas.
        zero: Partition over the data-parallel ranks.
        activation_checkpointing: Recomputation of activations.
        gradient_compression: Wire format of the gradients.
        local_sgd: Synchronisation interval of the replicas.
        topology: Links that join the ranks, and how the axes lie on them; 'auto' is what the launcher and the bytes
            say.
        checkpoint: Checkpoint options.
        monitor: Hang and batch guards, measurements.

    Raises:
        ConfigError: With every problem, one a line: key and value, rule, fix.
    """

    tp_size: Annotated[Size, Field(description="ranks that share each layer, an integer of 1 or more")] = 1
    pp_size: Annotated[Size, Field(description="pipeline stages, an integer of 1 or more")] = 1
    ep_size: Annotated[
        Size,
        Field(
            description="replicas that share the experts of each block, an integer of 1 or more that divides the replicas"
        ),
    ] = 1
    sp_size: Annotated[
        Size, Field(description="ranks that share the sequence of each row, an integer of 1 or more")
    ] = 1
    sp_attention: Annotated[
        Literal["auto", "ulysses", "ring"],
        Field(
            description="attention of a shared sequence: 'ulysses' (heads exchanged for sequence), 'ring' (keys and values go round) "
            "or 'auto' (the ring where heads are fewer than sp_size)"
        ),
    ] = "auto"
    layout: Annotated[
        Literal["given", "auto"],
        Field(description="'given' (by the other settings) or 'auto' (planned when training starts)"),
    ] = "given"
    gradient_accumulation_steps: Annotated[
        Literal["auto"] | Count,
        BeforeValidator(number),
        Field(
            description="batches of an optimizer step, an integer of 1 or more, or 'auto' (TrainingArguments' number)"
        ),
    ] = "auto"
    global_batch_size: Annotated[
        Count | None,
        Field(
            description="rows of an optimizer step, an integer of 1 or more, kept with any number of replicas by accumulating batches; "
            "or null"
        ),
    ] = None
    chunked_loss: Annotated[
        Literal["auto"] | bool,
        Field(
            description="false, true, or 'auto' (with stages or shards, where it verifies): loss from hidden states, a few tokens "
            "at a time, without logits"
        ),
    ] = "auto"
    pipeline: Annotated[PipelineConfig, _section(PipelineConfig)] = PipelineConfig()
    tensor_parallel: Annotated[TensorParallelConfig, _section(TensorParallelConfig)] = TensorParallelConfig()
    data_parallel: Annotated[DataParallelConfig, _section(DataParallelConfig)] = DataParallelConfig()
    zero: Annotated[ZeroConfig, _section(ZeroConfig)] = ZeroConfig()
    activation_checkpointing: Annotated[ActivationCheckpointingConfig, _section(ActivationCheckpointingConfig)] = (
        ActivationCheckpointingConfig()
    )
    gradient_compression: Annotated[GradientCompressionConfig, _section(GradientCompressionConfig)] = (
        GradientCompressionConfig()
    )
    local_sgd: Annotated[LocalSgdConfig, _section(LocalSgdConfig)] = LocalSgdConfig()
    topology: Annotated[TopologyConfig, BeforeValidator(auto_or_keys), _section(TopologyConfig, "'auto' or ")] = (
        TopologyConfig()
    )
    checkpoint: Annotated[CheckpointConfig, _section(CheckpointConfig)] = CheckpointConfig()
    monitor: Annotated[MonitorConfig, _section(MonitorConfig)] = MonitorConfig()

    if not TYPE_CHECKING:  # type checkers keep the generated signature

        def __init__(self, **values: Any) -> None:
            try:
                super().__init__(**values)
            except ValidationError as error:
                raise ConfigError("\n".join(rewritten(error, HFParallelConfig, values))) from None

    @model_validator(mode="before")
    @classmethod
    def _null_section_is_default(cls, values: Any) -> Any:
        """`accelerate config update` turns an empty section into null."""
        if not isinstance(values, dict):
            return values
        return {key: value for key, value in values.items() if value is not None or key not in sections_of(cls)}

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        problems = problems_together(self)
        if problems:
            raise PydanticCustomError("together", "{text}", {"text": "\n".join(problems)})
        return self

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any] | None, source: str = "config") -> Self:
        """Return the config that `values` (the content of the `hf_parallel:` section; null is empty) describes.

        Args:
            values: Keys as in the YAML file.
            source: Origin of the values, named in the error.

        Raises:
            ConfigError: With every problem of the mapping.
        """
        if values is not None and not isinstance(values, Mapping):
            raise ConfigError(
                f"{source}: hf_parallel={spelled(values)}: expected a mapping. Write its keys on lines below it."
            )
        unnamed = [key for key in values or {} if not isinstance(key, str)]
        if unnamed:
            raise ConfigError(f"{source}: {spelled(unnamed)}: keys are strings. Quote or remove them.")
        try:
            return cls(**(values or {}))
        except ConfigError as error:
            raise ConfigError(f"{source}:\n{error}") from None
        except RecursionError:
            raise ConfigError(f"{source}: nested too deeply. Settings have at most four levels.") from None

    def with_overrides(self, **overrides: Any) -> Self:
        """Return a copy with some settings replaced.

        Args:
            overrides: `pp_size=2`; a setting of a section by its own name (`num_microbatches=8`) or dotted
                (`**{"pipeline.split": "even"}`); or a section as a mapping, which is merged, or as its class.

        Raises:
            ConfigError: For an unknown name, or if the result is not valid.
        """
        source = f"overrides {', '.join(overrides)}" if overrides else "config"
        return type(self).from_mapping(type(self).replaced(self.model_dump(), **overrides), source=source)

    @classmethod
    def replaced(cls, values: Mapping[str, Any], **overrides: Any) -> dict[str, Any]:
        """Return the mapping `values` with some settings replaced; nothing but the names is checked.

        Args:
            values: Values, as for `from_mapping`.
            overrides: Overrides, as for `with_overrides`.

        Raises:
            ConfigError: For an unknown name.
        """
        merged = {key: dict(value) if isinstance(value, Mapping) else value for key, value in values.items()}
        for key, value in overrides.items():
            section, leaf = locate(cls, key)
            plain = value.model_dump() if isinstance(value, BaseModel) else value
            if section:
                home = merged.get(section) or {}
                if not isinstance(home, Mapping | BaseModel):
                    raise ConfigError(
                        f"{section}={spelled(home)} beside the override {key}: expected a mapping. Remove one of them."
                    )
                merged[section] = {**(home.model_dump() if isinstance(home, BaseModel) else home), leaf: plain}
            elif isinstance(merged.get(leaf), dict) and isinstance(plain, Mapping):
                merged[leaf] = {**merged[leaf], **plain}
            else:
                merged[leaf] = plain
        return merged

    def fingerprint(self) -> str:
        """Return 16 hex digits that are equal for equal configs, on every rank and in every process."""
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def model_parallel_size(self) -> int:
        """Ranks that together run one batch: tp_size * pp_size * sp_size."""
        return self.weight_parts * self.sp_size

    @property
    def weight_parts(self) -> int:
        """Ranks that together hold one copy of the weights: tp_size * pp_size."""
        return self.tp_size * self.pp_size

    @property
    def splits_model(self) -> bool:
        """Whether some rank holds a part of the model only, whatever ZeRO does."""
        return self.model_parallel_size > 1 or self.ep_size > 1

    @property
    def keeps_parts(self) -> bool:
        """Whether some rank holds a part of the model only."""
        return self.splits_model or self.zero.shards_parameters

    @property
    def sizes_text(self) -> str:
        """The product of the sizes that a copy takes, for messages."""
        names, sizes = ["tp_size", "pp_size"], [self.tp_size, self.pp_size]
        if self.sp_size > 1:
            names, sizes = [*names, "sp_size"], [*sizes, self.sp_size]
        return f"{' * '.join(names)} = {' * '.join(map(str, sizes))}"

    @property
    def chunks_loss(self) -> bool:
        """Whether the loss is computed without logits, if a trial shows that it can be."""
        wanted = self.chunked_loss
        unshared = self.sp_size == 1 and not self.zero.shards_parameters
        return self.model_parallel_size > 1 and unshared if wanted == "auto" else wanted

    @property
    def works_on_blocks(self) -> bool:
        """Whether the model's stack of blocks is cut, recomputed or compiled."""
        compiled = self.pipeline.compile_blocks != "none"
        return compiled or self.pp_size > 1 or self.activation_checkpointing.every is not None

    @property
    def remembers_verdicts(self) -> bool:
        """Whether what was found out at an earlier start counts: not where a self-check is insisted on."""
        checks = [(self.pp_size, self.pipeline.self_check), (self.tp_size, self.tensor_parallel.self_check)]
        return not any(size > 1 and self_check in ("on", "full") for size, self_check in checks)

    def dp_size(self, world_size: int) -> int:
        """Return the number of model copies in `world_size` ranks, 1 or more.

        Raises:
            ConfigError: If the world does not divide into whole copies.
        """
        copy = self.model_parallel_size
        if world_size >= copy and world_size % copy == 0:
            self._check_replicas(world_size // copy, world_size)
            self.topology.check(world_size, self.tp_size, world_size // copy)
            return world_size // copy
        below, above = world_size // copy * copy, (world_size // copy + 1) * copy
        valid = f"{below} or {above}" if below else f"{above}"
        relation = "is not a multiple of" if below else "is below"
        raise ConfigError(
            f"num_processes={world_size} {relation} {self.sizes_text} = {copy}: every "
            f"model copy needs {copy} processes. Set num_processes to {valid}, or lower {self._lowered}."
        )

    @property
    def _lowered(self) -> str:
        return "tp_size, pp_size or sp_size" if self.sp_size > 1 else "tp_size or pp_size"

    @property
    def asks_sums_in_nodes(self) -> list[str]:
        """The settings that insist on sums inside of nodes."""
        given = {
            "topology.reduction": self.topology.reduction,
            "gradient_compression.topology": self.gradient_compression.topology,
            "local_sgd.compression.topology": self.local_sgd.compression.topology,
        }
        return [key for key, way in given.items() if way == "hierarchical"]

    def check_links(self, world_size: int, ranks_per_node: int) -> None:
        """Refuse machines that the settings contradict.

        Args:
            world_size: Ranks of the run.
            ranks_per_node: Ranks of the run on each machine.

        Raises:
            ConfigError: With the key, the rule and a fix.
        """
        links = self.topology.links(world_size, ranks_per_node)
        if world_size > 1 and self.layout != "auto":
            sizes = self.dp_size(world_size), self.pp_size, self.tp_size, self.sp_size
            for key in self.asks_sums_in_nodes:
                self.topology.check_sums(key, links, MeshShape(*sizes, ep_size=self.ep_size))

    def _check_replicas(self, dp_size: int, world_size: int) -> None:
        """Refuse what needs several replicas where there is one. One process alone is a trial run of any config."""
        shard_size, method = self.zero.dp_shard_size, self.gradient_compression.method
        reduce_dtype, every, stage = self.data_parallel.reduce_dtype, self.local_sgd.sync_every, self.zero.stage
        no_gradient = "so no gradient travels"
        unmet = [
            (
                f"gradient_compression.method={method}",
                method != "none",
                no_gradient,
                "gradient_compression.method to none",
            ),
            (
                f"data_parallel.reduce_dtype={reduce_dtype}",
                reduce_dtype != "float32",
                no_gradient,
                "data_parallel.reduce_dtype to float32",
            ),
            (f"local_sgd.sync_every={every}", every > 1, "nothing to synchronise", "local_sgd.sync_every to 1"),
            (f"zero.stage={stage}", stage > 0, "so nothing is partitioned", "zero.stage to 0"),
        ]
        for setting, given, why, fix in unmet:
            if given and dp_size * self.sp_size == 1 and world_size > 1:
                raise ConfigError(
                    f"{setting} with num_processes={world_size} and {self.sizes_text}: there "
                    f"is one replica, {why}. Set {fix}, or num_processes to {2 * world_size}."
                )
        if world_size > 1 and dp_size % self.ep_size:
            raise ConfigError(
                f"ep_size={self.ep_size} with num_processes={world_size}: neighbouring replicas share the experts, and it does "
                f"not divide the {dp_size} replicas that tp_size * pp_size = {self.tp_size} * {self.pp_size} leaves. Set ep_size to "
                f"{math.gcd(self.ep_size, dp_size)}, or num_processes to {self.model_parallel_size * self.ep_size}."
            )
        if isinstance(shard_size, int) and world_size > 1 and (dp_size % shard_size or shard_size == 1):
            raise ConfigError(
                f"zero.dp_shard_size={shard_size} with {dp_size} replicas: it is a divisor of {dp_size}, 2 or more. Set "
                f"it to {dp_size} or 'auto'."
            )

    def to_yaml_section(self) -> dict[str, Any]:
        """Return the plain mapping to write under `hf_parallel:`; settings at their defaults are left out."""
        sizes = {"tp_size": self.tp_size, "pp_size": self.pp_size}  # sp_size where it is not 1
        plain: dict[str, Any] = self.model_dump(mode="json", exclude_defaults=True)
        return sizes | plain
