// Arguments of a launch: one struct of 64-bit integers by value, so that nothing is copied to the
// device before it.
//
// DSQ_TABLE 0: the struct is one job; grid (blocks of a row, rows).
// DSQ_TABLE bytes: it has up to so many, and jobs of many tensors; grid (blocks of all jobs). The
// constant bank holds them, where every block looks for its own.
//
// All fields are u64; strides and offsets count bytes; ds_quant/kernels/launch.py writes the same
// fields in the same order, and a test compares the two.
#ifndef DSQ_JOB_CUH
#define DSQ_JOB_CUH

#include "platform.cuh"

#ifndef DSQ_TABLE
#define DSQ_TABLE 0
#endif
#ifndef DSQ_WHOLE  // 1: every block is full and every row of values 16-byte aligned
#define DSQ_WHOLE 0
#endif

// Rows of one tensor on the wire.
struct WireJob {
    u64 bytes, stride;  // address of row 0, from row to row
    u64 plane1, plane2, scales, offsets;  // from the start of a row
    u64 end;  // its bytes; 0: values stay fp32
    u64 numel;  // elements of a row on the wire
};

// Rows of values, and the random bits, tables and signs of their codes.
struct EncodeJob {
    u64 first_block, row_blocks;  // table only: first block of the job, blocks of a row
    WireJob wire;
    u64 values, values_stride, numel;  // numel <= wire.numel, which holds whole rotation blocks
    u64 base, base_stride;  // subtracted
    u64 key, step, first_vector, row_vectors;  // of row 0, and from row to row
    u64 levels;  // fp32 table
    u64 flips_low, flips_high;  // signs of a rotation block, bit set = negative
};

struct SumJob {
    u64 first_block, row_blocks;
    WireJob wire;  // stride: from one output row to the next
    u64 sources, source_stride;  // rows that are added up, bytes from one to the next
    u64 values, values_stride, numel;  // written
    u64 own, own_values;  // index and fp32 values of this rank's own row; own >= sources for none
    u64 factor;  // bits of an fp32: multiplies the sum
    u64 levels;
    u64 flips_low, flips_high;  // DSQ_FLIPS 2: key and step of the signs of every source
};

struct RecodeJob {
    u64 first_block, row_blocks;
    WireJob wire;  // written
    WireJob source;  // read; stride: from one output row to the next
    u64 sources, source_stride;
    u64 own, own_values;
    u64 key, step, first_vector, row_vectors;
    u64 levels, source_levels;
};

struct CastJob {
    u64 first_block, row_blocks;
    u64 source, source_row;  // read; from one output row to the next
    u64 sources, source_stride;  // rows that are added up, bytes from one to the next
    u64 values, values_stride, numel, padded;  // written; zeros from numel to padded
    u64 own, own_values;  // index and fp32 values of this rank's own row; own >= sources for none
    u64 factor;  // bits of an fp32: multiplies the sum
    u64 source_type, values_type;  // DSQ_FP32, DSQ_BF16 or DSQ_FP16
    u64 is_copy;  // one source of the same type, and nothing is multiplied
};

struct LosslessJob {
    u64 first_block, row_blocks;
    u64 values, reference, wire;  // values: read by the sender, written by the receiver
    u64 numel;
    u64 nbytes;  // sender: address of the number of its bytes, 0 before; receiver: that number
    u64 status;  // receiver: u32 problem, u32 checksum computed - checksum sent, both 0 before
};

#if DSQ_TABLE
template <class Job>
struct Jobs {
    u64 count, begin;  // first block of this launch
    Job list[(DSQ_TABLE - 16) / sizeof(Job)];  // by their first blocks
};

#define DSQ_JOB_PARAMETERS(Job) DSQ_ARGUMENT(Jobs<Job>) table
// The last job that begins at this block or before it.
#define DSQ_FIND_JOB(Job)                                                                        \
    const u32 launch_block = blockIdx.x + (u32)table.begin;                                      \
    u32 found = 0;                                                                               \
    DSQ_NO_UNROLL                                                                                \
    for (u32 end = (u32)table.count; end - found > 1;) {                                         \
        const u32 middle = (found + end) / 2;                                                    \
        if ((u32)table.list[middle].first_block <= launch_block) found = middle;                 \
        else end = middle;                                                                       \
    }                                                                                            \
    const Job& job = table.list[found];                                                          \
    const u32 job_block = launch_block - (u32)job.first_block, row_blocks = (u32)job.row_blocks; \
    const u64 row = job_block / row_blocks, block = job_block % row_blocks;
#else
#define DSQ_JOB_PARAMETERS(Job) const Job job
#define DSQ_FIND_JOB(Job) const u64 block = blockIdx.x, row = blockIdx.y;
#endif

#endif  // DSQ_JOB_CUH
