// lossless.py on the CPU, byte for byte: [Note: lossless format], [Note: lossless choices] there.
//
// A block of 2048 elements is worked on in buffers that stay in cache. What can be is a plain loop
// that compilers vectorize; only the fields of a bit string are read and written one by one.
//
// A message is not trusted: a payload is copied into a buffer that is longer than any payload and
// ends in zeros, every position is compared with the end of the payload before it is used, and a
// block is written when all of it was found to be possible.
#include <atomic>

#include "native.hpp"

// Mirrored by kernels/native.py; the version is that of native.cpp.
struct LosslessJob {
    const u16 *reference;
    u16 *values;  // encode reads them, decode writes them; may be the reference
    u8 *wire;
    i64 numel, exponent_at;  // 7 for bf16, 10 for fp16
    i64 nbytes;              // of the message: encode writes it, decode reads it
    i64 problem;             // decode writes it
};

// Places in PROBLEMS of kernels/lossless.py, from 1 on; 0 for none.
enum Problem { NONE, LENGTH, MODE, KIND, SCALE, COUNT, OFFSET, QUOTIENT, SYMBOL, GAP, CHECKSUM };
enum Mode { UNCHANGED, RAW, BLOCKS };
enum Kind { SAME, PLAIN, RICE, GAPS = 16 };

static const i64 BLOCK = 2048, HEADER = 16, ENTRY = 8, PAYLOAD = 2 * BLOCK;
static const i32 MAX_K = 15, ESCAPE = 16, ZERO = 511;  // ZERO: the exponent of a zero
static const i32 UNUSUAL = 1 << 30;                    // more words than any payload has

struct Entry {
    u32 words;  // on the wire: where they end
    u16 count;
    u8 scale, kind;
};
static_assert(sizeof(Entry) == ENTRY, "as on the wire");

// Some symbols, and what their parameters follow from.
struct List {
    i32 count;
    u32 symbols[BLOCK];
    i32 exponents[BLOCK];
};

// One message: what the threads that work on it share.
struct Call {
    LosslessJob *job = nullptr;
    i64 blocks = 0, units = 0;  // units: blocks that are to be read
    std::atomic<u32> checksum{0};
    std::atomic<i64> problem{NONE};
    const u8 *payload = nullptr;
    i64 words = 0;  // of all payloads
    u32 header[4] = {};

    void open(LosslessJob *a_job) {
        job = a_job;
        blocks = (job->numel + BLOCK - 1) / BLOCK;
    }
    u8 *table() const { return job->wire + HEADER; }
    i32 size(i64 block) const {
        const i64 rest = job->numel - block * BLOCK;
        return (i32)(rest < BLOCK ? rest : BLOCK);
    }
};

INLINE Entry entry_at(const u8 *table, i64 block) {
    Entry entry;
    memcpy(&entry, table + ENTRY * block, ENTRY);
    return entry;
}

// --- symbols

INLINE u32 ordered(u32 bits) { return bits ^ (bits >> 15) * 0x7FFF; }

INLINE u32 symbol_of(u32 value, u32 reference) {
    const u32 difference = (ordered(value) - ordered(reference)) & 0xFFFF;
    return (difference << 1 & 0xFFFF) ^ (difference >> 15) * 0xFFFF;
}

INLINE u32 restored(u32 symbol, u32 reference) {
    const u32 difference = symbol >> 1 ^ (symbol & 1) * 0xFFFF;
    return ordered((ordered(reference) + difference) & 0xFFFF);
}

INLINE i32 exponent_of(u32 reference, i64 exponent_at) {
    const i32 magnitude = reference & 0x7FFF, exponent = magnitude >> exponent_at;
    return magnitude ? exponent > 1 ? exponent : 1 : ZERO;
}

INLINE i32 parameter(i32 scale, i32 exponent) {
    const i32 k = scale - exponent;
    return k < 0 ? 0 : k > MAX_K ? MAX_K : k;
}

INLINE i32 quotient(u32 symbol, i32 k) {
    const i32 q = (i32)(symbol >> k);
    return q < ESCAPE ? q : ESCAPE;
}

INLINE i32 bit_length(u32 number) {  // below 2^24; of 0 some negative number
    const float x = (float)(i32)number;
    u32 bits;
    memcpy(&bits, &x, 4);
    return (i32)(bits >> 23) - 126;
}

// Part of the checksum.
INLINE u32 checksum_of(const u16 *values, i64 start, i32 count) {
    u32 sum = 0;
    for (i32 i = 0; i < count; ++i) {
        const u32 x = ((u32)start + (u32)i) * 0x9E3779B1u;
        sum += values[i] * ((x ^ x >> 15) * 0x85EBCA77u | 1);
    }
    return sum;
}

INLINE void load_block(const Call &call, i64 block, List &all) {
    const LosslessJob &job = *call.job;
    const u16 *values = job.values + block * BLOCK, *reference = job.reference + block * BLOCK;
    const i64 exponent_at = job.exponent_at;
    all.count = call.size(block);
    for (i32 i = 0; i < all.count; ++i) all.symbols[i] = symbol_of(values[i], reference[i]);
    for (i32 i = 0; i < all.count; ++i) all.exponents[i] = exponent_of(reference[i], exponent_at);
}

// --- the sender's choices

INLINE i32 bits_of_list(const List &list, i32 scale) {
    i32 sum = 0;
    for (i32 i = 0; i < list.count; ++i) {
        const i32 k = parameter(scale, list.exponents[i]), q = quotient(list.symbols[i], k);
        sum += k + q + 1 + (q == ESCAPE ? 16 : 0);
    }
    return sum;
}

// Fewest bits of a list under one of the scales mean - 3 to mean.
INLINE i32 best_scale(const List &list, i32 mean, u8 *scale) {
    i32 fewest = UNUSUAL;
    for (i32 candidate = mean - 3; candidate <= mean; ++candidate) {
        const i32 clamped = candidate < 0 ? 0 : candidate > 255 ? 255 : candidate;
        const i32 bits = bits_of_list(list, clamped);
        if (bits < fewest) fewest = bits, *scale = (u8)clamped;
    }
    return fewest;
}

// Mean of bit length + exponent over the changed elements with a reference that is not zero.
INLINE i32 mean_size(const List &all) {
    i32 sum = 0, count = 0;
    for (i32 i = 0; i < all.count; ++i) {
        const bool known = all.symbols[i] > 0 && all.exponents[i] < ZERO;
        sum += known ? bit_length(all.symbols[i]) + all.exponents[i] : 0;
        count += known;
    }
    return sum / (count ? count : 1);
}

// Gaps, as a list with the exponent 0, and u - 1 of the changed elements.
INLINE void changes_of(const List &all, List &gaps, List &rest) {
    i32 places[BLOCK], found = 0;
    for (i32 i = 0; i < all.count; ++i) {
        places[found] = i;
        found += all.symbols[i] > 0;
    }
    gaps.count = rest.count = found;
    for (i32 i = 0; i < found; ++i) {
        rest.symbols[i] = all.symbols[places[i]] - 1;
        rest.exponents[i] = all.exponents[places[i]];
        gaps.symbols[i] = (u32)(places[i] - (i ? places[i - 1] : -1) - 1);
        gaps.exponents[i] = 0;
    }
}

INLINE i32 words_of(i32 bits) { return (bits + 31) / 32; }

// The entry of a block; `words` is how many its payload has.
INLINE Entry planned(const List &all, List &gaps, List &rest) {
    i32 changed = 0;
    for (i32 i = 0; i < all.count; ++i) changed += all.symbols[i] > 0;
    if (!changed) return {0, 0, 0, SAME};
    const i32 mean = mean_size(all);
    Entry best = {(u32)(all.count + 1) / 2, 0, 0, PLAIN}, other = {0, 0, 0, RICE};
    other.words = (u32)words_of(best_scale(all, mean, &other.scale));
    if (other.words < best.words) best = other;
    if (2 * changed > all.count) return best;
    changes_of(all, gaps, rest);
    const i32 bits = best_scale(rest, mean, &other.scale);
    i32 r = bit_length((u32)(all.count / changed)) - 1, gap_bits = bits_of_list(gaps, r);
    if (r > 0) {
        const i32 fewer = bits_of_list(gaps, r - 1);
        if (fewer < gap_bits) gap_bits = fewer, --r;
    }
    other = {(u32)words_of(bits + gap_bits), (u16)changed, other.scale, (u8)(GAPS + r)};
    return other.words < best.words ? other : best;
}

static EVERY_CPU void plan_blocks(Call *call, i64 first, i64 last) {
    List all, gaps, rest;
    u32 checksum = 0;
    for (i64 block = first; block < last; ++block) {
        load_block(*call, block, all);
        const Entry entry = planned(all, gaps, rest);
        memcpy(call->table() + ENTRY * block, &entry, ENTRY);
        checksum += checksum_of(call->job->values + block * BLOCK, block * BLOCK, all.count);
    }
    call->checksum += checksum;
}

// --- writing

// Fields from the lowest bit on. A field and the seven bits before it fit the eight bytes that are
// written at once, so up to eight bytes past the last field are overwritten.
struct Writer {
    u8 *at;
    u64 bits = 0;
    u32 count = 0;

    void put(u64 field, u32 length) {
        bits |= field << count;
        count += length;
        memcpy(at, &bits, 8);
        at += count / 8;
        bits >>= count & ~7u;
        count &= 7;
    }
};

INLINE void write_list(const List &list, i32 scale, Writer &writer) {
    u32 k[BLOCK + 1], low[BLOCK + 1], q[BLOCK], escaped = 0;  // one more: fields go in pairs
    const i32 count = list.count;
    for (i32 i = 0; i < count; ++i) {
        k[i] = (u32)parameter(scale, list.exponents[i]);
        low[i] = list.symbols[i] & ((1u << k[i]) - 1);
        q[i] = (u32)quotient(list.symbols[i], (i32)k[i]);
        escaped += q[i] == ESCAPE;
    }
    k[count] = low[count] = 0;
    for (i32 i = 0; i < count; i += 2) {
        writer.put(low[i] | (u64)low[i + 1] << k[i], k[i] + k[i + 1]);
    }
    for (i32 i = 0; i + 1 < count; i += 2) {
        writer.put((2ull << q[i + 1] | 1) << q[i], q[i] + q[i + 1] + 2);
    }
    if (count % 2) writer.put(1ull << q[count - 1], q[count - 1] + 1);
    for (i32 i = 0; escaped > 0; ++i) {
        if (q[i] < ESCAPE) continue;
        writer.put(list.symbols[i], 16);
        --escaped;
    }
}

static EVERY_CPU void write_blocks(Call *call, i64 first, i64 last) {
    List all, gaps, rest;
    u8 buffer[PAYLOAD + 16];
    for (i64 block = first; block < last; ++block) {
        const Entry entry = entry_at(call->table(), block);
        const u32 start = block ? entry_at(call->table(), block - 1).words : 0;
        const i64 nbytes = 4 * (i64)(entry.words - start);
        if (entry.kind == SAME) continue;
        if (entry.kind == PLAIN) {
            memset(buffer, 0, PAYLOAD);
            memcpy(buffer, call->job->values + block * BLOCK, 2 * call->size(block));
        } else {
            Writer writer{buffer};
            load_block(*call, block, all);
            if (entry.kind == RICE) {
                write_list(all, entry.scale, writer);
            } else {
                changes_of(all, gaps, rest);
                write_list(gaps, entry.kind - GAPS, writer);
                write_list(rest, entry.scale, writer);
            }
            memset(writer.at + (writer.count > 0), 0, 4);  // the last word's rest
        }
        memcpy((u8 *)call->payload + 4 * (i64)start, buffer, nbytes);
    }
}

static i64 blocks_of(const Call *call) { return call->blocks; }

static void encode(LosslessJob *job, i64 threads) {
    Call call;
    call.open(job);
    if (job->numel == 0) {
        job->nbytes = 0;
        return;
    }
    spread(&call, 1, threads, plan_blocks, blocks_of);
    for (i64 block = 0; block < call.blocks; ++block) {
        Entry entry = entry_at(call.table(), block);
        call.words += entry.words;
        entry.words = (u32)call.words;
        memcpy(call.table() + ENTRY * block, &entry, ENTRY);
    }
    const i64 start = HEADER + ENTRY * call.blocks, raw = (HEADER + 2 * job->numel + 15) / 16 * 16;
    i64 used = (start + 4 * call.words + 15) / 16 * 16;
    u32 mode = BLOCKS;
    if (call.words == 0) {
        mode = UNCHANGED, used = HEADER;
    } else if (used >= raw) {
        mode = RAW, used = raw;
        memcpy(call.table(), job->values, 2 * job->numel);
        memset(call.table() + 2 * job->numel, 0, raw - HEADER - 2 * job->numel);
    } else {
        call.payload = job->wire + start;
        spread(&call, 1, threads, write_blocks, blocks_of);
        memset(job->wire + start + 4 * call.words, 0, used - start - 4 * call.words);
    }
    const u32 header[4] = {mode, call.checksum, (u32)used, (u32)((u64)used >> 32)};
    memcpy(job->wire, header, HEADER);
    job->nbytes = used;
}

// --- reading

// A payload, followed by zeros that can be read like it.
struct Reader {
    u8 bytes[PAYLOAD + 80];  // 64: what find_ones reads ahead
    i32 at, stop;  // bits

    u64 word(i32 byte) const {
        u64 found;
        memcpy(&found, bytes + byte, 8);
        return found;
    }
    u32 field(i32 bit, i32 length) const {
        return (u32)(word(bit >> 3) >> (bit & 7)) & ((1u << length) - 1);
    }
};

// Where the next `count` ones lie, into `ones`, which has room for 64 more; false if they are not
// all there.
INLINE bool find_ones(const Reader &reader, i32 count, i32 *ones) {
    i32 found = 0, base = reader.at & ~63;
    u64 bits = reader.word(base >> 3) >> (reader.at & 63) << (reader.at & 63);
    while (found < count && base < reader.stop) {
        const i32 here = __builtin_popcountll(bits);
        for (i32 i = 0; i < here; i += 4) {  // four at a time: most of the branches are foreseen
            for (i32 j = 0; j < 4; ++j) {
                ones[found + i + j] = base + (bits ? __builtin_ctzll(bits) : 0);
                bits &= bits - 1;
            }
        }
        found += here, base += 64;
        bits = reader.word(base >> 3);
    }
    return found >= count;
}

// The symbols of a list, whose count and exponents are given.
INLINE Problem read_list(Reader &reader, i32 scale, List &list) {
    i32 k[BLOCK], ones[BLOCK + 72], sum = 0;
    const i32 count = list.count;
    for (i32 i = 0; i < count; ++i) sum += k[i] = parameter(scale, list.exponents[i]);
    i32 low = reader.at;
    reader.at += sum;
    if (reader.at > reader.stop) return OFFSET;
    ones[0] = reader.at - 1;
    if (!find_ones(reader, count, ones + 1)) return QUOTIENT;

    i32 largest = 0, escaped = 0;
    for (i32 i = 0; i < count; ++i) {
        const i32 q = ones[i + 1] - ones[i] - 1;
        list.symbols[i] = (u32)q << k[i];
        largest = largest > q ? largest : q;
        escaped += q == ESCAPE;
    }
    if (largest > ESCAPE) return QUOTIENT;
    i32 escape = ones[count] + 1;
    reader.at = escape + 16 * escaped;
    if (reader.at > reader.stop) return OFFSET;

    for (i32 i = 0; i < count; ++i) {
        list.symbols[i] |= reader.field(low, k[i]);
        low += k[i];
    }
    for (i32 i = 0; escaped > 0; ++i) {
        if (ones[i + 1] - ones[i] - 1 < ESCAPE) continue;
        list.symbols[i] = reader.field(escape, 16);
        escape += 16;
        --escaped;
    }
    u32 bits = 0;
    for (i32 i = 0; i < count; ++i) bits |= list.symbols[i];
    return bits > 0xFFFF ? SYMBOL : NONE;
}

INLINE Problem read_gaps(Reader &reader, const Entry &entry, const u16 *reference,
                         i64 exponent_at, List &all, List &rest) {
    i32 places[BLOCK], place = -1;
    rest.count = entry.count;
    for (i32 i = 0; i < rest.count; ++i) rest.exponents[i] = 0;
    Problem problem = read_list(reader, entry.kind - GAPS, rest);
    if (problem) return problem;
    for (i32 i = 0; i < rest.count; ++i) {
        place += (i32)rest.symbols[i] + 1;
        if (place >= all.count) return GAP;
        places[i] = place;
        rest.exponents[i] = exponent_of(reference[place], exponent_at);
    }
    problem = read_list(reader, entry.scale, rest);
    if (problem) return problem;
    memset(all.symbols, 0, sizeof(all.symbols));
    for (i32 i = 0; i < rest.count; ++i) {
        if (rest.symbols[i] == 0xFFFF) return SYMBOL;
        all.symbols[places[i]] = rest.symbols[i] + 1;
    }
    return NONE;
}

// What an entry alone shows.
INLINE Problem check_entry(const Entry &entry, i64 words, i32 size) {
    const bool gaps = entry.kind >= GAPS && entry.kind <= GAPS + MAX_K;
    if (!gaps && entry.kind > RICE) return KIND;
    if (!gaps && entry.kind != RICE && entry.scale) return SCALE;
    if (gaps ? entry.count == 0 || entry.count > size : entry.count != 0) return COUNT;
    if (words < 0 || words > (size + 1) / 2 || (entry.kind == SAME && words)) return OFFSET;
    return entry.kind == PLAIN && words != (size + 1) / 2 ? OFFSET : NONE;
}

// Write one block, after all of it was found to be possible.
INLINE Problem read_block(const Call &call, i64 block, List &all, List &rest, Reader &reader) {
    const LosslessJob &job = *call.job;
    const u16 *reference = job.reference + block * BLOCK;
    u16 *values = job.values + block * BLOCK;
    const Entry entry = entry_at(call.table(), block);
    const i64 start = block ? entry_at(call.table(), block - 1).words : 0;
    const i64 words = (i64)entry.words - start;
    all.count = call.size(block);
    Problem problem = check_entry(entry, words, all.count);
    if (problem) return problem;
    if (start + words > call.words) return OFFSET;
    const u8 *payload = call.payload + 4 * start;
    if (entry.kind == SAME) {
        memmove(values, reference, 2 * all.count);
        return NONE;
    }
    if (entry.kind == PLAIN) {
        memcpy(values, payload, 2 * all.count);
        return NONE;
    }
    memcpy(reader.bytes, payload, 4 * words);
    memset(reader.bytes + 4 * words, 0, sizeof(reader.bytes) - 4 * words);
    reader.at = 0, reader.stop = 32 * (i32)words;
    const i64 exponent_at = job.exponent_at;
    if (entry.kind == RICE) {
        for (i32 i = 0; i < all.count; ++i) {
            all.exponents[i] = exponent_of(reference[i], exponent_at);
        }
        problem = read_list(reader, entry.scale, all);
    } else {
        problem = read_gaps(reader, entry, reference, exponent_at, all, rest);
    }
    if (problem) return problem;
    if (words_of(reader.at) != words) return OFFSET;
    for (i32 i = 0; i < all.count; ++i) values[i] = (u16)restored(all.symbols[i], reference[i]);
    return NONE;
}

static EVERY_CPU void read_blocks(Call *call, i64 first, i64 last) {
    const LosslessJob &job = *call->job;
    List all, rest;
    Reader reader;
    u32 checksum = 0;
    for (i64 block = first; block < last; ++block) {
        u16 *values = job.values + block * BLOCK;
        const i32 size = call->size(block);
        Problem problem = NONE;
        if (call->header[0] == UNCHANGED) {
            memmove(values, job.reference + block * BLOCK, 2 * size);
        } else if (call->header[0] == RAW) {
            memcpy(values, call->table() + 2 * block * BLOCK, 2 * size);
        } else {
            problem = read_block(*call, block, all, rest, reader);
        }
        if (problem) {
            call->problem = problem;
            return;
        }
        checksum += checksum_of(values, block * BLOCK, size);
    }
    call->checksum += checksum;
}

static i64 units_of(const Call *call) { return call->units; }

// What the header and the last entry show; without a problem the blocks are to be read.
static Problem read_header(Call *call) {
    const LosslessJob &job = *call->job;
    if (job.numel == 0) return job.nbytes ? LENGTH : NONE;
    if (job.nbytes < HEADER || job.nbytes % 16) return LENGTH;
    memcpy(call->header, job.wire, HEADER);
    if ((call->header[2] | (u64)call->header[3] << 32) != (u64)job.nbytes) return LENGTH;
    const i64 start = HEADER + ENTRY * call->blocks;
    if (call->header[0] == UNCHANGED) {
        if (job.nbytes != HEADER) return LENGTH;
    } else if (call->header[0] == RAW) {
        if (job.nbytes != (HEADER + 2 * job.numel + 15) / 16 * 16) return LENGTH;
    } else if (call->header[0] == BLOCKS) {
        if (job.nbytes < start) return LENGTH;
        call->payload = job.wire + start;
        call->words = entry_at(call->table(), call->blocks - 1).words;
        const i64 room = (job.nbytes - start) / 4;
        if (call->words > room) return OFFSET;
        if (room - call->words > 3) return LENGTH;
    } else {
        return MODE;
    }
    call->units = call->blocks;
    return NONE;
}

extern "C" void dsq_lossless_encode(LosslessJob *jobs, i64 count, i64 threads) {
    for (i64 i = 0; i < count; ++i) encode(jobs + i, threads);
}
extern "C" void dsq_lossless_decode(LosslessJob *jobs, i64 count, i64 threads) {
    std::vector<Call> calls(count);
    for (i64 i = 0; i < count; ++i) {
        calls[i].open(jobs + i);
        calls[i].problem = read_header(&calls[i]);
    }
    spread(calls.data(), count, threads, read_blocks, units_of);
    for (i64 i = 0; i < count; ++i) {
        const i64 problem = calls[i].problem;
        const bool told = calls[i].checksum == calls[i].header[1];
        jobs[i].problem = problem || told ? problem : (i64)CHECKSUM;
    }
}
