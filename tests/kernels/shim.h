// Runs a CUDA kernel on the CPU, so that tests need no GPU. Include it before the .cu file, compile
// with -DDSQ_HOST, end with SHIM_EXPORT(kernel).
//
// Every CUDA thread is a fiber: ucontext makes its stack, and setjmp switches between fibers without
// a system call. A block runs alone, its warps one after the other, the lanes of a warp in turns: a
// lane runs until its next warp collective, barrier or end, then the next lane runs. At a collective
// a lane leaves its value in a slot and pauses; when its turn comes again, all lanes have left
// theirs. Slots alternate between two banks, because the lanes that run first may reach the next
// collective before the others have read this one.
// A barrier pauses until every thread of the block is at a barrier or has ended.
//
// Checked on the way, each ending the process with a message: lanes of one warp that are not all
// at the same kind of stop; misaligned vector access (the twins of platform.cuh).
#pragma once

#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <ucontext.h>

#include <utility>

#define __global__
#define __launch_bounds__(...)
#define __shared__ static  // one block at a time, and a kernel runs on one OS thread

namespace shim {

struct Dim3 {
    unsigned x, y, z;
};

enum Stop { RUNNING, AT_COLLECTIVE, AT_BARRIER, ENDED };

const int WARP = 32, MAX_THREADS = 1024, STACK = 256 * 1024;

struct Fiber {
    ucontext_t context;  // at its beginning
    jmp_buf stopped;     // at its last stop
    bool has_begun;
    Dim3 thread;
    Stop stop;
    unsigned phase;  // collectives so far
};

struct Slots {
    unsigned long long bank[2][WARP];
};

static Fiber fibers[MAX_THREADS];
static Slots slots[MAX_THREADS / WARP];
static char* stacks;
static Fiber* current;
static jmp_buf scheduler;
static Dim3 block_index, block_size;

static void fail(const char* what) {
    fprintf(stderr, "shim: %s, block (%u, %u), thread %u\n", what, block_index.x, block_index.y,
            current->thread.x);
    abort();
}

static void pause(Stop stop) {
    current->stop = stop;
    if (!_setjmp(current->stopped)) _longjmp(scheduler, 1);
}

static void resume(Fiber* fiber) {
    current = fiber;
    fiber->stop = RUNNING;
    if (_setjmp(scheduler)) return;
    if (fiber->has_begun) _longjmp(fiber->stopped, 1);
    fiber->has_begun = true;
    setcontext(&fiber->context);
}

// Leave a value, and get that of lane source(my lane).
template <class T, class Source>
T exchange(unsigned mask, T value, Source source) {
    static_assert(sizeof(T) <= 8, "a slot is 8 bytes");
    if (mask != 0xFFFFFFFFu) fail("only whole warps exchange");
    const unsigned lane = current->thread.x % WARP;
    auto& bank = slots[current->thread.x / WARP].bank[current->phase++ & 1];
    __builtin_memcpy(&bank[lane], &value, sizeof(T));
    pause(AT_COLLECTIVE);
    return source(bank, lane);
}

template <class T>
T taken(const unsigned long long* bank, unsigned lane) {
    T value;
    __builtin_memcpy(&value, &bank[lane], sizeof(T));
    return value;
}

// Runs every lane of a warp to its next stop; they must agree on its kind.
static Stop run_turn(Fiber* warp) {
    for (int lane = 0; lane < WARP; ++lane) {
        if (warp[lane].stop != ENDED) resume(&warp[lane]);
    }
    for (int lane = 1; lane < WARP; ++lane) {
        current = &warp[lane];
        if (current->stop != warp[0].stop || current->phase != warp[0].phase) {
            fail("lanes of a warp stopped at different places");
        }
    }
    return warp[0].stop;
}

static void run_block(void (*entry)(), bool reversed) {
    const int num_warps = block_size.x / WARP;
    for (unsigned i = 0; i < block_size.x; ++i) {
        Fiber& fiber = fibers[i];
        fiber.thread = {i, 0, 0};
        fiber.stop = RUNNING;
        fiber.phase = 0;
        fiber.has_begun = false;
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = stacks + (size_t)i * STACK;
        fiber.context.uc_stack.ss_size = STACK;
        makecontext(&fiber.context, entry, 0);
    }
    bool running = true;
    while (running) {
        running = false;
        for (int w = 0; w < num_warps; ++w) {
            Fiber* warp = fibers + (reversed ? num_warps - 1 - w : w) * WARP;
            if (warp->stop == ENDED) continue;
            Stop stop = run_turn(warp);
            while (stop == AT_COLLECTIVE) stop = run_turn(warp);
            running = running || stop == AT_BARRIER;
        }
    }
}

// A kernel and its arguments, from pointers to them as cuLaunchKernel takes them.
static void (*run_thread)(void** arguments);
static void** launch_arguments;

template <class... A, size_t... I>
void call(void (*kernel)(A...), void** arguments, std::index_sequence<I...>) {
    kernel(*(std::remove_const_t<std::remove_reference_t<A>>*)arguments[I]...);
}

template <class... A>
void call(void (*kernel)(A...), void** arguments) {
    call(kernel, arguments, std::index_sequence_for<A...>());
}

static void entry() {
    run_thread(launch_arguments);
    current->stop = ENDED;
    _longjmp(scheduler, 1);
}

static void launch(const unsigned* grid, unsigned threads, void** arguments, bool reversed) {
    if (!stacks) stacks = (char*)malloc((size_t)MAX_THREADS * STACK);
    launch_arguments = arguments;
    block_size = {threads, 1, 1};
    for (block_index.y = 0; block_index.y < grid[1]; ++block_index.y) {
        for (block_index.x = 0; block_index.x < grid[0]; ++block_index.x) {
            run_block(entry, reversed);
        }
    }
}

}  // namespace shim

#define threadIdx (shim::current->thread)
#define blockIdx (shim::block_index)

template <class T>
T __shfl_sync(unsigned mask, T value, int source) {
    return shim::exchange(mask, value, [source](auto& bank, unsigned) {
        return shim::taken<T>(bank, source % shim::WARP);
    });
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int distance) {
    return shim::exchange(mask, value, [distance](auto& bank, unsigned lane) {
        return shim::taken<T>(bank, lane ^ distance);
    });
}
static inline unsigned __reduce_max_sync(unsigned mask, unsigned value) {
    return shim::exchange(mask, value, [](auto& bank, unsigned) {
        unsigned largest = 0;
        for (int lane = 0; lane < shim::WARP; ++lane) {
            const unsigned other = shim::taken<unsigned>(bank, lane);
            largest = other > largest ? other : largest;
        }
        return largest;
    });
}
static inline void __syncwarp() { shim::pause(shim::AT_COLLECTIVE); }
static inline void __syncthreads() { shim::pause(shim::AT_BARRIER); }

// Elements that a kernel has read or written by themselves.
static unsigned long long elements_alone;
#define DSQ_NOTE_ELEMENT() ++elements_alone
extern "C" unsigned long long shim_elements_alone() { return elements_alone; }

#define SHIM_EXPORT(kernel)                                                                 \
    extern "C" void shim_launch(const unsigned* grid, unsigned threads, void** arguments,  \
                                int reversed) {                                            \
        shim::run_thread = [](void** a) { shim::call(kernel, a); };                        \
        shim::launch(grid, threads, arguments, reversed != 0);                             \
    }
