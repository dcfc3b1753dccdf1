// Codes in registers and as bit planes on the wire, [Note: wire layout] of ds_quant/kernels/wire.py.
//
// In registers the 8 codes of a vector are two words of bytes: byte k of `even` is code 2k, byte k
// of `odd` code 2k + 1. Plane p of a vector is `width` bytes, code i in bits [i * width, ...).
// A run is RUN consecutive vectors; its part of a plane is read or written at once.
//
// Every plane starts at a multiple of 16 bytes and is filled up to one, so an aligned run of up to
// 16 bytes that starts inside a plane ends inside its filling.
#ifndef DSQ_WIRE_CUH
#define DSQ_WIRE_CUH

#include "platform.cuh"

#define DSQ_MAX_PLANES 3

template <int BITS>
struct Planes {
    static_assert(BITS >= 2 && BITS <= 8, "2 to 8 bits");
    static const int COUNT = BITS == 7 ? 3 : BITS == 6 || BITS == 5 || BITS == 3 ? 2 : 1;
    static const int FIRST = BITS == 8 ? 8 : BITS >= 4 ? 4 : 2;
    static const int SECOND = BITS == 7 || BITS == 6 ? 2 : 1;
    DSQ_MEMBER static constexpr int width(int plane) {
        return plane == 0 ? FIRST : plane == 1 ? SECOND : 1;
    }
    DSQ_MEMBER static constexpr int shift(int plane) {
        return plane == 0 ? 0 : plane == 1 ? FIRST : FIRST + SECOND;
    }
};

struct Codes {
    u32 even, odd;
};

// A code in every byte.
DSQ_DEVICE constexpr u32 in_every_byte(u32 code) { return code * 0x01010101u; }

// Bits [shift, shift + WIDTH) of the codes of a vector, which have BITS bits, as WIDTH bytes.
template <int BITS, int WIDTH>
DSQ_DEVICE u64 plane_of(Codes codes, int shift) {
    if (WIDTH == 8) {
        const u32 low = permute(codes.even, codes.odd, 0x5140);
        const u32 high = permute(codes.even, codes.odd, 0x7362);
        return (u64)high << 32 | low;
    }
    const u32 mask = in_every_byte((1u << WIDTH) - 1);
    // Byte k: codes 2k and 2k + 1.
    u32 pairs = codes.even + (codes.odd << WIDTH);
    if (BITS != WIDTH) {
        pairs = (codes.even >> shift & mask) | (codes.odd >> shift & mask) << WIDTH;
    }
    if (WIDTH == 2) {
        pairs = (pairs | pairs >> 4) & 0x00FF00FF;
        pairs = (pairs | pairs >> 8) & 0xFFFF;
    } else if (WIDTH == 1) {
        pairs = (pairs | pairs >> 6) & 0x000F000F;
        pairs = (pairs | pairs >> 12) & 0xFF;
    }
    return pairs;
}

// Inverse of plane_of: the codes of a plane, at the bottom of each byte.
template <int WIDTH>
DSQ_DEVICE Codes codes_of(u64 plane) {
    if (WIDTH == 8) {
        const u32 low = (u32)plane, high = (u32)(plane >> 32);
        const Codes codes = {permute(low, high, 0x6420), permute(low, high, 0x7531)};
        return codes;
    }
    u32 pairs = (u32)plane;
    if (WIDTH == 2) {
        pairs = (pairs | pairs << 8) & 0x00FF00FF;
        pairs = (pairs | pairs << 4) & 0x0F0F0F0F;
    } else if (WIDTH == 1) {
        pairs = (pairs | pairs << 12) & 0x000F000F;
        pairs = (pairs | pairs << 6) & 0x03030303;
    }
    const u32 mask = in_every_byte((1u << WIDTH) - 1);
    const Codes codes = {pairs & mask, pairs >> WIDTH & mask};
    return codes;
}

// BYTES consecutive bytes of a plane: 1, 2, 4, 8, 16 or 32, at a multiple of min(BYTES, 16).
template <int BYTES>
struct PlaneBytes {
    static const int WORDS = (BYTES + 3) / 4;
    u32 w[WORDS];

    // `width` bytes of vector v of the run.
    DSQ_MEMBER void put(int v, int width, u64 bits) {
        const int start = v * width;
        if (width == 8) {
            w[start / 4] = (u32)bits;
            w[(start / 4 + 1) % WORDS] = (u32)(bits >> 32);
        } else if (start % 4 == 0) {
            w[start / 4] = (u32)bits;
        } else {
            w[start / 4] |= (u32)bits << (start % 4 * 8);
        }
    }
    DSQ_MEMBER u64 get(int v, int width) const {
        const int start = v * width;
        if (width == 8) return (u64)w[(start / 4 + 1) % WORDS] << 32 | w[start / 4];
        const u32 bits = w[start / 4] >> (start % 4 * 8);
        return width == 4 ? bits : bits & ((1u << (8 * width % 32)) - 1);
    }
    // Of 32 bytes only those below `length`, rounded up to 16.
    DSQ_MEMBER void store(u8* p, u64 length) const {
        if (BYTES == 1) {
            store1(p, w[0]);
        } else if (BYTES == 2) {
            store2(p, w[0]);
        } else if (BYTES == 4) {
            store4(p, w[0]);
        } else if (BYTES == 8) {
            store8(p, (u64)w[1 % WORDS] << 32 | w[0]);
        } else {
            DSQ_UNROLL
            for (u32 i = 0; i < WORDS / 4; ++i) {
                const Words4 x = {{w[4 * i], w[4 * i + 1], w[4 * i + 2], w[4 * i + 3]}};
                if (i == 0 || 16 * i < length) store16(p + 16 * i, x);
            }
        }
    }
    DSQ_MEMBER void load(const u8* p, u64 length) {
        if (BYTES == 1) {
            w[0] = load1(p);
        } else if (BYTES == 2) {
            w[0] = load2(p);
        } else if (BYTES == 4) {
            w[0] = load4(p);
        } else if (BYTES == 8) {
            const u64 x = load8(p);
            w[0] = (u32)x;
            w[1 % WORDS] = (u32)(x >> 32);
        } else {
            DSQ_UNROLL
            for (u32 i = 0; i < WORDS / 4; ++i) {
                const u8* part = p + (i == 0 || 16 * i < length ? 16 * i : 0);
                const Words4 x = BYTES == 16 ? load16_once(part) : load16(part);
                DSQ_UNROLL
                for (int j = 0; j < 4; ++j) w[4 * i + j] = x.w[j];
            }
        }
    }
};

#endif  // DSQ_WIRE_CUH
