"""The operators of torch that a plan may name: a static list, read by people.

Each computes its result from its arguments, checks them (shapes, and places against the sizes that
they point into), and does nothing else: no file, no network, no code, no random numbers. Gradients,
losses, sparse and packed tensors, libraries' own entrances and torch's internals are not here.
"""

from __future__ import annotations

_ELEMENTWISE = """
abs absolute acos acosh add addcdiv addcmul angle arccos arccosh arcsin arcsinh arctan arctan2
arctanh asin asinh atan atan2 atanh bitwise_and bitwise_left_shift bitwise_not bitwise_or
bitwise_right_shift bitwise_xor ceil celu clamp clamp_max clamp_min clip copysign cos cosh deg2rad
digamma div divide elu eq erf erfc erfinv exp exp2 expm1 float_power floor floor_divide fmax fmin
fmod frac frexp gcd ge gelu glu greater greater_equal gt hardshrink hardsigmoid hardswish hardtanh
heaviside hypot i0 igamma igammac isclose isfinite isinf isnan isneginf isposinf isreal ldexp
le leaky_relu lerp less less_equal lgamma log log10 log1p log2 log_sigmoid logaddexp logaddexp2
logical_and logical_not logical_or logical_xor logit lt maximum minimum mish mul multiply mvlgamma
nan_to_num ne neg negative nextafter not_equal polygamma positive pow prelu rad2deg reciprocal relu
relu6 remainder round rsqrt rsub selu sgn sigmoid sign signbit silu sin sinc sinh softplus
softshrink sqrt square sub subtract tan tanh threshold true_divide trunc where xlogy special_digamma
special_entr special_erf special_erfc special_erfcx special_erfinv special_exp2 special_expit
special_expm1 special_gammainc special_gammaincc special_gammaln special_i0 special_i0e special_i1
special_i1e special_log1p special_log_ndtr special_logit special_ndtr special_ndtri special_psi
special_round special_sinc special_xlog1py special_xlogy special_zeta
"""

_REDUCTIONS = """
all amax amin aminmax any argmax argmin argsort count_nonzero cummax cummin cumprod
cumsum cumulative_trapezoid diff dist kthvalue log_softmax logcumsumexp logsumexp max mean median
min mode msort nanmean nanmedian nanquantile nansum norm nuclear_norm frobenius_norm prod quantile
softmax sort std std_mean sum topk trapezoid trapz var var_mean special_log_softmax
special_logsumexp special_softmax _log_softmax _softmax
"""

_MOVING = """
adjoint alias_copy atleast_1d atleast_2d atleast_3d block_diag broadcast_tensors broadcast_to
bucketize cartesian_prod cat channel_shuffle chunk clone column_stack combinations concat
concatenate constant_pad_nd contiguous copy detach diag diag_embed diagflat diagonal diagonal_copy
diagonal_scatter dsplit dstack expand expand_as expand_copy fill flatten flip fliplr flipud
full_like gather hsplit hstack index index_add index_copy index_fill index_put index_reduce
index_select isin mH mT masked_fill masked_scatter matrix_H meshgrid moveaxis movedim
narrow narrow_copy new_full new_ones new_zeros numpy_T ones_like pad permute permute_copy
pixel_shuffle pixel_unshuffle ravel reflection_pad1d reflection_pad2d reflection_pad3d repeat
repeat_interleave replication_pad1d replication_pad2d replication_pad3d reshape reshape_as roll
rot90 row_stack scatter scatter_add scatter_reduce searchsorted select select_copy select_scatter
slice slice_copy slice_scatter split split_copy split_with_sizes split_with_sizes_copy squeeze
squeeze_copy stack sum_to_size swapaxes swapdims t t_copy take take_along_dim tensor_split tile to
transpose transpose_copy tril triu type_as unbind unbind_copy unflatten unfold unfold_copy
unsafe_chunk unsafe_split unsafe_split_with_sizes unsqueeze unsqueeze_copy vander view view_as
view_copy vsplit vstack zero zeros_like _to_copy _unsafe_view
"""

_PRODUCTS = """
addbmm addmm addmv addr baddbmm bilinear bmm cdist chain_matmul cholesky_inverse cholesky_solve
cosine_similarity cross det dot einsum ger inner inverse kron linalg_cholesky linalg_cond
linalg_cross linalg_det linalg_diagonal linalg_eigh linalg_eigvalsh
linalg_inv linalg_lu linalg_lu_factor linalg_matmul linalg_matrix_exp
linalg_matrix_norm linalg_matrix_power linalg_matrix_rank linalg_multi_dot linalg_norm linalg_pinv
linalg_qr linalg_slogdet linalg_solve linalg_solve_triangular linalg_svd linalg_svdvals
linalg_tensorinv linalg_tensorsolve linalg_vander linalg_vecdot linalg_vector_norm linear logdet
matmul matrix_exp matrix_power mm mv outer pairwise_distance pinverse renorm slogdet svd tensordot
trace vdot
"""

_LAYERS = """
adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d
adaptive_max_pool3d affine_grid_generator avg_pool1d avg_pool2d avg_pool3d batch_norm col2im conv1d
conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d convolution embedding
grid_sampler grid_sampler_2d grid_sampler_3d group_norm gru_cell im2col instance_norm layer_norm
lstm_cell max_pool1d max_pool1d_with_indices max_pool2d
max_pool2d_with_indices max_pool3d max_pool3d_with_indices max_unpool2d max_unpool3d
native_channel_shuffle native_group_norm native_layer_norm rms_norm rnn_relu_cell
rnn_tanh_cell upsample_bicubic2d upsample_bilinear2d upsample_linear1d
upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_trilinear3d _adaptive_avg_pool2d
_adaptive_avg_pool3d _upsample_bicubic2d_aa _upsample_bilinear2d_aa _upsample_nearest_exact1d
_upsample_nearest_exact2d _upsample_nearest_exact3d _weight_norm
"""

_SIGNALS = """
complex conj conj_physical fft_fft fft_fft2 fft_fftn fft_fftshift fft_hfft fft_hfft2 fft_hfftn
fft_ifft fft_ifft2 fft_ifftn fft_ifftshift fft_ihfft fft_ihfft2 fft_ihfftn fft_irfft fft_irfft2
fft_irfftn fft_rfft fft_rfft2 fft_rfftn imag polar real resolve_conj resolve_neg stft
view_as_complex view_as_complex_copy view_as_real view_as_real_copy
"""

_IMAGES = "deform_conv2d ps_roi_align ps_roi_pool roi_align roi_pool"

_ATEN = (_ELEMENTWISE, _REDUCTIONS, _MOVING, _PRODUCTS, _LAYERS, _SIGNALS)

ALLOWED: frozenset[str] = frozenset(
    [f"aten::{name}" for group in _ATEN for name in group.split()]
    + [f"torchvision::{name}" for name in _IMAGES.split()]
)
