// Floating-point values in memory and in registers: bf16, fp16 and fp32 as integer bits.
//
// The unit is a vector: 8 consecutive elements of a row, 16 bytes (16-bit types) or 32 (fp32).
// Exactness: conversions to fp32 are exact, conversions from fp32 round once to nearest even.
#ifndef DSQ_VALUES_CUH
#define DSQ_VALUES_CUH

#include "platform.cuh"

#define DSQ_FP32 0
#define DSQ_BF16 1
#define DSQ_FP16 2
#define DSQ_VECTOR 8

#ifdef DSQ_HOST
DSQ_DEVICE float fp16_to_float(u16 bits) {
    _Float16 h;
    __builtin_memcpy(&h, &bits, 2);
    return (float)h;
}
DSQ_DEVICE u16 float_to_fp16(float x) {
    const _Float16 h = (_Float16)x;
    u16 bits;
    __builtin_memcpy(&bits, &h, 2);
    return bits;
}
DSQ_DEVICE u16 float_to_bf16(float x) {
    const u32 b = bits_of(x);
    if (x != x) return 0x7FFF;
    return (u16)((b + 0x7FFF + (b >> 16 & 1)) >> 16);
}
DSQ_DEVICE u32 pack_bf16(float low, float high) {
    return float_to_bf16(low) | (u32)float_to_bf16(high) << 16;
}
DSQ_DEVICE u32 pack_fp16(float low, float high) {
    return float_to_fp16(low) | (u32)float_to_fp16(high) << 16;
}
DSQ_DEVICE float pair_max(float a, float b) { return max_nan(a, b); }
#else
DSQ_DEVICE float fp16_to_float(u16 bits) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
}
DSQ_DEVICE u32 pack_bf16(float low, float high) {
    u32 r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}
DSQ_DEVICE u32 pack_fp16(float low, float high) {
    u32 r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}
#endif

template <int DTYPE>
DSQ_DEVICE u32 pack_pair(float low, float high) {
    return DTYPE == DSQ_BF16 ? pack_bf16(low, high) : pack_fp16(low, high);
}

// The value in the low (0) or high (1) half of a word.
template <int DTYPE>
DSQ_DEVICE float half_of(u32 word, int high) {
    if (DTYPE == DSQ_BF16) return float_of(high ? word & 0xFFFF0000u : word << 16);
    return fp16_to_float((u16)(high ? word >> 16 : word & 0xFFFFu));
}

// NaN-propagating maximum and minimum of both halves at once.
template <int DTYPE>
DSQ_DEVICE u32 max_pair(u32 a, u32 b) {
#ifdef DSQ_HOST
    return pack_pair<DTYPE>(max_nan(half_of<DTYPE>(a, 0), half_of<DTYPE>(b, 0)),
                            max_nan(half_of<DTYPE>(a, 1), half_of<DTYPE>(b, 1)));
#else
    u32 r;
    if (DTYPE == DSQ_BF16) {
        asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    } else {
        asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    }
    return r;
#endif
}
template <int DTYPE>
DSQ_DEVICE u32 min_pair(u32 a, u32 b) {
#ifdef DSQ_HOST
    return pack_pair<DTYPE>(min_nan(half_of<DTYPE>(a, 0), half_of<DTYPE>(b, 0)),
                            min_nan(half_of<DTYPE>(a, 1), half_of<DTYPE>(b, 1)));
#else
    u32 r;
    if (DTYPE == DSQ_BF16) {
        asm("min.NaN.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    } else {
        asm("min.NaN.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    }
    return r;
#endif
}

// The 16 bytes from byte `skew` of 32 on; an even number below 16.
DSQ_DEVICE Words4 shifted(const Words4& low, const Words4& high, u32 skew) {
    u32 w[8];
    Words4 x;
    DSQ_UNROLL
    for (int i = 0; i < 8; ++i) w[i] = i < 4 ? low.w[i % 4] : high.w[i % 4];
    DSQ_UNROLL
    for (int i = 0; i < 6; ++i) w[i] = skew & 8 ? w[i + 2] : w[i];
    DSQ_UNROLL
    for (int i = 0; i < 5; ++i) w[i] = skew & 4 ? w[i + 1] : w[i];
    DSQ_UNROLL
    for (int i = 0; i < 4; ++i) x.w[i] = skew & 2 ? permute(w[i], w[i + 1], 0x5432) : w[i];
    return x;
}

// Bytes [from, to) of aligned ones, even numbers.
DSQ_DEVICE void store_part(u8* p, const Words4& x, u32 from, u32 to) {
    DSQ_UNROLL
    for (u32 i = 0; i < 4; ++i) {
        const bool low = from <= 4 * i && to > 4 * i, high = from <= 4 * i + 2 && to > 4 * i + 2;
        if (low && high) {
            store4(p + 4 * i, x.w[i]);
        } else if (low) {
            store2(p + 4 * i, x.w[i]);
        } else if (high) {
            store2(p + 4 * i + 2, x.w[i] >> 16);
        }
    }
}

// Stores the runs of a warp, one behind the other from an address on that is no multiple of 16, as
// aligned 16 bytes, the first of which begin with the end of the run before. All lanes make one; a
// lane whose run is not `whole` stores nothing, nor do those behind it.
struct SkewedStore {
    u8* p;  // aligned
    u32 skew;
    Words4 before;
    bool is_first, is_last;

    // end: the last 16 bytes of the run at `first`.
    DSQ_MEMBER SkewedStore(u8* first, const Words4& end, bool whole) {
        const u32 lane = threadIdx.x % DSQ_WARP, last = DSQ_WARP - 1;
        skew = (u64)first % 16;
        p = first - skew;
        DSQ_UNROLL
        for (int i = 0; i < 4; ++i) {
            before.w[i] = __shfl_sync(DSQ_ALL_LANES, end.w[i], (lane + last) % DSQ_WARP);
        }
        const u32 next = __shfl_sync(DSQ_ALL_LANES, (u32)whole, (lane + 1) % DSQ_WARP);
        is_first = lane == 0, is_last = lane == last || !next;
    }
    // The i-th 16 bytes of the run, in turn.
    DSQ_MEMBER void put(int i, const Words4& x) {
        const Words4 part = shifted(before, x, 16 - skew);
        if (i || !is_first) {
            store16(p + 16 * i, part);
        } else {
            store_part(p, part, skew, 16);
        }
        before = x;
    }
    DSQ_MEMBER void finish(int count) const {
        if (is_last) store_part(p + 16 * count, shifted(before, before, 16 - skew), 0, skew);
    }
};

// A vector as it lies in memory.
template <int DTYPE>
struct Raw {
    static const int WORDS = DTYPE == DSQ_FP32 ? 8 : 4;
    static const int ITEM = DTYPE == DSQ_FP32 ? 4 : 2;
    u32 w[WORDS];

    DSQ_MEMBER float at(int element) const {
        if (DTYPE == DSQ_FP32) return float_of(w[element % WORDS]);
        return half_of<DTYPE>(w[element / 2], element & 1);
    }
    // once: by load16_once, see there.
    DSQ_MEMBER void load(const u8* p, bool once) {
        DSQ_UNROLL
        for (int i = 0; i < WORDS / 4; ++i) {
            const Words4 x = once ? load16_once(p + 16 * i) : load16(p + 16 * i);
            DSQ_UNROLL
            for (int j = 0; j < 4; ++j) w[4 * i + j] = x.w[j];
        }
    }
    // At an address that is no multiple of 16: no aligned 16 bytes without one of the vector.
    DSQ_MEMBER void load_skewed(const u8* p) {
        const u32 skew = (u64)p % 16;
        Words4 before = load16(p - skew);
        DSQ_UNROLL
        for (int i = 0; i < WORDS / 4; ++i) {
            const Words4 next = load16(p - skew + 16 * (i + 1)), x = shifted(before, next, skew);
            DSQ_UNROLL
            for (int j = 0; j < 4; ++j) w[4 * i + j] = x.w[j];
            before = next;
        }
    }
    DSQ_MEMBER void load_anywhere(const u8* p) {
        if ((u64)p % 16) {
            load_skewed(p);
        } else {
            load(p, false);
        }
    }
    DSQ_MEMBER Words4 part(int i) const {
        const Words4 x = {{w[4 * i], w[4 * i + 1], w[4 * i + 2], w[4 * i + 3]}};
        return x;
    }
    DSQ_MEMBER void store(u8* p) const {
        DSQ_UNROLL
        for (int i = 0; i < WORDS / 4; ++i) store16(p + 16 * i, part(i));
    }
    DSQ_MEMBER void set(const float (&x)[DSQ_VECTOR]) {
        DSQ_UNROLL
        for (int i = 0; i < WORDS; ++i) {
            const int pair = 2 * i % 8;
            w[i] = DTYPE == DSQ_FP32 ? bits_of(x[i]) : pack_pair<DTYPE>(x[pair], x[pair + 1]);
        }
    }
};

#ifndef DSQ_NOTE_ELEMENT  // an element is read or written by itself; tests count them
#define DSQ_NOTE_ELEMENT()
#endif

template <int DTYPE>
DSQ_DEVICE u32 load_bits(const u8* p) {
    return DTYPE == DSQ_FP32 ? load4(p) : load2(p);
}
template <int DTYPE>
DSQ_DEVICE u32 load_element(const u8* p) {
    DSQ_NOTE_ELEMENT();
    return load_bits<DTYPE>(p);
}
// Of memory that this kernel writes.
template <int DTYPE>
DSQ_DEVICE u32 reload_element(const u8* p) {
    DSQ_NOTE_ELEMENT();
    return DTYPE == DSQ_FP32 ? load4_again(p) : load2_again(p);
}
template <int DTYPE>
DSQ_DEVICE void store_bits(u8* p, u32 bits) {
    DSQ_NOTE_ELEMENT();
    if (DTYPE == DSQ_FP32) {
        store4(p, bits);
    } else {
        store2(p, bits & 0xFFFFu);
    }
}
template <int DTYPE>
DSQ_DEVICE void store_element(u8* p, float x) {
    store_bits<DTYPE>(p, DTYPE == DSQ_FP32 ? bits_of(x) : pack_pair<DTYPE>(x, 0.0f));
}
template <int DTYPE>
DSQ_DEVICE float element_value(u32 bits) {
    return DTYPE == DSQ_FP32 ? float_of(bits) : half_of<DTYPE>(bits, 0);
}

#endif  // DSQ_VALUES_CUH
