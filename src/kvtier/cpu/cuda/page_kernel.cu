// Copies pages between device memory and mapped host memory.
//
// Few blocks of many threads: the bus is kept busy by the number of loads that are under way, and
// an SM that lends a block is one that the model's kernels cannot use.

typedef unsigned long long u64;
typedef unsigned int u32;

namespace {

constexpr u32 VECTOR_BYTES = 16;
constexpr u32 WARP = 32;
constexpr u32 STEP_BYTES = WARP * VECTOR_BYTES;
constexpr u32 UNROLL = 4;

struct alignas(VECTOR_BYTES) Vector {
    u32 x, y, z, w;
};

// What is copied is not read again: it need not push anything out of the cache.
__device__ __forceinline__ Vector load(u64 address) {
    Vector v;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(address));
    return v;
}

__device__ __forceinline__ void store(u64 address, Vector v) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(v.x), "r"(v.y),
                 "r"(v.z), "r"(v.w)
                 : "memory");
}

// One warp copies `bytes` bytes, a multiple of VECTOR_BYTES.
__device__ __forceinline__ void copy_piece(u64 from, u64 to, u32 bytes, u32 lane) {
    u32 at = lane * VECTOR_BYTES;
    for (; at + (UNROLL - 1) * STEP_BYTES < bytes; at += UNROLL * STEP_BYTES) {
        Vector v[UNROLL];
#pragma unroll
        for (u32 i = 0; i < UNROLL; i++) v[i] = load(from + at + i * STEP_BYTES);
#pragma unroll
        for (u32 i = 0; i < UNROLL; i++) store(to + at + i * STEP_BYTES, v[i]);
    }
    for (; at < bytes; at += STEP_BYTES) store(to + at, load(from + at));
}

}  // namespace

// Page i is sizes[i] bytes from sources[i] to targets[i]; all are multiples of 16. These arrays are
// in host memory, so a warp asks for its next entry before it copies the present one. Pages are cut
// into `pieces` pieces of `piece_bytes` bytes, so that few large ones keep all warps busy as well.
extern "C" __global__ void copy_pages(const u64* __restrict__ sources,
                                      const u64* __restrict__ targets,
                                      const u64* __restrict__ sizes, u32 num_pages, u32 pieces,
                                      u32 piece_bytes) {
    const u32 lane = threadIdx.x % WARP;
    const u64 num_warps = (u64)gridDim.x * blockDim.x / WARP;
    const u64 num_items = (u64)num_pages * pieces;
    u64 item = ((u64)blockIdx.x * blockDim.x + threadIdx.x) / WARP;
    if (item >= num_items) return;
    u64 page = item / pieces;
    u64 source = sources[page], target = targets[page], size = sizes[page];
    while (true) {
        const u64 next = item + num_warps;
        const bool has_next = next < num_items;
        u64 next_source = 0, next_target = 0, next_size = 0;
        if (has_next) {
            page = next / pieces;
            next_source = sources[page];
            next_target = targets[page];
            next_size = sizes[page];
        }
        const u64 offset = item % pieces * piece_bytes;
        if (offset < size) {
            const u64 left = size - offset;
            copy_piece(source + offset, target + offset, left < piece_bytes ? (u32)left : piece_bytes,
                       lane);
        }
        if (!has_next) return;
        item = next;
        source = next_source;
        target = next_target;
        size = next_size;
    }
}
