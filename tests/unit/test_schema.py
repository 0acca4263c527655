"""The JSON schema that editors read is the code's, and takes and refuses what the code does."""

from __future__ import annotations

import json
from pathlib import Path

from hf_parallel.cli.schema import file_schema
from hf_parallel.settings.config import HFParallelConfig
from hf_parallel.settings.problems import sections_of
from hf_parallel.settings.schedule_names import SHORT_NAMES


SNAPSHOT = Path(__file__).resolve().parents[2] / "docs" / "settings.schema.json"


def test_the_schema_in_docs_is_the_code_s() -> None:
    """A change of the settings is a change of this file: `hf-parallel schema > docs/settings.schema.json`."""
    assert json.loads(SNAPSHOT.read_text()) == file_schema()


def test_every_setting_is_in_the_schema_with_its_rule() -> None:
    definitions = file_schema()["$defs"]
    ours = definitions["hf_parallel"]
    assert set(ours["properties"]) == set(HFParallelConfig.model_fields)
    assert ours["additionalProperties"] is False
    for model in sections_of(HFParallelConfig).values():
        properties = definitions[model.__name__]["properties"]
        assert set(properties) == set(model.model_fields)
        assert all(
            properties[name].get("description") == field.description for name, field in model.model_fields.items()
        )
    assert definitions["ZeroConfig"]["properties"]["stage"]["maximum"] == 3
    assert set(SHORT_NAMES) < set(definitions["PipelineConfig"]["properties"]["schedule"]["enum"])
