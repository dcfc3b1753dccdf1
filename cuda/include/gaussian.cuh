// Gaussian levels with EDEN's scale: from the values of a tile of groups to their wire bytes.
//
// Inputs:  Held, the values of a lane: 32 consecutive elements of a group that four lanes share.
// Outputs: planes and bf16 scales of the row.
// Exactness: [Note: Gaussian levels] of ds_quant/kernels/reference.py, step by step.
#ifndef DSQ_GAUSSIAN_CUH
#define DSQ_GAUSSIAN_CUH

#include "encoder.cuh"

#if DSQ_ROUNDING == DSQ_GAUSSIAN

#define DSQ_MAGNITUDES (1 << (DSQ_BITS - 1))

// Folds by distance 8, 16, 1, 2, 4 inside a lane, then by 32 and 64 over the lanes of the group.
DSQ_DEVICE float folded(float (&v)[4][8]) {
    DSQ_UNROLL
    for (int i = 0; i < 8; ++i) {
        v[0][i] = add_rn(add_rn(v[0][i], v[1][i]), add_rn(v[2][i], v[3][i]));
    }
    DSQ_UNROLL
    for (int distance = 1; distance < 8; distance *= 2) {
        DSQ_UNROLL
        for (int i = 0; i < 8; i += 2 * distance) v[0][i] = add_rn(v[0][i], v[0][i + distance]);
    }
    float sum = v[0][0];
    sum = add_rn(sum, __shfl_xor_sync(DSQ_ALL_LANES, sum, 1));
    return add_rn(sum, __shfl_xor_sync(DSQ_ALL_LANES, sum, 2));
}

// Magnitudes of the levels and the squares of the borders between them.
struct Magnitudes {
    float level[DSQ_MAGNITUDES], border[DSQ_MAGNITUDES];
};

DSQ_DEVICE Magnitudes magnitudes_of(const float* levels) {
    Magnitudes m;
    DSQ_UNROLL
    for (int k = 0; k < DSQ_MAGNITUDES; ++k) {
        m.level[k] = float_of(load4(levels + DSQ_MAGNITUDES + k));
    }
    DSQ_UNROLL
    for (int k = 0; k + 1 < DSQ_MAGNITUDES; ++k) {
        const float middle = mul_rn(add_rn(m.level[k + 1], m.level[k]), 0.5f);
        m.border[k] = mul_rn(middle, middle);
    }
    return m;
}

// The code of x, and the magnitude of its level; square: of x over the rms of its group.
DSQ_DEVICE u32 gaussian_code(float x, float square, const Magnitudes& m, float& level) {
    u32 code = bits_of(x) >> 31 ? 0 : DSQ_MAGNITUDES;
    level = m.level[0];
    DSQ_UNROLL
    for (int k = 0; k + 1 < DSQ_MAGNITUDES; ++k) {
        const bool above = is_below(m.border[k], square);
        code += above;
        level = above ? m.level[k + 1] : level;
    }
    return code;
}

// bf16, rounded to nearest even, of a number that is not NaN.
DSQ_DEVICE u32 rounded_to_bf16(float x) {
    const u32 bits = bits_of(x);
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}

template <int DTYPE>
DSQ_DEVICE void encode_gaussian(const Held<DTYPE>& held, Tile tile, const WireRow& row,
                                const float* levels) {
    static_assert(DSQ_GROUP == 128 && DSQ_RUN == 4 && DSQ_LANES == 4, "a lane holds 32 elements");
    static_assert(DSQ_HELD == 4 && DSQ_WARPS == 1 && !DSQ_MINMAX, "of one group, with a scale");
    const u32 largest = extremes_of_group(extremes_of_slot(held, 0)).largest;
    const u32 exponent = largest >> 23;
    const float unit = float_of((254 - exponent) << 23);
    float u[4][8], v[4][8];
    DSQ_UNROLL
    for (int i = 0; i < 32; ++i) {
        u[i / 8][i % 8] = mul_rn(held.vector[i / 8].at(i % 8), unit);
        v[i / 8][i % 8] = mul_rn(u[i / 8][i % 8], u[i / 8][i % 8]);
    }
    const float energy = folded(v);
    const float inverse = reciprocal(mul_rn(energy, 1.0f / DSQ_GROUP));

    const bool tiny = is_below(float_of(largest), 0x1p-99f);
    const bool unusable = largest >= 0x7F000000u;  // 2^127, Inf or NaN
    const Magnitudes m = magnitudes_of(levels);
    Codes codes[4];
    DSQ_UNROLL
    for (int j = 0; j < 4; ++j) {
        u32 even[4], odd[4];
        DSQ_UNROLL
        for (int i = 0; i < 8; ++i) {
            const float x = u[j][i];
            float level;
            const u32 code = gaussian_code(x, mul_rn(mul_rn(x, x), inverse), m, level);
            (i % 2 ? odd : even)[i / 2] = code;
            v[j][i] = mul_rn(absolute(x), level);
        }
        codes[j] = packed(even, odd);
    }
    const float scale = mul_rn(mul_rn(energy, reciprocal(folded(v))), float_of(exponent << 23));
    const u64 num_groups = row.numel / DSQ_GROUP;
    if (!DSQ_WHOLE && tile.group >= num_groups) return;
    const u64 j = tile.group * DSQ_GROUP_VECTORS + tile.thread * DSQ_RUN;
    store_plane<0>(codes, row, j, tiny || unusable);
    if (Planes<DSQ_BITS>::COUNT > 1) store_plane<1>(codes, row, j, tiny || unusable);
    if (tile.thread == 0) {
        const u32 bits = tiny ? 0 : unusable ? DSQ_NAN_BITS >> 16 : rounded_to_bf16(scale);
        store2(row.bytes + row.scales + tile.group * 2, bits);
    }
}

#endif  // DSQ_ROUNDING

// Of any codec; levels: of Gaussian ones.
template <int DTYPE>
DSQ_DEVICE void encode_groups(const Held<DTYPE>& held, Tile tile, const WireRow& row, Stream stream,
                              const float* levels) {
#if DSQ_ROUNDING == DSQ_GAUSSIAN
    (void)stream;
    encode_gaussian(held, tile, row, levels);
#else
    (void)levels;
    encode_tile(held, tile, row, stream);
#endif
}

#endif  // DSQ_GAUSSIAN_CUH
