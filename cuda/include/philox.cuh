// Philox4x32 (Salmon et al., SC 2011): four random 32-bit words of a counter and a key.
//
// Inputs:  counter (c0, c1, c2, c3) = (vector low, vector high, step low, step high),
//          key (k0, k1) = (low, high), see [Note: who gets which bits] in ds_quant/kernels/random_bits.py.
// Output:  words w0..w3; element 2i of the vector of 8 takes the low 16 bits of w_i, element
//          2i + 1 the high 16 bits.
// Exactness: integers only, bit-equal to random_bits.philox4x32 and kernels/reference.py.
#ifndef DSQ_PHILOX_CUH
#define DSQ_PHILOX_CUH

#include "platform.cuh"

#ifndef DSQ_PHILOX_ROUNDS
#define DSQ_PHILOX_ROUNDS 7
#endif

struct PhiloxWords {
    u32 w0, w1, w2, w3;
};

// High half of a 32 x 32 product; the device has one instruction for it.
DSQ_DEVICE u32 philox_mulhi(u32 a, u32 b) {
#ifdef __CUDA_ARCH__
    return __umulhi(a, b);
#else
    return (u32)(((u64)a * b) >> 32);
#endif
}

DSQ_DEVICE PhiloxWords philox4x32(u32 c0, u32 c1, u32 c2, u32 c3, u32 k0, u32 k1) {
    const u32 m0 = 0xD2511F53u, m1 = 0xCD9E8D57u;
    DSQ_UNROLL
    for (int round = 0; round < DSQ_PHILOX_ROUNDS; ++round) {
        const u32 hi0 = philox_mulhi(m0, c0), lo0 = m0 * c0;
        const u32 hi1 = philox_mulhi(m1, c2), lo1 = m1 * c2;
        c0 = hi1 ^ c1 ^ k0;
        c1 = lo1;
        c2 = hi0 ^ c3 ^ k1;
        c3 = lo0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    const PhiloxWords words = {c0, c1, c2, c3};
    return words;
}

// Words of an element vector: 64-bit vector index, step and key as in rng.Address.
DSQ_DEVICE PhiloxWords philox_of_vector(u64 vector, u64 step, u64 key) {
    return philox4x32((u32)vector, (u32)(vector >> 32), (u32)step, (u32)(step >> 32), (u32)key,
                      (u32)(key >> 32));
}

#endif  // DSQ_PHILOX_CUH
