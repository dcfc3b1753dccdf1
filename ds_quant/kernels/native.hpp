// What the C++ kernels share: words, one version of a loop per instruction set, threads.
#pragma once

#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>
#ifdef __x86_64__
#include <immintrin.h>
#endif

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
typedef int32_t i32;
typedef int64_t i64;

#define INLINE static inline __attribute__((always_inline))
#if defined(__x86_64__) && defined(__GLIBC__)
// By features: "arch=haswell" would mean that processor alone, and give others of its age SSE2.
#define EVERY_CPU __attribute__((target_clones("avx2", "default")))
#else
#define EVERY_CPU
#endif

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the wire is little-endian");

// work(job, first, last) over the units of all jobs, in equal runs on so many threads.
template <typename AnyJob, typename Work, typename Units>
static void spread(AnyJob *jobs, i64 count, i64 threads, Work work, Units units) {
    i64 total = 0;
    for (i64 i = 0; i < count; ++i) total += units(jobs + i);
    const auto run = [=](i64 first, i64 last) {
        for (i64 i = 0, start = 0; i < count && start < last; ++i) {
            const i64 number = units(jobs + i);
            const i64 from = first > start ? first - start : 0;
            const i64 to = last - start < number ? last - start : number;
            if (from < to) work(jobs + i, from, to);
            start += number;
        }
    };
    std::vector<std::thread> others;
    for (i64 t = 1; t < threads; ++t) {
        others.emplace_back(run, total * t / threads, total * (t + 1) / threads);
    }
    run(0, total / threads);
    for (std::thread &thread : others) thread.join();
}
