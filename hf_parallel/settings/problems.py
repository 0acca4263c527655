"""Words the problems of settings: key path and value, rule, fix; one line a setting, all of them at once."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, Final

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from hf_parallel.errors import MAX_LINES, ConfigError
from hf_parallel.settings.schedule_names import SHORT_NAMES
from hf_parallel.settings.values import MAX_SHOWN, Section, spelled


SAME_STEM: Final = 5  # first letters alike: another form of the same word
TRUTH: Final = {
    "yes": True,
    "true": True,
    "on": True,
    "1": True,
    "no": False,
    "false": False,
    "off": False,
    "0": False,
}
_DP = "The data parallel size is derived: num_processes / (tp_size * pp_size * sp_size). Remove it, and set num_processes."
_TRAINERS = "It is an argument of TrainingArguments. Remove it here."
_ROWS = "It is per_device_train_batch_size of TrainingArguments. Remove it here."
_SCRIPTS = "It is the script's. Remove it here."
_EVERY = "Did you mean activation_checkpointing.every (1)?"
_OUTSIDE = "It stands at the top level of the file, outside of parallelism_config. Move it there."
# Keys of other programs, and of other places, that mean something here.
MEANT: Final = {
    **dict.fromkeys(("dp", "dp_size", "data_parallel_size", "dp_replicate_size", "num_replicas"), _DP),
    **dict.fromkeys(("dp_degree", "data_parallel_shard_degree", "data_parallel_replicate_degree"), _DP),
    **dict.fromkeys(
        ("tp", "tensor_parallel_size", "tensor_model_parallel_size", "tensor_parallel_degree"), "Did you mean tp_size?"
    ),
    **dict.fromkeys(
        ("pp", "pipeline_parallel_size", "pipeline_model_parallel_size", "pipeline_parallel_degree", "num_stages"),
        "Did you mean pp_size?",
    ),
    **dict.fromkeys(("ep", "expert_parallel_size", "expert_model_parallel_size"), "Did you mean ep_size?"),
    **dict.fromkeys(
        ("sp", "cp_size", "cp", "sequence_parallel_size", "context_parallel_size", "ulysses_size")
        + ("sequence_parallel_degree", "context_parallel_degree"),
        "Did you mean sp_size?",
    ),
    **dict.fromkeys(("zero_stage", "zero_optimization"), "Did you mean zero.stage?"),
    "offload_optimizer_device": "Did you mean zero.offload_optimizer?",
    "offload_param_device": "Did you mean zero.offload_param?",
    "fsdp": "Did you mean zero.stage (3)?",
    "use_distributed_optimizer": "Did you mean zero.stage (1)?",
    "deepspeed": "Did you mean zero.engine (deepspeed)? `hf-parallel import` takes a DeepSpeed JSON over.",
    **dict.fromkeys(("gradient_checkpointing", "recompute_granularity", "recompute_activations"), _EVERY),
    **dict.fromkeys(
        ("num_layers_per_virtual_pipeline_stage", "virtual_pipeline_model_parallel_size", "num_model_chunks"),
        "Did you mean pipeline.stages_per_rank?",
    ),
    "pipeline_parallel_schedule": "Did you mean pipeline.schedule?",
    **dict.fromkeys(
        ("bucket_size", "reduce_bucket_size", "ddp_bucket_size"), "Did you mean data_parallel.bucket_cap_mb?"
    ),
    "loss_parallel": "Did you mean tensor_parallel.vocab_parallel_loss?",
    **dict.fromkeys(("torch_compile", "dynamo_backend"), "Did you mean pipeline.compile_blocks?"),
    **dict.fromkeys(("hf_parallel", "parallelism"), "Write its keys one level up, without it."),
    **dict.fromkeys(("codec", "compressor"), "Did you mean gradient_compression.method?"),
    **dict.fromkeys(
        ("keep", "keep_last", "max_to_keep"), "It is save_total_limit of TrainingArguments. Remove it here."
    ),
    **dict.fromkeys(("micro_batches", "microbatches", "chunks"), "Did you mean pipeline.num_microbatches?"),
    **dict.fromkeys(
        ("num_processes", "num_machines", "machine_rank", "mixed_precision", "use_cpu", "distributed_type"), _OUTSIDE
    ),
    **dict.fromkeys(("bf16", "fp16"), "Set mixed_precision at the top level of the file. Remove it here."),
    **dict.fromkeys(("learning_rate", "per_device_train_batch_size", "max_grad_norm", "gradient_clipping"), _TRAINERS),
    **dict.fromkeys(("num_train_epochs", "max_steps", "save_steps", "output_dir", "seed", "optim"), _TRAINERS),
    **dict.fromkeys(("micro_batch_size", "train_micro_batch_size_per_gpu"), _ROWS),
    "train_batch_size": "Did you mean global_batch_size?",
    **dict.fromkeys(("cutoff_len", "sequence_len", "seq_length", "max_seq_length", "finetuning_type"), _SCRIPTS),
    **dict.fromkeys(("flash_attention", "attn_implementation", "torch_dtype", "load_in_4bit"), _SCRIPTS),
}


def sections_of(root: type[Section]) -> dict[str, type[Section]]:
    """Name -> class of the sections of a config."""
    return {
        name: type(field.default) for name, field in root.model_fields.items() if isinstance(field.default, Section)
    }


def locate(root: type[Section], key: str) -> tuple[str, str]:
    """(section, leaf) of an override name; the section of a top-level name is ''.

    Raises:
        ConfigError: No setting, or several, have that name.
    """
    sections = sections_of(root)
    section, _, leaf = key.rpartition(".")
    if section in sections or (not section and leaf in root.model_fields):
        return section, leaf
    homes = [name for name, model in sections.items() if leaf in model.model_fields] if not section else []
    if len(homes) == 1:
        return homes[0], leaf
    if homes:
        raise ConfigError(f"{key}: found in {', '.join(homes)}. Write it with its section: {homes[0]}.{key}.")
    raise ConfigError(_unknown_key(root, key, ""))


def rewritten(error: ValidationError, root: type[Section], values: Mapping[str, Any]) -> list[str]:
    """Pydantic's errors, one line a setting (a union reports once for each of its members)."""
    lines: list[str] = []
    for path, details in islice(_by_setting(error, root).items(), MAX_LINES):
        lines.append(_problem(root, path, details, values))
        if details[0]["type"] == "extra_forbidden":
            lines += _inside(root, path, details[0]["input"])
    return lines[:MAX_LINES]


def _by_setting(
    error: ValidationError, root: type[Section], start: tuple[str, ...] = ()
) -> dict[str, list[ErrorDetails]]:
    found: dict[str, list[ErrorDetails]] = {}
    for detail in error.errors():
        found.setdefault(_setting_path(root, (*start, *detail["loc"])), []).append(detail)
    return found


def _inside(root: type[Section], key: str, content: object) -> list[str]:
    """The problems of the content of an unknown section, as of the section that was probably meant."""
    if not isinstance(content, Mapping) or "." in key or key in MEANT:
        return []
    sections = sections_of(root)
    near = nearest_word(key, sections)
    if near is None:
        return []
    try:
        sections[near].model_validate(content)
    except ValidationError as error:
        found = islice(_by_setting(error, root, (near,)).items(), MAX_LINES)
        lines = [_problem(root, path, details, {near: content}) for path, details in found if path != near]
        return [f"{key}{line.removeprefix(near)}" for line in lines]
    return []


def _setting_path(root: type[Section], loc: Iterable[int | str]) -> str:
    """The part of a pydantic location that names a setting, without union members and list positions."""
    path: list[str] = []
    model: type[Section] | None = root
    for part in map(str, loc):
        if model is None:
            break
        path.append(part)
        model = sections_of(model).get(part)
    return ".".join(path)


def _home(root: type[Section], section: str) -> type[Section]:
    """The class of a section, which may be inside another; '' is the config itself."""
    for part in filter(None, section.split(".")):
        root = sections_of(root)[part]
    return root


def _parted(root: type[Section], path: str) -> tuple[str, str]:
    """The section of a setting and its key, which may have dots of its own."""
    section, parts = [], path.split(".")
    while len(parts) > 1 and parts[0] in sections_of(root):
        root = sections_of(root)[parts[0]]
        section.append(parts.pop(0))
    return ".".join(section), ".".join(parts)


def _problem(root: type[Section], path: str, details: Sequence[ErrorDetails], values: Mapping[str, Any]) -> str:
    section, leaf = _parted(root, path)
    detail = details[0]
    if detail["type"] == "together":
        return detail["msg"]
    if detail["type"] == "problem":
        return f"{path}{detail['msg']}"
    if detail["type"] == "extra_forbidden":
        return _unknown_key(root, leaf, section)
    home = _home(root, section)
    field = home.model_fields.get(leaf)
    if field is None:  # a key that is no string
        return f"{section or 'the settings'}: {_cut(leaf)} is not a key. Keys are strings: quote or remove it."
    given: Any = values
    for part in path.split("."):
        given = given[part] if isinstance(given, Mapping) else getattr(given, part, None)
    if leaf in sections_of(home):
        return f"{path}={spelled(given)}: expected {field.description}. {as_mapping(given, leaf, sections_of(home)[leaf])}"
    near = nearest_value(given, details, field.default)
    return f"{path}={spelled(given)}: expected {field.description}. Set {path} to {spelled(near)}."


def nearest_value(given: object, details: Sequence[ErrorDetails], default: object) -> object:
    """The allowed value that was probably meant; `default` where nothing is near.

    Args:
        given: Value that was written.
        details: Errors of pydantic, one for each member of a union; the allowed words and bounds stand there.
        default: The setting's.
    """
    if isinstance(given, list) and len(given) == 1:
        return nearest_value(given[0], details, default)
    if isinstance(default, list | tuple) and isinstance(given, int) and not isinstance(given, bool) and given > 0:
        return [given]
    if isinstance(given, str):
        return _meant_by_text(given, details, default)
    if given is True:
        return _meant_by_true(details, default)
    if isinstance(given, int | float) and given is not False and (isinstance(given, int) or math.isfinite(given)):
        bounds = [
            detail["ctx"][bound] for detail in details for bound in ("ge", "le") if bound in detail.get("ctx", {})
        ]
        if bounds:
            return bounds[0]
        if _has(details, "int"):
            return max(1, round(given))
    return default


def _meant_by_text(given: str, details: Sequence[ErrorDetails], default: object) -> object:
    near = nearest_word(given, [word for detail in details for word in _words_of(detail)])
    if near is not None:
        return near
    first = given.lower().partition(" ")[0]
    if first in TRUTH and _has(details, "bool"):
        return TRUTH[first]
    number = re.fullmatch(r"(\d{1,9})\W*", given)
    if number and _has(details, "int"):
        return max(1, int(number[1]))
    if first in ("all", "each", "every", "full") and default is None and _has(details, "int"):  # blocks, each of them
        return 1
    return default


def _meant_by_true(details: Sequence[ErrorDetails], default: object) -> object:
    """The first word that is not "none"; of what counts and is off, one."""
    words = [word for detail in details for word in _words_of(detail)]
    if "none" in words:
        return next(word for word in words if word != "none")
    return 1 if default is None and _has(details, "int") else default


def _has(details: Sequence[ErrorDetails], kind: str) -> bool:
    """Whether a value of this kind would be right."""
    return any(detail["type"].startswith(kind) for detail in details)


def nearest_word(given: str, words: Iterable[str]) -> str | None:
    """The word that was probably meant: letters exchanged count as near, and short names stand for their schedule."""
    known = {word: word for word in words}
    known |= {short: full for short, full in SHORT_NAMES.items() if full in known}
    given = given.strip().lower()
    letters = [word for word in known if sorted(word) == sorted(given)]
    near = letters or difflib.get_close_matches(given[:MAX_SHOWN], known, n=1, cutoff=0.6)
    return known[near[0]] if near else None


def _takes(model: type[Section], key: str, value: object) -> bool:
    """Whether a value is meant for this key of a section: it may have the value, and not just any text (a path)."""
    try:
        model(**{key: value})
    except ValidationError:
        return False
    if not isinstance(value, str):
        return True
    try:
        model(**{key: f"{value} or any other"})
    except ValidationError:
        return True
    return False


def _words_of(detail: ErrorDetails) -> list[str]:
    expected = str(detail.get("ctx", {}).get("expected", "")) if detail["type"] == "literal_error" else ""
    return re.findall(r"'([^']*)'", expected)


def as_mapping(given: object, name: str = "", model: type[Section] | None = None) -> str:
    """Word the fix where a mapping is expected and something else was written.

    Args:
        given: Value that was written.
        name: The section's.
        model: The section's; the value may be meant for its first key that takes it.
    """
    if model is not None and isinstance(given, str | int) and not isinstance(given, bool):
        key = next((key for key in model.model_fields if _takes(model, key, given)), None)
        if key is not None:
            return f"Write {name}: {{{key}: {given}}}."
    if isinstance(given, list) and given and all(isinstance(item, Mapping) for item in given):
        return "Remove the dashes before its keys."
    if isinstance(given, str) and re.fullmatch(r"(?:[a-z_]+ *= *[^\s=]+\s+)+[a-z_]+ *= *[^\s=]+", given[:MAX_SHOWN]):
        return "Write a line for each key, with a colon for the equals sign."
    words = re.fullmatch(r"([a-z_]+) *[ =] *(\S+)", given) if isinstance(given, str) else None
    if words:
        return f"Write {words[1]}: {words[2]} with a colon."
    return "Write its keys on lines below it, or leave it out."


def _cut(key: str) -> str:
    return key if len(key) <= MAX_SHOWN else f"{key[: MAX_SHOWN - 3]}..."


def _unknown_key(root: type[Section], key: str, section: str) -> str:
    sections, home, key = sections_of(root), _home(root, section), _cut(key)
    path = f"{section}.{key}" if section else key
    if key in MEANT:
        return f"{path}: unknown key. {MEANT[key]}"
    if not home.model_fields:
        return f"{path} is not available yet: the {section} section has no options. Remove it."
    known = [*home.model_fields]
    longer = [".".join(filter(None, (section, name))) for name in known if key in name.split("_")]
    if longer and not difflib.get_close_matches(key, known, n=1, cutoff=0.85):
        return f"{path}: unknown key. Did you mean {' or '.join(longer)}?"
    elsewhere = [f"{name}.{key}" for name, model in sections.items() if key in model.model_fields]
    if section and key in home.model_fields:
        return f"{path}: unknown key. Keys of a file have no dots. Write {section}: {{{key}: ...}}."
    if key in root.model_fields:
        elsewhere.append(f"{key} at the top level")
    if elsewhere:
        return f"{path}: unknown key here. Move it to {' or '.join(elsewhere)}."
    leaves = {leaf: f"{name}.{leaf}" for name, model in sections.items() for leaf in model.model_fields}
    seen = key if key.isprintable() else "".join(filter(str.isprintable, key))
    path = path if key.isprintable() else ascii(path).strip("'")
    nearest = difflib.get_close_matches(seen.lower(), [*known, *leaves], n=1, cutoff=0.6)
    stem = seen.lower()[:SAME_STEM]
    nearest = nearest or [name for name in known if len(stem) == SAME_STEM and name.startswith(stem)][:1]
    hint = f"Did you mean {nearest[0] if nearest[0] in known else leaves[nearest[0]]}?" if nearest else "Remove it."
    return f"{path}: unknown key. {hint} Known keys{f' of {section}' if section else ''}: {', '.join(known)}."
