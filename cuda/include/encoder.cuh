// From the values of a tile of groups to their wire bytes: range, round, pack.
//
// Inputs:  Held, the values of a lane's vectors; absent ones repeat present values of their group,
//          so that they leave its range alone.
// Outputs: planes, scales and offsets of the row; the first tile of a row zeroes the gaps.
// Exactness: [Note: numbers] of ds_quant/kernels/reference.py, step by step.
#ifndef DSQ_ENCODER_CUH
#define DSQ_ENCODER_CUH

#include "job.cuh"
#include "philox.cuh"
#include "platform.cuh"
#include "ranges.cuh"
#include "tile.cuh"
#include "values.cuh"
#include "wire.cuh"

#ifndef DSQ_BITS
#define DSQ_BITS 4
#endif
#ifndef DSQ_MINMAX
#define DSQ_MINMAX 0
#endif
#ifndef DSQ_ROUNDING
#define DSQ_ROUNDING DSQ_STOCHASTIC
#endif

#define DSQ_FRACTION (DSQ_ROUNDING != DSQ_STOCHASTIC ? 0 : DSQ_BITS == 8 ? 15 : 16)
#define DSQ_ZERO (DSQ_MINMAX ? 0 : 1 << (DSQ_BITS - 1))  // code of zero
#define DSQ_TOP ((1 << DSQ_BITS) - 1)                    // largest code
#define DSQ_SCALE_BYTES (DSQ_ROUNDING == DSQ_GAUSSIAN ? 2 : 4)
// Three roundings stand between x and T: |T| exceeds its largest value by less than 1/2, which
// rounding forgives, as long as T has at most 21 bits. Above, and with a shift, T is clamped.
#define DSQ_STEPS (DSQ_MINMAX ? DSQ_TOP : DSQ_TOP - DSQ_ZERO)
#define DSQ_CLAMP                                    \
    (DSQ_ROUNDING == DSQ_RANDOM_SHIFT ||             \
     (DSQ_FRACTION > 0 && ((u64)DSQ_STEPS << DSQ_FRACTION) >= (1u << 21)))

static_assert(DSQ_MINMAX || DSQ_ROUNDING <= DSQ_STOCHASTIC || DSQ_ROUNDING == DSQ_GAUSSIAN,
              "shift and levels need offsets");

// One row on the wire.
struct WireRow {
    u8* bytes;
    u64 plane[DSQ_MAX_PLANES];  // offsets in bytes, as those of the next line
    u64 scales, offsets, end;
    u64 numel;    // elements
    u64 vectors;  // ceil(numel / 8)
};

DSQ_DEVICE WireRow row_of(const WireJob& wire, u64 row) {
    const WireRow r = {(u8*)(wire.bytes + row * wire.stride),
                       {0, wire.plane1, wire.plane2},
                       wire.scales,
                       wire.offsets,
                       wire.end,
                       wire.numel,
                       (wire.numel + 7) / 8};
    return r;
}

struct Stream {
    u64 key, step, first_vector;  // first_vector: of this row
};

// The values of a lane as they came, 16 bits each, or as fp32.
template <int DTYPE>
struct Held {
    Raw<DTYPE> vector[DSQ_HELD];
};

#if DSQ_MINMAX
struct Extremes {
    float low, high;
};
DSQ_DEVICE Extremes joined(Extremes a, Extremes b) {
    const Extremes r = {min_nan(a.low, b.low), max_nan(a.high, b.high)};
    return r;
}
DSQ_DEVICE Extremes from_lane(Extremes a, int mask) {
    const Extremes r = {__shfl_xor_sync(DSQ_ALL_LANES, a.low, mask),
                        __shfl_xor_sync(DSQ_ALL_LANES, a.high, mask)};
    return r;
}
#else
// max |x| as bits: unsigned order puts NaN above Inf above every number.
struct Extremes {
    u32 largest;
};
DSQ_DEVICE Extremes joined(Extremes a, Extremes b) {
    const Extremes r = {a.largest > b.largest ? a.largest : b.largest};
    return r;
}
DSQ_DEVICE Extremes from_lane(Extremes a, int mask) {
    const Extremes r = {__shfl_xor_sync(DSQ_ALL_LANES, a.largest, mask)};
    return r;
}
#endif

template <int DTYPE>
DSQ_DEVICE Extremes extremes_of_slot(const Held<DTYPE>& held, int slot) {
    const Raw<DTYPE>* first = held.vector + slot * DSQ_VECTORS;
    const int words = Raw<DTYPE>::WORDS;
#if DSQ_MINMAX
    if (DTYPE == DSQ_FP32) {
        Extremes all = {first[0].at(0), first[0].at(0)};
        DSQ_UNROLL
        for (int i = 1; i < DSQ_VECTORS * 8; ++i) {
            const float x = first[i / 8].at(i % 8);
            const Extremes one = {x, x};
            all = joined(all, one);
        }
        return all;
    }
    u32 low = first[0].w[0], high = low;  // two values per word
    DSQ_UNROLL
    for (int i = 1; i < DSQ_VECTORS * words; ++i) {
        low = min_pair<DTYPE>(low, first[i / words].w[i % words]);
        high = max_pair<DTYPE>(high, first[i / words].w[i % words]);
    }
    const Extremes r = {min_nan(half_of<DTYPE>(low, 0), half_of<DTYPE>(low, 1)),
                        max_nan(half_of<DTYPE>(high, 0), half_of<DTYPE>(high, 1))};
    return r;
#else
    if (DTYPE == DSQ_FP32) {
        float largest = absolute(first[0].at(0));
        DSQ_UNROLL
        for (int i = 1; i < DSQ_VECTORS * 8; ++i) {
            largest = max_nan(largest, absolute(first[i / 8].at(i % 8)));
        }
        const Extremes all = {bits_of(largest) & 0x7FFFFFFFu};
        return all;
    }
    u32 high = first[0].w[0] & 0x7FFF7FFFu;  // two values per word
    DSQ_UNROLL
    for (int i = 1; i < DSQ_VECTORS * words; ++i) {
        high = max_pair<DTYPE>(high, first[i / words].w[i % words] & 0x7FFF7FFFu);
    }
    const Extremes a = {bits_of(half_of<DTYPE>(high, 0)) & 0x7FFFFFFFu};
    const Extremes b = {bits_of(half_of<DTYPE>(high, 1)) & 0x7FFFFFFFu};
    return joined(a, b);
#endif
}

// Over all threads of the group.
DSQ_DEVICE Extremes extremes_of_group(Extremes mine) {
#if !DSQ_MINMAX
    if (DSQ_LANES == DSQ_WARP) {
        mine.largest = __reduce_max_sync(DSQ_ALL_LANES, mine.largest);
    } else
#endif
    {
        DSQ_UNROLL
        for (int mask = 1; mask < DSQ_LANES; mask *= 2) mine = joined(mine, from_lane(mine, mask));
    }
#if DSQ_WARPS > 1
    __shared__ Extremes of_warp[DSQ_THREADS / DSQ_WARP];
    const u32 warp = threadIdx.x / DSQ_WARP;
    if (threadIdx.x % DSQ_WARP == 0) of_warp[warp] = mine;
    __syncthreads();
    const u32 first = warp / DSQ_WARPS * DSQ_WARPS;
    mine = of_warp[first];
    DSQ_UNROLL
    for (int i = 1; i < DSQ_WARPS; ++i) mine = joined(mine, of_warp[first + i]);
#endif
    return mine;
}

// QSDP sec. 4.2: one shift u in [-1/2, 1/2) per parameter and step; rng.shift_of.
DSQ_DEVICE float shift_of(Stream stream) {
    const PhiloxWords words = philox_of_vector(0, stream.step, stream.key);
    return sub_rn(mul_rn((float)(words.w0 >> 8), 0x1p-24f), 0.5f);
}

DSQ_DEVICE Range range_of(Extremes all, Stream stream) {
#if DSQ_MINMAX
    const bool shifted = DSQ_ROUNDING == DSQ_RANDOM_SHIFT;
    const float shift = shifted ? shift_of(stream) : 0.0f;
    return minmax_range<DSQ_BITS, DSQ_FRACTION, shifted>(all.low, all.high, shift);
#else
    (void)stream;
    return absmax_range<DSQ_BITS, DSQ_FRACTION>(float_of(all.largest));
#endif
}

// With two slots, even threads settle slot 0 and odd ones slot 1: one division for both.
struct Ranges {
    Range mine;
    u64 group;  // that `mine` belongs to
};

DSQ_DEVICE Ranges ranges_of_tile(const Extremes (&all)[DSQ_SLOTS], Tile tile, Stream stream) {
    Ranges ranges;
    const bool second = DSQ_SLOTS == 2 && (tile.thread & 1);
    ranges.mine = range_of(second ? all[DSQ_SLOTS - 1] : all[0], stream);
    ranges.group = tile.group + (second ? slot_group(1) : 0);
    return ranges;
}

DSQ_DEVICE Range range_of_slot(Ranges ranges, Tile tile, int slot) {
    if (DSQ_SLOTS == 1) return ranges.mine;
    const int from = (tile.lane & ~(DSQ_LANES - 1)) | slot;
    Range range;
    range.scale = 0.0f;
    range.offset = DSQ_MINMAX ? __shfl_sync(DSQ_ALL_LANES, ranges.mine.offset, from) : 0.0f;
    range.inverse = __shfl_sync(DSQ_ALL_LANES, ranges.mine.inverse, from);
    return range;
}

#if DSQ_ROUNDING == DSQ_LEARNED
__shared__ float middles[DSQ_TOP + 1];

// Between neighbouring levels; one half of a sum is what / 2 gives.
DSQ_DEVICE void load_middles(const float* levels) {
    for (u32 i = threadIdx.x; i < DSQ_TOP; i += DSQ_THREADS) {
        middles[i] = mul_rn(add_rn(levels[i + 1], levels[i]), 0.5f);
    }
    __syncthreads();
}

// How many middles lie below x: the nearest level, ties to the lower one.
DSQ_DEVICE u32 nearest_level(float x) {
    u32 below = 0;
    DSQ_UNROLL
    for (u32 half = 1u << (DSQ_BITS - 1); half > 0; half /= 2) {
        if (!at_least(middles[below + half - 1], x)) below += half;
    }
    return below;
}
#endif

// The code of x in byte CODE_BYTE: T is read off the mantissa of 2^23 + zero + t.
#define DSQ_CODE_BYTE (DSQ_FRACTION ? 2 : 0)

DSQ_DEVICE u32 rounded(float x, Range range, u32 random) {
    if (DSQ_MINMAX) x = sub_rn(x, range.offset);
    float t = mul_rn(x, range.inverse);
#if DSQ_ROUNDING == DSQ_LEARNED
    (void)random;
    return nearest_level(t);
#else
    if (DSQ_CLAMP) {
        const float low = DSQ_MINMAX ? 0.0f : -(float)((u32)DSQ_STEPS << DSQ_FRACTION);
        const float high = (float)((u32)DSQ_STEPS << DSQ_FRACTION);
        t = min_nan(max_nan(t, low), high);
    }
    u32 fixed = bits_of(add_rn(t, 8388608.0f + (float)(DSQ_ZERO << DSQ_FRACTION)));
    if (DSQ_FRACTION == 16) return fixed + random;
    if (DSQ_FRACTION == 15) return (fixed + (random >> 1)) << 1;
    return fixed;
#endif
}

DSQ_DEVICE Codes packed(const u32 (&even)[4], const u32 (&odd)[4]) {
    const u32 two = DSQ_CODE_BYTE | (DSQ_CODE_BYTE + 4) << 4, four = 0x5410;
    const Codes codes = {
        permute(permute(even[0], even[1], two), permute(even[2], even[3], two), four),
        permute(permute(odd[0], odd[1], two), permute(odd[2], odd[3], two), four)};
    return codes;
}

template <int DTYPE>
DSQ_DEVICE Codes codes_of_vector(const Raw<DTYPE>& vector, Range range, Stream stream, u64 j) {
    u32 random[4] = {0, 0, 0, 0};
    if (DSQ_ROUNDING == DSQ_STOCHASTIC) {
        const u64 index = stream.first_vector + j;
        const PhiloxWords words = philox_of_vector(index, stream.step, stream.key);
        random[0] = words.w0;
        random[1] = words.w1;
        random[2] = words.w2;
        random[3] = words.w3;
    }
    // The compiler would search for all elements of a lane at once, and spill.
    if (DSQ_ROUNDING == DSQ_LEARNED) __syncwarp();
    u32 even[4], odd[4];
    DSQ_UNROLL
    for (int i = 0; i < 4; ++i) {
        even[i] = rounded(vector.at(2 * i), range, random[i] & 0xFFFFu);
        odd[i] = rounded(vector.at(2 * i + 1), range, random[i] >> 16);
    }
    return packed(even, odd);
}

template <int PLANE>
DSQ_DEVICE void store_plane(const Codes (&codes)[DSQ_RUN], const WireRow& row, u64 j,
                            bool unusable) {
    u8* p = row.bytes + row.plane[PLANE];
    const int width = Planes<DSQ_BITS>::width(PLANE), shift = Planes<DSQ_BITS>::shift(PLANE);
    const Codes zero = {in_every_byte(DSQ_ZERO), in_every_byte(DSQ_ZERO)};
    const u64 forced = plane_of<DSQ_BITS, width>(zero, shift);
    PlaneBytes<DSQ_RUN * width> bytes = {};
    DSQ_UNROLL
    for (int v = 0; v < DSQ_RUN; ++v) {
        const u64 plane = plane_of<DSQ_BITS, width>(codes[v], shift);
        bytes.put(v, width, unusable ? forced : plane);
    }
    bytes.store(p + j * width, (row.vectors - j) * width);
}

// Codes past the end of the row become 0: the thread that wrote the last run, if that is partial,
// goes over its bytes again.
template <int PLANE>
DSQ_DEVICE void clear_tail(const WireRow& row, u64 j) {
    const int width = Planes<DSQ_BITS>::width(PLANE);
    const u32 used = (u32)(row.numel - j * 8) * width;  // bits of the run that stay
    const u32 filled = (u32)((row.vectors - j) * width + 15) / 16 * 16;  // up to the next section
    u8* p = row.bytes + row.plane[PLANE] + j * width;
    DSQ_NO_UNROLL
    for (u32 i = used / 8; i < DSQ_RUN * width && i < filled; ++i) {
        p[i] &= i * 8 < used ? (1u << (used - i * 8)) - 1 : 0;
    }
}

DSQ_DEVICE void zero_gap(u8* bytes, u64 end, u64 next) {
    const u32 lane = threadIdx.x;
    if (lane < next - end) store1(bytes + end + lane, 0);
}

DSQ_DEVICE void zero_gaps(const WireRow& row, u64 num_groups) {
    const int count = Planes<DSQ_BITS>::COUNT;
    DSQ_UNROLL
    for (int p = 0; p < count; ++p) {
        const u64 end = row.plane[p] + row.vectors * Planes<DSQ_BITS>::width(p);
        zero_gap(row.bytes, end, p + 1 < count ? row.plane[(p + 1) % DSQ_MAX_PLANES] : row.scales);
    }
    const u64 scales_end = row.scales + num_groups * DSQ_SCALE_BYTES;
    zero_gap(row.bytes, scales_end, DSQ_MINMAX ? row.offsets : row.end);
    if (DSQ_MINMAX) zero_gap(row.bytes, row.offsets + num_groups * 4, row.end);
}

// Instead of their codes the values themselves, end to end from the first byte of the row on.
DSQ_DEVICE void store_values(const Held<DSQ_FP32>& held, Tile tile, const WireRow& row) {
    DSQ_UNROLL
    for (int i = 0; i < DSQ_HELD; ++i) {
        const u64 group = tile.group + slot_group(i / DSQ_VECTORS);
        const int v = i % DSQ_VECTORS;
        const u64 j = group * DSQ_GROUP_VECTORS + tile.thread * DSQ_RUN + vector_step(v);
        if (is_absent(tile.thread, v) || (!DSQ_WHOLE && j >= row.vectors)) continue;
        if (DSQ_WHOLE || (j + 1) * 8 <= row.numel) {
            held.vector[i].store(row.bytes + j * 32);
            continue;
        }
        DSQ_UNROLL
        for (u32 e = 0; e < 8; ++e) {
            if (j * 8 + e < row.numel) store4(row.bytes + j * 32 + 4 * e, held.vector[i].w[e]);
        }
    }
}

template <int DTYPE>
DSQ_DEVICE void encode_tile(const Held<DTYPE>& held, Tile tile, const WireRow& row, Stream stream) {
    const u64 num_groups = (row.numel + DSQ_GROUP - 1) / DSQ_GROUP;
    Extremes all[DSQ_SLOTS];
    DSQ_UNROLL
    for (int s = 0; s < DSQ_SLOTS; ++s) all[s] = extremes_of_group(extremes_of_slot(held, s));
    const Ranges ranges = ranges_of_tile(all, tile, stream);
    if (tile.thread < DSQ_SLOTS && (DSQ_WHOLE || ranges.group < num_groups)) {
        u8* p = row.bytes + ranges.group * 4;
        store4(p + row.scales, bits_of(ranges.mine.scale));
        if (DSQ_MINMAX) store4(p + row.offsets, bits_of(ranges.mine.offset));
    }
    DSQ_UNROLL
    for (int s = 0; s < DSQ_SLOTS; ++s) {
        const Range range = range_of_slot(ranges, tile, s);
        const u64 first = (tile.group + slot_group(s)) * DSQ_GROUP_VECTORS + tile.thread * DSQ_RUN;
        DSQ_UNROLL
        for (int v = 0; v < DSQ_VECTORS; v += DSQ_RUN) {
            const u64 j = first + vector_step(v);
            Codes codes[DSQ_RUN];
            DSQ_UNROLL
            for (int i = 0; i < DSQ_RUN; ++i) {
                const Raw<DTYPE>& vector = held.vector[s * DSQ_VECTORS + v + i];
                codes[i] = codes_of_vector(vector, range, stream, j + i);
            }
            if (is_absent(tile.thread, v) || (!DSQ_WHOLE && j >= row.vectors)) continue;
            const bool unusable = bits_of(range.inverse) == 0;
            store_plane<0>(codes, row, j, unusable);
            if (Planes<DSQ_BITS>::COUNT > 1) store_plane<1>(codes, row, j, unusable);
            if (Planes<DSQ_BITS>::COUNT > 2) store_plane<2>(codes, row, j, unusable);
        }
    }
    const u64 last = row.numel / (8 * DSQ_RUN) * DSQ_RUN;  // of the run that may be partial
    if (DSQ_WHOLE || last * 8 == row.numel) return;
    DSQ_NO_UNROLL
    for (int i = 0; i < DSQ_HELD; i += DSQ_RUN) {
        const u64 first = (tile.group + slot_group(i / DSQ_VECTORS)) * DSQ_GROUP_VECTORS;
        const u64 j = first + tile.thread * DSQ_RUN + vector_step(i % DSQ_VECTORS);
        if (j != last || is_absent(tile.thread, i % DSQ_VECTORS)) continue;
        clear_tail<0>(row, j);
        if (Planes<DSQ_BITS>::COUNT > 1) clear_tail<1>(row, j);
        if (Planes<DSQ_BITS>::COUNT > 2) clear_tail<2>(row, j);
    }
}

#endif  // DSQ_ENCODER_CUH
