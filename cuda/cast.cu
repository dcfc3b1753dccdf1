// cast: rows of floats -> their sum, cast once; with one source, the values in another dtype.
//
// Inputs:  `sources` rows of bf16, fp16 or fp32 per output row, but for source `own`, fp32.
// Outputs: bf16, fp16 or fp32, filled up with zeros to `padded` elements. All at any address.
// Grid:    one thread per vector of 8 elements, one block per DSQ_THREADS vectors of a row.
// Exactness: fp32 sums in the order of the sources, multiplied once. A copy moves bits.
//
// Dtypes are arguments, so that all casts of a step's part are one launch: memory is what they wait
// for.
#include "include/job.cuh"
#include "include/values.cuh"

#ifndef DSQ_THREADS
#define DSQ_THREADS 256
#endif

// Elements [0, left) of the vector at p as they lie there, zeros behind them.
template <int DTYPE>
DSQ_DEVICE Raw<DTYPE> load_present(const u8* p, u64 left) {
    Raw<DTYPE> x;
    if (left >= 8) {
        x.load_anywhere(p);
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

// All lanes of a warp store their vectors, one behind the other.
template <int DTYPE>
DSQ_DEVICE void store_present(u8* p, u64 left, const Raw<DTYPE>& x) {
    if ((u64)p % 16) {
        const int parts = Raw<DTYPE>::WORDS / 4;
        SkewedStore store(p, x.part(parts - 1), left >= 8);
        DSQ_UNROLL
        for (int i = 0; i < parts && left >= 8; ++i) store.put(i, x.part(i));
        if (left >= 8) store.finish(parts);
    } else if (left >= 8) {
        x.store(p);
    }
    if (left >= 8) return;
    DSQ_UNROLL
    for (u32 i = 0; i < 8; ++i) {
        const int item = Raw<DTYPE>::ITEM;
        const u32 bits = item == 4 ? x.w[i % Raw<DTYPE>::WORDS] : x.w[i / 2] >> (i % 2 * 16);
        if (i < left) store_bits<DTYPE>(p + item * i, bits);
    }
}

// A vector of a type that the job names; of 16 bits, it takes the first words.
DSQ_DEVICE void load_vector(const u8* p, u64 type, u64 left, Raw<DSQ_FP32>& x) {
    if (type == DSQ_FP32) {
        x = load_present<DSQ_FP32>(p, left);
    } else {
        const Raw<DSQ_BF16> half = load_present<DSQ_BF16>(p, left);
        DSQ_UNROLL
        for (int i = 0; i < 4; ++i) x.w[i] = half.w[i];
    }
}

DSQ_DEVICE void store_vector(u8* p, u64 type, u64 left, const Raw<DSQ_FP32>& x) {
    if (type == DSQ_FP32) {
        store_present(p, left, x);
    } else {
        const Raw<DSQ_BF16> half = {{x.w[0], x.w[1], x.w[2], x.w[3]}};
        store_present(p, left, half);
    }
}

DSQ_DEVICE float number_at(const Raw<DSQ_FP32>& x, u64 type, int element) {
    if (type == DSQ_FP32) return x.at(element);
    const u32 word = x.w[element / 2];
    return type == DSQ_BF16 ? half_of<DSQ_BF16>(word, element & 1)
                            : half_of<DSQ_FP16>(word, element & 1);
}

DSQ_DEVICE void set_numbers(Raw<DSQ_FP32>& x, u64 type, const float (&y)[8]) {
    if (type == DSQ_FP32) {
        x.set(y);
        return;
    }
    DSQ_UNROLL
    for (int i = 0; i < 4; ++i) {
        const float low = y[2 * i], high = y[2 * i + 1];
        x.w[i] = type == DSQ_BF16 ? pack_bf16(low, high) : pack_fp16(low, high);
    }
}

extern "C" __global__ void __launch_bounds__(DSQ_THREADS) cast(DSQ_JOB_PARAMETERS(CastJob)) {
    DSQ_FIND_JOB(CastJob)
    const u64 start = (block * DSQ_THREADS + threadIdx.x) * 8;
    const u64 left = start < job.numel ? job.numel - start : 0;
    const u64 room = start < job.padded ? job.padded - start : 0;
    const u8* source = (const u8*)job.source + row * job.source_row;
    source += start * (job.source_type == DSQ_FP32 ? 4 : 2);
    u8* out = (u8*)job.values + row * job.values_stride;
    out += start * (job.values_type == DSQ_FP32 ? 4 : 2);
    Raw<DSQ_FP32> x;
    if (job.is_copy) {
        load_vector(source, job.source_type, left, x);
        store_vector(out, job.values_type, room, x);
        return;
    }
    float sum[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    DSQ_NO_UNROLL
    for (u64 i = 0; i < job.sources; ++i) {
        const u64 type = i == job.own ? DSQ_FP32 : job.source_type;
        load_vector(i == job.own ? (u8*)job.own_values + start * 4 : source, type, left, x);
        if (i != job.own) source += job.source_stride;
        DSQ_UNROLL
        for (int e = 0; e < 8; ++e) {
            const float number = number_at(x, type, e);
            sum[e] = i ? add_rn(sum[e], number) : number;
        }
    }
    DSQ_UNROLL
    for (int e = 0; e < 8; ++e) sum[e] = mul_rn(sum[e], float_of((u32)job.factor));
    set_numbers(x, job.values_type, sum);
    store_vector(out, job.values_type, room, x);
}
