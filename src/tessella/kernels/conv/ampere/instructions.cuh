// 16 bytes into shared memory that nobody waits for yet; zeros where there is nothing to read
__device__ __forceinline__ void copy_16(u32 to, const void* from, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               :: "r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}
__device__ __forceinline__ void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING> __device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" :: "n"(PENDING) : "memory");
}
// four blocks of 8 × 8 numbers of 16 bits; lane i gives the address of row i % 8 of block i / 8
__device__ __forceinline__ void read_blocks(u32& a, u32& b, u32& c, u32& d, u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "r"(at) : "memory");
}
__device__ __forceinline__ u32 read_word(u32 at) {
  u32 x; asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(at) : "memory"); return x;
}
__device__ __forceinline__ void write_word(u32 at, u32 x) {
  asm volatile("st.shared.b32 [%0], %1;" :: "r"(at), "r"(x) : "memory");
}
__device__ __forceinline__ uint2 read_two(u32 at) {
  uint2 x;
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "r"(at) : "memory");
  return x;
}
__device__ __forceinline__ void write_two(u32 at, u32 x, u32 y) {
  asm volatile("st.shared.v2.b32 [%0], {%1, %2};" :: "r"(at), "r"(x), "r"(y) : "memory");
}
__device__ __forceinline__ uint4 read_four(u32 at) {
  uint4 x;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(at) : "memory");
  return x;
}
__device__ __forceinline__ void write_four(u32 at, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};"
               :: "r"(at), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
// of two pairs of float16 or bfloat16, or what is no number
__device__ __forceinline__ u32 larger_halves(u32 x, u32 y) {
  u32 z; asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y)); return z;
}
__device__ __forceinline__ u32 larger_bfloats(u32 x, u32 y) {
  u32 z; asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y)); return z;
}
// of two numbers the larger, or what is no number
__device__ __forceinline__ float larger(float x, float y) {
  float z; asm("max.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y)); return z;
}
__device__ __forceinline__ u32 to_halves(float x, float y) {
  u32 z; asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(z) : "f"(y), "f"(x)); return z;
}
__device__ __forceinline__ u32 to_bfloats(float x, float y) {
  u32 z; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(z) : "f"(y), "f"(x)); return z;
}
// Bytes by sums with a number whose last bits count ones: conversions take four times as long.
// one of four signed ones, of which each sign's bit is the other way round
__device__ __forceinline__ float of_byte(u32 bits, int place) {
  return __uint_as_float(__byte_perm(bits, 0x4b000000, 0x7440 | place)) - 8388736.0f;
}
// four signed ones, half to even, saturated; from 0 on where none is BELOW it
template <bool BELOW> __device__ __forceinline__ u32 to_bytes(const float (&y)[4]) {
  u32 bits[4];
  #pragma unroll
  for (int l = 0; l < 4; ++l)
    bits[l] = __float_as_uint(fminf(BELOW ? fmaxf(y[l], -128.0f) : y[l], 127.0f) + 12582912.0f);
  return __byte_perm(__byte_perm(bits[0], bits[1], 0x40), __byte_perm(bits[2], bits[3], 0x40), 0x5410);
}
