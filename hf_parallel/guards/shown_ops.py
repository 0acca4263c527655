"""Functions of torch by how they are carried out on a gradient that is shared by ranks."""

from __future__ import annotations

import torch


aten = torch.ops.aten
NORMS = {aten.linalg_vector_norm.default, aten.norm.Scalar, aten.norm.ScalarOpt_dim}
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
# Reductions to one number, which are computed on the whole of a tensor.
WHOLE = {
    aten.sum.default,
    aten.mean.default,
    aten.max.default,
    aten.min.default,
    aten.std.correction,
    aten.var.correction,
    aten.std.default,
    aten.var.default,
    aten.any.default,
    aten.all.default,
    aten.median.default,
    aten.prod.default,
    aten.count_nonzero.default,
}
VIEWS = {aten.view, aten.reshape, aten._unsafe_view}
# Elements by their places in the whole tensor.
BY_INDEX = {
    *(
        aten.index,
        aten.index_put,
        aten.index_put_,
        aten.index_select,
        aten.index_fill,
        aten.index_fill_,
        aten.index_copy_,
    ),
    *(aten.index_add_, aten.index_copy, aten.index_add, aten.gather, aten.scatter, aten.scatter_, aten.scatter_add_),
    *(aten.masked_select, aten.tril, aten.triu, aten.tril_, aten.triu_, aten.sort, aten.topk, aten.cumsum),
    *(aten._softmax, aten._log_softmax, aten.flip, aten.roll),
}
