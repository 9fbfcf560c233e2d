// Vectors of 16 elements, in float32 or stored as bfloat16; aligned buffers; and the outcomes that functions return to
// Python.
//
// NaN and infinity must reach the results, because they show that a model or a run is broken.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <new>
#include <stdexcept>
#include <utility>

#ifdef __AVX512F__
#include <immintrin.h>
#endif

// GCC and Clang compile arithmetic on these types for any processor.
typedef float Floats __attribute__((vector_size(64), aligned(4)));
typedef int32_t Ints __attribute__((vector_size(64), aligned(4)));
typedef uint16_t Halves __attribute__((vector_size(32), aligned(2)));

constexpr int WIDTH = 16;

static inline Floats load(const float* p) { return *reinterpret_cast<const Floats*>(p); }
static inline void store(float* p, Floats v) { *reinterpret_cast<Floats*>(p) = v; }
static inline Floats fill(float x) { return Floats{} + x; }
// Takes `b` where either is NaN.
static inline Floats max(Floats a, Floats b) { return a > b ? a : b; }
static inline Floats relu(Floats v) { return max(Floats{}, v); }

static inline float sum(Floats v) {
#ifdef __AVX512F__
    return _mm512_reduce_add_ps((__m512)v);
#else
    float total = 0;
    for (int i = 0; i < WIDTH; i++) total += v[i];
    return total;
#endif
}

static inline float largest(Floats v) {
#ifdef __AVX512F__
    return _mm512_reduce_max_ps((__m512)v);
#else
    float best = v[0];
    for (int i = 1; i < WIDTH; i++) best = std::max(best, v[i]);
    return best;
#endif
}

static inline int32_t largest(Ints v) {
#ifdef __AVX512F__
    return _mm512_reduce_max_epi32((__m512i)v);
#else
    int32_t best = v[0];
    for (int i = 1; i < WIDTH; i++) best = std::max(best, v[i]);
    return best;
#endif
}

// A bfloat16 is the upper half of a float32.
static inline Floats load(const uint16_t* p) {
    Halves halves = *reinterpret_cast<const Halves*>(p);
    return (Floats)(__builtin_convertvector(halves, Ints) << 16);
}

static inline uint16_t to_bfloat16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if (x != x) return 0x7fc0;  // rounding could turn a NaN into infinity or 0
    return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;  // round to nearest, ties to even
}

static inline void store(uint16_t* p, Floats v) {
    typedef uint32_t Bits __attribute__((vector_size(64)));
    Bits bits = (Bits)v;
    bits = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    bits = v == v ? bits : Bits{} + 0x7fc0;
    *reinterpret_cast<Halves*>(p) = __builtin_convertvector(bits, Halves);
}

// e^x with a relative error of 1e-7; 0 below -87; NaN for NaN.
static inline Floats exponential(Floats x) {
    Floats clamped = x < -87.0f ? fill(-87.0f) : x;
    Floats shifted = clamped * 1.44269504088896341f + 12582912.0f;  // adding 1.5 * 2^23 rounds to an integer
    Floats whole = shifted - 12582912.0f;
    Floats rest = clamped - whole * 0.693359375f + whole * 2.12194440e-4f;
    Floats result = fill(1.9875691500e-4f);
    result = result * rest + 1.3981999507e-3f;
    result = result * rest + 8.3334519073e-3f;
    result = result * rest + 4.1665795894e-2f;
    result = result * rest + 1.6666665459e-1f;
    result = result * rest + 5.0000001201e-1f;
    result = result * rest * rest + rest + 1.0f;
    Ints power = (__builtin_convertvector(whole, Ints) + 127) << 23;
    result *= (Floats)power;
    return x < -87.0f ? Floats{} : result;
}

// Softmax in place over `padded` scores, a multiple of WIDTH. A score of -inf gets a weight of 0.
static inline void softmax(float* scores, int64_t padded) {
    if (padded == 0) return;
    Floats best = load(scores);
    for (int64_t i = WIDTH; i < padded; i += WIDTH) best = max(best, load(scores + i));
    float bound = largest(best);
    Floats total = {};
    for (int64_t i = 0; i < padded; i += WIDTH) {
        Floats weight = exponential(load(scores + i) - bound);
        store(scores + i, weight);
        total += weight;
    }
    float share = 1 / sum(total);
    for (int64_t i = 0; i < padded; i += WIDTH) store(scores + i, load(scores + i) * share);
}

#ifdef __AVX512F__
// Transposes 16 rows of 16 floats.
static inline void transpose_tile(__m512* rows) {
    __m512 pairs[16];
    for (int i = 0; i < 16; i += 2) {
        pairs[i] = _mm512_unpacklo_ps(rows[i], rows[i + 1]);
        pairs[i + 1] = _mm512_unpackhi_ps(rows[i], rows[i + 1]);
    }
    // Column 4 lane + c of rows 4 i to 4 i + 3, for each of the four lanes, is in rows[4 i + c].
    for (int i = 0; i < 16; i += 4)
        for (int half = 0; half < 2; half++) {
            __m512d low = (__m512d)pairs[i + half], high = (__m512d)pairs[i + half + 2];
            rows[i + 2 * half] = (__m512)_mm512_unpacklo_pd(low, high);
            rows[i + 2 * half + 1] = (__m512)_mm512_unpackhi_pd(low, high);
        }
    for (int c = 0; c < 4; c++) {
        pairs[c] = _mm512_shuffle_f32x4(rows[c], rows[4 + c], 0x88);
        pairs[4 + c] = _mm512_shuffle_f32x4(rows[c], rows[4 + c], 0xdd);
        pairs[8 + c] = _mm512_shuffle_f32x4(rows[8 + c], rows[12 + c], 0x88);
        pairs[12 + c] = _mm512_shuffle_f32x4(rows[8 + c], rows[12 + c], 0xdd);
    }
    for (int c = 0; c < 4; c++) {
        rows[c] = _mm512_shuffle_f32x4(pairs[c], pairs[8 + c], 0x88);
        rows[8 + c] = _mm512_shuffle_f32x4(pairs[c], pairs[8 + c], 0xdd);
        rows[4 + c] = _mm512_shuffle_f32x4(pairs[4 + c], pairs[12 + c], 0x88);
        rows[12 + c] = _mm512_shuffle_f32x4(pairs[4 + c], pairs[12 + c], 0xdd);
    }
}
#endif

// The product of sizes. A product that is negative or too large for memory throws std::bad_alloc.
template <typename... Counts>
size_t product(Counts... counts) {
    size_t result = 1;
    bool fits = true;
    for (int64_t count : {static_cast<int64_t>(counts)...})
        fits = fits && count >= 0 && !__builtin_mul_overflow(result, static_cast<size_t>(count), &result);
    if (!fits || result > PTRDIFF_MAX) throw std::bad_alloc();
    return result;
}

// Uninitialised memory, aligned to cache lines.
template <typename T>
struct Buffer {
    T* data = nullptr;
    size_t size = 0;

    Buffer() = default;
    explicit Buffer(size_t count) { reserve(count); }
    Buffer(Buffer&& other) noexcept { std::swap(data, other.data), std::swap(size, other.size); }
    Buffer& operator=(Buffer&& other) noexcept {
        std::swap(data, other.data), std::swap(size, other.size);
        return *this;
    }
    ~Buffer() { free(data); }

    // Makes room for at least `count` elements; the content is lost.
    T* reserve(size_t count) {
        if (count > size) {
            free(data);
            data = nullptr, size = 0;
            data = static_cast<T*>(aligned_alloc(64, (product(count, sizeof(T)) + 63) / 64 * 64));
            if (!data) throw std::bad_alloc();
            size = count;
        }
        return data;
    }
};

// What functions return to Python; the tables of shared constants compare the values.
enum Outcome : int { DONE, UNKNOWN_TOKEN, NO_MEMORY, FAILED, BAD_ARGUMENT };

// The outcome for the exception being handled: no exception may leave an extern "C" function.
static inline int outcome_of_exception() noexcept {
    try {
        throw;
    } catch (const std::bad_alloc&) {
        return NO_MEMORY;
    } catch (const std::length_error&) {
        // A std::vector larger than the address space.
        return NO_MEMORY;
    } catch (const std::invalid_argument&) {
        return BAD_ARGUMENT;
    } catch (...) {
        return FAILED;
    }
}
