// rotate: values -> H (signs * values) block by block, filled up with zeros to whole blocks.
//
// Inputs:  bf16, fp16 or fp32 values at any address.
// Outputs: fp32, 16-byte aligned, whole blocks.
// Grid:    one thread per run of 32 elements, one block per DSQ_THREADS runs.
// Exactness: equal to ds_quant/kernels/reference.py bit for bit.
#include "include/hadamard.cuh"
#include "include/job.cuh"
#include "include/values.cuh"

#ifndef DSQ_VALUES
#define DSQ_VALUES DSQ_BF16
#endif
#ifndef DSQ_ROTATION  // block of the rotation
#define DSQ_ROTATION 32
#endif
#ifndef DSQ_FLIPS  // signs before the rotation
#define DSQ_FLIPS 0
#endif
#ifndef DSQ_THREADS
#define DSQ_THREADS 256
#endif

DSQ_DEVICE void load_run(const u8* p, u64 left, float (&x)[DSQ_BLOCK_RUN][8]) {
    const int item = Raw<DSQ_VALUES>::ITEM;
    if (left >= 32 && (u64)p % 16 == 0) {
        DSQ_UNROLL
        for (int v = 0; v < DSQ_BLOCK_RUN; ++v) {
            Raw<DSQ_VALUES> vector;
            vector.load(p + v * 8 * item, false);
            DSQ_UNROLL
            for (int e = 0; e < 8; ++e) x[v][e] = vector.at(e);
        }
        return;
    }
    DSQ_UNROLL
    for (u32 i = 0; i < 32; ++i) {
        const u32 bits = i < left ? load_element<DSQ_VALUES>(p + i * item) : 0;
        x[i / 8][i % 8] = element_value<DSQ_VALUES>(bits);
    }
}

extern "C" __global__ void __launch_bounds__(DSQ_THREADS) rotate(DSQ_JOB_PARAMETERS(RotateJob)) {
    DSQ_FIND_JOB(RotateJob)
    const u64 start = (block * DSQ_THREADS + threadIdx.x) * 32;
    const u8* values = (const u8*)job.values + row * job.values_stride;
    float x[DSQ_BLOCK_RUN][8];
    load_run(values + start * Raw<DSQ_VALUES>::ITEM, start < job.numel ? job.numel - start : 0, x);
    if (DSQ_FLIPS) {
        flip_signs(x, flips_of_lane<DSQ_ROTATION>(job.flips_low, job.flips_high, threadIdx.x));
    }
    butterflies<DSQ_ROTATION>(x, threadIdx.x);
    if (start >= job.padded) return;
    u8* out = (u8*)(job.rotated + row * job.rotated_stride) + start * 4;
    DSQ_UNROLL
    for (int v = 0; v < DSQ_BLOCK_RUN; ++v) {
        Raw<DSQ_FP32> vector;
        vector.set(x[v]);
        vector.store(out + v * 32);
    }
}
