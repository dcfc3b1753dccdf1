// recode: wire rows -> the sum of what they encode -> wire bytes of another codec.
//
// Inputs:  `sources` rows per output row, 16-byte aligned on the wire, but for source `own`, fp32.
// Outputs: rows on the wire, 16-byte aligned, every byte of them; of a job whose rows have no end,
//          the sums in fp32.
// Grid:    one block per DSQ_BLOCK_GROUPS groups of an output row, see include/tile.cuh.
// Exactness: decode_sum in fp32 without a factor, then encode, byte for byte.
#include "include/decoder.cuh"
#include "include/encoder.cuh"
#include "include/gaussian.cuh"
#include "include/job.cuh"

// Positions that are absent repeat the first value of their run, which is present.
DSQ_DEVICE void repeat_present(Held<DSQ_FP32>& held, Tile tile, u64 numel) {
    Held<DSQ_FP32> staged = held;
    DSQ_NO_UNROLL
    for (u32 i = 0; i < DSQ_HELD * 8; ++i) {
        const u32 v = i / 8 % DSQ_VECTORS;
        const u64 group = tile.group + slot_group(i / 8 / DSQ_VECTORS);
        const u64 j = group * DSQ_GROUP_VECTORS + tile.thread * DSQ_RUN + vector_step(v);
        if (j * 8 + i % 8 < numel) continue;
        staged.vector[i / 8].w[i % 8] = staged.vector[i / 8 / DSQ_RUN * DSQ_RUN].w[0];
    }
    held = staged;
}

// Two blocks per multiprocessor: aiming at more, ptxas spills on sm_100; there, where ends are
// checked in a table, even with two.
#if DSQ_TABLE && !DSQ_WHOLE && __CUDA_ARCH__ >= 1000
#define DSQ_BOUNDS __launch_bounds__(DSQ_THREADS)
#else
#define DSQ_BOUNDS __launch_bounds__(DSQ_THREADS, 2)
#endif

extern "C" __global__ void DSQ_BOUNDS recode(DSQ_JOB_PARAMETERS(RecodeJob)) {
    DSQ_FIND_JOB(RecodeJob)
    const Tile tile = tile_of(block);
    const WireRow wire = row_of(job.wire, row);
    const SourceRow source =
        source_row(job.source, row, job.sources, job.source_stride, job.own, job.own_values);
    const Stream stream = {job.key, job.step, job.first_vector + row * job.row_vectors};
#if DSQ_SOURCE_TABLE
    load_levels((const float*)job.source_levels, DSQ_THREADS);
#endif
#if DSQ_ROUNDING == DSQ_LEARNED
    load_middles((const float*)job.levels);
#endif
    const bool keeps_fp32 = wire.end == 0;
    if (block == 0 && !keeps_fp32) zero_gaps(wire, (wire.numel + DSQ_GROUP - 1) / DSQ_GROUP);

    Held<DSQ_FP32> held;
    DSQ_UNROLL
    for (int i = 0; i < DSQ_HELD; i += DSQ_RUN) {
        const int v = i % DSQ_VECTORS;
        const u64 first = (tile.group + slot_group(i / DSQ_VECTORS)) * DSQ_GROUP_VECTORS;
        u64 j = first + tile.thread * DSQ_RUN + vector_step(v);
        // Instead of what is absent, a run of the same group.
        if (is_absent(tile.thread, v) || (!DSQ_WHOLE && j >= wire.vectors)) j = first;
        if (!DSQ_WHOLE && j >= wire.vectors) j = 0;
        float sum[DSQ_RUN][8];
        sum_run(source, j, sum, Unchanged());
        DSQ_UNROLL
        for (int k = 0; k < DSQ_RUN; ++k) held.vector[i + k].set(sum[k]);
    }
    if (keeps_fp32) {
        store_values(held, tile, wire);
        return;
    }
    const u64 end = (tile.group + slot_group(DSQ_SLOTS - 1) + 1) * DSQ_GROUP;
    if (!DSQ_WHOLE && end > wire.numel) repeat_present(held, tile, wire.numel);
    encode_groups(held, tile, wire, stream, (const float*)job.levels);
}
