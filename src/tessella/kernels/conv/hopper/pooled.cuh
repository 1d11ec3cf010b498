__device__ __forceinline__ float larger(float x, float y) {  // NaN stays
  float z; asm("max.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y)); return z;
}
__device__ __forceinline__ float of_next_pixels(float x) { return __shfl_down_sync(~0u, x, 4); }
__device__ __forceinline__ u32 of_lane(u32 x, int lane) { return __shfl_sync(~0u, x, lane); }
__device__ __forceinline__ u32 pack_16_bit(float x, float y) {
  u32 z; asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(z) : "f"(y), "f"(x)); return z;
}
__device__ __forceinline__ u32 bfloats(float x, float y) {
  u32 z; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(z) : "f"(y), "f"(x)); return z;
}
__device__ __forceinline__ u32 word(u32 at) {
  u32 x; asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(at) : "memory"); return x;
}
__device__ __forceinline__ void box(u32 to, const CUtensorMap* map, int x, int y, int z, u32 bar) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
               "[%0], [%1, {%2, %3, %4}], [%5];"
               :: "r"(to), "l"((u64)map), "r"(x), "r"(y), "r"(z), "r"(bar) : "memory");
}
__device__ __forceinline__ void end_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wait_for_products() {
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
}
// a word that products read is not written before they have ended
__device__ __forceinline__ void settled(u32& word) { asm volatile("" : "+r"(word) :: "memory"); }
