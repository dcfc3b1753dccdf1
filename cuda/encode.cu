// encode: values -> wire bytes, with an optional difference and an optional rotation before.
//
// Inputs:  rows of bf16, fp16 or fp32 values at any address, rows of base values likewise.
// Outputs: rows on the wire, 16-byte aligned, every byte of them, [Note: wire layout]; of a job
//          whose rows have no end, the rotated values in fp32.
// Grid:    one block per DSQ_BLOCK_GROUPS groups of a row, see include/tile.cuh and job.cuh.
// Exactness: equal to ds_quant/kernels/reference.py byte for byte.
#include "include/encoder.cuh"
#include "include/gaussian.cuh"
#include "include/hadamard.cuh"
#include "include/job.cuh"

#ifndef DSQ_VALUES
#define DSQ_VALUES DSQ_BF16
#endif
#ifndef DSQ_BASE  // dtype of the base of a difference, -1 for no difference
#define DSQ_BASE -1
#endif
#ifndef DSQ_ROTATION  // block of the rotation, 0 for none
#define DSQ_ROTATION 0
#endif
#ifndef DSQ_FLIPS  // signs before the rotation
#define DSQ_FLIPS 0
#endif

// Values that are computed before they are encoded are held as fp32, others as they came.
#define DSQ_COMPUTED (DSQ_BASE >= 0 || DSQ_ROTATION > 0)
#define DSQ_HELD_TYPE (DSQ_COMPUTED ? DSQ_FP32 : DSQ_VALUES)

// Without a number of blocks ptxas aims at many, keeps to 32 registers where it can, and spills a
// word or two where many values are alive: there two blocks per multiprocessor will do.
#if DSQ_ROUNDING == DSQ_LEARNED || (DSQ_TABLE && !DSQ_WHOLE) || \
    (DSQ_MINMAX && DSQ_HELD_TYPE == DSQ_FP32 && !DSQ_WHOLE) || \
    (DSQ_ROUNDING == DSQ_NEAREST && !DSQ_WHOLE && \
     (__CUDA_ARCH__ >= 1000 || (DSQ_BITS == 8 && __CUDA_ARCH__ < 900)))
#define DSQ_BOUNDS __launch_bounds__(DSQ_THREADS, 2)
#else
#define DSQ_BOUNDS __launch_bounds__(DSQ_THREADS)
#endif

static_assert(DSQ_ROTATION == 0 || DSQ_GROUP % (DSQ_ROTATION ? DSQ_ROTATION : 1) == 0,
              "a group is whole rotation blocks");
static_assert(DSQ_ROTATION == 0 || DSQ_RUN == 4, "a lane rotates runs of 32 elements");

// Which element of its group stands at a position: itself, another one for positions that are
// absent, -1 for the zeros that fill up the last rotation block.
DSQ_DEVICE long long present(u32 position, u64 values, u64 on_wire) {
    if (position < values) return position;
    if (position < on_wire) return -1;
    const u32 other = DSQ_ROTATION ? position % (DSQ_ROTATION ? DSQ_ROTATION : 1) : 0;
    return other < values ? (long long)other : -1;
}

// Vector i of a lane, from its first one; of the same group instead of an absent one.
DSQ_DEVICE u32 vector_of_lane(Tile tile, int i) {
    const int s = i / DSQ_VECTORS, v = i % DSQ_VECTORS;
    const u32 step = is_absent(tile.thread, v) ? v % DSQ_RUN : vector_step(v);
    return slot_group(s) * DSQ_GROUP_VECTORS + step;
}

// All vectors of a lane by 16 bytes. At the end of a row through local memory, and of a vector that
// is cut off or absent element by element.
template <int DTYPE>
DSQ_DEVICE void load_tile(Held<DTYPE>& held, const u8* row, const EncodeJob& job, Tile tile,
                          bool inside) {
    const int bytes = Raw<DTYPE>::ITEM * 8;
    const bool once = DSQ_RUN == 1 && Raw<DTYPE>::ITEM == 2;
    const u8* first = row + (tile.group * DSQ_GROUP_VECTORS + tile.thread * DSQ_RUN) * bytes;
    if (inside && (DSQ_WHOLE || (u64)row % 16 == 0)) {
        DSQ_UNROLL
        for (int i = 0; i < DSQ_HELD; ++i) {
            held.vector[i].load(first + vector_of_lane(tile, i) * bytes, once);
        }
        return;
    }
    if (inside) {
        DSQ_UNROLL
        for (int i = 0; i < DSQ_HELD; ++i) {
            held.vector[i].load_skewed(first + vector_of_lane(tile, i) * bytes);
        }
        return;
    }
    Held<DTYPE> staged;
    DSQ_NO_UNROLL
    for (u32 i = 0; i < DSQ_HELD; ++i) {
        const u32 v = i % DSQ_VECTORS;
        const u64 start = (tile.group + slot_group(i / DSQ_VECTORS)) * DSQ_GROUP;
        const u64 values = job.numel > start ? job.numel - start : 0;
        const u64 on_wire = job.wire.numel > start ? job.wire.numel - start : 0;
        const u32 step = is_absent(tile.thread, v) ? v % DSQ_RUN : vector_step(v);
        const u32 place = (tile.thread * DSQ_RUN + step) * 8;
        const u8* group = row + start * Raw<DTYPE>::ITEM;
        Raw<DTYPE>& vector = staged.vector[i];
        if (place + 8 <= values) {
            vector.load_anywhere(group + place * Raw<DTYPE>::ITEM);
            continue;
        }
        DSQ_UNROLL
        for (u32 e = 0; e < 8; ++e) {
            const long long element = present(place + e, values, on_wire);
            const u8* p = group + element * Raw<DTYPE>::ITEM;
            if (element == (long long)(place + e)) {
                DSQ_NOTE_ELEMENT();
            }
            const u32 bits = element < 0 ? 0 : load_bits<DTYPE>(p);
            // No u16 pointer into the words: the compiler may assume that types do not alias.
            u32& word = vector.w[e * Raw<DTYPE>::WORDS / 8];
            word = DTYPE != DSQ_FP32 && e % 2 ? word | bits << 16 : bits;
        }
    }
    held = staged;
}

DSQ_DEVICE void rotate(Held<DSQ_FP32>& held, const EncodeJob& job, Tile tile) {
    const int block = DSQ_ROTATION ? DSQ_ROTATION : 32;
    DSQ_UNROLL
    for (int run = 0; run < DSQ_HELD; run += DSQ_BLOCK_RUN) {
        float x[DSQ_BLOCK_RUN][8];
        DSQ_UNROLL
        for (int i = 0; i < 32; ++i) x[i / 8][i % 8] = held.vector[run + i / 8].at(i % 8);
        if (DSQ_FLIPS) {
            flip_signs(x, flips_of_lane<block>(job.flips_low, job.flips_high, tile.thread));
        }
        butterflies<block>(x, tile.lane);
        DSQ_UNROLL
        for (int v = 0; v < DSQ_BLOCK_RUN; ++v) held.vector[run + v].set(x[v]);
    }
}

extern "C" __global__ void DSQ_BOUNDS encode(DSQ_JOB_PARAMETERS(EncodeJob)) {
    DSQ_FIND_JOB(EncodeJob)
    const Tile tile = tile_of(block);
    const WireRow wire = row_of(job.wire, row);
#if DSQ_ROUNDING == DSQ_LEARNED
    load_middles((const float*)job.levels);
#endif
    const bool keeps_fp32 = DSQ_ROTATION && wire.end == 0;
    if (block == 0 && !keeps_fp32) zero_gaps(wire, (wire.numel + DSQ_GROUP - 1) / DSQ_GROUP);

    const u8* values = (const u8*)(job.values + row * job.values_stride);
    const u64 end = (tile.group + slot_group(DSQ_SLOTS - 1) + 1) * DSQ_GROUP;
    const bool inside = DSQ_WHOLE || end <= job.numel;
    Held<DSQ_HELD_TYPE> held;
#if !DSQ_COMPUTED
    load_tile(held, values, job, tile, inside);
#else
    Held<DSQ_VALUES> minuend;
    load_tile(minuend, values, job, tile, inside);
#if DSQ_BASE >= 0
    const u8* base = (const u8*)(job.base + row * job.base_stride);
    Held<DSQ_BASE> subtrahend;
    load_tile(subtrahend, base, job, tile, inside);
#endif
    DSQ_UNROLL
    for (int i = 0; i < DSQ_HELD * 8; ++i) {
        float x = minuend.vector[i / 8].at(i % 8);
#if DSQ_BASE >= 0
        x = sub_rn(x, subtrahend.vector[i / 8].at(i % 8));
#endif
        held.vector[i / 8].w[i % 8] = bits_of(x);
    }
    if (DSQ_ROTATION) rotate(held, job, tile);
    if (keeps_fp32) {
        store_values(held, tile, wire);
        return;
    }
#endif
    const Stream stream = {job.key, job.step, job.first_vector + row * job.row_vectors};
    encode_groups(held, tile, wire, stream, (const float*)job.levels);
}
