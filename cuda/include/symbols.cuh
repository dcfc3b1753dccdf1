// Lossless differences: elements as symbols, sums over a thread block, fields in shared memory.
//
// A thread block works on a block of 2048 elements of the message, a thread on 8 of them in a row;
// the format is [Note: lossless format] of ds_quant/kernels/lossless.py.
#ifndef DSQ_SYMBOLS_CUH
#define DSQ_SYMBOLS_CUH

#include "platform.cuh"
#include "values.cuh"

#define DSQ_THREADS 256
#define DSQ_WARPS (DSQ_THREADS / DSQ_WARP)
#define DSQ_OWN 8                                  // elements of a thread
#define DSQ_BLOCK (DSQ_THREADS * DSQ_OWN)          // elements of a block
#define DSQ_WORDS (DSQ_BLOCK / 2)                  // most words of a payload
#define DSQ_OWN_WORDS (DSQ_WORDS / DSQ_THREADS)

#define DSQ_HEADER 16  // bytes
#define DSQ_ENTRY 8

enum Mode { UNCHANGED, RAW, BLOCKS };
enum Kind { SAME, PLAIN, RICE, GAPS = 16 };
const u32 MAX_K = 15, ESCAPE = 16, ZERO = 511;  // ZERO: the exponent of a zero

struct Shared {
    u64 warps[DSQ_WARPS];
    u32 sums[DSQ_WARPS][6];
    u32 words[DSQ_WORDS + 4];  // of a payload; fields of no bits may lie past it
    u16 places[DSQ_BLOCK];     // of what is found by its number: ones, changed elements
    u16 symbols[DSQ_BLOCK];
    u16 reference[DSQ_BLOCK];
    u32 problem;
};

// ---- elements ----

DSQ_DEVICE u32 ordered(u32 bits) { return bits ^ (bits >> 15) * 0x7FFF; }

DSQ_DEVICE u32 symbol_of(u32 value, u32 reference) {
    const u32 difference = (ordered(value) - ordered(reference)) & 0xFFFF;
    return (difference << 1 & 0xFFFF) ^ (difference >> 15) * 0xFFFF;
}

DSQ_DEVICE u32 restored(u32 symbol, u32 reference) {
    const u32 difference = symbol >> 1 ^ (symbol & 1) * 0xFFFF;
    return ordered((ordered(reference) + difference) & 0xFFFF);
}

template <u32 EXPONENT_AT>
DSQ_DEVICE u32 exponent_of(u32 reference) {
    const u32 magnitude = reference & 0x7FFF, exponent = magnitude >> EXPONENT_AT;
    return magnitude ? exponent > 1 ? exponent : 1 : ZERO;
}

DSQ_DEVICE u32 parameter(u32 scale, u32 exponent) {
    const u32 k = scale > exponent ? scale - exponent : 0;
    return k < MAX_K ? k : MAX_K;
}

DSQ_DEVICE u32 quotient(u32 symbol, u32 k) {
    const u32 q = symbol >> k;
    return q < ESCAPE ? q : ESCAPE;
}

DSQ_DEVICE u32 field_bits(u32 symbol, u32 k) {
    const u32 q = quotient(symbol, k);
    return k + q + 1 + (q == ESCAPE ? 16 : 0);
}

DSQ_DEVICE u32 checksum_of(const u32 (&bits)[DSQ_OWN], u64 start, u32 count) {
    u32 sum = 0;
    DSQ_UNROLL
    for (u32 i = 0; i < DSQ_OWN; ++i) {
        const u32 x = ((u32)start + i) * 0x9E3779B1u;
        if (i < count) sum += bits[i] * ((x ^ x >> 15) * 0x85EBCA77u | 1);
    }
    return sum;
}

// 8 elements in a row, as bits.
DSQ_DEVICE void take(const Raw<DSQ_BF16>& own, u32 (&bits)[DSQ_OWN]) {
    DSQ_UNROLL
    for (int i = 0; i < DSQ_OWN; ++i) bits[i] = own.w[i / 2] >> 16 * (i % 2) & 0xFFFF;
}
DSQ_DEVICE Words4 words_of(const u32 (&bits)[DSQ_OWN]) {
    Words4 words;
    DSQ_UNROLL
    for (int i = 0; i < 4; ++i) words.w[i] = bits[2 * i] | bits[2 * i + 1] << 16;
    return words;
}

// The first `count` of them, at any address; zeros after them.
DSQ_DEVICE void load_own(const u8* p, u32 count, u32 (&bits)[DSQ_OWN]) {
    if (count == DSQ_OWN) {
        Raw<DSQ_BF16> own;
        own.load_anywhere(p);
        take(own, bits);
        return;
    }
    DSQ_UNROLL
    for (u32 i = 0; i < DSQ_OWN; ++i) {
        bits[i] = i < count ? reload_element<DSQ_BF16>(p + 2 * i) : 0;
    }
}

// All lanes of a warp store theirs, one behind the other.
DSQ_DEVICE void store_own(u8* p, u32 count, const u32 (&bits)[DSQ_OWN]) {
    const Words4 words = words_of(bits);
    const bool whole = count == DSQ_OWN;
    if ((u64)p % 16) {
        SkewedStore store(p, words, whole);
        if (whole) store.put(0, words), store.finish(1);
    } else if (whole) {
        store16(p, words);
    }
    if (whole) return;
    DSQ_UNROLL
    for (u32 i = 0; i < DSQ_OWN; ++i) {
        if (i < count) store_bits<DSQ_BF16>(p + 2 * i, bits[i]);
    }
}

// ---- sums over a thread block ----

// x[i] = sum over all threads.
template <int N>
DSQ_DEVICE void sum_up(u32 (&x)[N], Shared& shared) {
    const u32 warp = threadIdx.x / DSQ_WARP;
    DSQ_UNROLL
    for (int i = 0; i < N; ++i) {
        DSQ_UNROLL
        for (int distance = DSQ_WARP / 2; distance; distance /= 2) {
            x[i] += __shfl_xor_sync(DSQ_ALL_LANES, x[i], distance);
        }
        if (threadIdx.x % DSQ_WARP == 0) shared.sums[warp][i] = x[i];
    }
    __syncthreads();
    DSQ_UNROLL
    for (int i = 0; i < N; ++i) {
        x[i] = 0;
        for (int other = 0; other < DSQ_WARPS; ++other) x[i] += shared.sums[other][i];
    }
    __syncthreads();
}

// Sum over the threads before this one; `total` over all.
DSQ_DEVICE u64 sum_before(u64 own, u64* total, Shared& shared) {
    const u32 lane = threadIdx.x % DSQ_WARP, warp = threadIdx.x / DSQ_WARP;
    u64 sum = own;
    DSQ_UNROLL
    for (u32 distance = 1; distance < DSQ_WARP; distance *= 2) {
        const u64 other = __shfl_sync(DSQ_ALL_LANES, sum, (int)(lane - distance) & (DSQ_WARP - 1));
        if (lane >= distance) sum += other;
    }
    if (lane == DSQ_WARP - 1) shared.warps[warp] = sum;
    __syncthreads();
    u64 before = 0, all = 0;
    DSQ_UNROLL
    for (u32 other = 0; other < DSQ_WARPS; ++other) {
        if (other < warp) before += shared.warps[other];
        all += shared.warps[other];
    }
    __syncthreads();
    *total = all;
    return before + sum - own;
}

// ---- fields ----

// Three sums of one Rice list in one word: low bits, bits in unary, escapes.
struct Lengths {
    u64 packed;

    DSQ_MEMBER void add(u32 k, u32 q) {
        packed += k | (u64)(q + 1) << 20 | (u64)(q == ESCAPE) << 40;
    }
    DSQ_MEMBER u32 low() const { return packed & 0xFFFFF; }
    DSQ_MEMBER u32 unary() const { return packed >> 20 & 0xFFFFF; }
    DSQ_MEMBER u32 escapes() const { return (u32)(packed >> 40); }
};

// A field of at most 17 bits, into words that are still zero there.
DSQ_DEVICE void put(Shared& shared, u32 at, u32 field) {
    const u64 shifted = (u64)field << at % 32;
    if ((u32)shifted) or_atomically(&shared.words[at / 32], (u32)shifted);
    if (shifted >> 32) or_atomically(&shared.words[at / 32 + 1], (u32)(shifted >> 32));
}

DSQ_DEVICE u32 field_at(const Shared& shared, u32 at, u32 length) {
    const u64 pair = shared.words[at / 32] | (u64)shared.words[at / 32 + 1] << 32;
    return (u32)(pair >> at % 32) & ((1u << length) - 1);
}

// Write the Rice list of the present elements at bit `start`; returns its end.
DSQ_DEVICE u32 put_list(Shared& shared, u32 start, u32 present, const u32 (&symbols)[DSQ_OWN],
                        const u32 (&k)[DSQ_OWN]) {
    Lengths own = {0}, all;
    DSQ_UNROLL
    for (int i = 0; i < DSQ_OWN; ++i) {
        if (present >> i & 1) own.add(k[i], quotient(symbols[i], k[i]));
    }
    const Lengths before = {sum_before(own.packed, &all.packed, shared)};
    const u32 unary = start + all.low(), escapes = unary + all.unary();
    u32 low_at = start + before.low(), one_at = unary + before.unary();
    u32 escape_at = escapes + 16 * before.escapes();
    DSQ_UNROLL
    for (int i = 0; i < DSQ_OWN; ++i) {
        if (present >> i & 1) {
            const u32 q = quotient(symbols[i], k[i]);
            put(shared, low_at, symbols[i] & ((1u << k[i]) - 1));
            put(shared, one_at + q, 1);
            low_at += k[i], one_at += q + 1;
            if (q == ESCAPE) put(shared, escape_at, symbols[i]), escape_at += 16;
        }
    }
    return escapes + 16 * all.escapes();
}

#endif  // DSQ_SYMBOLS_CUH
