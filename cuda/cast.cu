// cast: rows of floats -> their sum, cast once; with one source, the values in another dtype.
//
// Inputs:  `sources` rows of bf16, fp16 or fp32 per output row, but for source `own`, fp32.
// Outputs: bf16, fp16 or fp32, filled up with zeros to `padded` elements. All at any address.
// Grid:    one thread per vector of 8 elements, one block per DSQ_THREADS vectors of a row.
// Exactness: fp32 sums in the order of the sources, multiplied once. With DSQ_COPY bits are moved.
#include "include/job.cuh"
#include "include/values.cuh"

#ifndef DSQ_SOURCE
#define DSQ_SOURCE DSQ_BF16
#endif
#ifndef DSQ_VALUES
#define DSQ_VALUES DSQ_FP32
#endif
#ifndef DSQ_COPY  // one source of the same dtype, and nothing is multiplied
#define DSQ_COPY 0
#endif
#ifndef DSQ_THREADS
#define DSQ_THREADS 256
#endif

static_assert(!DSQ_COPY || DSQ_SOURCE == DSQ_VALUES, "bits of one dtype");

// Elements [0, left) of the vector at p, zeros behind them.
template <int DTYPE>
DSQ_DEVICE Raw<DTYPE> load_vector(const u8* p, u64 left) {
    Raw<DTYPE> x;
    if (left >= 8 && (u64)p % 16 == 0) {
        x.load(p, false);
        return x;
    }
    const int item = Raw<DTYPE>::ITEM, halves = 4 / item;
    DSQ_UNROLL
    for (u32 i = 0; i < 8; ++i) {
        const u32 bits = i < left ? load_element<DTYPE>(p + i * item) : 0;
        x.w[i / halves] = i % halves ? x.w[i / halves] | bits << 16 : bits;
    }
    return x;
}

template <int DTYPE>
DSQ_DEVICE void store_vector(u8* p, u64 left, const Raw<DTYPE>& x) {
    if (left >= 8 && (u64)p % 16 == 0) {
        x.store(p);
        return;
    }
    DSQ_UNROLL
    for (u32 i = 0; i < 8; ++i) {
        if (i >= left) continue;
        if (DTYPE == DSQ_FP32) {
            store4(p + 4 * i, x.w[i % Raw<DTYPE>::WORDS]);
        } else {
            store2(p + 2 * i, x.w[i / 2] >> (i % 2 * 16) & 0xFFFFu);
        }
    }
}

extern "C" __global__ void __launch_bounds__(DSQ_THREADS) cast(DSQ_JOB_PARAMETERS(CastJob)) {
    DSQ_FIND_JOB(CastJob)
    const u64 start = (block * DSQ_THREADS + threadIdx.x) * 8;
    if (start >= job.padded) return;
    const u64 left = start < job.numel ? job.numel - start : 0;
    const u8* source = (const u8*)job.source + row * job.source_row;
    source += start * Raw<DSQ_SOURCE>::ITEM;
    u8* out = (u8*)job.values + row * job.values_stride + start * Raw<DSQ_VALUES>::ITEM;
#if DSQ_COPY
    store_vector<DSQ_VALUES>(out, job.padded - start, load_vector<DSQ_VALUES>(source, left));
#else
    float sum[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    DSQ_NO_UNROLL
    for (u64 i = 0; i < job.sources; ++i) {
        float x[8];
        if (i == job.own) {
            const Raw<DSQ_FP32> own = load_vector<DSQ_FP32>((u8*)job.own_values + start * 4, left);
            DSQ_UNROLL
            for (int e = 0; e < 8; ++e) x[e] = own.at(e);
        } else {
            const Raw<DSQ_SOURCE> other = load_vector<DSQ_SOURCE>(source, left);
            source += job.source_stride;
            DSQ_UNROLL
            for (int e = 0; e < 8; ++e) x[e] = other.at(e);
        }
        DSQ_UNROLL
        for (int e = 0; e < 8; ++e) sum[e] = i ? add_rn(sum[e], x[e]) : x[e];
    }
    DSQ_UNROLL
    for (int e = 0; e < 8; ++e) sum[e] = mul_rn(sum[e], float_of((u32)job.factor));
    Raw<DSQ_VALUES> vector;
    vector.set(sum);
    store_vector<DSQ_VALUES>(out, job.padded - start, vector);
#endif
}
