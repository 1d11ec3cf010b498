// four elements from a place that is a multiple of four
template <int KIND> __device__ __forceinline__
void load(const void* from, long long place, float (&x)[4]) {
  if constexpr (KIND == 0) {
    float4 v = ((const float4*)from)[place / 4];
    x[0] = v.x; x[1] = v.y; x[2] = v.z; x[3] = v.w;
  } else if constexpr (KIND == 1) {
    uint2 v = ((const uint2*)from)[place / 4];
    x[0] = of_half(v.x); x[1] = of_half(v.x >> 16);
    x[2] = of_half(v.y); x[3] = of_half(v.y >> 16);
  } else if constexpr (KIND == 2) {
    uint2 v = ((const uint2*)from)[place / 4];
    x[0] = __uint_as_float(v.x << 16); x[1] = __uint_as_float(v.x & 0xffff0000u);
    x[2] = __uint_as_float(v.y << 16); x[3] = __uint_as_float(v.y & 0xffff0000u);
  } else if constexpr (KIND == 3) {
    char4 v = ((const char4*)from)[place / 4];
    x[0] = (signed char)v.x; x[1] = (signed char)v.y;
    x[2] = (signed char)v.z; x[3] = (signed char)v.w;
  } else {
    x[0] = x[1] = x[2] = x[3] = 0.0f;
  }
}
template <int KIND> __device__ __forceinline__
void store(void* to, long long place, const float (&x)[4]) {
  if constexpr (KIND == 0) {
    ((float4*)to)[place / 4] = make_float4(x[0], x[1], x[2], x[3]);
  } else if constexpr (KIND == 1) {
    ((uint2*)to)[place / 4] =
        make_uint2(to_half(x[0]) | to_half(x[1]) << 16, to_half(x[2]) | to_half(x[3]) << 16);
  } else if constexpr (KIND == 2) {
    ((uint2*)to)[place / 4] = make_uint2(
        to_bfloat(x[0]) | to_bfloat(x[1]) << 16, to_bfloat(x[2]) | to_bfloat(x[3]) << 16);
  } else {
    ((u32*)to)[place / 4] =
        to_byte(x[0]) | to_byte(x[1]) << 8 | to_byte(x[2]) << 16 | to_byte(x[3]) << 24;
  }
}
