"""The zoo: a tiny random model of every type that `AutoModelForCausalLM` knows."""

from __future__ import annotations

from zoo.models import all_types, batch, build, entries, type_of, why_not


__all__ = ["all_types", "batch", "build", "entries", "type_of", "why_not"]
