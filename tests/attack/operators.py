"""Calls that torch's operators accept, to be spoilt: a line each, what is not here follows from
the schema.

``f(2,3)`` is a tensor of floats, ``c(…)`` complex, ``b(…)`` booleans, ``p(…)`` a positive definite
matrix, ``z(…)`` zeros, ``i(2,3)<4`` integers from 0 to 3; numbers, lists, words and null are JSON,
and stand for the arguments in the schema's order.
"""

from __future__ import annotations

CALLS = """
_adaptive_avg_pool2d f(1,2,6,6) [3,3]
_adaptive_avg_pool3d f(1,2,4,4,4) [2,2,2]
_log_softmax f(3,4) 1 false
_softmax f(3,4) 1 false
_unsafe_view f(3,4) [4,3]
_upsample_bicubic2d_aa f(1,2,4,4) [8,3] false null null
_upsample_bicubic2d_aa.vec f(1,2,4,4) [8,3] false null
_upsample_bilinear2d_aa f(1,2,4,4) [8,3] false null null
_upsample_bilinear2d_aa.vec f(1,2,4,4) null false [2.0,0.5]
_upsample_nearest_exact1d f(1,2,4) [8] null
_upsample_nearest_exact2d f(1,2,4,4) [8,3] null null
_upsample_nearest_exact2d.vec f(1,2,4,4) null [2.0,2.0]
_upsample_nearest_exact3d f(1,2,4,4,4) [8,3,4] null null null
_weight_norm f(3,4) f(3,1) 0
adaptive_avg_pool1d f(1,2,6) [3]
adaptive_avg_pool2d f(1,2,6,6) [3,3]
adaptive_avg_pool3d f(1,2,4,4,4) [2,2,2]
adaptive_max_pool1d f(1,2,6) [3]
adaptive_max_pool2d f(1,2,6,6) [3,3]
adaptive_max_pool3d f(1,2,4,4,4) [2,2,2]
addbmm f(3,5) f(2,3,4) f(2,4,5)
addmm f(3,5) f(3,4) f(4,5)
addmv f(3) f(3,4) f(4)
addr f(3,4) f(3) f(4)
affine_grid_generator f(1,2,3) [1,2,4,4] false
avg_pool1d f(1,2,8) [3] [2] [1] false true
avg_pool2d f(1,2,8,8) [3,3] [2,2] [1,1] false true null
avg_pool3d f(1,2,4,4,4) [2,2,2] [2,2,2] [0,0,0] false true null
baddbmm f(2,3,5) f(2,3,4) f(2,4,5)
batch_norm f(2,3,4,4) f(3) f(3) f(3) f(3) false 0.1 1e-5 false
bilinear f(2,3) f(2,4) f(5,3,4) f(5)
bitwise_and i(3,4)<9 i(3,4)<9
bitwise_left_shift i(3,4)<9 i(3,4)<9
bitwise_not i(3,4)<9
bitwise_or i(3,4)<9 i(3,4)<9
bitwise_right_shift i(3,4)<9 i(3,4)<9
bitwise_xor i(3,4)<9 i(3,4)<9
bmm f(2,3,4) f(2,4,5)
broadcast_to f(1,4) [3,4]
bucketize f(3,4) f(5)
bucketize.Scalar 0.5 f(5)
cartesian_prod [f(3),f(2)]
cdist f(2,3,4) f(2,5,4) 2.0 null
chain_matmul [f(2,3),f(3,4),f(4,2)]
channel_shuffle f(1,4,3,3) 2
cholesky_inverse p(3) false
cholesky_solve f(3,2) p(3) false
col2im f(1,8,9) [4,4] [2,2] [1,1] [0,0] [1,1]
column_stack [f(3),f(3,2)]
combinations f(4) 2 false
complex f(3,4) f(3,4)
constant_pad_nd f(2,3) [1,1] 0.5
conv1d f(1,4,8) f(6,2,3) f(6) [1] [1] [1] 2
conv2d f(1,4,7,7) f(6,2,3,3) f(6) [1,1] [1,1] [1,1] 2
conv3d f(1,4,5,5,5) f(6,2,3,3,3) f(6) [1,1,1] [1,1,1] [1,1,1] 2
conv1d.padding f(1,4,8) f(6,2,3) f(6) [1] "same" [1] 2
conv2d.padding f(1,4,7,7) f(6,2,3,3) f(6) [1,1] "valid" [1,1] 2
conv3d.padding f(1,4,5,5,5) f(6,2,3,3,3) f(6) [1,1,1] "same" [1,1,1] 2
conv_tbc f(8,1,4) f(3,4,6) f(6) 1
conv_transpose1d f(1,4,8) f(4,3,3) f(6) [2] [1] [1] 2 [1]
conv_transpose2d.input f(1,4,7,7) f(4,3,3,3) f(6) [2,2] [1,1] [1,1] 2 [1,1]
conv_transpose3d.input f(1,4,4,4,4) f(4,3,3,3,3) f(6) [2,2,2] [1,1,1] [1,1,1] 2 [1,1,1]
conv_transpose1d f(1,4,8) f(4,3,3) f(6) [2] [1] [1] 2 [1]
convolution f(1,4,7,7) f(6,2,3,3) f(6) [1,1] [1,1] [1,1] false [0,0] 2
copy f(3,4) f(3,4) false
cosine_similarity f(3,4) f(3,4) 1 1e-8
cross f(4,3) f(4,3) 1
deform_conv2d f(1,4,6,6) f(2,4,3,3) f(1,18,6,6) f(1,9,6,6) f(2) 1 1 1 1 1 1 1 1 true
diag_embed f(3,4) 0 0 1
diagonal_scatter f(3,4) f(3) 0 0 1
diagonal f(3,4) 0 0 1
dot f(4) f(4)
dsplit.int f(2,2,4) 2
dsplit.array f(2,2,4) [1,2]
einsum "bij,bjk->bik" [f(2,3,4),f(2,4,5)]
embedding f(5,4) i(2,3)<5 -1
expand f(1,4) [3,4]
expand_copy f(1,4) [3,4]
fft_fft2 f(4,4) null [-2,-1] null
fft_hfft2 c(4,4)
fft_hfftn c(4,4)
fft_irfft2 c(4,4)
fft_irfftn c(4,4)
flatten.using_ints f(2,3,4) 1 2
frobenius_norm.dim f(3,4) [0,1]
gather f(3,4) 1 i(3,2)<4
gcd i(3,4)<9 i(3,4)<9
ger f(3) f(4)
glu f(3,4) 1
grid_sampler f(1,2,5,5) f(1,4,4,2) 0 0 false
grid_sampler_2d f(1,2,5,5) f(1,4,4,2) 0 0 false
grid_sampler_3d f(1,2,4,4,4) f(1,3,3,3,3) 0 0 false
group_norm f(2,4,3,3) 2 f(4) f(4) 1e-5 false
gru_cell f(2,3) f(2,4) f(12,3) f(12,4) f(12) f(12)
hsplit.int f(2,4) 2
hsplit.array f(2,4) [1,2]
im2col f(1,2,4,4) [2,2] [1,1] [0,0] [1,1]
index.Tensor f(3,4) [i(2)<3,i(2)<4]
index_add f(3,4) 0 i(2)<3 f(2,4)
index_copy f(3,4) 0 i(2)<3 f(2,4)
index_fill.int_Scalar f(3,4) 0 i(2)<3 1.5
index_fill.int_Tensor f(3,4) 0 i(2)<3 f()
index_put f(3,4) [i(2)<3,i(2)<4] f(2) false
index_reduce f(3,4) 0 i(2)<3 f(2,4) "prod"
index_select f(3,4) 1 i(2)<4
inner f(3,4) f(5,4)
instance_norm f(2,3,4,4) f(3) f(3) null null true 0.1 1e-5 false
isin.Tensor_Tensor f(3,4) f(5)
kron f(2,3) f(3,2)
kthvalue f(3,4) 2 1 false
layer_norm f(2,3,4) [4] f(4) f(4) 1e-5 false
ldexp.Tensor f(3,4) i(3,4)<9
linalg_cholesky p(3)
linalg_cross f(4,3) f(4,3)
linalg_matrix_power f(3,3) 3
linalg_multi_dot [f(2,3),f(3,4),f(4,2)]
linalg_pinv f(3,4) 1e-5
linalg_solve p(3) f(3,2)
linalg_solve_triangular p(3) f(3,2) upper=true
linalg_tensorinv f(4,2,2) 1
linalg_tensorsolve f(2,2,4) f(2,2)
linalg_vander f(4)
linear f(2,3) f(4,3) f(4)
lstm_cell f(2,3) [f(2,4),f(2,4)] f(16,3) f(16,4) f(16) f(16)
masked_fill.Scalar f(3,4) b(3,4) 0.5
masked_fill.Tensor f(3,4) b(3,4) f()
masked_scatter f(3,4) b(3,4) f(12)
matmul f(3,4) f(4,5)
matrix_power f(3,3) 3
max_pool1d f(1,2,8) [3] [2] [1] [1] false
max_pool1d_with_indices f(1,2,8) [3] [2] [1] [1] false
max_pool2d f(1,2,8,8) [3,3] [2,2] [1,1] [1,1] false
max_pool2d_with_indices f(1,2,8,8) [3,3] [2,2] [1,1] [1,1] false
max_pool3d f(1,2,4,4,4) [2,2,2] [2,2,2] [0,0,0] [1,1,1] false
max_pool3d_with_indices f(1,2,4,4,4) [2,2,2] [2,2,2] [0,0,0] [1,1,1] false
max_unpool2d f(1,2,3,3) i(1,2,3,3)<36 [6,6]
max_unpool3d f(1,2,2,2,2) i(1,2,2,2,2)<64 [4,4,4] [2,2,2] [0,0,0]
meshgrid [f(3),f(2)]
meshgrid.indexing [f(3),f(2)] indexing="ij"
mm f(3,4) f(4,5)
movedim.int f(2,3,4) 0 2
movedim.intlist f(2,3,4) [0] [2]
moveaxis.int f(2,3,4) 0 2
moveaxis.intlist f(2,3,4) [0] [2]
mv f(3,4) f(4)
narrow f(3,4) 1 1 2
narrow.Tensor f(3,4) 1 i()<2 2
narrow_copy f(3,4) 1 1 2
nanquantile f(3,4) f(2) 1 false
native_channel_shuffle f(1,4,3,3) 2
native_group_norm f(2,4,9) f(4) f(4) 2 4 9 2 1e-5
native_layer_norm f(2,3,4) [4] f(4) f(4) 1e-5
new_full f(3) [2,2] 0.5
new_ones f(3) [2,2]
new_zeros f(3) [2,2]
outer f(3) f(4)
pad f(1,2,4,4) [1,1] "constant" 0.5
pairwise_distance f(3,4) f(3,4) 2.0 1e-6 false
permute f(2,3,4) [2,0,1]
permute_copy f(2,3,4) [2,0,1]
pinverse f(3,4)
pixel_shuffle f(1,4,3,3) 2
pixel_unshuffle f(1,1,4,4) 2
prelu f(2,3,4) f(3)
quantile f(3,4) f(2) 1 false
reflection_pad1d f(1,2,4) [1,1]
reflection_pad2d f(1,2,4,4) [1,1,1,1]
reflection_pad3d f(1,2,4,4,4) [1,1,1,1,1,1]
renorm f(3,4) 2 0 1.0
repeat f(3,4) [2,1]
repeat_interleave.self_int f(3,4) 2 1
replication_pad1d f(1,2,4) [1,1]
replication_pad2d f(1,2,4,4) [1,1,1,1]
replication_pad3d f(1,2,4,4,4) [1,1,1,1,1,1]
reshape f(3,4) [2,6]
rms_norm f(2,3,4) [4] f(4) null
rnn_relu_cell f(2,3) f(2,4) f(4,3) f(4,4) f(4) f(4)
rnn_tanh_cell f(2,3) f(2,4) f(4,3) f(4,4) f(4) f(4)
roll f(3,4) [1] [1]
rot90 f(3,4) 1 [0,1]
scatter.src f(3,4) 1 i(3,2)<4 f(3,2)
scatter.value f(3,4) 1 i(3,2)<4 0.5
scatter.reduce f(3,4) 1 i(3,2)<4 f(3,2) reduce="add"
scatter.value_reduce f(3,4) 1 i(3,2)<4 0.5 reduce="add"
scatter_add f(3,4) 1 i(3,2)<4 f(3,2)
scatter_reduce.two f(3,4) 1 i(3,2)<4 f(3,2) "mean"
searchsorted.Tensor f(5) f(3)
searchsorted.Tensor f(5) f(3) sorter=i(5)<5
searchsorted.Scalar f(5) 0.5
select.int f(3,4) 1 2
select_copy.int f(3,4) 1 2
select_scatter f(3,4) f(3) 1 2
slice.Tensor f(3,4) 1 0 3 1
slice_copy.Tensor f(3,4) 1 0 3 1
slice_scatter f(3,4) f(3,3) 1 0 3 1
split.sizes f(3,4) [1,3] 1
split_copy.Tensor f(3,4) 2 1
split_with_sizes f(3,4) [1,3] 1
split_with_sizes_copy f(3,4) [1,3] 1
squeeze.dims f(3,1) [1]
squeeze_copy.dims f(3,1) [1]
stft f(64) 16 4 16 f(16) false true true
stft.center f(64) 16 4 16 f(16) true "reflect" false true true
sum_to_size f(3,4) [1,4]
take f(3,4) i(5)<12
take_along_dim f(3,4) i(3,2)<4 1
tensor_split.sections f(3,4) 2 1
tensor_split.indices f(3,4) [1,2] 1
tensor_split.tensor_indices_or_sections f(3,4) i(2)<4 1
tensordot f(2,3,4) f(3,4,5) [1,2] [0,1]
tile f(3,4) [2,1]
topk f(3,4) 2 1 true true
transpose.int f(3,4) 0 1
transpose_copy.int f(3,4) 0 1
trapezoid.x f(3,4) f(3,4)
unflatten.int f(3,4) 1 [2,2]
unfold f(3,8) 1 3 2
unfold_copy f(3,8) 1 3 2
unsafe_split_with_sizes f(3,4) [1,3] 1
upsample_bicubic2d f(1,2,4,4) [8,3] false null null
upsample_bicubic2d.vec f(1,2,4,4) null false [2.0,2.0]
upsample_bilinear2d f(1,2,4,4) [8,3] false null null
upsample_bilinear2d.vec f(1,2,4,4) [8,3] false null
upsample_linear1d f(1,2,4) [8] false null
upsample_linear1d.vec f(1,2,4) [8] false null
upsample_nearest1d f(1,2,4) [8] null
upsample_nearest1d.vec f(1,2,4) [8] null
upsample_nearest2d f(1,2,4,4) [8,3] null null
upsample_nearest2d.vec f(1,2,4,4) [8,3] null
upsample_nearest3d f(1,2,4,4,4) [8,3,4] null null null
upsample_nearest3d.vec f(1,2,4,4,4) [8,3,4] null
upsample_trilinear3d f(1,2,4,4,4) [8,3,4] false null null null
upsample_trilinear3d.vec f(1,2,4,4,4) [8,3,4] false null
vander f(4)
vdot f(4) f(4)
view f(3,4) [2,6]
view_copy f(3,4) [2,6]
view_as_complex f(3,4,2)
view_as_complex_copy f(3,4,2)
view_as_real c(3,4)
view_as_real_copy c(3,4)
vsplit.int f(4,3) 2
vsplit.array f(4,3) [1,2]
where.self b(3,4) f(3,4) f(3,4)
where.ScalarSelf b(3,4) 1.5 f(3,4)
where.ScalarOther b(3,4) f(3,4) 1.5
where.Scalar b(3,4) 1.5 2.5
atleast_1d.Sequence [f(3),f()]
fill.Tensor f(3,4) f()
nuclear_norm.dim f(3,4) [0,1]
norm.ScalarOpt_dim_dtype f(3,4) 2 [1] false dtype={"dtype":"float64"}
linalg_norm.ord_str f(3,4) "fro"
linalg_matrix_norm.str_ord f(3,4) "nuc"
quantile.scalar f(3,4) 0.5 1
_upsample_nearest_exact1d.vec f(1,2,4) [8] null
_upsample_nearest_exact3d.vec f(1,2,4,4,4) [8,3,4] null
div.Tensor_mode i(3,4)<9 i(3,4)<9 rounding_mode="trunc"
div.Scalar_mode i(3,4)<9 2 rounding_mode="floor"
divide.Tensor_mode i(3,4)<9 i(3,4)<9 rounding_mode="floor"
divide.Scalar_mode i(3,4)<9 3 rounding_mode="trunc"
floor_divide i(3,4)<9 i(3,4)<9
floor_divide.Scalar i(3,4)<9 3
remainder.Tensor i(3,4)<9 i(3,4)<9
remainder.Scalar i(3,4)<9 3
remainder.Scalar_Tensor 7 i(3,4)<9
fmod.Tensor i(3,4)<9 i(3,4)<9
fmod.Scalar i(3,4)<9 3
pow.Tensor_Tensor i(3,4)<9 i(3,4)<9
pow.Scalar 3 i(3,4)<9
linalg_cond.p_str p(3) "nuc"
roi_align f(1,2,6,6) z(2,5) 1.0 2 2 2 false
roi_pool f(1,2,6,6) z(2,5) 1.0 2 2
ps_roi_align f(1,8,6,6) z(2,5) 1.0 2 2 2
ps_roi_pool f(1,8,6,6) z(2,5) 1.0 2 2
block_diag [f(2,3),f(3,2)]
broadcast_tensors [f(3,1),f(1,4)]
cat [f(3,4),f(3,2)] 1
"""


def calls() -> dict[str, list[str]]:
    """The lines by target, without the namespace."""
    found: dict[str, list[str]] = {}
    for line in CALLS.strip().splitlines():
        target, _, rest = line.partition(" ")
        found.setdefault(target, []).append(rest)
    return found
