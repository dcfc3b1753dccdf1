// Scale, offset and inverse of a group from its smallest and largest value.
//
// Exactness: [Note: numbers] of ds_quant/kernels/reference.py, [Note: exceptional groups] of
// reference.py. A group without a usable range has inverse 0: all its codes are the code of zero.
#ifndef DSQ_RANGES_CUH
#define DSQ_RANGES_CUH

#include "platform.cuh"

#define DSQ_NEAREST 0
#define DSQ_STOCHASTIC 1
#define DSQ_RANDOM_SHIFT 2
#define DSQ_LEARNED 3
#define DSQ_GAUSSIAN 4

#define DSQ_NAN_BITS 0x7FC00000u  // of the scale of a non-finite group, on every device

struct Range {
    float scale, offset, inverse;
};

// Denormals and negative zeros become +0; NaN stays.
DSQ_DEVICE float flush(float x) { return (bits_of(x) & 0x7F800000u) == 0 ? 0.0f : x; }

// largest: max |x|, Inf or NaN if an element is.
template <int BITS, int FRACTION>
DSQ_DEVICE Range absmax_range(float largest) {
    const float tiny = 0x1p-99f, huge_scale = 0x1p126f;
    Range range;
    range.scale = divided_by<(1 << (BITS - 1)) - 1>(largest);
    range.offset = 0.0f;
    // Rounded once: the power of two is exact.
    range.inverse = mul_rn(reciprocal(range.scale), (float)(1 << FRACTION));
    if (is_below(largest, tiny)) {
        range.scale = 0.0f;
        range.inverse = 0.0f;
    } else if (!at_least(huge_scale, range.scale)) {
        range.scale = float_of(DSQ_NAN_BITS);
        range.inverse = 0.0f;
    }
    return range;
}

// low, high: smallest and largest element, NaN if an element is. shift: of random_shift, else 0.
template <int BITS, int FRACTION, bool SHIFTED>
DSQ_DEVICE Range minmax_range(float low, float high, float shift) {
    const float tiny = 0x1p-99f, huge_scale = 0x1p126f, largest_float = 0x1.fffffep127f;
    const float span = sub_rn(high, low);
    Range range;
    range.scale = divided_by<(1 << BITS) - 1>(span);
    range.offset = flush(low);
    const bool is_tiny = is_below(span, tiny);
    bool usable = is_tiny || at_least(huge_scale, range.scale);
    range.inverse = is_tiny ? 0.0f : mul_rn(reciprocal(range.scale), (float)(1 << FRACTION));
    if (is_tiny) {
        range.scale = 0.0f;
        if (is_below(absolute(low), tiny) && is_below(absolute(high), tiny)) range.offset = 0.0f;
    }
    if (SHIFTED) {
        range.offset = flush(add_rn(range.offset, flush(mul_rn(range.scale, shift))));
        usable = usable && at_least(largest_float, absolute(range.offset));
    }
    if (!usable) {
        range.scale = float_of(DSQ_NAN_BITS);
        range.offset = 0.0f;
        range.inverse = 0.0f;
    }
    return range;
}

#endif  // DSQ_RANGES_CUH
