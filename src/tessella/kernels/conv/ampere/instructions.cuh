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
__device__ __forceinline__ u32 read_half(u32 at) {
  u16 x; asm volatile("ld.shared.u16 %0, [%1];" : "=h"(x) : "r"(at) : "memory"); return x;
}
__device__ __forceinline__ void write_half(u32 at, u32 x) {
  asm volatile("st.shared.u16 [%0], %1;" :: "r"(at), "h"((u16)x) : "memory");
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
