// Which lane holds which vectors of which groups: the one thread layout of encode and recode.
//
// A group belongs to DSQ_LANES lanes of one warp, or to DSQ_WARPS whole warps. A lane holds
// DSQ_VECTORS vectors of each of DSQ_SLOTS groups, DSQ_RUN consecutive ones at a time: vector v of
// thread r of the group is vector ((v / RUN) * threads + r) * RUN + v % RUN of the group, so that
// neighbouring lanes read neighbouring bytes. The numbers come from kernels/launch.py.
#ifndef DSQ_TILE_CUH
#define DSQ_TILE_CUH

#include "platform.cuh"

#ifndef DSQ_GROUP
#define DSQ_GROUP 128  // elements
#endif
#ifndef DSQ_RUN
#define DSQ_RUN 1
#endif
#ifndef DSQ_LANES
#define DSQ_LANES 8
#endif
#ifndef DSQ_WARPS
#define DSQ_WARPS 1
#endif
#ifndef DSQ_VECTORS
#define DSQ_VECTORS 2
#endif
#ifndef DSQ_SLOTS
#define DSQ_SLOTS 2
#endif
#ifndef DSQ_THREADS
#define DSQ_THREADS 256
#endif

#define DSQ_GROUP_VECTORS (DSQ_GROUP / 8)
#define DSQ_GROUP_THREADS (DSQ_LANES * DSQ_WARPS)
#define DSQ_HELD (DSQ_SLOTS * DSQ_VECTORS)  // vectors of a lane
#define DSQ_WARP_GROUPS (DSQ_WARP / DSQ_LANES)  // groups side by side in a warp
#define DSQ_BLOCK_GROUPS (DSQ_THREADS / DSQ_GROUP_THREADS * DSQ_SLOTS)

static_assert(DSQ_GROUP % 32 == 0, "groups are whole runs of 32 elements");
static_assert((DSQ_LANES & (DSQ_LANES - 1)) == 0 && DSQ_LANES <= DSQ_WARP, "a power of two");
static_assert(DSQ_WARPS == 1 || (DSQ_LANES == DSQ_WARP && DSQ_SLOTS == 1), "whole warps");
static_assert(DSQ_THREADS % (DSQ_WARP * DSQ_WARPS) == 0, "whole groups in a block");
static_assert(DSQ_SLOTS == 1 || (DSQ_SLOTS == 2 && DSQ_LANES >= 2), "one lane settles one slot");
static_assert(DSQ_VECTORS % DSQ_RUN == 0 && DSQ_GROUP_VECTORS % DSQ_RUN == 0, "whole runs");
static_assert(DSQ_GROUP_THREADS * DSQ_VECTORS >= DSQ_GROUP_VECTORS, "every vector has a holder");
static_assert(DSQ_GROUP_THREADS * DSQ_RUN <= DSQ_GROUP_VECTORS, "every thread has a first run");

struct Tile {
    u64 group;   // of slot 0
    u32 thread;  // r, among the threads of the group
    u32 lane;
};

// Group of a slot, as a distance from that of slot 0.
DSQ_DEVICE constexpr u32 slot_group(int slot) { return slot * DSQ_WARP_GROUPS; }

DSQ_DEVICE Tile tile_of(u64 block) {
    const u32 lane = threadIdx.x % DSQ_WARP, warp = threadIdx.x / DSQ_WARP;
    Tile tile;
    tile.lane = lane;
    if (DSQ_WARPS == 1) {
        tile.thread = lane % DSQ_LANES;
        const u32 in_block = warp * (DSQ_WARP_GROUPS * DSQ_SLOTS) + lane / DSQ_LANES;
        tile.group = block * DSQ_BLOCK_GROUPS + in_block;
    } else {
        tile.thread = warp % DSQ_WARPS * DSQ_WARP + lane;
        tile.group = block * DSQ_BLOCK_GROUPS + warp / DSQ_WARPS;
    }
    return tile;
}

// Vector v of thread r inside its group, without r's own part r * RUN.
DSQ_DEVICE constexpr u32 vector_step(int v) {
    return (v / DSQ_RUN) * (DSQ_GROUP_THREADS * DSQ_RUN) + v % DSQ_RUN;
}

// Where threads do not divide the vectors of a group, the last run of some threads is absent.
DSQ_DEVICE bool is_absent(u32 thread, int v) {
    return DSQ_GROUP_THREADS * DSQ_VECTORS != DSQ_GROUP_VECTORS &&
           thread * DSQ_RUN + vector_step(v) >= DSQ_GROUP_VECTORS;
}

#endif  // DSQ_TILE_CUH
