"""Functions of torch by how they are carried out on a gradient that is shared by ranks."""

from __future__ import annotations

import torch


aten = torch.ops.aten
NORMS = {aten.linalg_vector_norm.default, aten.norm.Scalar, aten.norm.ScalarOpt_dim}
NAMES_OF_NORMS = {"norm", "vector_norm", "linalg_vector_norm", "_foreach_norm"}
SAME = {aten.detach.default, aten.alias.default}
COPIES = {aten._to_copy.default, aten.clone.default}
# Elementwise changes by numbers: right on any part of a tensor.
IN_PLACE = {
    aten.mul_.Tensor,
    aten.mul_.Scalar,
    aten.div_.Tensor,
    aten.div_.Scalar,
    aten.clamp_.default,
    aten.clamp_min_.default,
    aten.clamp_max_.default,
    aten.zero_.default,
    aten.neg_.default,
    aten.nan_to_num_.default,
}
# What may be done to summands: done to each, it is done to their sum.
LINEAR = {
    *(aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar, aten.neg.default, aten.zeros_like.default),
    *(aten.mul_.Tensor, aten.div_.Tensor, aten.detach.default, aten.clone.default),
    *(aten.ones_like.default, aten.empty_like.default),
}
VIEWS = {aten.view, aten.reshape, aten._unsafe_view}
