// decode_sum: wire rows -> the sum of what they encode; with one source, plain decoding.
//
// Inputs:  `sources` rows per output row, 16-byte aligned on the wire, but for source `own`, fp32.
// Outputs: bf16, fp16 or fp32 values at any address, cast once; optionally added to what is there.
// Grid:    one thread per run of DSQ_RUN vectors, one block per DSQ_THREADS runs of a row.
// Stores:  a thread writes its own run, so neighbouring lanes write DSQ_RUN vectors apart; with
//          DSQ_STAGED a warp turns its runs in shared memory and neighbouring lanes write
//          neighbouring 16 bytes. kernels/launch.py chooses.
// Exactness: equal to ds_quant/kernels/reference.py byte for byte.
#include "include/decoder.cuh"
#include "include/hadamard.cuh"
#include "include/job.cuh"
#include "include/philox.cuh"
#include "include/values.cuh"

#ifndef DSQ_VALUES
#define DSQ_VALUES DSQ_FP32
#endif
#ifndef DSQ_ADD  // values += the sum, in fp32, instead of values = the sum
#define DSQ_ADD 0
#endif
#ifndef DSQ_FACTOR  // multiply the sum
#define DSQ_FACTOR 1
#endif
#ifndef DSQ_ROTATION  // block of the rotation to undo, 0 for none
#define DSQ_ROTATION 0
#endif
#ifndef DSQ_FLIPS  // signs after the rotation; 2: of each source, which is rotated back alone
#define DSQ_FLIPS 0
#endif
#ifndef DSQ_STAGED
#define DSQ_STAGED 0
#endif
#ifndef DSQ_THREADS
#define DSQ_THREADS 256
#endif

static_assert(DSQ_ROTATION == 0 || (DSQ_RUN == 4 && DSQ_FACTOR), "rotated runs of 32 elements");

#if DSQ_FLIPS == 2
// Rotates source k back, without the factor; its sign flips are those of vector k + 1.
struct RotateSourceBack {
    u64 key, step;

    DSQ_MEMBER void operator()(u64 k, float (&x)[DSQ_RUN][8]) const {
        const PhiloxWords w = philox_of_vector(k + 1, step, key);
        const u64 low = (u64)w.w1 << 32 | w.w0, high = (u64)w.w3 << 32 | w.w2;
        butterflies<DSQ_ROTATION>(x, threadIdx.x);
        flip_signs(x, inverted(flips_of_lane<DSQ_ROTATION>(low, high, threadIdx.x)));
    }
};
#endif

#if DSQ_ROTATION && DSQ_FLIPS != 2
DSQ_DEVICE void finish(float (&x)[DSQ_RUN][8], const SumJob& job) {
    butterflies<DSQ_ROTATION>(x, threadIdx.x);
    DSQ_UNROLL
    for (int i = 0; i < DSQ_RUN * 8; ++i) {
        x[i / 8][i % 8] = mul_rn(x[i / 8][i % 8], float_of((u32)job.factor));
    }
    if (DSQ_FLIPS) {
        flip_signs(x, flips_of_lane<DSQ_ROTATION>(job.flips_low, job.flips_high, threadIdx.x));
    }
}
#else
DSQ_DEVICE void finish(float (&x)[DSQ_RUN][8], const SumJob& job) {
    if (!DSQ_FACTOR) return;
    DSQ_UNROLL
    for (int i = 0; i < DSQ_RUN * 8; ++i) {
        x[i / 8][i % 8] = mul_rn(x[i / 8][i % 8], float_of((u32)job.factor));
    }
}
#endif

// What becomes of the vector at p.
DSQ_DEVICE Raw<DSQ_VALUES> finished(const float (&x)[8], const u8* p) {
    Raw<DSQ_VALUES> vector;
    float y[8];
    if (DSQ_ADD && DSQ_WHOLE) vector.load(p, false);
    if (DSQ_ADD && !DSQ_WHOLE) vector.load_anywhere(p);
    DSQ_UNROLL
    for (int e = 0; e < 8; ++e) y[e] = DSQ_ADD ? add_rn(vector.at(e), x[e]) : x[e];
    vector.set(y);
    return vector;
}

#define DSQ_PARTS (Raw<DSQ_VALUES>::WORDS / 4)  // 16 bytes each, of a vector

#if DSQ_STAGED
#define DSQ_LANE_PARTS (DSQ_RUN * DSQ_PARTS)

// The parts of a lane lie together, one place is left out before those of the next: 8 lanes that
// write parts of their own meet in no bank, and all addresses are a register and a constant.
#define DSQ_LEFT_OUT (DSQ_LANE_PARTS > 1)

// The runs of a whole warp. first: address of its first run, p: of this lane's.
DSQ_DEVICE void store_staged(const float (&x)[DSQ_RUN][8], u8* first, const u8* p) {
    __shared__ Words4 staged[DSQ_THREADS * (DSQ_LANE_PARTS + DSQ_LEFT_OUT)];
    const u32 lane = threadIdx.x % DSQ_WARP;
    Words4* written = staged + threadIdx.x * (DSQ_LANE_PARTS + DSQ_LEFT_OUT);
    DSQ_UNROLL
    for (u32 i = 0; i < DSQ_LANE_PARTS; ++i) {
        const u32 v = i / DSQ_PARTS, w = i % DSQ_PARTS * 4;
        const Raw<DSQ_VALUES> vector = finished(x[v], p + v * 8 * Raw<DSQ_VALUES>::ITEM);
        const Words4 part = {{vector.w[w], vector.w[w + 1], vector.w[w + 2], vector.w[w + 3]}};
        written[i] = part;
    }
    __syncwarp();
    // Part c of the warp is part c % LANE_PARTS of lane c / LANE_PARTS.
    const Words4* read = staged + (threadIdx.x - lane) * (DSQ_LANE_PARTS + DSQ_LEFT_OUT) + lane +
                         lane / DSQ_LANE_PARTS * DSQ_LEFT_OUT;
    DSQ_UNROLL
    for (u32 i = 0; i < DSQ_LANE_PARTS; ++i) {
        const u32 lanes = i * DSQ_WARP / DSQ_LANE_PARTS;
        store16(first + (i * DSQ_WARP + lane) * 16, read[i * DSQ_WARP + lanes * DSQ_LEFT_OUT]);
    }
}
#endif

// All runs of a warp, at addresses that are no multiples of 16.
DSQ_DEVICE void store_anywhere(const float (&x)[DSQ_RUN][8], u8* p, bool whole) {
    const u32 bytes = 8 * Raw<DSQ_VALUES>::ITEM;
    Raw<DSQ_VALUES> last = {}, vector;
    if (whole) last = finished(x[DSQ_RUN - 1], p + (DSQ_RUN - 1) * bytes);
    SkewedStore store(p, last.part(DSQ_PARTS - 1), whole);
    if (!whole) return;
    DSQ_UNROLL
    for (int i = 0; i < DSQ_RUN * DSQ_PARTS; ++i) {
        const int v = i / DSQ_PARTS;
        if (i % DSQ_PARTS == 0) vector = v + 1 < DSQ_RUN ? finished(x[v], p + v * bytes) : last;
        store.put(i, vector.part(i % DSQ_PARTS));
    }
    store.finish(DSQ_RUN * DSQ_PARTS);
}

// A run that is cut off, element by element through local memory.
DSQ_DEVICE void store_slowly(const float (&x)[DSQ_RUN][8], u8* p, u64 count) {
    float staged[DSQ_RUN * 8];
    DSQ_UNROLL
    for (int i = 0; i < DSQ_RUN * 8; ++i) staged[i] = x[i / 8][i % 8];
    DSQ_NO_UNROLL
    for (u32 i = 0; i < DSQ_RUN * 8 && i < count; ++i, p += Raw<DSQ_VALUES>::ITEM) {
        float y = staged[i];
        if (DSQ_ADD) y = add_rn(element_value<DSQ_VALUES>(reload_element<DSQ_VALUES>(p)), y);
        store_element<DSQ_VALUES>(p, y);
    }
}

extern "C" __global__ void __launch_bounds__(DSQ_THREADS) decode_sum(DSQ_JOB_PARAMETERS(SumJob)) {
    DSQ_FIND_JOB(SumJob)
    const SourceRow source =
        source_row(job.wire, row, job.sources, job.source_stride, job.own, job.own_values);
#if DSQ_SOURCE_TABLE
    load_levels((const float*)job.levels, DSQ_THREADS);
#endif
    u64 j = (block * DSQ_THREADS + threadIdx.x) * DSQ_RUN;
    const bool present = DSQ_WHOLE || j < source.vectors;
    if (!present) j = 0;  // takes part in the shuffles of its warp

    float sum[DSQ_RUN][8];
#if DSQ_FLIPS == 2
    sum_run(source, j, sum, RotateSourceBack{job.flips_low, job.flips_high});
#else
    sum_run(source, j, sum, Unchanged());
#endif
    finish(sum, job);

    const u32 bytes = 8 * Raw<DSQ_VALUES>::ITEM;  // of a vector
    u8* values = (u8*)(job.values + row * job.values_stride);
#if DSQ_STAGED
    const u64 warp_j = (block * DSQ_THREADS + threadIdx.x / DSQ_WARP * DSQ_WARP) * DSQ_RUN;
    const bool is_full = (warp_j + DSQ_WARP * DSQ_RUN) * 8 <= job.numel && (u64)values % 16 == 0;
    if (DSQ_WHOLE || is_full) {
        store_staged(sum, values + warp_j * bytes, values + j * bytes);
        return;
    }
#endif
    const u64 count = present && j * 8 < job.numel ? job.numel - j * 8 : 0;
    const bool whole = DSQ_WHOLE || count >= DSQ_RUN * 8;
    u8* p = values + j * bytes;
    if (!DSQ_WHOLE && (u64)values % 16) {
        store_anywhere(sum, p, whole);
    } else if (whole) {
        DSQ_UNROLL
        for (int v = 0; v < DSQ_RUN; ++v) finished(sum[v], p + v * bytes).store(p + v * bytes);
    }
    if (!whole) store_slowly(sum, p, count);
}
