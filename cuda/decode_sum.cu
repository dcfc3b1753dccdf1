// decode_sum: wire rows -> the sum of what they encode; with one source, plain decoding.
//
// Inputs:  `sources` rows per output row, 16-byte aligned on the wire, but for source `own`, fp32.
// Outputs: bf16, fp16 or fp32 values at any address, cast once; optionally added to what is there.
// Grid:    one thread per run of DSQ_RUN vectors, one block per DSQ_THREADS runs of a row.
// Exactness: equal to ds_quant/kernels/reference.py and rotation.py byte for byte.
#include "include/decoder.cuh"
#include "include/hadamard.cuh"
#include "include/job.cuh"
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
#ifndef DSQ_FLIPS
#define DSQ_FLIPS 0
#endif
#ifndef DSQ_THREADS
#define DSQ_THREADS 256
#endif

static_assert(DSQ_ROTATION == 0 || (DSQ_RUN == 4 && DSQ_FACTOR), "rotated runs of 32 elements");

#if DSQ_ROTATION
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

DSQ_DEVICE void store_vector(const float (&x)[8], u8* p) {
    Raw<DSQ_VALUES> vector;
    float y[8];
    if (DSQ_ADD) vector.load(p, false);
    DSQ_UNROLL
    for (int e = 0; e < 8; ++e) y[e] = DSQ_ADD ? add_rn(vector.at(e), x[e]) : x[e];
    vector.set(y);
    vector.store(p);
}

// A run that is cut off or not aligned, element by element through local memory.
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
#if DSQ_SOURCE_LEARNED
    load_levels((const float*)job.levels, DSQ_THREADS);
#endif
    u64 j = (block * DSQ_THREADS + threadIdx.x) * DSQ_RUN;
    const bool present = DSQ_WHOLE || j < source.vectors;
    if (DSQ_ROTATION == 0 && !present) return;
    if (!present) j = 0;  // takes part in the shuffles of its warp

    float sum[DSQ_RUN][8];
    sum_run(source, j, sum);
    finish(sum, job);

    if (!DSQ_WHOLE && (!present || j * 8 >= job.numel)) return;
    const u64 count = job.numel - j * 8;
    u8* p = (u8*)(job.values + row * job.values_stride) + j * 8 * Raw<DSQ_VALUES>::ITEM;
    if (DSQ_WHOLE || (count >= DSQ_RUN * 8 && (u64)p % 16 == 0)) {
        DSQ_UNROLL
        for (int v = 0; v < DSQ_RUN; ++v) store_vector(sum[v], p + v * 8 * Raw<DSQ_VALUES>::ITEM);
    } else {
        store_slowly(sum, p, count);
    }
}
