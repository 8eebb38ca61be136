// Copies the pages of KV-cache blocks between device memory and mapped host memory, or between
// device memory and a buffer on the device.
//
// To host memory, a launch has few thread blocks of many threads: enough to keep the bus busy, and
// each thread block takes an SM that the model's kernels cannot use.

typedef unsigned long long u64;
typedef unsigned int u32;

namespace {

constexpr u32 VECTOR_BYTES = 16;
constexpr u32 WARP = 32;
constexpr u32 STEP_BYTES = WARP * VECTOR_BYTES;
constexpr u32 UNROLL = 4;
constexpr u32 MOST_THREADS = 1024;  // of a block

struct alignas(VECTOR_BYTES) Vector {
    u32 x, y, z, w;
};

// `_Order` in page_kernel.py. Columns are the pages of a block: see Columns in page_table.py.
struct Order {
    const u64* columns;  // rows: device base, device step, offset, step of a place, size
    u64 base;            // address of the first slot
    u64 row_bytes;       // from one slot to the next
    u32 num_columns, num_entries;
    u32 pieces, piece_bytes;  // pieces of a page: a few large pages keep all warps busy
    u32 chunk, first_place;   // places of a slot; the place of the first entry
    u32 is_store;
    u32 is_packed;  // slots are adjacent, in the order of entries
};

struct Entry {
    u32 block, slot;
};

template <u32 CAPACITY>
struct Launch {
    Order order;
    Entry entries[CAPACITY];
};

struct Piece {
    u64 from, to;
    u32 bytes;
};

// Does not allocate in L1: the data is not read again, so it should not replace other data there.
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

// Called by one warp for each piece. The size of a piece is a multiple of VECTOR_BYTES.
__device__ __forceinline__ void copy(Piece piece, u32 lane) {
    u32 at = lane * VECTOR_BYTES;
    for (; at + (UNROLL - 1) * STEP_BYTES < piece.bytes; at += UNROLL * STEP_BYTES) {
        Vector v[UNROLL];
#pragma unroll
        for (u32 i = 0; i < UNROLL; i++) v[i] = load(piece.from + at + i * STEP_BYTES);
#pragma unroll
        for (u32 i = 0; i < UNROLL; i++) store(piece.to + at + i * STEP_BYTES, v[i]);
    }
    for (; at < piece.bytes; at += STEP_BYTES) store(piece.to + at, load(piece.from + at));
}

// Returns the piece of an item. Its size is 0 if the pages of the column have fewer pieces.
template <u32 CAPACITY>
__device__ __forceinline__ Piece find(const Launch<CAPACITY>& launch, u32 item) {
    const Order& order = launch.order;
    const u32 offset = item % order.pieces * order.piece_bytes;
    const u32 page = item / order.pieces;
    const u32 index = page / order.num_columns;
    const u64* column = order.columns + page % order.num_columns;
    const Entry entry = launch.entries[index];
    const u32 place = order.first_place + index;
    const u64 slot = order.is_packed ? place / order.chunk : entry.slot;
    const u64 device = column[0] + entry.block * column[order.num_columns] + offset;
    const u64 other = order.base + slot * order.row_bytes + column[2 * order.num_columns] +
                      place % order.chunk * column[3 * order.num_columns] + offset;
    const u64 size = column[4 * order.num_columns];
    const u64 left = offset < size ? size - offset : 0;
    return {order.is_store ? device : other, order.is_store ? other : device,
            left < order.piece_bytes ? (u32)left : order.piece_bytes};
}

// Each warp computes the addresses of its next piece before it copies the current one.
template <u32 CAPACITY>
__device__ __forceinline__ void copy_all(const Launch<CAPACITY>& launch) {
    const u32 lane = threadIdx.x % WARP;
    const u32 num_warps = gridDim.x * blockDim.x / WARP;
    const Order& order = launch.order;
    const u32 num_items = order.num_entries * order.num_columns * order.pieces;
    u32 item = (blockIdx.x * blockDim.x + threadIdx.x) / WARP;
    if (item >= num_items) return;
    Piece piece = find(launch, item);
    while (true) {
        item += num_warps;
        const bool has_next = item < num_items;
        Piece next = piece;
        if (has_next) next = find(launch, item);
        copy(piece, lane);
        if (!has_next) return;
        piece = next;
    }
}

}  // namespace

// Entries are parameters of the launch. The driver copies the whole parameter, whatever part of it
// is used, so there is a smaller kernel for the many launches that have few entries.
extern "C" __global__ void __launch_bounds__(MOST_THREADS)
    copy_few_blocks(const __grid_constant__ Launch<FEW> launch) {
    copy_all(launch);
}
extern "C" __global__ void __launch_bounds__(MOST_THREADS)
    copy_many_blocks(const __grid_constant__ Launch<MANY> launch) {
    copy_all(launch);
}
