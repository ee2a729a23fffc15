"""The operators of PyTorch that a ``.pt2`` file may call: all others are refused.

They compute results from tensors and settings. PyTorch checks these, though not all of them: the
backward pass of a weight norm takes the size of `g` as it is. What is left out reads or writes
files, takes memory as it is (packed weights, storages, sparse parts that are not validated), or is
of devices and back ends that nothing here writes.
"""

from __future__ import annotations

from partitioner.ir.ops import ROWS

#: What the names of families of operators begin with, all of which compute.
_FAMILIES = (
    *("_fft_", "_linalg_", "_upsample_", "adaptive_", "bitwise_", "fft_", "linalg_", "logical_"),
    *("reflection_pad", "replication_pad", "slow_conv", "special_", "upsample_"),
)
#: Others that `torch.export` writes and that are decomposed, or kept whole, when they are traced,
#: and those of the backward passes of the latter.
_EXPORTED = frozenset((
    "absolute", "adjoint", "affine_grid_generator", "alpha_dropout", "angle", "arccos", "arccosh",
    "arcsin", "arcsinh", "arctan", "arctan2", "arctanh", "argsort", "argwhere", "as_strided",
    "as_strided_scatter", "atleast_1d", "atleast_2d", "atleast_3d", "avg_pool1d", "bartlett_window",
    "batch_norm", "bernoulli", "bilinear", "binary_cross_entropy",
    "binary_cross_entropy_with_logits", "bincount", "blackman_window", "block_diag",
    "broadcast_tensors", "broadcast_to", "bucketize", "cartesian_prod", "cdist", "chain_matmul",
    "chalf", "cholesky", "cholesky_inverse", "cholesky_solve", "chunk", "clip", "column_stack",
    "combinations", "complex", "concat", "concatenate", "conj", "conj_physical", "contiguous",
    "conv1d", "conv2d", "conv3d", "conv_depthwise3d", "conv_tbc", "conv_transpose1d",
    "conv_transpose2d", "conv_transpose3d", "corrcoef", "cosine_embedding_loss",
    "cosine_similarity", "cov", "cross", "cross_entropy_loss", "ctc_loss", "cummax", "cummin",
    "cumulative_trapezoid", "deg2rad", "det", "diag", "diag_embed", "diagflat", "diagonal_scatter",
    "diff", "digamma", "dim", "dist", "divide", "dropout", "dsplit", "dstack", "einsum",
    "embedding_bag", "embedding_renorm_", "empty_permuted", "empty_strided", "erfinv", "expand_as",
    "exponential_", "feature_alpha_dropout", "feature_dropout", "fill_diagonal_", "fix", "flatten",
    "fliplr", "flipud", "float_power", "fractional_max_pool2d", "fractional_max_pool2d_backward",
    "fractional_max_pool3d", "fractional_max_pool3d_backward", "frexp", "frobenius_norm", "gcd",
    "geqrf", "ger", "gradient", "greater", "greater_equal", "grid_sampler", "grid_sampler_3d",
    "grid_sampler_3d_backward", "group_norm", "gru", "gru_cell", "hamming_window", "hann_window",
    "heaviside", "hinge_embedding_loss", "histogram", "histogramdd", "hsplit", "hstack",
    "huber_loss", "i0", "igamma", "igammac", "imag", "index_fill", "index_reduce", "inner",
    "instance_norm", "inverse", "isclose", "isfinite", "isin", "isneginf", "isposinf", "isreal",
    "istft", "item", "kaiser_window", "kl_div", "kron", "kthvalue", "l1_loss", "layer_norm", "lcm",
    "ldexp", "less", "less_equal", "lgamma", "log_sigmoid", "log_softmax", "logaddexp",
    "logaddexp2", "logcumsumexp", "logdet", "logspace", "lstm", "lstm_cell", "lu_solve",
    "lu_unpack", "mH", "mT", "margin_ranking_loss", "masked_scatter", "masked_select", "matrix_H",
    "matrix_exp", "matrix_power", "max_pool1d", "max_pool1d_with_indices", "max_pool2d",
    "max_pool3d", "max_unpool3d", "median", "meshgrid", "mode", "moveaxis", "movedim", "mse_loss",
    "msort", "multi_margin_loss", "multilabel_margin_loss", "multilabel_margin_loss_forward",
    "multinomial", "multiply", "mvlgamma", "nanmean", "nanmedian", "nanquantile", "nansum",
    "narrow", "native_batch_norm", "native_channel_shuffle", "native_dropout", "native_norm",
    "negative", "nextafter", "nll_loss", "nll_loss2d", "nll_loss_nd", "nonzero", "nonzero_numpy",
    "nonzero_static", "norm_except_dim", "normal", "not_equal", "nuclear_norm", "numel", "numpy_T",
    "one_hot", "orgqr", "ormqr", "outer", "pad", "pad_sequence", "pairwise_distance", "pdist",
    "pinverse", "poisson", "poisson_nll_loss", "polar", "polygamma", "positive", "prelu", "put",
    "qr", "quantile", "rad2deg", "rand", "rand_like", "randint", "randint_like", "randn",
    "randn_like", "randperm", "range", "ravel", "real", "relu6", "renorm", "repeat_interleave",
    "reshape_as", "resolve_conj", "resolve_neg", "rms_norm", "rnn_relu", "rnn_relu_cell",
    "rnn_tanh", "rnn_tanh_cell", "rot90", "row_stack", "rrelu", "rrelu_with_noise",
    "scaled_dot_product_attention", "searchsorted", "selu", "sinc", "size", "slogdet",
    "smooth_l1_loss", "soft_margin_loss", "softmax", "square", "stft", "subtract", "sum_to_size",
    "svd", "swapaxes", "swapdims", "sym_constrain_range", "sym_constrain_range_for_size",
    "sym_is_contiguous", "sym_numel", "sym_size", "sym_storage_offset", "sym_stride", "take",
    "take_along_dim", "tensor_split", "tensordot", "thnn_conv2d", "tile", "to", "to_padded_tensor",
    "trace", "trapezoid", "trapz", "triangular_solve", "tril_indices", "triplet_margin_loss",
    "triu_indices", "true_divide", "type_as", "unflatten", "uniform_", "unique_consecutive",
    "unique_dim", "unique_dim_consecutive", "unsafe_chunk", "unsafe_split",
    "unsafe_split_with_sizes", "vander", "vdot", "view_as", "vsplit", "vstack", "zero", "__and__",
    "__iand__", "__ior__", "__ixor__", "__lshift__", "__or__", "__rshift__", "__xor__",
    "_assert_async", "_assert_scalar", "_assert_tensor_metadata", "_batch_norm_no_update",
    "_batch_norm_with_update", "_cast_Double", "_cast_Float", "_cast_Half", "_cast_Int",
    "_cast_Long", "_cdist_backward", "_cdist_forward", "_chunk_cat", "_conj", "_convolution",
    "_dim_arange", "_embedding_bag", "_embedding_bag_forward_only", "_grouped_mm", "_int_mm",
    "_is_all_true", "_is_any_true", "_local_scalar_dense", "_lu_with_info",
    "_native_batch_norm_legit", "_native_batch_norm_legit_functional",
    "_native_multi_head_attention", "_neg_view", "_pack_padded_sequence", "_pad_circular",
    "_pad_enum", "_pad_packed_sequence", "_pdist_backward", "_pdist_forward", "_reshape_alias",
    "_scaled_dot_product_attention_math", "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu", "_shape_as_tensor",
    "_transformer_encoder_layer_fwd", "_unique", "_unique2", "_unsafe_masked_index", "_weight_norm",
    "_weight_norm_interface", "_weight_norm_interface_backward",
))  # fmt: skip
#: Operators with a row.
_KNOWN = frozenset(key.partition("::")[2].partition(".")[0] for key in ROWS if key[:6] == "aten::")
#: Communications that rank files call.
_COMMUNICATIONS = frozenset((
    "all_gather_into_tensor", "all_reduce", "all_reduce_", "all_to_all_single", "irecv",
    "isend", "reduce_scatter_tensor", "wait_tensor",
))  # fmt: skip


def may_call(namespace: str, name: str, overload: str) -> bool:
    """Tell whether a graph may call an operator, such as "aten", "add", "Tensor".

    All overloads of an operator compute the same, and so does the one that writes to its operand.
    """
    if namespace == "_c10d_functional":
        return name in _COMMUNICATIONS
    if namespace == "partitioner":  # those are ours
        return True
    key = f"{namespace}::{name}" if overload == "default" else f"{namespace}::{name}.{overload}"
    if key in ROWS or namespace != "aten":
        return key in ROWS
    names = name, name.removesuffix("_")
    return name.startswith(_FAMILIES) or not (_KNOWN | _EXPORTED).isdisjoint(names)
