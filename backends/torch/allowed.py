"""The operators of PyTorch that a ``.pt2`` file may call: all others are refused.

They compute results from tensors and settings, and check both. What is left out reads or writes
files, takes memory as it is (packed weights, storages, sparse parts that are not validated), or is
of devices and back ends that nothing here writes.
"""

from __future__ import annotations

from partitioner.ir.ops import ROWS

#: Operators that `torch.export` writes and that are decomposed, or kept whole, when they are
#: traced; all of their overloads.
_EXPORTED = frozenset(
    """
abs abs_ absolute absolute_ acos acos_ acosh acosh_ adaptive_avg_pool2d adaptive_avg_pool3d
adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d add add_ addbmm_ addcdiv_ addcmul_ addmm
addmm_ addmv_ addr_ adjoint affine_grid_generator alias alpha_dropout alpha_dropout_ amax amin angle
arange arccos arccos_ arccosh arccosh_ arcsin arcsin_ arcsinh arcsinh_ arctan arctan2 arctan2_
arctan_ arctanh arctanh_ argsort argwhere as_strided as_strided_scatter asin asin_ asinh asinh_ atan
atan2 atan2_ atan_ atanh atanh_ atleast_1d atleast_2d atleast_3d baddbmm baddbmm_ bartlett_window
batch_norm bernoulli bernoulli_ bilinear binary_cross_entropy binary_cross_entropy_with_logits
bincount bitwise_and bitwise_and_ bitwise_left_shift_ bitwise_not bitwise_not_ bitwise_or
bitwise_or_ bitwise_right_shift_ bitwise_xor bitwise_xor_ blackman_window block_diag bmm
broadcast_tensors broadcast_to bucketize cartesian_prod cat cdist ceil ceil_ celu_ chain_matmul
chalf cholesky cholesky_inverse cholesky_solve chunk clamp_ clamp_max_ clamp_min_ clip clip_ clone
column_stack combinations complex concat concatenate conj conj_physical contiguous conv1d conv2d
conv3d conv_depthwise3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d convolution copy
copy_ copysign_ corrcoef cos cos_ cosh cosh_ cosine_embedding_loss cosine_similarity cov cross
cross_entropy_loss ctc_loss cummax cummin cumprod_ cumsum_ cumulative_trapezoid deg2rad deg2rad_ det
detach detach_ diag diag_embed diagflat diagonal_scatter diff digamma digamma_ dim dist div div_
divide divide_ dropout dropout_ dsplit dstack einsum elu_ embedding_bag embedding_renorm_ empty
empty_like empty_permuted empty_strided eq eq_ erf erf_ erfc erfc_ erfinv erfinv_ exp exp2 exp2_
exp_ expand_as expm1 expm1_ exponential_ feature_alpha_dropout feature_alpha_dropout_
feature_dropout feature_dropout_ fft_fft fft_fft2 fft_fftfreq fft_fftn fft_fftshift fft_hfft
fft_hfft2 fft_hfftn fft_ifft fft_ifft2 fft_ifftn fft_ifftshift fft_ihfft fft_ihfft2 fft_ihfftn
fft_irfft fft_irfft2 fft_irfftn fft_rfft fft_rfft2 fft_rfftfreq fft_rfftn fill fill_ fill_diagonal_
fix fix_ flatten fliplr flipud float_power float_power_ floor floor_ floor_divide_ fmax fmin fmod
fmod_ frac_ fractional_max_pool2d fractional_max_pool3d frexp frobenius_norm full full_like gcd gcd_
ge ge_ gelu_ geqrf ger gradient greater greater_ greater_equal greater_equal_ grid_sampler
grid_sampler_2d grid_sampler_3d group_norm gru gru_cell gt gt_ hamming_window hann_window
hardsigmoid_ hardswish_ hardtanh_ heaviside heaviside_ hinge_embedding_loss hsplit hstack huber_loss
hypot hypot_ i0 i0_ igamma igamma_ igammac igammac_ imag index_add_ index_copy_ index_fill
index_fill_ index_put_ index_reduce index_reduce_ inner instance_norm inverse isclose isfinite isin
isneginf isposinf isreal istft item kaiser_window kl_div kron l1_loss layer_norm lcm lcm_ ldexp
ldexp_ le le_ leaky_relu_ lerp_ less less_ less_equal less_equal_ lgamma lgamma_ lift_fresh_copy
linalg_cholesky linalg_cholesky_ex linalg_cond linalg_cross linalg_det linalg_diagonal linalg_eig
linalg_eigh linalg_eigvals linalg_eigvalsh linalg_householder_product linalg_inv linalg_inv_ex
linalg_ldl_factor linalg_ldl_factor_ex linalg_ldl_solve linalg_lstsq linalg_lu linalg_lu_factor
linalg_lu_factor_ex linalg_lu_solve linalg_matmul linalg_matrix_exp linalg_matrix_norm
linalg_matrix_power linalg_matrix_rank linalg_multi_dot linalg_norm linalg_pinv linalg_qr
linalg_slogdet linalg_solve linalg_solve_ex linalg_solve_triangular linalg_svd linalg_svdvals
linalg_tensorinv linalg_tensorsolve linalg_vander linalg_vecdot linspace log log10 log10_ log1p
log1p_ log2 log2_ log_ log_sigmoid log_softmax logaddexp logaddexp2 logcumsumexp logdet logical_and_
logical_not_ logical_or_ logical_xor_ logit_ logspace lstm lstm_cell lt lt_ lu_solve lu_unpack mH mT
margin_ranking_loss masked_fill_ masked_scatter masked_scatter_ masked_select matrix_H matrix_exp
matrix_power max max_pool1d max_pool1d_with_indices max_pool2d max_pool3d max_unpool3d maximum
median meshgrid min minimum mish_ mm mode moveaxis movedim mse_loss msort mul mul_ multi_margin_loss
multilabel_margin_loss multilabel_margin_loss_forward multinomial multiply multiply_ mvlgamma
mvlgamma_ nan_to_num_ nanmean nanmedian nanquantile nansum narrow native_batch_norm
native_channel_shuffle native_dropout native_norm ne ne_ neg neg_ negative negative_ new_empty
new_full new_ones new_zeros nextafter nextafter_ nll_loss nll_loss2d nll_loss_nd nonzero
nonzero_numpy nonzero_static norm norm_except_dim normal normal_ not_equal not_equal_ nuclear_norm
numel one_hot orgqr ormqr outer pad pad_sequence pairwise_distance pdist pinverse poisson
poisson_nll_loss polar polygamma polygamma_ positive pow pow_ prelu prod put put_ qr quantile
rad2deg rad2deg_ rand rand_like randint randint_like randn randn_like randperm range ravel real
reciprocal reciprocal_ relu6 relu6_ relu_ remainder remainder_ renorm renorm_ repeat_interleave
replication_pad1d reshape reshape_as resolve_conj resolve_neg rms_norm rnn_relu rnn_relu_cell
rnn_tanh rnn_tanh_cell rot90 round round_ row_stack rrelu rrelu_with_noise rsqrt rsqrt_
scalar_tensor scaled_dot_product_attention scatter scatter_ scatter_add_ scatter_reduce_
searchsorted selu selu_ sgn_ sigmoid_ sign sign_ signbit silu_ sin sin_ sinc sinc_ sinh sinh_ size
slogdet slow_conv3d slow_conv3d_forward slow_conv_dilated2d slow_conv_dilated3d
slow_conv_transpose2d slow_conv_transpose3d smooth_l1_loss soft_margin_loss softmax special_airy_ai
special_bessel_j0 special_bessel_j1 special_bessel_y0 special_bessel_y1
special_chebyshev_polynomial_t special_chebyshev_polynomial_u special_chebyshev_polynomial_v
special_chebyshev_polynomial_w special_digamma special_entr special_erf special_erfc special_erfcx
special_erfinv special_exp2 special_expit special_expm1 special_gammainc special_gammaincc
special_gammaln special_hermite_polynomial_h special_hermite_polynomial_he special_i0 special_i0e
special_i1 special_i1e special_laguerre_polynomial_l special_legendre_polynomial_p special_log1p
special_log_ndtr special_log_softmax special_logit special_logsumexp special_modified_bessel_i0
special_modified_bessel_i1 special_modified_bessel_k0 special_modified_bessel_k1
special_multigammaln special_ndtr special_ndtri special_polygamma special_psi special_round
special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1
special_shifted_chebyshev_polynomial_t special_shifted_chebyshev_polynomial_u
special_shifted_chebyshev_polynomial_v special_shifted_chebyshev_polynomial_w special_sinc
special_softmax special_spherical_bessel_j0 special_xlog1py special_xlogy special_zeta split sqrt
sqrt_ square square_ squeeze squeeze_ std std_mean stft sub sub_ subtract subtract_ sum svd swapaxes
swapaxes_ swapdims swapdims_ sym_constrain_range sym_constrain_range_for_size sym_is_contiguous
sym_numel sym_size sym_storage_offset sym_stride t_ take take_along_dim tan tan_ tanh tanh_
tensor_split tensordot thnn_conv2d threshold_ tile to to_padded_tensor trace transpose transpose_
trapezoid trapz triangular_solve tril_ tril_indices triplet_margin_loss triu_ triu_indices
true_divide true_divide_ trunc trunc_ type_as unflatten uniform_ unique_consecutive unique_dim
unique_dim_consecutive unsafe_chunk unsafe_split unsafe_split_with_sizes unsqueeze_
upsample_bicubic2d upsample_bilinear2d upsample_linear1d upsample_nearest1d upsample_nearest2d
upsample_nearest3d upsample_trilinear3d vander var var_mean vdot view view_as vsplit vstack where
xlogy_ zero zero_ __and__ __iand__ __ior__ __ixor__ __lshift__ __or__ __rshift__ __xor__
_adaptive_avg_pool2d _adaptive_avg_pool3d _assert_async _assert_scalar _assert_tensor_metadata
_batch_norm_no_update _batch_norm_with_update _cast_Double _cast_Float _cast_Half _cast_Int
_cast_Long _cdist_forward _chunk_cat _conj _conj_physical _convolution _dim_arange _embedding_bag
_embedding_bag_forward_only _fft_c2c _fft_c2r _fft_r2c _grouped_mm _is_all_true _is_any_true
_linalg_det _linalg_eigh _linalg_slogdet _linalg_solve_ex _linalg_svd _local_scalar_dense
_log_softmax _native_batch_norm_legit _native_batch_norm_legit_functional
_native_batch_norm_legit_no_training _native_multi_head_attention _neg_view _pack_padded_sequence
_pad_circular _pad_enum _pad_packed_sequence _pdist_forward _reshape_alias _safe_softmax
_scaled_dot_product_attention_math _scaled_dot_product_cudnn_attention
_scaled_dot_product_efficient_attention _scaled_dot_product_flash_attention
_scaled_dot_product_flash_attention_for_cpu _shape_as_tensor _softmax _to_copy
_transformer_encoder_layer_fwd _trilinear _unique _unique2 _unsafe_index _unsafe_masked_index
_unsafe_view _upsample_bicubic2d_aa _upsample_bilinear2d_aa _upsample_nearest_exact1d
_upsample_nearest_exact2d _upsample_nearest_exact3d _weight_norm _weight_norm_interface
    """.split()
)
#: Communications that rank files call.
_COMMUNICATIONS = frozenset(
    """
all_gather_into_tensor all_reduce all_reduce_ all_to_all_single irecv isend reduce_scatter_tensor
wait_tensor
    """.split()
)


def may_call(namespace: str, name: str, overload: str) -> bool:
    """Whether a graph may call an operator, such as "aten", "add", "Tensor"."""
    if namespace == "_c10d_functional":
        return name in _COMMUNICATIONS
    if namespace == "partitioner":  # those are ours
        return True
    key = f"{namespace}::{name}" if overload == "default" else f"{namespace}::{name}.{overload}"
    return key in ROWS or (namespace == "aten" and name in _EXPORTED)
