"""Configs of narrower models: the numbers of a config that are widths, divided by one number, and fewer words.

Two kinds of numbers can be divided. Mostly those are the channels of heads, and there are as many heads as before. A layer of
a state space (Mamba 2) takes a number for each head from the same projection as the channels: there the heads are divided
with the channels of the states, and each head has as many channels as before.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any, Final

from transformers import PretrainedConfig

from hf_parallel.model.layer_configs import config_of_layer, settings_of_layers


# Numbers of a config that are widths; all of them are divided by one number.
WIDTHS: Final = (
    *("hidden_size", "n_embd", "d_model", "intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "head_dim"),
    *("moe_intermediate_size", "shared_expert_intermediate_size", "word_embed_proj_dim", "rotary_dim", "kv_channels"),
    *("shared_intermediate_size", "moe_shared_expert_intermediate_size", "hidden_size_per_layer_input"),
    # Of attention through latent vectors, whose parts of a head are cut apart by number.
    *("q_lora_rank", "kv_lora_rank", "v_head_dim", "index_head_dim"),
    *("qk_rope_head_dim", "qk_nope_head_dim", "qk_head_dim"),
)
HEADS: Final = ("num_attention_heads", "n_head", "n_heads", "num_heads")
VOCABULARIES: Final = ("vocab_size", "vocab_size_per_layer_input")
# Of layers that are state spaces: channels of a state, heads, and groups of heads that share what goes into their states.
STATES: Final = ("state_size", "ssm_state_size", "mamba_d_state")
HEADS_OF_STATES: Final = ("mamba_n_heads", "mamba_num_heads", "num_heads")
GROUPS_OF_STATES: Final = ("n_groups", "mamba_n_groups")
LEAST_HEAD: Final = 8  # channels of a head: positions are rotated in pairs
LEAST_WIDTH: Final = 2  # one channel may be taken for none
LEAST_VOCABULARY: Final = 256
ORDINARY: Final = 0.1  # standard deviation of random weights, beyond which rounding grows from block to block


def narrow_configs(config: PretrainedConfig, *, parts: int = 1, vocabulary: bool = True) -> Iterator[PretrainedConfig]:
    """Configs of narrower blocks, and of fewer words, the narrowest of each kind first; none where it names no widths that can be divided.

    There may be several, since code may make numbers of widths that a model of some of them does not have alike.

    Args:
        config: Config of the wide model.
        parts: A width that is divisible by so many stays so, and one that is not stays not.
        vocabulary: Whether the vocabulary gets smaller.
    """
    for way in filter(None, (_by_heads(config), _by_channels(config))):
        for times in (32, 16, 8, 4, 2):
            if way.allows(times, parts):
                yield _divided(config, way.names, times, parts, vocabulary=vocabulary)


@dataclasses.dataclass(frozen=True)
class _Way:
    """Numbers of a config that may be divided.

    Args:
        names: Their names.
        sizes: Their values in all layers.
        head: The least channels of a head that is divided.
        heads: Heads that are divided, and the groups that share them; 0 for none.
    """

    names: frozenset[str]
    sizes: frozenset[int]
    head: int
    heads: tuple[int, int] = (0, 0)

    def allows(self, times: int, parts: int) -> bool:
        """Whether all of them can be divided by `times`."""
        heads, groups = self.heads
        return (
            all(size % times == 0 and size // times >= LEAST_WIDTH for size in self.sizes)
            and all(_parts_alike(size, size // times, parts) for size in self.sizes)
            and self.head // times >= LEAST_HEAD
            and (not heads or (heads % parts == 0 and (heads > groups) == (heads // times > groups)))
        )


def _by_channels(config: PretrainedConfig) -> _Way | None:
    """All widths, for as many heads; a model without heads may be one of states."""
    layers = _layers(config)
    first, names = layers[0], frozenset(WIDTHS)
    heads = _first(first, HEADS)
    if not heads and not _first(first, STATES):
        return None
    return _way(layers, names, heads)


def _by_heads(config: PretrainedConfig) -> _Way | None:
    """All widths, and in layers of states the heads and the states, not what is in a head."""
    layers = _layers(config)
    first = layers[0]
    name = next((name for name in HEADS_OF_STATES if _number(first, name)), None)
    if name is None or not _first(first, STATES):
        return None
    own = name in HEADS and not _first(first, [other for other in HEADS if other != name])  # there are no others
    names = frozenset({*WIDTHS, *STATES, name} - ({"head_dim"} if own else set()))
    way = _way(layers, names, 0 if own else _first(first, HEADS))
    groups = _first(first, GROUPS_OF_STATES) or 1
    return way and dataclasses.replace(way, heads=(_number(first, name), groups))


def _way(layers: list[Any], names: frozenset[str], heads: int) -> _Way | None:
    """The way to divide what has these names; None for a model without a width."""
    sizes = [{name: size for name in names if (size := _number(layer, name))} for layer in layers]
    widest = [max((size.get(name, 0) for name in WIDTHS[:3]), default=0) for size in sizes]
    if not all(widest):
        return None
    channels = [size.get("head_dim", hidden // max(1, heads)) for size, hidden in zip(sizes, widest, strict=True)]
    return _Way(names, frozenset(n for size in sizes for n in size.values()) | {*channels}, min(channels))


def _layers(config: PretrainedConfig) -> list[Any]:
    """The configs of its layers, of the text; one where they do not differ."""
    text = config.get_text_config()
    if config_of_layer(text, 0) is text:
        return [text]
    return [config_of_layer(text, layer) for layer in range(text.num_hidden_layers)]


def _number(config: Any, name: str) -> int:
    value = getattr(config, name, None)
    return value if isinstance(value, int) and value > 0 else 0


def _first(config: Any, names: Any) -> int:
    return next((n for name in names if (n := _number(config, name))), 0)


def _divided(
    config: PretrainedConfig, names: frozenset[str], times: int, parts: int, *, vocabulary: bool
) -> PretrainedConfig:
    """A copy with widths divided by a number."""
    text, made = config.get_text_config(), copy.deepcopy(config)
    small = made.get_text_config()
    inside, keys = vars(small), {text.attribute_map.get(name, name) for name in names}

    def divided(settings: Mapping[str, Any]) -> dict[str, Any]:
        return {key: n // times for key, n in settings.items() if key in keys and isinstance(n, int)}

    inside.update(divided(inside))
    if own := settings_of_layers(text):
        small.per_layer_config = {layer: settings | divided(settings) for layer, settings in own.items()}
    if isinstance(spread := inside.get("initializer_range"), float):
        inside["initializer_range"] = min(spread, ORDINARY)
    if vocabulary and isinstance(size := getattr(text, "vocab_size", None), int):
        alike = {text.attribute_map.get(name, name) for name in VOCABULARIES if getattr(text, name, None) == size}
        inside.update(dict.fromkeys(alike, _fewer_words(config, size, parts)))
    return made


def _parts_alike(wide: int, narrow: int, parts: int) -> bool:
    return (wide % parts == 0) == (narrow % parts == 0)


def _fewer_words(config: PretrainedConfig, size: int, parts: int) -> int:
    """The smallest vocabulary of which the real one is a multiple and that has all words that the config names."""
    every = [*vars(config).items(), *vars(config.get_text_config()).items()]
    named = [value for key, value in every if "token_id" in key or "token_index" in key]
    ids = [
        n for value in named for n in (value if isinstance(value, (list, tuple)) else (value,)) if isinstance(n, int)
    ]
    least = max(LEAST_VOCABULARY, *(n + 1 for n in ids)) if ids else LEAST_VOCABULARY
    divisors = sorted({d for n in range(1, math.isqrt(size) + 1) if size % n == 0 for d in (n, size // n)})
    return next((d for d in divisors if d >= least and _parts_alike(size, d, parts)), size)
