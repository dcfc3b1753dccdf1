// lossless: exact differences of 16-bit floats to a message and back.
//
// DSQ_PHASE, one launch each:
// 0 plan   one thread block per block of 2048 elements: how it is coded, into its entry, and how
//          many words that takes; the checksum to where the bytes of the message will be told
// 1 scan   one thread block: words into ends, mode, checksum and bytes into the header
// 2 write  one thread block per block: its payload, or the raw values
// 3 read   one thread block per block: all of the receiver's work
//
// Where a payload begins is known when all lengths are. A scan within one launch (decoupled
// look-back) would save two launches, but keep every payload in shared memory until its
// predecessors are done, and wait for thread blocks that may not run; 8 bytes per 2048 elements are
// scanned in a launch of their own at a few hundredths of the time of the others.
//
// Inputs:  bf16 or fp16 at any address. The message, 16-byte aligned, is not trusted: a thread
//          block writes its elements after all of them were found to be possible, reads nothing
//          outside `nbytes`, and leaves a place in PROBLEMS of lossless.py in the status.
// Exactness: bytes equal to ds_quant/kernels/lossless.py. Atomics only add, take the largest or
//          set bits, in any order.
#include "include/job.cuh"
#include "include/symbols.cuh"

#ifndef DSQ_VALUES
#define DSQ_VALUES DSQ_BF16
#endif
#ifndef DSQ_PHASE
#define DSQ_PHASE 0
#endif
#define DSQ_EXPONENT_AT (DSQ_VALUES == DSQ_BF16 ? 7 : 10)

enum Problem { NONE, LENGTH, MODE, KIND, SCALE, COUNT, OFFSET, QUOTIENT, SYMBOL, GAP, CHECKSUM };

// A block and the elements of this thread.
struct Place {
    u64 start;   // first element of the thread
    u32 size;    // elements of the block
    u32 count;   // elements of the thread
    u8* entry;   // of the block

    DSQ_MEMBER Place(const LosslessJob& job, u64 block) {
        const u64 rest = job.numel - block * DSQ_BLOCK;
        size = rest < DSQ_BLOCK ? (u32)rest : DSQ_BLOCK;
        const u32 first = threadIdx.x * DSQ_OWN;
        count = first >= size ? 0 : size - first < DSQ_OWN ? size - first : DSQ_OWN;
        start = block * DSQ_BLOCK + first;
        entry = (u8*)job.wire + DSQ_HEADER + DSQ_ENTRY * block;
    }
    DSQ_MEMBER u32 present() const { return (1u << count) - 1; }
};

struct Elements {
    u32 values[DSQ_OWN], symbols[DSQ_OWN], exponents[DSQ_OWN];
    u32 changed;  // bit i: symbol i is not 0

    DSQ_MEMBER Elements(const LosslessJob& job, const Place& place) {
        u32 reference[DSQ_OWN];
        load_own((const u8*)job.values + 2 * place.start, place.count, values);
        load_own((const u8*)job.reference + 2 * place.start, place.count, reference);
        changed = 0;
        DSQ_UNROLL
        for (int i = 0; i < DSQ_OWN; ++i) {
            symbols[i] = symbol_of(values[i], reference[i]);
            exponents[i] = exponent_of<DSQ_EXPONENT_AT>(reference[i]);
            changed |= (u32)(symbols[i] > 0) << i;
        }
    }
};

DSQ_DEVICE u64 blocks_of(const LosslessJob& job) { return (job.numel + DSQ_BLOCK - 1) / DSQ_BLOCK; }
DSQ_DEVICE u8* payload_of(const LosslessJob& job) {
    return (u8*)job.wire + DSQ_HEADER + DSQ_ENTRY * blocks_of(job);
}
DSQ_DEVICE u64 raw_bytes(const LosslessJob& job) {
    return (DSQ_HEADER + 2 * job.numel + 15) / 16 * 16;
}

// Unchanged elements before each changed one.
DSQ_DEVICE void find_gaps(const Elements& own, Shared& shared, u32 (&gaps)[DSQ_OWN]) {
    u64 all;
    const u32 rank = (u32)sum_before(count_ones(own.changed), &all, shared);
    u32 next = rank;
    DSQ_UNROLL
    for (u32 i = 0; i < DSQ_OWN; ++i) {
        if (own.changed >> i & 1) shared.places[next++] = (u16)(threadIdx.x * DSQ_OWN + i);
    }
    __syncthreads();
    int last = rank ? (int)shared.places[rank - 1] : -1;
    DSQ_UNROLL
    for (u32 i = 0; i < DSQ_OWN; ++i) {
        const int here = (int)(threadIdx.x * DSQ_OWN + i);
        gaps[i] = (u32)(here - last - 1);
        if (own.changed >> i & 1) last = here;
    }
}

// ---- plan ----

struct Choice {
    u32 words, count, scale, kind;
};

DSQ_DEVICE u32 candidate(u32 mean, u32 less) {
    const u32 scale = mean > less ? mean - less : 0;
    return scale < 255 ? scale : 255;
}

// Bits of a list under the scales mean - 3 to mean, of the present elements of all threads.
template <int N>
DSQ_DEVICE void add_scales(u32 (&bits)[N], const Elements& own, u32 present, u32 less, u32 mean) {
    DSQ_UNROLL
    for (int c = 0; c < 4; ++c) {
        bits[c] = 0;
        const u32 scale = candidate(mean, 3 - c);
        DSQ_UNROLL
        for (int i = 0; i < DSQ_OWN; ++i) {
            const u32 k = parameter(scale, own.exponents[i]);
            if (present >> i & 1) bits[c] += field_bits(own.symbols[i] - less, k);
        }
    }
}

// Fewest bits, and the scale they need.
template <int N>
DSQ_DEVICE u32 best_scale(const u32 (&bits)[N], u32 mean, u32* scale) {
    u32 fewest = bits[0];
    *scale = candidate(mean, 3);
    DSQ_UNROLL
    for (int c = 1; c < 4; ++c) {
        if (bits[c] < fewest) fewest = bits[c], *scale = candidate(mean, 3 - c);
    }
    return fewest;
}

DSQ_DEVICE void plan_gaps(const Elements& own, Shared& shared, u32 size, u32 changed, u32 mean,
                          Choice* best) {
    u32 gaps[DSQ_OWN], bits[6], scale;
    find_gaps(own, shared, gaps);
    add_scales(bits, own, own.changed, 1, mean);
    u32 r = bit_length(size / changed) - 1;
    bits[4] = bits[5] = 0;
    DSQ_UNROLL
    for (int i = 0; i < DSQ_OWN; ++i) {
        if (own.changed >> i & 1) {
            bits[4] += field_bits(gaps[i], r);
            bits[5] += field_bits(gaps[i], r - 1);  // r is at least 1
        }
    }
    sum_up(bits, shared);
    const u32 rest = best_scale(bits, mean, &scale), shorter = bits[5] < bits[4];
    const u32 words = (rest + bits[4 + shorter] + 31) / 32;
    if (words < best->words) *best = {words, changed, scale, GAPS + r - shorter};
}

DSQ_DEVICE void plan_block(const LosslessJob& job, u64 block, Shared& shared) {
    const Place place(job, block);
    const Elements own(job, place);
    u32 sums[4] = {count_ones(own.changed), 0, 0, checksum_of(own.values, place.start, place.count)};
    DSQ_UNROLL
    for (int i = 0; i < DSQ_OWN; ++i) {
        if ((own.changed >> i & 1) && own.exponents[i] < ZERO) {
            sums[1] += bit_length(own.symbols[i]) + own.exponents[i];
            ++sums[2];
        }
    }
    sum_up(sums, shared);
    Choice best = {0, 0, 0, SAME};
    const u32 changed = sums[0];
    if (changed) {
        const u32 mean = sums[1] / (sums[2] ? sums[2] : 1);
        best = {(place.size + 1) / 2, 0, 0, PLAIN};
        u32 bits[4], scale;
        add_scales(bits, own, place.present(), 0, mean);
        sum_up(bits, shared);
        const u32 words = (best_scale(bits, mean, &scale) + 31) / 32;
        if (words < best.words) best = {words, 0, scale, RICE};
        if (2 * changed <= place.size) plan_gaps(own, shared, place.size, changed, mean, &best);
    }
    if (threadIdx.x) return;
    const u32 rest = best.count | best.scale << 16 | best.kind << 24;
    store8(place.entry, best.words | (u64)rest << 32);
    add_atomically((u32*)job.nbytes, sums[3]);
}

// ---- scan ----

DSQ_DEVICE void scan_blocks(const LosslessJob& job, Shared& shared) {
    const u64 blocks = blocks_of(job);
    u8* table = (u8*)job.wire + DSQ_HEADER;
    u64 before = 0;
    DSQ_NO_UNROLL
    for (u64 first = 0; first < blocks; first += DSQ_THREADS * DSQ_OWN) {
        const u64 mine = first + threadIdx.x * DSQ_OWN;
        u32 words[DSQ_OWN];
        u64 own = 0, total;
        DSQ_UNROLL
        for (int i = 0; i < DSQ_OWN; ++i) {
            words[i] = mine + i < blocks ? load4_again(table + DSQ_ENTRY * (mine + i)) : 0;
            own += words[i];
        }
        u64 end = before + sum_before(own, &total, shared);
        DSQ_UNROLL
        for (int i = 0; i < DSQ_OWN; ++i) {
            end += words[i];
            if (mine + i < blocks) store4(table + DSQ_ENTRY * (mine + i), (u32)end);
        }
        before += total;
    }
    if (threadIdx.x) return;
    const u64 raw = raw_bytes(job);
    u64 used = (DSQ_HEADER + DSQ_ENTRY * blocks + 4 * before + 15) / 16 * 16;
    u32 mode = BLOCKS;
    if (before == 0) {
        mode = UNCHANGED, used = DSQ_HEADER;
    } else if (used >= raw) {
        mode = RAW, used = raw;
    }
    store4((u8*)job.wire, mode);
    store4((u8*)job.wire + 4, load4_again((const u8*)job.nbytes));
    store8((u8*)job.wire + 8, used);
    store8((u8*)job.nbytes, used);
}

// ---- write ----

DSQ_DEVICE void write_raw(const LosslessJob& job, u64 block) {
    const Place place(job, block);
    u32 values[DSQ_OWN];
    load_own((const u8*)job.values + 2 * place.start, place.count, values);
    if (place.count) store16((u8*)job.wire + DSQ_HEADER + 2 * place.start, words_of(values));
}

// Fill `shared.words` with the payload of a block.
DSQ_DEVICE void write_payload(const Elements& own, const Place& place, u32 rest, Shared& shared) {
    const u32 kind = rest >> 24, scale = rest >> 16 & 0xFF;
    if (kind == PLAIN) {
        DSQ_UNROLL
        for (int i = 0; i < DSQ_OWN / 2; ++i) {
            const u32 pair = own.values[2 * i] | own.values[2 * i + 1] << 16;
            shared.words[threadIdx.x * (DSQ_OWN / 2) + i] = pair;
        }
        return;
    }
    DSQ_UNROLL
    for (int i = 0; i < DSQ_OWN_WORDS; ++i) shared.words[i * DSQ_THREADS + threadIdx.x] = 0;
    if (threadIdx.x < 4) shared.words[DSQ_WORDS + threadIdx.x] = 0;
    __syncthreads();
    u32 k[DSQ_OWN], symbols[DSQ_OWN], at = 0, present = place.present();
    if (kind >= GAPS) {
        find_gaps(own, shared, symbols);
        DSQ_UNROLL
        for (int i = 0; i < DSQ_OWN; ++i) k[i] = kind - GAPS;
        present = own.changed;
        at = put_list(shared, 0, present, symbols, k);
    }
    DSQ_UNROLL
    for (int i = 0; i < DSQ_OWN; ++i) {
        k[i] = parameter(scale, own.exponents[i]);
        symbols[i] = own.symbols[i] - (kind >= GAPS);
    }
    put_list(shared, at, present, symbols, k);
}

DSQ_DEVICE void write_block(const LosslessJob& job, u64 block, Shared& shared) {
    const u32 mode = load4((const u8*)job.wire);
    if (mode == RAW) write_raw(job, block);
    if (mode != BLOCKS) return;
    const Place place(job, block);
    const u32 start = block ? load4(place.entry - DSQ_ENTRY) : 0;
    const u32 words = load4(place.entry) - start;
    u8* payload = payload_of(job) + 4 * (u64)start;
    if (words) {
        const Elements own(job, place);
        write_payload(own, place, load4(place.entry + 4), shared);
        __syncthreads();
        for (u32 i = threadIdx.x; i < words; i += DSQ_THREADS) {
            store4(payload + 4 * i, shared.words[i]);
        }
    }
    if (block + 1 == blocks_of(job) && threadIdx.x < 4) {  // up to a multiple of 16 bytes
        const u8* end = (const u8*)job.wire + load8((const u8*)job.wire + 8);
        u8* rest = payload + 4 * ((u64)words + threadIdx.x);
        if (rest < end) store4(rest, 0);
    }
}

// ---- read ----

// The payload of the block into `shared.words`, zeros after it.
DSQ_DEVICE void load_payload(const u8* payload, u32 words, Shared& shared) {
    for (u32 i = threadIdx.x; i < DSQ_WORDS + 4; i += DSQ_THREADS) {
        shared.words[i] = i < words ? load4(payload + 4 * (u64)i) : 0;
    }
    __syncthreads();
}

// Positions of the ones from bit `at` on into `shared.places`; how many there are.
DSQ_DEVICE u32 find_ones(Shared& shared, u32 at) {
    u32 own[DSQ_OWN_WORDS], count = 0;
    DSQ_UNROLL
    for (u32 i = 0; i < DSQ_OWN_WORDS; ++i) {
        const u32 word = threadIdx.x * DSQ_OWN_WORDS + i, first = word * 32;
        own[i] = shared.words[word];
        if (first < at) own[i] = at - first < 32 ? own[i] >> (at - first) << (at - first) : 0;
        count += count_ones(own[i]);
    }
    u64 all;
    u32 next = (u32)sum_before(count, &all, shared);
    DSQ_UNROLL
    for (u32 i = 0; i < DSQ_OWN_WORDS; ++i) {
        DSQ_NO_UNROLL
        for (u32 bits = own[i]; bits && next < DSQ_BLOCK; bits &= bits - 1) {
            shared.places[next++] = (u16)((threadIdx.x * DSQ_OWN_WORDS + i) * 32 + lowest_one(bits));
        }
    }
    __syncthreads();
    return (u32)all;
}

// The `count` symbols of the Rice list at bit *at, 8 to a thread, and its end; parameters of those
// that are there. A problem is the same for all threads, but for that of a symbol.
DSQ_DEVICE u32 read_list(Shared& shared, u32* at, u32 stop, u32 count, const u32 (&k)[DSQ_OWN],
                         u32 (&symbols)[DSQ_OWN]) {
    const u32 first = threadIdx.x * DSQ_OWN;
    Lengths own = {0}, all;
    DSQ_UNROLL
    for (u32 i = 0; i < DSQ_OWN; ++i) own.packed += first + i < count ? k[i] : 0;
    Lengths before = {sum_before(own.packed, &all.packed, shared)};
    u32 low_at = *at + before.low();
    const u32 unary = *at + all.low();
    if (unary > stop) return OFFSET;
    if (find_ones(shared, unary) < count) return QUOTIENT;

    u32 last = first && first <= count ? shared.places[first - 1] : unary - 1, problem = NONE;
    own.packed = 0;
    DSQ_UNROLL
    for (u32 i = 0; i < DSQ_OWN; ++i) {
        if (first + i < count) {
            const u32 one = shared.places[first + i], q = one - last - 1;
            last = one;
            if (q > ESCAPE) problem = QUOTIENT;
            symbols[i] = q;
            own.packed += q == ESCAPE;
        }
    }
    const u32 end = count ? (u32)shared.places[count - 1] + 1 : unary;
    before.packed = sum_before(own.packed, &all.packed, shared);
    u32 escape_at = end + 16 * before.low();
    *at = end + 16 * all.low();
    if (*at > stop) return OFFSET;
    DSQ_UNROLL
    for (u32 i = 0; i < DSQ_OWN; ++i) {
        if (first + i < count && problem == NONE) {
            const bool escaped = symbols[i] == ESCAPE;
            symbols[i] = symbols[i] << k[i] | field_at(shared, low_at, k[i]);
            if (escaped) symbols[i] = field_at(shared, escape_at, 16), escape_at += 16;
            low_at += k[i];
            if (symbols[i] > 0xFFFF) problem = SYMBOL;
        }
    }
    return problem;
}

// Whether any thread found a problem; the largest is kept.
DSQ_DEVICE u32 agreed(Shared& shared, u32 problem) {
    if (problem) max_atomically(&shared.problem, problem);
    __syncthreads();
    const u32 found = shared.problem;
    __syncthreads();
    return found;
}

// Symbols of a block coded by gaps.
DSQ_DEVICE u32 read_gaps(Shared& shared, u32* at, u32 stop, u32 rest, u32 size,
                         u32 (&symbols)[DSQ_OWN]) {
    const u32 first = threadIdx.x * DSQ_OWN, count = rest & 0xFFFF;
    u32 k[DSQ_OWN], places[DSQ_OWN];
    DSQ_UNROLL
    for (u32 i = 0; i < DSQ_OWN; ++i) {
        k[i] = (rest >> 24) - GAPS;
        shared.symbols[first + i] = 0;
    }
    u32 problem = agreed(shared, read_list(shared, at, stop, count, k, symbols));
    if (problem) return problem;
    u64 sum = 0, all;
    DSQ_UNROLL
    for (u32 i = 0; i < DSQ_OWN; ++i) sum += first + i < count ? symbols[i] + 1 : 0;
    u64 next = sum_before(sum, &all, shared);
    if (all > size) return GAP;
    DSQ_UNROLL
    for (u32 i = 0; i < DSQ_OWN; ++i) {
        places[i] = 0;
        if (first + i < count) {
            next += symbols[i] + 1;
            places[i] = (u32)next - 1;
        }
        const u32 exponent = exponent_of<DSQ_EXPONENT_AT>(shared.reference[places[i]]);
        k[i] = parameter(rest >> 16 & 0xFF, exponent);
    }
    problem = read_list(shared, at, stop, count, k, symbols);
    DSQ_UNROLL
    for (u32 i = 0; i < DSQ_OWN; ++i) {
        if (first + i < count && problem == NONE) {
            if (symbols[i] == 0xFFFF) problem = SYMBOL;
            shared.symbols[places[i]] = (u16)(symbols[i] + 1);
        }
    }
    problem = agreed(shared, problem);
    DSQ_UNROLL
    for (u32 i = 0; i < DSQ_OWN; ++i) symbols[i] = shared.symbols[first + i];
    return problem;
}

DSQ_DEVICE u32 check_entry(u32 words, u32 rest, u32 size) {
    const u32 kind = rest >> 24, count = rest & 0xFFFF, raw = (size + 1) / 2;
    const bool gaps = kind >= GAPS && kind <= GAPS + MAX_K;
    if (!gaps && kind > RICE) return KIND;
    if (!gaps && kind != RICE && (rest >> 16 & 0xFF)) return SCALE;
    if (gaps ? count == 0 || count > size : count != 0) return COUNT;
    if (words > raw || (kind == SAME && words) || (kind == PLAIN && words != raw)) return OFFSET;
    return NONE;
}

// What the header and the last entry say, by each block: nothing is kept between launches.
DSQ_DEVICE u32 check_header(const LosslessJob& job, const Words4& header) {
    const u32 mode = header.w[0];
    if ((header.w[2] | (u64)header.w[3] << 32) != job.nbytes) return LENGTH;
    if (mode == UNCHANGED) return job.nbytes == DSQ_HEADER ? NONE : LENGTH;
    if (mode == RAW) return job.nbytes == raw_bytes(job) ? NONE : LENGTH;
    if (mode != BLOCKS) return MODE;
    const u64 fixed = DSQ_HEADER + DSQ_ENTRY * blocks_of(job);
    if (job.nbytes < fixed) return LENGTH;
    const u64 room = (job.nbytes - fixed) / 4, words = load4(payload_of(job) - DSQ_ENTRY);
    return words > room ? OFFSET : room - words > 3 ? LENGTH : NONE;
}

// Bits of the values of this thread, in place of those of the reference.
DSQ_DEVICE u32 read_block(const LosslessJob& job, const Place& place, u64 block, Shared& shared,
                          u32 (&bits)[DSQ_OWN]) {
    const u32 start = block ? load4(place.entry - DSQ_ENTRY) : 0, stop = load4(place.entry);
    const u32 rest = load4(place.entry + 4), words = stop - start, kind = rest >> 24;
    u32 problem = check_entry(words, rest, place.size);
    if (start > stop || stop > load4(payload_of(job) - DSQ_ENTRY)) problem = OFFSET;
    if (problem || kind == SAME) return problem;
    const u8* payload = payload_of(job) + 4 * (u64)start;
    if (kind == PLAIN) {
        DSQ_UNROLL
        for (u32 i = 0; i < DSQ_OWN; ++i) {
            if (i < place.count) bits[i] = load2(payload + 2 * (threadIdx.x * DSQ_OWN + i));
        }
        return NONE;
    }
    load_payload(payload, words, shared);
    u32 symbols[DSQ_OWN], at = 0;
    if (kind == RICE) {
        u32 k[DSQ_OWN];
        DSQ_UNROLL
        for (int i = 0; i < DSQ_OWN; ++i) {
            k[i] = parameter(rest >> 16 & 0xFF, exponent_of<DSQ_EXPONENT_AT>(bits[i]));
        }
        problem = read_list(shared, &at, 32 * words, place.size, k, symbols);
    } else {
        problem = read_gaps(shared, &at, 32 * words, rest, place.size, symbols);
    }
    problem = agreed(shared, problem);
    if (problem) return problem;
    if ((at + 31) / 32 != words) return OFFSET;
    DSQ_UNROLL
    for (int i = 0; i < DSQ_OWN; ++i) bits[i] = restored(symbols[i], bits[i]);
    return NONE;
}

DSQ_DEVICE void read_message(const LosslessJob& job, u64 block, Shared& shared) {
    const Place place(job, block);
    const Words4 header = load16((const u8*)job.wire);
    u32* status = (u32*)job.status;
    u32 problem = check_header(job, header), bits[DSQ_OWN];
    if (threadIdx.x == 0) shared.problem = NONE;
    load_own((const u8*)job.reference + 2 * place.start, place.count, bits);
    DSQ_UNROLL
    for (int i = 0; i < DSQ_OWN; ++i) {
        shared.reference[threadIdx.x * DSQ_OWN + i] = (u16)bits[i];
    }
    __syncthreads();
    if (problem == NONE && header.w[0] == RAW && place.count) {
        Raw<DSQ_BF16> own;
        own.load((const u8*)job.wire + DSQ_HEADER + 2 * place.start, false);
        take(own, bits);
    } else if (problem == NONE && header.w[0] == BLOCKS) {
        problem = read_block(job, place, block, shared, bits);
    }
    if (problem) {
        if (threadIdx.x == 0) max_atomically(status, problem);
        return;
    }
    store_own((u8*)job.values + 2 * place.start, place.count, bits);
    u32 sums[1] = {checksum_of(bits, place.start, place.count)};
    sum_up(sums, shared);
    if (threadIdx.x == 0) add_atomically(status + 1, sums[0] - (block ? 0 : header.w[1]));
}

#if DSQ_PHASE == 2  // aiming at five blocks per multiprocessor, ptxas spills on sm_80
#define DSQ_BOUNDS __launch_bounds__(DSQ_THREADS, 4)
#else
#define DSQ_BOUNDS __launch_bounds__(DSQ_THREADS)
#endif

extern "C" __global__ void DSQ_BOUNDS lossless(DSQ_JOB_PARAMETERS(LosslessJob)) {
    DSQ_FIND_JOB(LosslessJob)
    __shared__ Shared shared;
    if (DSQ_PHASE == 0) plan_block(job, block, shared);
    if (DSQ_PHASE == 1) scan_blocks(job, shared);
    if (DSQ_PHASE == 2) write_block(job, block, shared);
    if (DSQ_PHASE == 3) read_message(job, block, shared);
    (void)row, (void)block;
}
