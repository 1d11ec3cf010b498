__device__ __forceinline__ void expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
               :: "r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(barrier) : "memory");
}
__device__ __forceinline__ void wait(u32 barrier, u32 phase) {
  asm volatile("{\n.reg .pred done;\nagain:\n"
               "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra again;\n}"
               :: "r"(barrier), "r"(phase) : "memory");
}
__device__ __forceinline__ void tile(u32 to, const CUtensorMap* map, int x, int y, u32 barrier) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
               "[%0], [%1, {%2, %3}], [%4];"
               :: "r"(to), "l"((u64)map), "r"(x), "r"(y), "r"(barrier) : "memory");
}
__device__ __forceinline__ void bulk(u32 to, const void* from, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
               "[%0], [%1], %2, [%3];"
               :: "r"(to), "l"((u64)from), "r"(bytes), "r"(barrier) : "memory");
}
__device__ __forceinline__ void begin(u32 barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(barrier), "r"(arrivals));
}
__device__ __forceinline__ void show_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
}
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
}
__device__ __forceinline__ void read(u32 (&to)[2], u32 at) {
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(to[0]), "=r"(to[1]) : "r"(at));
}
__device__ __forceinline__ void read(u32 (&to)[4], u32 at) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(at));
}
template <int COUNT> __device__ __forceinline__ void meet() {
  asm volatile("bar.sync 1, %0;" :: "n"(COUNT) : "memory");
}
__device__ __forceinline__ void begin_products() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
// nothing that reads a sum moves before the wait for it
__device__ __forceinline__ void settled(float& sum) { asm volatile("" : "+f"(sum) :: "memory"); }
__device__ __forceinline__ void settled(int& sum) { asm volatile("" : "+r"(sum) :: "memory"); }
template <int BLOCKS, int COUNT> __device__ __forceinline__
void wait_for(Sum (&sums)[BLOCKS][COUNT]) {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  #pragma unroll
  for (int m = 0; m < BLOCKS; ++m)
    #pragma unroll
    for (int j = 0; j < COUNT; ++j) settled(sums[m][j]);
}
