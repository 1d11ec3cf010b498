typedef unsigned long long u64;
typedef unsigned int u32;
typedef unsigned short u16;
struct alignas(64) CUtensorMap { u64 words[16]; };
