// Walsh-Hadamard transform of blocks of 32, 64 or 128 elements, in registers and shuffles.
//
// Exactness: [Note: rotation numbers] of ds_quant/kernels/reference.py: stages of distance 1, 2, 4,
// ... block / 2, each mapping a pair (a, b) to (fl(a + b), fl(a - b)).
// Layout: a lane holds whole runs of 32 consecutive elements, so the first five stages stay inside
// the lane; stages of distance 32 and 64 pair lanes whose numbers differ in bit 0 and bit 1.
#ifndef DSQ_HADAMARD_CUH
#define DSQ_HADAMARD_CUH

#include "platform.cuh"

#define DSQ_BLOCK_RUN 4  // vectors of a lane's run

template <int BLOCK>
DSQ_DEVICE void butterflies(float (&x)[DSQ_BLOCK_RUN][8], u32 lane) {
    static_assert(BLOCK == 32 || BLOCK == 64 || BLOCK == 128, "blocks of 32, 64 or 128 elements");
    DSQ_UNROLL
    for (int distance = 1; distance < 32; distance *= 2) {
        DSQ_UNROLL
        for (int i = 0; i < 32; ++i) {
            if (i & distance) continue;
            const int j = i + distance;
            const float a = x[i / 8][i % 8], b = x[j / 8][j % 8];
            x[i / 8][i % 8] = add_rn(a, b);
            x[j / 8][j % 8] = sub_rn(a, b);
        }
    }
    DSQ_UNROLL
    for (int step = 1; step < BLOCK / 32; step *= 2) {
        const float sign = lane & step ? -1.0f : 1.0f;
        DSQ_UNROLL
        for (int i = 0; i < 32; ++i) {
            const float mine = x[i / 8][i % 8];
            const float other = __shfl_xor_sync(DSQ_ALL_LANES, mine, step);
            // Exact product: one rounding, as a sum or a difference has.
            x[i / 8][i % 8] = fma_rn(mine, sign, other);
        }
    }
}

// Sign flips of 32 elements of a block: bit i of `flips` is element i of the run.
DSQ_DEVICE void flip_signs(float (&x)[DSQ_BLOCK_RUN][8], u32 flips) {
    DSQ_UNROLL
    for (int i = 0; i < 32; ++i) {
        x[i / 8][i % 8] = with_sign_flipped(x[i / 8][i % 8], flips << (31 - i));
    }
}

// The 32 bits of the flips of a whole block that belong to the run of a lane.
template <int BLOCK>
DSQ_DEVICE u32 flips_of_lane(u64 low, u64 high, u32 lane) {
    const u32 run = lane % (BLOCK / 32);
    const u64 half = run & 2 ? high : low;
    return (u32)(run & 1 ? half >> 32 : half);
}

#endif  // DSQ_HADAMARD_CUH
