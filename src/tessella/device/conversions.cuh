__device__ __forceinline__ float of_half(u32 bits) {
  float x; asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"((u16)bits)); return x;
}
__device__ __forceinline__ u32 to_half(float x) {
  u16 bits; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x)); return bits;
}
__device__ __forceinline__ u32 to_bfloat(float x) {
  u16 bits; asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x)); return bits;
}
__device__ __forceinline__ u32 to_byte(float x) {  // half to even, saturated
  int code; asm("cvt.rni.sat.s8.f32 %0, %1;" : "=r"(code) : "f"(x)); return code & 255;
}

__device__ __forceinline__ u32 address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
