"""Seconds of one micro-batch in one block, in the head and in the embedding.

Products and kernels take the time of their arithmetic plus that of their memory traffic, so that thin products and
small micro-batches lose speed; a launch of each kernel by the host bounds the block from below.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from hf_parallel.memory.experts import stay_whole
from hf_parallel.memory.heads import most_heads
from hf_parallel.planner.adapters import adapter_pass, is_beside, moved_by_unpacking, stored_bytes, trained_share
from hf_parallel.planner.collectives import Group, all_reduce, all_to_all, by_copies, groups_of, one_way
from hf_parallel.planner.constants import Constants
from hf_parallel.planner.hardware import Cluster
from hf_parallel.planner.layout import LayoutSpec
from hf_parallel.planner.profile import BlockProfile, ModelProfile, Product


@dataclass(frozen=True)
class Kernels:
    """Ways in which the ops between products run; judged from counts of the ops of GPT and Llama blocks.

    Attributes:
        norm: Bytes moved forward for each element of the residual stream, with RMS norms and with layer norms.
        gate: Bytes for each element of the feed-forward part, gated and not.
        head: Bytes for each element of queries and keys.
        backward: Bytes backward, as a multiple of forward, with RMS norms and with layer norms.
        launched: Kernels forward and backward.
        logits: Bytes for each logit, forward and backward.
        fp8: Rate of fp8 products with their casts, as a multiple of bf16's.
    """

    norm: tuple[float, float]
    gate: tuple[float, float]
    head: float
    backward: tuple[float, float]
    launched: tuple[int, int]
    logits: float
    fp8: float


KERNELS: Final[Mapping[str, Kernels]] = {
    "fused": Kernels((26, 19), (5.7, 4), 1, (2.05, 2.0), (22, 36), 15, 2.08),
    "compiled": Kernels((19, 19), (5.2, 4), 1, (2.05, 2.0), (16, 24), 15, 1.8),
    "norms": Kernels((26, 19), (8.7, 4.5), 1, (2.05, 1.8), (24, 42), 15, 1.5),
    "eager": Kernels((75, 32), (8.7, 4.5), 10, (2.25, 1.6), (32, 60), 26, 1.5),
}
FUSED_LOSS: Final = 6.0  # bytes for each logit: read forward, read and written backward
SCORE_BYTES: Final = {
    "fused": (8, 10),
    "compiled": (11, 13),
    "norms": (20, 24),
    "eager": (20, 24),
}  # attention that stores its scores


@dataclass(frozen=True)
class Pass:
    """Seconds of one micro-batch.

    Attributes:
        forward: All of it.
        backward: All of it, what is computed again included.
        exposed: Part of both that messages add.
        weights: Part of the backward that gradients of weights take, which schedules may put off.
    """

    forward: float
    backward: float
    exposed: float = 0.0
    weights: float = 0.0

    @property
    def both(self) -> float:
        return self.forward + self.backward


@dataclass(frozen=True)
class Place:
    """Inputs that the costs of all blocks share: layout, machines, length of a row, constants."""

    spec: LayoutSpec
    cluster: Cluster
    seq_len: int
    c: Constants

    @property
    def tokens(self) -> float:
        """Tokens of a rank and micro-batch."""
        return self.spec.micro_batch * self.seq_len / self.spec.sp

    @property
    def rate(self) -> float:
        """FLOP/s of large products in bf16 or fp32."""
        card = self.cluster.card
        part = card.tuned if self.spec.kernels == "fused" and card.tuned is not None else card.achievable
        return (card.fp32 if self.spec.dtype == "fp32" else card.peak) * part * self.c.e_mm

    @property
    def moved(self) -> float:
        """Bytes per second of other kernels."""
        return self.cluster.card.bandwidth * self.c.e_bw

    def beside(self, device: float, host: float) -> float:
        """Seconds of work of a device and of the host that launches it: the longer one, or both if the host waits for each kernel."""
        return device + host if self.spec.blocking_launches else max(device, host)

    def passed_on(self, width: float) -> float:
        """Bytes per second of kernels that read what the one before them wrote, `width` elements of each token.

        What is still in a large cache is read from there: all of it if the cache has room for two such tensors.
        """
        card = self.cluster.card
        if not card.cache or not card.cached:
            return self.moved
        held = min(1.0, card.cache / (2 * max(1.0, self.tokens * width * self.spec.element)))
        return 1 / ((1 - held) / self.moved + held / (card.cached * self.c.e_bw))


def block_pass(profile: ModelProfile, block: BlockProfile, place: Place) -> Pass:
    """Seconds of one micro-batch in a block, messages included."""
    spec, c = place.spec, place.c
    share = block.heads / heads_of_rank(block, spec) if block.heads else 0.0
    products = sum(_product(one, place, share_of_heads=share) for one in placed(block, spec))
    kernels, kernels_back = _between(profile, block, place)
    core, core_back = attention_pass(block, place)
    forward = products + kernels + core
    late = trained_share(profile, spec) * products  # frozen weights need no gradient
    backward = products + late + kernels_back + core_back
    if is_beside(profile, spec):
        there, back = adapter_pass(profile, block, spec, place.tokens, place.rate, place.passed_on(profile.hidden))
        unpacking = moved_by_unpacking(block, spec) / (c.unpack * place.moved)
        forward, backward = forward + there + unpacking, backward + back + unpacking
    again = 0.0
    if spec.recompute == "full":
        unread = _unread(profile, block, spec)
        again = spec.repeated * (forward - (_product(unread, place) if unread else 0.0))
    elif spec.recompute == "selective":
        again = core if spec.repeats_attention_alone else products / 2 + kernels
    messages, messages_back = _tensor_messages(profile, block, place)
    sent, sent_back = _expert_messages(profile, block, place)
    messages, messages_back = messages + sent, messages_back + sent_back
    backward += _summed(block.held(spec.sharing_replicas, whole_experts(block, spec)), place)
    launched, launched_back = KERNELS[spec.kernels].launched
    forward, backward = forward + launched * c.t_floor, backward + launched_back * c.t_floor
    calls = 2 * (spec.tp > 1) * c.t_call + (spec.zero == 3 and spec.engine != "fsdp2") * c.t_fetch
    host = launched * c.t_kernel + calls
    host_back = launched_back * c.t_kernel + calls + spec.repeated * host
    launches = place.beside(forward, host), place.beside(backward + again, host_back)
    whole = place.beside(forward + messages, host), place.beside(backward + again + messages_back, host_back)
    sharded = _sharded_messages(profile, block, place, *whole)
    exposed = sum(whole) - sum(launches)
    exposed += sum(sharded) - sum(whole)
    return Pass(*sharded, exposed, late / (backward + again) * whole[1])


def whole_experts(block: BlockProfile, spec: LayoutSpec) -> int:
    """Tensor-parallel ranks that have all experts whole, as this package leaves those that cannot be cut; else 1."""
    return spec.tp if spec.places_replicas and stay_whole(block.expert_width, spec.tp) else 1


def placed(block: BlockProfile, spec: LayoutSpec) -> Sequence[Product]:
    """The products of a block, those of experts not cut where every rank has them whole."""
    if whole_experts(block, spec) == 1:
        return block.products
    return [replace(one, cut="none") if one.stored > 1 else one for one in block.products]


def _unread(profile: ModelProfile, block: BlockProfile, spec: LayoutSpec) -> Product | None:
    """The product that does not run again with its block, because nothing but a sum reads its result."""
    beside = spec.repeats_all or spec.adapters or profile.has_dropout
    return None if beside else block.unread


def unrepeated(profile: ModelProfile, block: BlockProfile, spec: LayoutSpec) -> float:
    """All-reduces of tp ranks that do not run again with a block; with a shared sequence, what was gathered before does."""
    if _unread(profile, block, spec) is None:
        return 0.0
    return 0.5 if spec.sequence_parallel else 1.0


def _summed(parameters: float, place: Place) -> float:
    """Seconds that a micro-batch adds its gradients of `parameters` to those before it.

    Fused kernels add inside of the product, whose writes its arithmetic hides; elsewhere the product writes them, and
    another kernel reads both and writes the sum. FSDP sums parts, which is little.
    """
    spec = place.spec
    inside = spec.kernels in ("fused", "norms") and spec.engine == "native"
    if spec.num_microbatches == 1 or spec.gathers_each_pass or spec.adapters or inside:
        return 0.0
    each = 2 * spec.gradient_bytes + spec.element
    rate = min(place.moved, place.cluster.card.bandwidth)  # gradients of a whole model are in no cache
    return each * parameters / spec.tp * (1 - 1 / spec.num_microbatches) / rate


def heads_of_rank(block: BlockProfile, spec: LayoutSpec) -> int:
    """Query heads of the tensor-parallel rank with most: this package cuts them in units (`memory/heads.py`)."""
    if spec.places_replicas and block.kv_heads:
        return most_heads(block.heads, block.kv_heads, spec.tp, block.numbers)[0]
    return math.ceil(block.heads / spec.tp)


def _product(one: Product, place: Place, *, fp8: bool = True, share_of_heads: float = 0.0) -> float:
    """Seconds forward; products of attention are divided by `share_of_heads`, if it is given."""
    spec, tokens = place.spec, place.tokens
    whole = spec.experts_over_tp and one.stored > 1  # on a rank, which gets its part of the tokens
    tokens /= spec.tp if whole else 1
    share: float = spec.tp if one.cut != "none" and not whole else 1
    if one.is_attention and share_of_heads and share > 1:
        share = share_of_heads
    inputs = one.inputs / (share if one.cut == "row" else 1)
    outputs = one.outputs / (share if one.cut == "column" else 1)
    rate = place.rate * (KERNELS[spec.kernels].fp8 if spec.dtype == "fp8" and fp8 and one.cut != "none" else 1)
    stored = one.stored / (spec.ep if one.stored > 1 else 1)  # on a rank, which gets the tokens of others for them
    thin = (1 + place.c.thin / inputs + place.c.thin / outputs) * (
        1 + place.c.few / max(1.0, tokens * one.times / stored)
    )
    size = spec.element
    weights = min(stored, one.times * tokens)  # experts that some token goes to
    traffic = size * (tokens * one.times * (inputs + outputs) + weights * inputs * outputs)
    return 2 * tokens * one.times * inputs * outputs / rate * thin + traffic / place.moved


def _between(profile: ModelProfile, block: BlockProfile, place: Place) -> tuple[float, float]:
    """Seconds forward and backward of norms, residuals, gates and rotary embeddings."""
    spec, kernels = place.spec, KERNELS[place.spec.kernels]
    other, gated = int(not block.has_rms), int(not block.is_gated)
    parts = spec.tp if spec.sequence_parallel else 1
    heads = (block.heads + block.kv_heads) * block.head_dim
    routed = 4.0 * spec.element * block.routed * profile.hidden  # to experts and back
    forward = kernels.norm[other] * profile.hidden / parts / place.passed_on(profile.hidden / parts)
    width = block.width * whole_experts(block, spec) / spec.tp
    forward += kernels.gate[gated] * width / place.passed_on(width)
    forward += (
        kernels.head * heads / spec.tp / place.passed_on(heads / spec.tp)
        + routed * whole_experts(block, spec) / spec.tp / place.moved
    )
    forward *= place.tokens * spec.element / 2
    return forward, kernels.backward[other] * forward


def attention_pass(block: BlockProfile, place: Place) -> tuple[float, float]:
    """Seconds forward and backward of scores and weighted values; each query that stores no scores has a fixed part."""
    spec, c = place.spec, place.c
    if not block.heads:
        return 0.0, 0.0
    heads = spec.micro_batch * math.ceil(heads_of_rank(block, spec) / spec.sp)
    width = block.head_dim + block.value_dim
    if spec.attention != "eager":
        card = place.cluster.card
        rate = (card.flash * c.flash if spec.attention == "flash" else card.attention) * c.e_att
        rate *= card.fp32 / card.peak if spec.dtype == "fp32" else 1.0
        keys = block.pairs(place.seq_len) / place.seq_len
        rate *= keys / (keys + c.few_keys)
        forward = 2 * heads * block.pairs(place.seq_len) * width / rate
        return forward, 2.5 * forward
    square = float(place.seq_len) ** 2
    size = spec.element
    products = heads * (
        2 * square * width / place.rate + 2 * size * (place.seq_len * width / 2 + square) / place.moved
    )
    there, back = (count * size / 2 * heads * square / place.moved for count in SCORE_BYTES[spec.kernels])
    return products + there, 2 * products + back


def _tensor_messages(profile: ModelProfile, block: BlockProfile, place: Place) -> tuple[float, float]:
    """Seconds that ranks of a tensor-parallel or sequence group wait for each other, forward and backward."""
    spec, cluster, c = place.spec, place.cluster, place.c
    groups = groups_of(spec, cluster)
    size = spec.element * place.tokens * profile.hidden
    forward = backward = 0.0
    if spec.tp > 1:
        one = _joined(size, groups["tp"], place) + c.t_message
        cut = [p for p in placed(block, spec) if p.cut == "row" and not (spec.experts_over_tp and p.stored > 1)]
        rows = min(2, len({p.is_attention for p in cut}))
        forward += rows * one
        backward += (rows + spec.repeated * max(0.0, rows - unrepeated(profile, block, spec))) * one
        if spec.overlap_tp:
            forward, backward = forward * c.tp_overlapped, backward * c.tp_overlapped
    if spec.sp > 1 and block.heads:
        turned = spec.element * place.tokens * 2 * (block.heads + block.kv_heads) * block.head_dim / spec.tp
        one = all_to_all(turned, groups["sp"], cluster, c) + 4 * c.t_message
        forward += one
        backward += one * (1 + spec.repeated)
    return forward, backward


def _expert_messages(profile: ModelProfile, block: BlockProfile, place: Place) -> tuple[float, float]:
    """Seconds that tokens are on their way to experts of other ranks and back, forward and backward."""
    spec, c = place.spec, place.c
    if spec.ep == 1 or not block.routed:
        return 0.0, 0.0
    size = spec.element * place.tokens / spec.tp * block.routed * profile.hidden
    one = all_to_all(size, groups_of(spec, place.cluster)["ep"], place.cluster, c) + c.t_message
    forward = 2 * one + c.t_message  # how many tokens come is sent first
    return forward, 2 * one + spec.repeated * forward


def _joined(size: float, group: Group, place: Place) -> float:
    """An all-reduce, or with sequence parallelism its two halves."""
    if place.spec.sequence_parallel:
        return 2 * one_way(size, group, place.cluster, place.c)
    return all_reduce(size, group, place.cluster, place.c)


def _sharded_messages(
    profile: ModelProfile, block: BlockProfile, place: Place, forward: float, backward: float
) -> tuple[float, float]:
    """Passes with what partitioned parameters and gradients send for each micro-batch."""
    spec, cluster, c = place.spec, place.cluster, place.c
    if not spec.gathers_each_pass or spec.dp * spec.sp == 1:
        return forward, backward
    size = min(spec.states[0], stored_bytes(1.0, 1.0, spec)) / spec.tp
    size_back = spec.gradient_bytes * spec.trained(profile.parameters / spec.tp) / profile.parameters  # one stage
    gathered = reduced = 0.0
    for held, group in by_copies(
        block.held(spec.sharing_replicas), block.experts / spec.sharing_replicas, spec, cluster
    ):
        gathered += one_way(size * held, group, cluster, c)
        reduced += one_way(size_back * held, group, cluster, c)
    again = gathered if spec.zero == 3 else 0.0
    if not spec.overlap_dp:
        return forward + gathered, backward + again + reduced
    return _overlapped(forward, gathered, c), _overlapped(backward, again + reduced, c)


def _overlapped(work: float, messages: float, c: Constants) -> float:
    return max(work, messages) + c.gamma * min(work, messages)


def head_pass(profile: ModelProfile, place: Place) -> Pass:
    """Seconds of the head and the loss."""
    product = _product(Product(profile.hidden, profile.vocab), place, fp8=False)
    spec = place.spec
    stored = "eager" if spec.loss in ("logits", "gathered") else spec.kernels
    each = FUSED_LOSS if spec.loss == "fused" else KERNELS[stored].logits
    logits = each * place.tokens * profile.vocab / (1 if spec.loss == "gathered" else spec.tp) / place.moved
    summed = _summed(profile.head, place)
    late = trained_share(profile, spec) * product
    gathered = 0.0
    if spec.loss == "gathered":  # backward, each rank takes its part of what it has computed whole
        size = spec.element * place.tokens * profile.vocab
        gathered = one_way(size, groups_of(spec, place.cluster)["tp"], place.cluster, place.c)
    return Pass(product + gathered + logits / 3, product + late + 2 * logits / 3 + summed, weights=late)


def embedding_pass(profile: ModelProfile, place: Place) -> Pass:
    """Seconds of the embedding."""
    each = 6.0 * place.tokens * profile.hidden / place.moved
    return Pass(each, each + (0.0 if profile.tied else _summed(profile.embedding, place)))
