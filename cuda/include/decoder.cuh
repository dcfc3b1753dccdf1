// From wire rows to sums of decoded values, a run of vectors at a time.
//
// Inputs:  `sources` rows on the wire, one behind the other at a fixed stride.
// Outputs: sum[v][e], fp32, of vector j + v of the row.
// Exactness: fl(q * scale), or fl(fl(code * scale) + offset); sums in fp32 in the order of the
// sources, the first one copied. [Note: numbers] of ds_quant/kernels/reference.py.
#ifndef DSQ_DECODER_CUH
#define DSQ_DECODER_CUH

#include "job.cuh"
#include "platform.cuh"
#include "wire.cuh"

#ifndef DSQ_SOURCE_BITS
#define DSQ_SOURCE_BITS 4
#endif
#ifndef DSQ_SOURCE_GROUP
#define DSQ_SOURCE_GROUP 128
#endif
#ifndef DSQ_SOURCE_MINMAX
#define DSQ_SOURCE_MINMAX 0
#endif
#ifndef DSQ_SOURCE_LEARNED
#define DSQ_SOURCE_LEARNED 0
#endif
#ifndef DSQ_SOURCE_GAUSSIAN  // Gaussian levels: a table, too, and scales in bf16
#define DSQ_SOURCE_GAUSSIAN 0
#endif
#ifndef DSQ_SOURCES  // number of sources, 0 if only the launch knows it
#define DSQ_SOURCES 8
#endif
#ifndef DSQ_OWN  // one source may be given as values
#define DSQ_OWN 0
#endif
#ifndef DSQ_RUN
#define DSQ_RUN 4
#endif

#define DSQ_SOURCE_ZERO (DSQ_SOURCE_MINMAX ? 0 : 1 << (DSQ_SOURCE_BITS - 1))

static_assert(DSQ_SOURCE_GROUP % (DSQ_RUN * 8) == 0, "a run lies in one group");

#define DSQ_SOURCE_TABLE (DSQ_SOURCE_LEARNED || DSQ_SOURCE_GAUSSIAN)

#if DSQ_SOURCE_TABLE
__shared__ float source_level[1 << DSQ_SOURCE_BITS];

DSQ_DEVICE void load_levels(const float* levels, u32 threads) {
    for (u32 i = threadIdx.x; i < 1u << DSQ_SOURCE_BITS; i += threads) source_level[i] = levels[i];
    __syncthreads();
}
#endif

struct SourceRow {
    const u8* bytes;  // of the first source on the wire
    u64 stride;       // to the next one
    u64 plane[DSQ_MAX_PLANES];
    u64 scales, offsets;
    u64 numel, vectors;
    u64 sources;
    u64 own;
    const float* own_values;
};

DSQ_DEVICE SourceRow source_row(const WireJob& wire, u64 row, u64 sources, u64 stride, u64 own,
                                u64 own_values) {
    const SourceRow r = {(const u8*)(wire.bytes + row * wire.stride),
                         stride / 16 * 16,  // as it is; told, the compiler folds offsets of 16
                         {0, wire.plane1, wire.plane2},
                         wire.scales,
                         wire.offsets,
                         wire.numel,
                         (wire.numel + 7) / 8,
                         DSQ_SOURCES ? DSQ_SOURCES : sources,
                         own,
                         (const float*)own_values};
    return r;
}

template <int PLANE>
struct PlaneRun {
    static const int WIDTH = Planes<DSQ_SOURCE_BITS>::width(PLANE);
    PlaneBytes<DSQ_RUN * WIDTH> bytes;

    DSQ_MEMBER void load(const SourceRow& row, const u8* source, u64 j) {
        const u64 length = DSQ_WHOLE ? DSQ_RUN * WIDTH : (row.vectors - j) * WIDTH;
        bytes.load(source + row.plane[PLANE] + j * WIDTH, length);
    }
    DSQ_MEMBER void add_to(Codes& codes, int v) const {
        const Codes part = codes_of<WIDTH>(bytes.get(v, WIDTH));
        codes.even |= part.even << Planes<DSQ_SOURCE_BITS>::shift(PLANE);
        codes.odd |= part.odd << Planes<DSQ_SOURCE_BITS>::shift(PLANE);
    }
};

// What one source contributes to a run, as it lies in memory.
struct SourceRun {
    PlaneRun<0> plane0;
    PlaneRun<1> plane1;
    PlaneRun<2> plane2;
    float scale, offset;

    DSQ_MEMBER void load(const SourceRow& row, const u8* source, u64 j) {
        plane0.load(row, source, j);
        if (Planes<DSQ_SOURCE_BITS>::COUNT > 1) plane1.load(row, source, j);
        if (Planes<DSQ_SOURCE_BITS>::COUNT > 2) plane2.load(row, source, j);
        const u64 group = j / (DSQ_SOURCE_GROUP / 8);
        if (DSQ_SOURCE_GAUSSIAN) {
            scale = float_of(load2(source + row.scales + group * 2) << 16);
        } else {
            scale = float_of(load4(source + row.scales + group * 4));
        }
        if (DSQ_SOURCE_MINMAX) offset = float_of(load4(source + row.offsets + group * 4));
    }

    DSQ_MEMBER void decode(int v, float (&x)[8]) const {
        if constexpr (Planes<DSQ_SOURCE_BITS>::COUNT == 1 && !DSQ_SOURCE_TABLE) {
            decode_in_place(v, x);
        } else {
            Codes codes = {0, 0};
            plane0.add_to(codes, v);
            if (Planes<DSQ_SOURCE_BITS>::COUNT > 1) plane1.add_to(codes, v);
            if (Planes<DSQ_SOURCE_BITS>::COUNT > 2) plane2.add_to(codes, v);
            DSQ_UNROLL
            for (int e = 0; e < 8; ++e) x[e] = mul_rn(number_of(codes, e), scale);
        }
        if (DSQ_SOURCE_MINMAX) {
            DSQ_UNROLL
            for (int e = 0; e < 8; ++e) x[e] = add_rn(x[e], offset);
        }
    }

    // The code of an element as a number: q, or its level.
    DSQ_MEMBER float number_of(Codes codes, int e) const {
        const u32 bytes = e & 1 ? codes.odd : codes.even;
#if DSQ_SOURCE_TABLE
        return source_level[bytes >> (e / 2 * 8) & 0xFF];
#else
        // The code becomes the lowest byte of the mantissa of 2^23.
        const float shifted = float_of(permute(bytes, 0x4B000000u, 0x7440 + e / 2));
        return sub_rn(shifted, 8388608.0f + (float)DSQ_SOURCE_ZERO);
#endif
    }

    // Codes of one plane, taken apart byte by byte. Number k of a byte is 2^(23 - k * bits) plus
    // its codes from k up, code k counting ones, and behind the point the code of zero in place of
    // every code below k. Less 2^bits times number k + 1, q of code k is left. With 4 bits:
    // (2^23 + 16 b + a) - 16 (2^19 + b + 8 / 16) = a - 8,
    // (2^19 + b + 8 / 16) - (2^19 + 8 + 8 / 16) = b - 8.
    DSQ_MEMBER void decode_in_place(int v, float (&x)[8]) const {
        const int bits = DSQ_SOURCE_BITS, count = 8 / bits;
        DSQ_UNROLL
        for (int e = 0; e < 8; e += count) {
            const int byte = (v * 8 + e) / count;
            // Operands in this order: else ptxas moves every selector to a register.
            const u32 word = permute(0x4B000000u, plane0.bytes.w[byte / 4], 0x3004 + byte % 4);
            float number = float_of(word);
            u32 zeros = DSQ_SOURCE_ZERO;  // in place of codes 0 to k
            DSQ_UNROLL
            for (int k = 0; k < count - 1; ++k, zeros |= zeros << bits) {
                const int below = (k + 1) * bits;
                const u32 power = 0x4B000000u - (below << 23), above = 0xFFu << below & 0xFFu;
                const float next = float_of(and_or(word, above, power | zeros));
                x[e + k] = mul_rn(fma_rn(next, -(float)(1 << bits), number), scale);
                number = next;
            }
            const float none = (float)(1 << (15 + bits)) + (float)zeros / (float)(256 >> bits);
            x[e + count - 1] = mul_rn(sub_rn(number, none), scale);
        }
    }
};

// The values of source `own`, which the wire leaves out. What lies past the end of the row is a
// present value, unused.
DSQ_DEVICE void load_own(const SourceRow& row, u64 j, float (&x)[DSQ_RUN][8]) {
    const float* p = row.own_values + j * 8;
    const u64 left = row.numel - j * 8;
    if (left >= DSQ_RUN * 8 && (u64)p % 16 == 0) {
        DSQ_UNROLL
        for (int i = 0; i < DSQ_RUN * 8; i += 4) {
            const Words4 words = load16_once(p + i);
            DSQ_UNROLL
            for (int k = 0; k < 4; ++k) x[i / 8][i % 8 + k] = float_of(words.w[k]);
        }
        return;
    }
    const u32 last = left < DSQ_RUN * 8 ? (u32)left - 1 : DSQ_RUN * 8 - 1;
    DSQ_UNROLL
    for (u32 i = 0; i < DSQ_RUN * 8; ++i) {
        x[i / 8][i % 8] = float_of(load4(p + (i < last ? i : last)));
    }
}

// What becomes of source k before it is added.
struct Unchanged {
    DSQ_MEMBER void operator()(u64, float (&)[DSQ_RUN][8]) const {}
};

template <typename Transform>
DSQ_DEVICE void sum_run(const SourceRow& row, u64 j, float (&sum)[DSQ_RUN][8], Transform transform) {
    const u8* source = row.bytes;
#if DSQ_SOURCES
    DSQ_UNROLL
#else
    DSQ_NO_UNROLL
#endif
    for (u64 k = 0; k < row.sources; ++k) {
        float x[DSQ_RUN][8];
        if (DSQ_OWN && k == row.own) {
            load_own(row, j, x);
        } else {
            SourceRun run;
            run.load(row, source, j);
            source += row.stride;
            DSQ_UNROLL
            for (int v = 0; v < DSQ_RUN; ++v) run.decode(v, x[v]);
        }
        transform(k, x);
        DSQ_UNROLL
        for (int i = 0; i < DSQ_RUN * 8; ++i) {
            float& total = sum[i / 8][i % 8];
            total = k == 0 ? x[i / 8][i % 8] : add_rn(total, x[i / 8][i % 8]);
        }
    }
}

#endif  // DSQ_DECODER_CUH
