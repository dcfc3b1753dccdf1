// Decodes and encodes with the C++ kernels in memory of exactly the sizes that they are told, to be
// built with sanitizers: sanitized FILE ROUNDS. Prints how many damaged messages were refused.
#include <stdio.h>
#include <stdlib.h>

#include <vector>

#include "lossless.cpp"

static u64 state = 88172645463325252ull;

static u64 random_below(u64 limit) {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return state % limit;
}

template <class T>
static std::vector<T> read_some(FILE *file, i64 count) {
    std::vector<T> found(count);
    if (count && fread(found.data(), sizeof(T), count, file) != (size_t)count) abort();
    return found;
}

// In a block of its own, so that one byte more is seen.
static i64 decode_copy(const std::vector<u8> &message, const std::vector<u16> &reference,
                       i64 exponent_at, bool in_place, std::vector<u16> &out) {
    u8 *wire = (u8 *)malloc(message.size() + !message.size());
    u16 *held = (u16 *)malloc(2 * reference.size()), *values = held;
    memcpy(wire, message.data(), message.size());
    memcpy(held, reference.data(), 2 * reference.size());
    if (!in_place) values = (u16 *)malloc(2 * reference.size());
    LosslessJob job = {held, values, wire, (i64)reference.size(), exponent_at,
                       (i64)message.size(), -1};
    dsq_lossless_decode(&job, 1, 1 + (i64)random_below(2));
    if (!job.problem) out.assign(values, values + reference.size());
    if (!in_place) free(values);
    free(held), free(wire);
    return job.problem;
}

static void damage(std::vector<u8> &message) {
    const u64 table = message.size() < 80 ? message.size() : 80;
    for (u64 changes = 1 + random_below(4); changes; --changes) {
        const u64 area = random_below(2) ? table : message.size();
        if (area) message[random_below(area)] = (u8)random_below(256);
    }
    if (random_below(3) == 0) {
        message.resize(random_below(message.size() + 64));
        const u64 size = message.size();
        if (random_below(2) && size >= 16) memcpy(&message[8], &size, 8);
    }
}

int main(int, char **arguments) {
    FILE *file = fopen(arguments[1], "rb");
    const std::vector<i64> head = read_some<i64>(file, 3);
    const std::vector<u16> reference = read_some<u16>(file, head[0]);
    std::vector<u16> values = read_some<u16>(file, head[0]), found;
    const std::vector<u8> message = read_some<u8>(file, head[2]);
    if (decode_copy(message, reference, head[1], false, found) || found != values) abort();

    const i64 most = head[0] ? (16 + 2 * head[0] + 15) / 16 * 16 : 0;
    u8 *room = (u8 *)malloc(most);
    LosslessJob job = {reference.data(), values.data(), room, head[0], head[1], 0, 0};
    dsq_lossless_encode(&job, 1, 2);
    if (job.nbytes != head[2] || memcmp(room, message.data(), head[2])) abort();
    free(room);

    int refused = 0;
    for (int round = 0; round < atoi(arguments[2]); ++round) {
        std::vector<u8> other = message;
        damage(other);
        if (decode_copy(other, reference, head[1], round % 2, found)) {
            ++refused;
        } else if (found != values) {
            fprintf(stderr, "a damaged message of %d elements gave other values:\n", (int)head[0]);
            for (size_t i = 0; i < other.size() && i < 64; ++i) {
                fprintf(stderr, "%02x %02x  ", i < message.size() ? message[i] : 0, other[i]);
            }
            return 1;
        }
    }
    printf("%d\n", refused);
    fclose(file);
}
