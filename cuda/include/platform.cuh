// Words, correctly rounded arithmetic and memory access, each with its twin for the host.
//
// Exactness: every float operation here rounds once, to nearest even, or not at all, and keeps
// denormals. On the device it is inline PTX, because CuPy compiles with -ftz=true and a*b + c may
// become one fused operation; PTX with an explicit .rn and without .ftz is subject to neither. On
// the host the compiler must get -ffp-contract=off.
//
// DSQ_HOST selects the twins; the includer then provides threadIdx, blockIdx and the warp
// collectives (tests/kernels/shim.h). No CUDA header is needed.
#ifndef DSQ_PLATFORM_CUH
#define DSQ_PLATFORM_CUH

// DSQ_DEVICE for functions, DSQ_MEMBER for member functions, DSQ_ARGUMENT for a large argument that
// is read where the launch has put it.
#ifdef __CUDACC__
#define DSQ_ARGUMENT(Type) const __grid_constant__ Type
#define DSQ_DEVICE __device__ __forceinline__
#define DSQ_MEMBER __device__ __forceinline__
#define DSQ_UNROLL _Pragma("unroll")
#define DSQ_NO_UNROLL _Pragma("unroll 1")
#else
#define DSQ_ARGUMENT(Type) const Type&
#define DSQ_DEVICE static inline
#define DSQ_MEMBER inline
#define DSQ_UNROLL
#define DSQ_NO_UNROLL
#endif

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

static_assert(sizeof(u16) == 2 && sizeof(u32) == 4 && sizeof(u64) == 8, "sizes of the words");

#define DSQ_ALL_LANES 0xFFFFFFFFu
#define DSQ_WARP 32

struct alignas(16) Words4 {
    u32 w[4];
};

#ifdef DSQ_HOST

DSQ_DEVICE u32 bits_of(float x) {
    u32 b;
    __builtin_memcpy(&b, &x, 4);
    return b;
}
DSQ_DEVICE float float_of(u32 b) {
    float x;
    __builtin_memcpy(&x, &b, 4);
    return x;
}
DSQ_DEVICE float add_rn(float a, float b) { return a + b; }
DSQ_DEVICE float sub_rn(float a, float b) { return a - b; }
DSQ_DEVICE float mul_rn(float a, float b) { return a * b; }
// 1 / a for normal a up to 2^126 with a normal result.
DSQ_DEVICE float reciprocal(float a) { return 1.0f / a; }
DSQ_DEVICE float fma_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
// NaN if either operand is; the sign of a zero result is not specified.
DSQ_DEVICE float max_nan(float a, float b) { return a != a || b != b ? a + b : a > b ? a : b; }
DSQ_DEVICE float min_nan(float a, float b) { return a != a || b != b ? a + b : a < b ? a : b; }

DSQ_DEVICE float absolute(float a) { return float_of(bits_of(a) & 0x7FFFFFFFu); }
DSQ_DEVICE bool at_least(float a, float b) { return a >= b; }
DSQ_DEVICE bool is_below(float a, float b) { return a < b; }

// Byte i of the result is byte (selector >> 4i) & 7 of the eight bytes a (0-3), b (4-7).
DSQ_DEVICE u32 permute(u32 a, u32 b, u32 selector) {
    const u64 bytes = (u64)b << 32 | a;
    u32 out = 0;
    for (int i = 0; i < 4; ++i) {
        out |= (u32)(bytes >> (8 * (selector >> (4 * i) & 7)) & 0xFF) << (8 * i);
    }
    return out;
}
DSQ_DEVICE u32 and_or(u32 a, u32 mask, u32 c) { return (a & mask) | c; }
DSQ_DEVICE u32 inverted(u32 a) { return ~a; }
// x, negated if bit 31 of `flip` is set.
DSQ_DEVICE float with_sign_flipped(float x, u32 flip) {
    return float_of(bits_of(x) ^ (flip & 0x80000000u));
}

// The device faults on a misaligned access, so the twin does.
DSQ_DEVICE Words4 load16(const void* p) {
    if ((u64)p % 16) __builtin_trap();
    return *(const Words4*)p;
}
DSQ_DEVICE Words4 load16_once(const void* p) { return load16(p); }
DSQ_DEVICE u64 load8(const void* p) { return *(const u64*)p; }
DSQ_DEVICE u32 load4(const void* p) { return *(const u32*)p; }
DSQ_DEVICE u32 load2(const void* p) { return *(const u16*)p; }
DSQ_DEVICE u32 load1(const void* p) { return *(const u8*)p; }
DSQ_DEVICE void store8(void* p, u64 x) { *(u64*)p = x; }
DSQ_DEVICE void store4(void* p, u32 x) { *(u32*)p = x; }
DSQ_DEVICE void store2(void* p, u32 x) { *(u16*)p = (u16)x; }
DSQ_DEVICE void store1(void* p, u32 x) { *(u8*)p = (u8)x; }
DSQ_DEVICE void store16(void* p, Words4 x) {
    if ((u64)p % 16) __builtin_trap();
    *(Words4*)p = x;
}

// One thread at a time.
DSQ_DEVICE void add_atomically(u32* p, u32 x) { *p += x; }
DSQ_DEVICE void or_atomically(u32* p, u32 x) { *p |= x; }
DSQ_DEVICE void max_atomically(u32* p, u32 x) { *p = x > *p ? x : *p; }
DSQ_DEVICE u32 count_ones(u32 x) { return (u32)__builtin_popcount(x); }
DSQ_DEVICE u32 lowest_one(u32 x) { return (u32)__builtin_ctz(x); }  // x is not 0
DSQ_DEVICE u32 bit_length(u32 x) { return x ? 32 - (u32)__builtin_clz(x) : 0; }
// Of memory that this kernel writes.
DSQ_DEVICE u32 load2_again(const void* p) { return load2(p); }
DSQ_DEVICE u32 load4_again(const void* p) { return load4(p); }

#else  // device

DSQ_DEVICE void add_atomically(u32* p, u32 x) { atomicAdd(p, x); }
DSQ_DEVICE void or_atomically(u32* p, u32 x) { atomicOr(p, x); }
DSQ_DEVICE void max_atomically(u32* p, u32 x) { atomicMax(p, x); }
DSQ_DEVICE u32 count_ones(u32 x) { return (u32)__popc(x); }
DSQ_DEVICE u32 lowest_one(u32 x) { return (u32)__ffs(x) - 1; }
DSQ_DEVICE u32 bit_length(u32 x) { return 32 - (u32)__clz(x); }
DSQ_DEVICE u32 load2_again(const void* p) { return *(const volatile u16*)p; }
DSQ_DEVICE u32 load4_again(const void* p) { return *(const volatile u32*)p; }

DSQ_DEVICE u32 bits_of(float x) { return __float_as_uint(x); }
DSQ_DEVICE float float_of(u32 b) { return __uint_as_float(b); }

#define DSQ_BINARY(name, instruction)                                          \
    DSQ_DEVICE float name(float a, float b) {                                  \
        float r;                                                               \
        asm(instruction " %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));            \
        return r;                                                              \
    }
DSQ_BINARY(add_rn, "add.rn.f32")
DSQ_BINARY(sub_rn, "sub.rn.f32")
DSQ_BINARY(mul_rn, "mul.rn.f32")
DSQ_BINARY(max_nan, "max.NaN.f32")
DSQ_BINARY(min_nan, "min.NaN.f32")
#undef DSQ_BINARY
// Operand modifiers, unlike a mask.
DSQ_DEVICE float absolute(float a) {
    float r;
    asm("abs.f32 %0, %1;" : "=f"(r) : "f"(a));
    return r;
}
DSQ_DEVICE float negated(float a) {
    float r;
    asm("neg.f32 %0, %1;" : "=f"(r) : "f"(a));
    return r;
}

// False with a NaN. A plain comparison would take denormals for zeros.
#define DSQ_COMPARISON(name, comparison)                                               \
    DSQ_DEVICE bool name(float a, float b) {                                           \
        u32 r;                                                                         \
        asm("{.reg .pred p; setp." comparison ".f32 p, %1, %2; selp.u32 %0, 1, 0, p;}" \
            : "=r"(r)                                                                  \
            : "f"(a), "f"(b));                                                         \
        return r;                                                                      \
    }
DSQ_COMPARISON(at_least, "ge")
DSQ_COMPARISON(is_below, "lt")
#undef DSQ_COMPARISON

DSQ_DEVICE float fma_rn(float a, float b, float c) {
    float r;
    asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(r) : "f"(a), "f"(b), "f"(c));
    return r;
}
// 1 / a, rounded to nearest, for normal a up to 2^126 with a normal result: the three operations
// that rcp.rn.f32 itself takes for such numbers, without the check and the call for others.
DSQ_DEVICE float reciprocal(float a) {
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(a));
    return fma_rn(r, fma_rn(negated(a), r, 1.0f), r);
}
DSQ_DEVICE u32 permute(u32 a, u32 b, u32 selector) { return __byte_perm(a, b, selector); }

// (a & mask) | c as one instruction; from two constants the compiler would make two.
DSQ_DEVICE u32 and_or(u32 a, u32 mask, u32 c) {
    u32 r;
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(r) : "r"(a), "r"(mask), "r"(c));
    return r;
}

// Written as C, the compiler for sm_100 makes a neg.ftz.f32 of it, which takes denormals for zeros.
DSQ_DEVICE float with_sign_flipped(float x, u32 flip) {
    u32 r;
    asm("lop3.b32 %0, %1, %2, 0x80000000, 0x78;" : "=r"(r) : "r"(bits_of(x)), "r"(flip));
    return float_of(r);
}

// Once for a word, which the compiler would repeat behind every shift of it.
DSQ_DEVICE u32 inverted(u32 a) {
    u32 r;
    asm("not.b32 %0, %1;" : "=r"(r) : "r"(a));
    return r;
}

// For bytes that are read once, by one load per sector: they need no place in the first cache.
DSQ_DEVICE Words4 load16_once(const void* p) {
    Words4 x;
    asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(x.w[0]), "=r"(x.w[1]), "=r"(x.w[2]), "=r"(x.w[3])
        : "l"(p));
    return x;
}
// For sectors that a second load completes, and for memory this kernel writes.
DSQ_DEVICE Words4 load16(const void* p) {
    Words4 x;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.w[0]), "=r"(x.w[1]), "=r"(x.w[2]), "=r"(x.w[3])
                 : "l"(p)
                 : "memory");
    return x;
}
#define DSQ_LOAD(name, Word, kind, constraint)                                  \
    DSQ_DEVICE Word name(const void* p) {                                      \
        Word x;                                                                \
        asm("ld.global.nc." kind " %0, [%1];" : "=" constraint(x) : "l"(p));   \
        return x;                                                              \
    }
DSQ_LOAD(load8, u64, "u64", "l")
DSQ_LOAD(load4, u32, "u32", "r")
DSQ_LOAD(load2, u32, "u16", "r")
DSQ_LOAD(load1, u32, "u8", "r")
#undef DSQ_LOAD
#define DSQ_STORE(name, Word, kind, constraint)                                                  \
    DSQ_DEVICE void name(void* p, Word x) {                                                      \
        asm volatile("st.global." kind " [%0], %1;" : : "l"(p), constraint(x) : "memory");       \
    }
DSQ_STORE(store8, u64, "u64", "l")
DSQ_STORE(store4, u32, "u32", "r")
DSQ_STORE(store2, u32, "u16", "r")
DSQ_STORE(store1, u32, "u8", "r")
#undef DSQ_STORE
DSQ_DEVICE void store16(void* p, Words4 x) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
                 :
                 : "l"(p), "r"(x.w[0]), "r"(x.w[1]), "r"(x.w[2]), "r"(x.w[3])
                 : "memory");
}

#endif  // DSQ_HOST

// x / N, rounded to nearest, for x of at least 2^-99 (Inf and NaN give NaN): the quotient by
// 1 / N, corrected by its exact remainder. A test compares all mantissas and all N = 2^k - 1.
template <int N>
DSQ_DEVICE float divided_by(float x) {
    const float inverse = 1.0f / (float)N;
    const float quotient = mul_rn(x, inverse);
    return fma_rn(fma_rn(-(float)N, quotient, x), inverse, quotient);
}

#endif  // DSQ_PLATFORM_CUH
