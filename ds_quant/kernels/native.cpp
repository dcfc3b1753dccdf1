// GroupCodec, casts and rotations on the CPU, bit for bit as the notes of reference.py and [Note: wire
// layout] of wire.py specify them.
//
// A group is loaded as fp32 into a buffer that stays in cache, and every step is a plain loop over
// it, which compilers vectorize: once per instruction set, and the dynamic loader picks. No fused
// multiply-adds (-ffp-contract=off). The functions are plain C and take an array of Jobs, so that
// many tensors cost one call and the library knows neither Python nor torch; kernels/native.py
// loads it.
#include "native.hpp"

enum Dtype { FP32, BF16, FP16 };
static const i64 CODES = -1;  // a row holds codes of groups, not numbers
enum Rounding { NEAREST, STOCHASTIC, RANDOM_SHIFT, LEARNED, GAUSSIAN };

// Mirrored by kernels/native.py. A change of the fields or their meaning changes the version.
struct Job {
    u8 *values, *wire, *base;  // rows of floats, of bytes, of floats to be subtracted (or null)
    i64 values_stride, wire_stride, base_stride;  // bytes from row to row
    i64 rows, numel, valid;    // elements of a row on the wire, and of values: fewer if rotated
    i64 dtype, base_dtype, add;  // of values and base; decode adds to the values that are there
    i64 cast;  // dtype of the numbers that a row holds, or CODES
    i64 bits, group, has_offset, rounding, rotation;
    i64 planes[3], scales, offsets, nbytes;  // where the sections of a row lie
    u64 key, step, first_vector, row_vectors;  // of the random bits; vectors from row to row
    u64 flips_low, flips_high;                 // bit i set: element i of a rotation block is negated
    const float *levels;  // learned and Gaussian: 2^bits levels
    u8 *own_values;       // fp32 values of row `own` of a sum, which the wire leaves out
    i64 own;              // -1 for none
    i64 own_signs;        // rows of a sum have sign flips of their own, row k those of vector k + 1
    float factor, unused;  // whole words
};
// Decode and add up with the first, encode the sum with the second; its values are not used.
struct Recode {
    Job sum, encode;
};
extern "C" i64 dsq_version() { return 7; }

// --- floats

INLINE float float_of(u32 bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

INLINE u32 bits_of(float x) {
    u32 bits;
    memcpy(&bits, &x, 4);
    return bits;
}

INLINE u16 to_bf16(float x) {  // nearest, ties to even
    const u32 bits = bits_of(x);
    const u32 rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    return (u16)((bits & 0x7FFFFFFF) > 0x7F800000u ? 0x7FC0 : rounded);
}

INLINE u16 to_fp16(float x) {  // nearest, ties to even
    const u32 sign = bits_of(x) >> 16 & 0x8000, rest = bits_of(x) & 0x7FFFFFFF;
    const u32 normal = (rest - 0x38000000 + 0xFFF + (rest >> 13 & 1)) >> 13;
    // Below 2^-14: adding 1/2 rounds to a multiple of 2^-24.
    const u32 subnormal = bits_of(float_of(rest) + 0.5f) - bits_of(0.5f);
    u32 found = rest < 0x38800000 ? subnormal : normal;
    if (rest >= 0x477FF000) found = rest > 0x7F800000 ? 0x7E00 : 0x7C00;
    return (u16)(sign | found);
}

INLINE float of_fp16(u16 x) {
    const u32 sign = (u32)(x & 0x8000) << 16, rest = (u32)(x & 0x7FFF) << 13;
    const float finite = float_of(rest) * 0x1p112f;  // moves the exponent, of subnormals too
    return float_of(sign | (rest >= 0x0F800000 ? 0x7F800000 | rest : bits_of(finite)));
}

INLINE void load(float *to, const u8 *from, i64 dtype, i64 count) {
    if (dtype == FP32) {
        memcpy(to, from, 4 * count);
        return;
    }
    for (i64 i = 0; i < count; ++i) {
        u16 bits;
        memcpy(&bits, from + 2 * i, 2);
        to[i] = dtype == BF16 ? float_of((u32)bits << 16) : of_fp16(bits);
    }
}

INLINE void store(u8 *to, const float *from, i64 dtype, i64 count) {
    if (dtype == FP32) {
        memcpy(to, from, 4 * count);
        return;
    }
    for (i64 i = 0; i < count; ++i) {
        const u16 bits = dtype == BF16 ? to_bf16(from[i]) : to_fp16(from[i]);
        memcpy(to + 2 * i, &bits, 2);
    }
}

INLINE i64 width_of(i64 dtype) { return dtype == FP32 ? 4 : 2; }

// --- bit planes

struct Plane {
    int width, shift;
};

// Planes of codes of `bits` bits, as layout.planes; returns how many.
INLINE int planes_of(i64 bits, Plane planes[3]) {
    int count = 0, shift = 0;
    for (int width = 8; width; width /= 2) {
        if (bits & width) {
            planes[count++] = {width, shift};
            shift += width;
        }
    }
    return count;
}

// As many codes as fit a byte of the plane, one per byte of a word: 2, 4 or 8.
template <int WIDTH>
struct Word;
template <>
struct Word<4> {
    typedef u16 Type;
};
template <>
struct Word<2> {
    typedef u32 Type;
};
template <>
struct Word<1> {
    typedef u64 Type;
};

template <int WIDTH>
INLINE void pack_plane(u8 *to, const u8 *codes, i64 count, int shift) {
    typedef typename Word<WIDTH>::Type Type;
    const Type mask = (Type)(0x0101010101010101u * ((1u << WIDTH) - 1));
    for (i64 i = 0; i < count * WIDTH / 8; ++i) {
        Type word, byte = 0;
        memcpy(&word, codes + sizeof word * i, sizeof word);
        word = word >> shift & mask;
        for (int j = 0; j < (int)sizeof word; ++j) byte |= word >> ((8 - WIDTH) * j);
        to[i] = (u8)byte;
    }
}

// The first plane overwrites the codes, the others add their bits.
template <int WIDTH>
INLINE void unpack_plane(u8 *codes, const u8 *from, i64 count, int shift) {
    typedef typename Word<WIDTH>::Type Type;
    const Type mask = (Type)(0x0101010101010101u * ((1u << WIDTH) - 1));
    for (i64 i = 0; i < count * WIDTH / 8; ++i) {
        Type word = from[i], before = 0;
        // Halves apart, again and again: 4 codes of 2 bits move by 12 and then by 6 bits.
        if (WIDTH == 1) word = (word | (u64)word << 28) & (Type)0x0000000F0000000Fu;
        if (WIDTH == 1) word = (word | (u64)word << 14) & (Type)0x0003000300030003u;
        if (WIDTH == 1) word = (word | (u64)word << 7) & mask;
        if (WIDTH == 2) word = (word | (u64)word << 12) & (Type)0x000F000Fu;
        if (WIDTH == 2) word = (word | (u64)word << 6) & mask;
        if (WIDTH == 4) word = (word | (u64)word << 4) & mask;
        if (shift) memcpy(&before, codes + sizeof word * i, sizeof word);
        word = word << shift | before;
        memcpy(codes + sizeof word * i, &word, sizeof word);
    }
}

// count codes, a multiple of 8, from element `start` of a row on.
INLINE void pack(const Job &job, u8 *row, i64 start, const u8 *codes, i64 count) {
    Plane planes[3];
    const int num_planes = planes_of(job.bits, planes);
    for (int p = 0; p < num_planes; ++p) {
        u8 *to = row + job.planes[p] + start / 8 * planes[p].width;
        switch (planes[p].width) {
            case 8: memcpy(to, codes, count); break;
            case 4: pack_plane<4>(to, codes, count, planes[p].shift); break;
            case 2: pack_plane<2>(to, codes, count, planes[p].shift); break;
            default: pack_plane<1>(to, codes, count, planes[p].shift);
        }
    }
}

INLINE void unpack(const Job &job, const u8 *row, i64 start, u8 *codes, i64 count) {
    Plane planes[3];
    const int num_planes = planes_of(job.bits, planes);
    for (int p = 0; p < num_planes; ++p) {
        const u8 *from = row + job.planes[p] + start / 8 * planes[p].width;
        switch (planes[p].width) {
            case 8: memcpy(codes, from, count); break;
            case 4: unpack_plane<4>(codes, from, count, planes[p].shift); break;
            case 2: unpack_plane<2>(codes, from, count, planes[p].shift); break;
            default: unpack_plane<1>(codes, from, count, planes[p].shift);
        }
    }
}

// --- random bits, [Note: who gets which bits] of random_bits.py

struct Key {
    u32 k0, k1;
};
INLINE Key next(Key key) { return {key.k0 + 0x9E3779B9u, key.k1 + 0xBB67AE85u}; }

static const u64 M0 = 0xD2511F53u, M1 = 0xCD9E8D57u, LOW = 0xFFFFFFFFu;
static const int ROUNDS = 7;

// Words of vectors first .. first + count - 1, 4 each. A word has a lane of 64 bits to itself; what
// lies above its 32 bits is never multiplied.
static void philox(const Job &job, u64 first, i64 count, u32 *words) {
    for (i64 i = 0; i < count; ++i) {
        u64 c0 = first + i, c1 = c0 >> 32, c2 = job.step, c3 = job.step >> 32;
        Key key = {(u32)job.key, (u32)(job.key >> 32)};
        for (int round = 0; round < ROUNDS; ++round, key = next(key)) {
            const u64 p0 = M0 * (c0 & LOW), p1 = M1 * (c2 & LOW);
            c0 = p1 >> 32 ^ c1 ^ key.k0, c1 = p1;
            c2 = p0 >> 32 ^ c3 ^ key.k1, c3 = p0;
        }
        const u32 found[4] = {(u32)c0, (u32)c1, (u32)c2, (u32)c3};
        memcpy(words + 4 * i, found, sizeof found);
    }
}

#ifdef __x86_64__
// The same, 4 vectors at once; returns how many it has done. Compilers do not find the instruction
// for a 32 x 32 product by themselves.
static __attribute__((target("avx2"))) i64 philox_avx2(const Job &job, u64 first, i64 count,
                                                       u32 *words) {
    i64 i = 0;
    for (; i + 4 <= count; i += 4) {
        const __m256i index = _mm256_set_epi64x(3, 2, 1, 0);
        __m256i c0 = _mm256_add_epi64(_mm256_set1_epi64x((i64)(first + i)), index);
        __m256i c1 = _mm256_srli_epi64(c0, 32);
        __m256i c2 = _mm256_set1_epi64x((i64)job.step), c3 = _mm256_srli_epi64(c2, 32);
        Key key = {(u32)job.key, (u32)(job.key >> 32)};
        for (int round = 0; round < ROUNDS; ++round, key = next(key)) {
            const __m256i p0 = _mm256_mul_epu32(c0, _mm256_set1_epi64x((i64)M0));
            const __m256i p1 = _mm256_mul_epu32(c2, _mm256_set1_epi64x((i64)M1));
            c1 = _mm256_xor_si256(c1, _mm256_set1_epi64x(key.k0));
            c3 = _mm256_xor_si256(c3, _mm256_set1_epi64x(key.k1));
            c0 = _mm256_xor_si256(_mm256_srli_epi64(p1, 32), c1), c1 = p1;
            c2 = _mm256_xor_si256(_mm256_srli_epi64(p0, 32), c3), c3 = p0;
        }
        const __m256i front = _mm256_blend_epi32(c0, _mm256_slli_epi64(c1, 32), 0xAA);
        const __m256i back = _mm256_blend_epi32(c2, _mm256_slli_epi64(c3, 32), 0xAA);
        const __m256i even = _mm256_unpacklo_epi64(front, back);  // vectors 0 and 2
        const __m256i odd = _mm256_unpackhi_epi64(front, back);
        __m256i *to = (__m256i *)(words + 4 * i);
        _mm256_storeu_si256(to, _mm256_permute2x128_si256(even, odd, 0x20));
        _mm256_storeu_si256(to + 1, _mm256_permute2x128_si256(even, odd, 0x31));
    }
    return i;
}
static const bool HAS_AVX2 = __builtin_cpu_supports("avx2");
#endif

static void random_words(const Job &job, u64 first, i64 count, u32 *words) {
    i64 done = 0;
#ifdef __x86_64__
    if (HAS_AVX2) done = philox_avx2(job, first, count, words);
#endif
    philox(job, first + done, count - done, words + 4 * done);
}

// --- rotation, [Note: rotation numbers] of reference.py

typedef float Lanes __attribute__((vector_size(32)));

template <int BLOCK>
INLINE void butterflies(float *values) {
    const int count = BLOCK / 8;
    Lanes v[count];  // in registers, once the loops are unrolled
    const Lanes one = {1, -1, 1, -1, 1, -1, 1, -1};
    const Lanes two = {1, 1, -1, -1, 1, 1, -1, -1};
    const Lanes four = {1, 1, 1, 1, -1, -1, -1, -1};
#pragma GCC unroll 16
    for (int i = 0; i < count; ++i) {
        Lanes x;
        memcpy(&x, values + 8 * i, sizeof x);
        // (a, b) -> (b + a, a - b)
        x = __builtin_shufflevector(x, x, 1, 0, 3, 2, 5, 4, 7, 6) + x * one;
        x = __builtin_shufflevector(x, x, 2, 3, 0, 1, 6, 7, 4, 5) + x * two;
        x = __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3) + x * four;
        v[i] = x;
    }
#pragma GCC unroll 4
    for (int distance = 1; distance < count; distance *= 2) {
#pragma GCC unroll 16
        for (int i = 0; i < count; ++i) {
            if (i & distance) continue;
            const Lanes a = v[i], b = v[i + distance];
            v[i] = a + b;
            v[i + distance] = a - b;
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < count; ++i) memcpy(values + 8 * i, &v[i], sizeof v[i]);
}

INLINE void rotate(float *values, i64 count, i64 block) {
    for (i64 start = 0; start < count; start += block) {
        if (block == 32) {
            butterflies<32>(values + start);
        } else if (block == 64) {
            butterflies<64>(values + start);
        } else {
            butterflies<128>(values + start);
        }
    }
}

// Factors +-1 of the elements of a rotation block.
struct Signs {
    float of[128];
    bool any;
};
INLINE Signs signs_of(u64 low, u64 high) {
    Signs signs;
    signs.any = low || high;
    for (int i = 0; signs.any && i < 128; ++i) {
        signs.of[i] = (i < 64 ? low : high) >> (i & 63) & 1 ? -1.0f : 1.0f;
    }
    return signs;
}

INLINE void flip_signs(float *values, i64 padded, i64 block, const Signs &signs) {
    for (i64 start = 0; signs.any && start < padded; start += block) {
        for (i64 i = 0; i < block; ++i) values[start + i] *= signs.of[i];
    }
}

// values = H (signs * values), `count` of them filled up with zeros to whole blocks.
INLINE void rotate_forward(float *values, i64 count, i64 padded, i64 block, const Signs &signs) {
    for (i64 i = count; i < padded; ++i) values[i] = 0.0f;
    flip_signs(values, padded, block, signs);
    rotate(values, padded, block);
}

// values = signs * (factor * (H values)), whole blocks.
INLINE void rotate_back(float *values, i64 padded, i64 block, const Signs &signs, float factor) {
    rotate(values, padded, block);
    for (i64 i = 0; i < padded; ++i) values[i] *= factor;
    flip_signs(values, padded, block, signs);
}

// --- encode

// One shift per key and step, rng.shift_of.
static float shift_of(const Job &job) {
    u32 words[4];
    random_words(job, 0, 1, words);
    return (float)(words[0] >> 8) * 0x1p-24f - 0.5f;
}

struct Range {
    float scale, offset, inverse;
    bool forced;  // every code is the code of 0
};

// Integers in the order of the floats, -0 below +0, NaN outermost; and back.
INLINE i32 ordered(float x) {
    const i32 bits = (i32)bits_of(x);
    return bits ^ (i32)((u32)(bits >> 31) >> 1);
}
INLINE float unordered(i32 x) { return float_of((u32)x ^ (u32)(x >> 31) >> 1); }
static const i32 INFINITE = 0x7F800000;

INLINE float flush(float x) { return x > -0x1p-126f && x < 0x1p-126f ? 0.0f : x; }

INLINE Range range_of(const Job &job, const float *values, i64 count, float shift) {
    const float tiny_span = 0x1p-99f, huge_scale = 0x1p126f, largest = 0x1.fffffep127f;
    float low = 0.0f, high = 0.0f, magnitude;
    bool finite;
    if (job.has_offset) {
        i32 lowest = INT32_MAX, highest = INT32_MIN;
        for (i64 i = 0; i < count; ++i) {
            const i32 x = ordered(values[i]);
            lowest = x < lowest ? x : lowest;
            highest = x > highest ? x : highest;
        }
        finite = highest < INFINITE && lowest > ~INFINITE;
        low = unordered(lowest), high = unordered(highest);
        magnitude = high > -low ? high : -low;
    } else {
        i32 largest_bits = 0;
        for (i64 i = 0; i < count; ++i) {
            const i32 x = (i32)(bits_of(values[i]) & 0x7FFFFFFF);
            largest_bits = x > largest_bits ? x : largest_bits;
        }
        finite = largest_bits < INFINITE;
        magnitude = float_of((u32)largest_bits);
    }
    const float span = job.has_offset ? high - low : magnitude;
    const i64 steps = job.has_offset ? (1 << job.bits) - 1 : (1 << (job.bits - 1)) - 1;
    Range range = {span / (float)steps, 0.0f, 0.0f, false};
    const bool tiny = finite && span < tiny_span;
    bool nan = !finite || !(tiny || range.scale <= huge_scale);
    if (tiny) range.scale = 0.0f;
    if (job.has_offset && !nan) {
        range.offset = tiny && magnitude < tiny_span ? 0.0f : flush(low);
        if (job.rounding == RANDOM_SHIFT) {
            range.offset = flush(range.offset + flush(range.scale * shift));
            nan = !(range.offset <= largest && range.offset >= -largest);
        }
    }
    const int fraction = job.rounding != STOCHASTIC ? 0 : job.bits == 8 ? 15 : 16;
    if (nan) return {float_of(0x7FC00000), 0.0f, 0.0f, true};
    if (!tiny) range.inverse = 1.0f / range.scale * (float)(1 << fraction);
    range.forced = tiny && job.rounding == LEARNED;
    return range;
}

// random: a u16 per value, or null unless rounding is stochastic.
INLINE void round_all(const Job &job, const float *values, const Range &range, const u16 *random,
                      i64 count, u8 *codes) {
    const int fraction = !random ? 0 : job.bits == 8 ? 15 : 16;
    const i64 zero = job.has_offset ? 0 : 1 << (job.bits - 1);
    const i64 lowest = job.has_offset ? 0 : 1, highest = (1 << job.bits) - 1;
    const float low = (float)((lowest - zero) * (1 << fraction));
    const float high = (float)((highest - zero) * (1 << fraction));
    const float unit = 0x1p23f + (float)(zero << fraction);  // adding it rounds to an integer
    const float offset = range.offset, inverse = range.inverse;
    if (random) {
        for (i64 i = 0; i < count; ++i) {
            float x = (values[i] - offset) * inverse;
            x = x > low ? x : low;
            x = x < high ? x : high;
            const u32 r = (u32)random[i] >> (16 - fraction);
            codes[i] = (u8)((bits_of(x + unit) + r) >> fraction);
        }
        return;
    }
    for (i64 i = 0; i < count; ++i) {
        float x = (values[i] - offset) * inverse;
        x = x > low ? x : low;
        x = x < high ? x : high;
        codes[i] = (u8)bits_of(x + unit);
    }
}

INLINE void nearest_level(const Job &job, const float *values, const Range &range,
                          const float *middles, i64 count, u8 *codes) {
    for (i64 i = 0; i < count; ++i) {
        const float x = (values[i] - range.offset) * range.inverse;
        i64 index = 0;  // middles below x
        for (i64 half = (i64)1 << (job.bits - 1); half; half /= 2) {
            index += middles[index + half - 1] < x ? half : 0;
        }
        codes[i] = (u8)index;
    }
}

// --- Gaussian levels, [Note: Gaussian levels] of reference.py

static const i64 GAUSSIAN_GROUP = 128;

INLINE float folded(const float *values) {
    float runs[4];
    for (int run = 0; run < 4; ++run) {
        const float *v = values + 32 * run;
        float sums[8];
        for (int i = 0; i < 8; ++i) sums[i] = (v[i] + v[i + 8]) + (v[i + 16] + v[i + 24]);
        runs[run] = ((sums[0] + sums[1]) + (sums[2] + sums[3])) +
                    ((sums[4] + sums[5]) + (sums[6] + sums[7]));
    }
    return (runs[0] + runs[1]) + (runs[2] + runs[3]);
}

// Codes of a group, and its scale as bf16.
INLINE u16 gaussian_group(const Job &job, const float *values, u8 *codes) {
    const int half = 1 << (job.bits - 1);
    i32 largest = 0;
    for (i64 i = 0; i < GAUSSIAN_GROUP; ++i) {
        const i32 x = (i32)(bits_of(values[i]) & 0x7FFFFFFF);
        largest = x > largest ? x : largest;
    }
    const bool tiny = float_of((u32)largest) < 0x1p-99f;
    if (tiny || largest >= (i32)bits_of(0x1p127f)) {  // or Inf or NaN
        memset(codes, half, GAUSSIAN_GROUP);
        return tiny ? 0 : 0x7FC0;
    }
    const i32 exponent = largest >> 23;
    const float unit = float_of((u32)(254 - exponent) << 23);
    const float *levels = job.levels + half;
    float units[GAUSSIAN_GROUP], squares[GAUSSIAN_GROUP], chosen[GAUSSIAN_GROUP];
    i32 found[GAUSSIAN_GROUP];
    for (i64 i = 0; i < GAUSSIAN_GROUP; ++i) {
        const float x = values[i] * unit;
        squares[i] = x * x;
        units[i] = x < 0.0f ? -x : x;
        found[i] = bits_of(values[i]) >> 31 ? 0 : half;
        chosen[i] = levels[0];
    }
    const float energy = folded(squares);
    const float inverse = 1.0f / (energy / (float)GAUSSIAN_GROUP);
    for (i64 i = 0; i < GAUSSIAN_GROUP; ++i) squares[i] *= inverse;
    for (int k = 0; k + 1 < half; ++k) {
        const float middle = (levels[k + 1] + levels[k]) / 2.0f, border = middle * middle;
        const float level = levels[k + 1];
        for (i64 i = 0; i < GAUSSIAN_GROUP; ++i) {
            found[i] += squares[i] > border;
            chosen[i] = squares[i] > border ? level : chosen[i];
        }
    }
    for (i64 i = 0; i < GAUSSIAN_GROUP; ++i) {
        codes[i] = (u8)found[i];
        chosen[i] *= units[i];
    }
    return to_bf16(energy * (1.0f / folded(chosen)) * float_of((u32)exponent << 23));
}

// Groups first .. last - 1 of all rows, counted through.
static EVERY_CPU void encode_groups(const Job *pointer, i64 first, i64 last) {
    const Job &job = *pointer;
    const i64 groups = (job.numel + job.group - 1) / job.group;
    const float shift = job.rounding == RANDOM_SHIFT ? shift_of(job) : 0.0f;
    const Signs signs = signs_of(job.flips_low, job.flips_high);
    std::vector<float> values(job.group), base(job.base ? job.group : 0);
    std::vector<float> middles(job.rounding == LEARNED ? (1 << job.bits) - 1 : 0);
    for (size_t i = 0; i < middles.size(); ++i) {
        middles[i] = (job.levels[i + 1] + job.levels[i]) / 2.0f;
    }
    std::vector<u8> codes(job.group);
    std::vector<u32> random(job.rounding == STOCHASTIC ? job.group / 2 : 0);
    for (i64 i = first; i < last; ++i) {
        const i64 row = i / groups, index = i % groups, start = index * job.group;
        const i64 count = job.numel - start < job.group ? job.numel - start : job.group;
        const i64 padded = (count + 7) / 8 * 8;
        const i64 valid = job.valid - start < job.group ? job.valid - start : job.group;
        u8 *wire = job.wire + row * job.wire_stride;
        const u8 *x = job.values + row * job.values_stride + start * width_of(job.dtype);
        if (job.cast == job.dtype && !job.base && !job.rotation) {  // every bit, of a NaN too
            memcpy(wire + start * width_of(job.cast), x, width_of(job.cast) * count);
            continue;
        }
        load(values.data(), x, job.dtype, valid);
        if (job.base) {
            const i64 width = width_of(job.base_dtype);
            load(base.data(), job.base + row * job.base_stride + start * width, job.base_dtype,
                 valid);
            for (i64 j = 0; j < valid; ++j) values[j] -= base[j];
        }
        if (job.rotation) rotate_forward(values.data(), valid, count, job.rotation, signs);
        if (job.cast != CODES) {
            store(wire + start * width_of(job.cast), values.data(), job.cast, count);
            continue;
        }
        if (job.rounding == GAUSSIAN) {
            const u16 scale = gaussian_group(job, values.data(), codes.data());
            pack(job, wire, start, codes.data(), padded);
            memcpy(wire + job.scales + 2 * index, &scale, 2);
            continue;
        }
        const Range range = range_of(job, values.data(), count, shift);
        if (range.forced) {
            memset(codes.data(), job.has_offset ? 0 : 1 << (job.bits - 1), count);
        } else if (job.rounding == LEARNED) {
            nearest_level(job, values.data(), range, middles.data(), count, codes.data());
        } else {
            const u16 *bits = nullptr;
            if (job.rounding == STOCHASTIC) {
                const u64 vector = job.first_vector + row * job.row_vectors + start / 8;
                random_words(job, vector, padded / 8, random.data());
                bits = (const u16 *)random.data();
            }
            round_all(job, values.data(), range, bits, count, codes.data());
        }
        memset(codes.data() + count, 0, padded - count);
        pack(job, wire, start, codes.data(), padded);
        memcpy(wire + job.scales + 4 * index, &range.scale, 4);
        if (job.has_offset) memcpy(wire + job.offsets + 4 * index, &range.offset, 4);
    }
}

INLINE i64 scale_width(const Job &job) { return job.rounding == GAUSSIAN ? 2 : 4; }

// The bytes of a row that no section uses.
static void clear_gaps(const Job &job, u8 *row) {
    if (job.cast != CODES) {
        const i64 used = job.numel * width_of(job.cast);
        memset(row + used, 0, job.nbytes - used);
        return;
    }
    const i64 vectors = (job.numel + 7) / 8, groups = (job.numel + job.group - 1) / job.group;
    Plane planes[3];
    const int num_planes = planes_of(job.bits, planes);
    for (int p = 0; p < num_planes; ++p) {
        const i64 end = job.planes[p] + vectors * planes[p].width;
        memset(row + end, 0, (p + 1 < num_planes ? job.planes[p + 1] : job.scales) - end);
    }
    const i64 end = job.scales + scale_width(job) * groups;
    memset(row + end, 0, (job.has_offset ? job.offsets : job.nbytes) - end);
    if (job.has_offset) memset(row + job.offsets + 4 * groups, 0, job.nbytes - job.offsets - 4 * groups);
}

// --- decode

// One group of a row as fp32.
INLINE void decode_group(const Job &job, const u8 *row, i64 index, i64 count, u8 *codes,
                         float *values) {
    const i64 start = index * job.group;
    if (job.cast != CODES) {
        load(values, row + start * width_of(job.cast), job.cast, count);
        return;
    }
    unpack(job, row, start, codes, (count + 7) / 8 * 8);
    float scale, offset = 0.0f;
    load(&scale, row + job.scales + scale_width(job) * index, job.rounding == GAUSSIAN ? BF16 : FP32,
         1);
    const i32 zero = job.has_offset ? 0 : 1 << (job.bits - 1);
    if (job.rounding == LEARNED || job.rounding == GAUSSIAN) {
        for (i64 i = 0; i < count; ++i) values[i] = job.levels[codes[i]] * scale;
    } else {
        for (i64 i = 0; i < count; ++i) values[i] = (float)((i32)codes[i] - zero) * scale;
    }
    if (!job.has_offset) return;
    memcpy(&offset, row + job.offsets + 4 * index, 4);
    for (i64 i = 0; i < count; ++i) values[i] += offset;
}

static EVERY_CPU void decode_groups(const Job *pointer, i64 first, i64 last) {
    const Job &job = *pointer;
    const i64 groups = (job.numel + job.group - 1) / job.group;
    std::vector<float> values(job.group), before(job.add ? job.group : 0);
    std::vector<u8> codes(job.group);
    for (i64 i = first; i < last; ++i) {
        const i64 row = i / groups, index = i % groups, start = index * job.group;
        const i64 count = job.numel - start < job.group ? job.numel - start : job.group;
        u8 *out = job.values + row * job.values_stride + start * width_of(job.dtype);
        const u8 *wire = job.wire + row * job.wire_stride;
        if (job.cast == job.dtype && !job.add) {
            memcpy(out, wire + start * width_of(job.cast), width_of(job.cast) * count);
            continue;
        }
        decode_group(job, wire, index, count, codes.data(), values.data());
        if (job.add) {
            load(before.data(), out, job.dtype, count);
            for (i64 j = 0; j < count; ++j) values[j] += before[j];
        }
        store(out, values.data(), job.dtype, count);
    }
}

// Signs of every row of a sum.
static std::vector<Signs> signs_of_rows(const Job &job) {
    std::vector<Signs> signs(job.own_signs ? job.rows : 0);
    for (size_t row = 0; row < signs.size(); ++row) {
        u32 w[4];
        random_words(job, row + 1, 1, w);
        signs[row] = signs_of(~((u64)w[1] << 32 | w[0]), ~((u64)w[3] << 32 | w[2]));
    }
    return signs;
}

// values = factor * (row 0 + row 1 + ...), one row.
static EVERY_CPU void sum_groups(const Job *pointer, i64 first, i64 last) {
    const Job &job = *pointer;
    const Signs signs = signs_of(job.flips_low, job.flips_high);
    const std::vector<Signs> own = signs_of_rows(job);
    std::vector<float> values(job.group), total(job.group);
    std::vector<u8> codes(job.group);
    for (i64 index = first; index < last; ++index) {
        const i64 start = index * job.group;
        const i64 count = job.numel - start < job.group ? job.numel - start : job.group;
        const u8 *wire = job.wire;
        for (i64 row = 0; row < job.rows; ++row) {
            float *target = row ? values.data() : total.data();
            if (row == job.own) {
                load(target, job.own_values + 4 * start, FP32, count);
            } else {
                decode_group(job, wire, index, count, codes.data(), target);
                wire += job.wire_stride;
            }
            if (job.own_signs) {
                rotate(target, count, job.rotation);
                flip_signs(target, count, job.rotation, own[row]);
            }
            if (row) {
                for (i64 j = 0; j < count; ++j) total[j] += values[j];
            }
        }
        if (job.rotation && !job.own_signs) {
            rotate_back(total.data(), count, job.rotation, signs, job.factor);
        } else if (job.factor != 1.0f) {
            for (i64 j = 0; j < count; ++j) total[j] *= job.factor;
        }
        const i64 valid = job.valid - start < job.group ? job.valid - start : job.group;
        store(job.values + start * width_of(job.dtype), total.data(), job.dtype, valid);
    }
}

// A rotation alone; `group` is its block. fp32 blocks are written behind the wire: the rotated
// values, or just the values if `rotation` is 0.
static EVERY_CPU void rotate_blocks(const Job *pointer, i64 first, i64 last) {
    const Job &job = *pointer;
    const i64 block = job.group;
    const Signs signs = signs_of(job.flips_low, job.flips_high);
    for (i64 index = first; index < last; ++index) {
        const i64 start = index * block;
        const i64 count = job.valid - start < block ? job.valid - start : block;
        float *out = (float *)(job.wire + 4 * start);
        load(out, job.values + start * width_of(job.dtype), job.dtype, count);
        if (job.rotation) rotate_forward(out, count, block, block, signs);
    }
}

// A sum and its encoding, in runs of whole groups of both codecs: what is added up stays in cache.
static i64 run_of(const Recode *recode) {
    i64 a = recode->sum.group, b = recode->encode.group;
    while (b) {
        const i64 rest = a % b;
        a = b, b = rest;
    }
    return recode->sum.group / a * recode->encode.group;
}

static void recode_runs(const Recode *recode, i64 first, i64 last) {
    Job sum = recode->sum, encode = recode->encode;
    const i64 numel = encode.numel, run = run_of(recode);
    std::vector<float> total(run < numel ? run : numel);
    for (i64 i = first; i < last; ++i) {
        const i64 start = i * run, stop = start + run < numel ? start + run : numel;
        sum.values = encode.values = (u8 *)total.data() - 4 * start;  // where element 0 would be
        sum_groups(&sum, start / sum.group, (stop + sum.group - 1) / sum.group);
        encode_groups(&encode, start / encode.group, (stop + encode.group - 1) / encode.group);
    }
}

// --- entry points

static i64 groups_of(const Job *job) { return (job->numel + job->group - 1) / job->group; }
static i64 groups_of_rows(const Job *job) { return job->rows * groups_of(job); }
static i64 blocks_of(const Job *job) { return (job->valid + job->group - 1) / job->group; }
static i64 runs_of(const Recode *job) {
    return (job->encode.numel + run_of(job) - 1) / run_of(job);
}
static void clear_rows(const Job &job) {
    for (i64 row = 0; row < job.rows; ++row) clear_gaps(job, job.wire + row * job.wire_stride);
}

extern "C" void dsq_encode(const Job *jobs, i64 count, i64 threads) {
    for (i64 i = 0; i < count; ++i) clear_rows(jobs[i]);
    spread(jobs, count, threads, encode_groups, groups_of_rows);
}
extern "C" void dsq_decode(const Job *jobs, i64 count, i64 threads) {
    spread(jobs, count, threads, decode_groups, groups_of_rows);
}
extern "C" void dsq_decode_sum(const Job *jobs, i64 count, i64 threads) {
    spread(jobs, count, threads, sum_groups, groups_of);
}
extern "C" void dsq_recode(const Recode *jobs, i64 count, i64 threads) {
    for (i64 i = 0; i < count; ++i) clear_rows(jobs[i].encode);
    spread(jobs, count, threads, recode_runs, runs_of);
}
extern "C" void dsq_rotate(const Job *jobs, i64 count, i64 threads) {
    spread(jobs, count, threads, rotate_blocks, blocks_of);
}
