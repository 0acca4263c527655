"""The `hf-parallel schema` command: the JSON schema of a settings file, for editors."""

from __future__ import annotations

import json
from typing import Any, Final

import typer
from annotated_types import Le

from hf_parallel.dry_run.accelerate_file import PRECISIONS, TYPES
from hf_parallel.settings.config import HFParallelConfig
from hf_parallel.settings.problems import sections_of
from hf_parallel.settings.recipes import AUTO, KEY, SECTION
from hf_parallel.settings.schedule_names import SHORT_NAMES
from hf_parallel.settings.values import Section


NUMBER: Final = {"type": "integer", "minimum": 1}


def schema() -> None:
    """Print the JSON schema of a settings file; `# yaml-language-server: $schema=FILE` in a file names it to editors."""
    typer.echo(json.dumps(file_schema(), indent=2))


def file_schema() -> dict[str, Any]:
    """The schema of an accelerate config file with our section, as JSON schema of draft 2020-12."""
    ours = HFParallelConfig.model_json_schema(ref_template="#/$defs/{model}")
    definitions = ours.pop("$defs")
    definitions[KEY] = ours
    _add_short_names(definitions["PipelineConfig"]["properties"]["schedule"])
    topology = ours["properties"]["topology"]
    topology["anyOf"] = [{"$ref": topology.pop("$ref")}, {"const": AUTO}]
    for model in sections_of(HFParallelConfig).values():
        _bound(model, definitions[model.__name__]["properties"])
    section = {"anyOf": [{"$ref": f"#/$defs/{KEY}"}, {"const": AUTO}, {"type": "null"}]}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "An accelerate config file with settings of hf_parallel",
        "type": "object",
        "properties": {
            "compute_environment": {"const": "LOCAL_MACHINE"},
            "distributed_type": {"enum": list(TYPES), "description": "MULTI_GPU, also for several CPU processes"},
            "num_processes": NUMBER | {"description": "processes on all machines"},
            "num_machines": NUMBER,
            "machine_rank": {"type": "integer", "minimum": 0},
            "main_process_ip": {"type": ["string", "null"], "description": "name or address of machine 0"},
            "main_process_port": {"type": ["integer", "null"], "minimum": 0, "maximum": 65535},
            "mixed_precision": {"enum": list(PRECISIONS)},
            "use_cpu": {"type": "boolean"},
            SECTION: {"type": "object", "properties": {KEY: section}},
        },
        "required": ["distributed_type"],
        "$defs": definitions,
    }


def _bound(model: type[Section], properties: dict[str, Any]) -> None:
    """Give each setting its lowest upper bound: of a type with a bound and a field with another, pydantic takes the first."""
    for name, field in model.model_fields.items():
        bounds: list[Any] = [limit.le for limit in field.metadata if isinstance(limit, Le)]
        if bounds and "maximum" in properties[name]:
            properties[name]["maximum"] = min(bounds)
            properties[name].pop("le", None)


def _add_short_names(field: dict[str, Any]) -> None:
    field["enum"] = [*field["enum"], *SHORT_NAMES]
