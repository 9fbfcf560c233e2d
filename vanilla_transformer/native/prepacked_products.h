// Matrix products with prepacked weights, in float32, bfloat16 or 8-bit integers, for few rows as well as for many.
//
// A prepacked matrix [outputs, inputs] is a sequence of panels of 64 outputs; a panel is a sequence of steps along the
// inputs; a step holds four tiles of 16 outputs. In bfloat16 and int8 a tile is 16 groups of 16 outputs of 4 bytes (2
// or 4 neighbouring inputs), which is what the matrix units (AMX) and the dot-product instructions (VNNI, AVX512-BF16)
// read. In float32 a step is one input.

#pragma once

#include "simd.h"

#include <memory>
#include <vector>

#if defined(__AMX_TILE__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

enum Precision { FLOAT32, BFLOAT16, INT8 };

constexpr int PANEL = 64;
constexpr int TILE_BYTES = 1024;
constexpr int STEP_BYTES = 4 * TILE_BYTES;

// A thread's buffers for converted rows and their scales.
struct Scratch {
    Buffer<char> rows;
    Buffer<float> scales;
};

static inline Scratch& scratch() {
    static thread_local Scratch mine;
    return mine;
}

static bool supports(int precision) {
#if defined(__AMX_TILE__) && defined(__linux__)
    constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
    static const bool permitted = syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
    if (precision != FLOAT32 && !permitted) return false;
#endif
#ifdef __AVX512VNNI__
    if (precision == INT8) return true;
#endif
#ifdef __AVX512BF16__
    if (precision == BFLOAT16) return true;
#endif
    return precision == FLOAT32;
}

// Configures this thread's AMX tiles for as long as the object lives.
struct MatrixUnit {
#ifdef __AMX_TILE__
    MatrixUnit() {
        alignas(64) static const struct Configuration {
            uint8_t palette = 1, start = 0, reserved[14] = {};
            uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
            uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
        } configuration;
        _tile_loadconfig(&configuration);
    }
    ~MatrixUnit() { _tile_release(); }
#else
    MatrixUnit() {}
    ~MatrixUnit() {}
#endif
};

#if defined(__AVX512VNNI__) || defined(__AVX512BF16__)

// total + the dot products of groups of 4 bytes: 4 elements in int8, 2 in bfloat16.
template <int KIND>
static inline Ints dot(Ints total, Ints left, Ints right) {
#ifdef __AVX512VNNI__
    if constexpr (KIND == INT8) return (Ints)_mm512_dpbusd_epi32((__m512i)total, (__m512i)left, (__m512i)right);
#endif
#ifdef __AVX512BF16__
    if constexpr (KIND == BFLOAT16)
        return (Ints)_mm512_dpbf16_ps((__m512)total, (__m512bh)(__m512i)left, (__m512bh)(__m512i)right);
#endif
    return total;
}

// totals [ROWS, TILES * 16] for the first TILES tiles of each step of one panel; `rows` are `stride` bytes apart.
template <int KIND, int ROWS, int TILES>
static void multiply_vectors(const char* rows, size_t stride, const char* weights, int steps, Ints* totals) {
    Ints sums[ROWS][TILES] = {};
    for (int step = 0; step < steps; step++, weights += STEP_BYTES)
        for (int group = 0; group < 16; group++) {
            Ints right[TILES];
            for (int j = 0; j < TILES; j++)
                right[j] = *reinterpret_cast<const Ints*>(weights + j * TILE_BYTES + group * 64);
            for (int i = 0; i < ROWS; i++) {
                int32_t four;
                memcpy(&four, rows + i * stride + step * 64 + group * 4, 4);
                for (int j = 0; j < TILES; j++) sums[i][j] = dot<KIND>(sums[i][j], Ints{} + four, right[j]);
            }
        }
    for (int i = 0; i < ROWS; i++)
        for (int j = 0; j < TILES; j++) totals[i * TILES + j] = sums[i][j];
}

#ifdef __AMX_TILE__

// A macro, because GCC's intrinsics need tile indices as literals.
#define DOT_TILES(total, left, right)          \
    if constexpr (KIND == INT8)                \
        _tile_dpbusd(total, left, right);      \
    else                                       \
        _tile_dpbf16ps(total, left, right)

// GCC does not know that tile instructions read and write memory: keep other accesses on their side of the barrier.
static inline void memory_barrier() { __asm__ volatile("" ::: "memory"); }

static inline void zero_tiles() {
    memory_barrier();
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

// totals [32, 32]
template <int KIND>
static void multiply_tiles_2x2(const char* rows, size_t stride, const char* weights, int steps, Ints* totals) {
    zero_tiles();
    for (int step = 0; step < steps; step++, weights += STEP_BYTES, rows += 64) {
        _tile_loadd(4, rows, stride);
        _tile_loadd(6, weights, 64);
        DOT_TILES(0, 4, 6);
        _tile_loadd(7, weights + TILE_BYTES, 64);
        DOT_TILES(1, 4, 7);
        _tile_loadd(5, rows + 16 * stride, stride);
        DOT_TILES(2, 5, 6);
        DOT_TILES(3, 5, 7);
    }
    char* out = reinterpret_cast<char*>(totals);
    _tile_stored(0, out, 128);
    _tile_stored(1, out + 64, 128);
    _tile_stored(2, out + 16 * 128, 128);
    _tile_stored(3, out + 16 * 128 + 64, 128);
    memory_barrier();
}

// totals [16, 64]
template <int KIND>
static void multiply_tiles_1x4(const char* rows, size_t stride, const char* weights, int steps, Ints* totals) {
    zero_tiles();
    for (int step = 0; step < steps; step++, weights += STEP_BYTES, rows += 64) {
        // With few rows the product waits for the weights.
        for (int line = 0; line < STEP_BYTES; line += 64) _mm_prefetch(weights + 2 * STEP_BYTES + line, _MM_HINT_T0);
        _tile_loadd(4, rows, stride);
        _tile_loadd(5, weights, 64);
        DOT_TILES(0, 4, 5);
        _tile_loadd(6, weights + TILE_BYTES, 64);
        DOT_TILES(1, 4, 6);
        _tile_loadd(7, weights + 2 * TILE_BYTES, 64);
        DOT_TILES(2, 4, 7);
        _tile_loadd(5, weights + 3 * TILE_BYTES, 64);
        DOT_TILES(3, 4, 5);
    }
    char* out = reinterpret_cast<char*>(totals);
    _tile_stored(0, out, 256);
    _tile_stored(1, out + 64, 256);
    _tile_stored(2, out + 128, 256);
    _tile_stored(3, out + 192, 256);
    memory_barrier();
}

#endif
#endif

// A prepacked weight matrix [outputs, inputs] with a bias.
class Matrix {
  public:
    int64_t outputs = 0, inputs = 0;

    Matrix() = default;

    // Stacks matrices, each given as a pointer and its number of outputs. Each has a bias, which may be null for zeros.
    Matrix(Precision precision, int64_t inputs, const std::vector<std::pair<const float*, int64_t>>& matrices,
           const std::vector<const float*>& biases)
        : inputs(inputs), precision(precision) {
        for (auto& matrix : matrices) outputs += matrix.second;
        size_t panels = (outputs + PANEL - 1) / PANEL;
        int per_group = precision == INT8 ? 4 : precision == BFLOAT16 ? 2 : 1;
        steps = precision == FLOAT32 ? inputs : (inputs + 16 * per_group - 1) / (16 * per_group);
        panel_bytes = product(steps, precision == FLOAT32 ? PANEL * 4 : STEP_BYTES);
        // The vector and tile products prefetch beyond the end.
        size_t bytes = product(panels, panel_bytes) + 4 * STEP_BYTES;
        memset(weights.reserve(bytes), 0, bytes);
        std::fill_n(bias.reserve(panels * PANEL), panels * PANEL, 0.0f);
        std::fill_n(scales.reserve(panels * PANEL), panels * PANEL, 0.0f);
        std::fill_n(sums.reserve(panels * PANEL), panels * PANEL, 0);
        int64_t output = 0;
        for (size_t i = 0; i < matrices.size(); i++)
            for (int64_t row = 0; row < matrices[i].second; row++, output++) {
                if (biases[i]) bias.data[output] = biases[i][row];
                lay_out(output, matrices[i].first + row * inputs, per_group);
            }
    }

    // out [count, outputs] = x W^T + b, through ReLU if `relu`. Rows of `x` and `out` are `x_stride` and `out_stride`
    // elements apart.
    template <typename T>
    void multiply(const float* x, int64_t x_stride, int64_t count, T* out, int64_t out_stride, bool relu = false) const {
        Rows rows = convert(x, x_stride, count);
        multiply(rows, out, out_stride, relu, 0, outputs);
    }

    // Rows of x, converted to the precision of the product.
    struct Rows {
        const char* data;
        size_t stride;
        const float* scales;
        int64_t count;
    };

    Rows convert(const float* x, int64_t x_stride, int64_t count) const {
        if (precision == FLOAT32) return {reinterpret_cast<const char*>(x), x_stride * sizeof(float), nullptr, count};
        size_t stride = steps * 64;
        int64_t padded = (count + 31) / 32 * 32;
        char* rows = scratch().rows.reserve(product(padded, stride));
        float* row_scales = scratch().scales.reserve(padded);
        for (int64_t i = 0; i < count; i++)
            if (precision == INT8)
                row_scales[i] = round_row(x + i * x_stride, reinterpret_cast<uint8_t*>(rows) + i * stride, stride);
            else
                halve_row(x + i * x_stride, reinterpret_cast<uint16_t*>(rows + i * stride), stride / 2);
        memset(rows + count * stride, 0, (padded - count) * stride);
        return {rows, stride, row_scales, count};
    }

    // The same for outputs [first, last) of converted rows. Both bounds are multiples of PANEL, or the end.
    template <typename T>
    void multiply(const Rows& rows, T* out, int64_t out_stride, bool relu, int64_t first, int64_t last) const {
        switch (precision) {
            case FLOAT32: return multiply_floats(rows, out, out_stride, relu, first, last);
            case BFLOAT16: return multiply_groups<BFLOAT16>(rows, out, out_stride, relu, first, last);
            case INT8: return multiply_groups<INT8>(rows, out, out_stride, relu, first, last);
        }
    }

  private:
    Precision precision = FLOAT32;
    int64_t steps = 0, panel_bytes = 0;
    Buffer<char> weights;
    Buffer<float> bias, scales;
    Buffer<int32_t> sums;

    // Round the weights of one output [inputs] into their panel.
    void lay_out(int64_t output, const float* row, int per_group) {
        char* panel = weights.data + output / PANEL * panel_bytes;
        int64_t column = output % PANEL;
        if (precision == FLOAT32) {
            for (int64_t k = 0; k < inputs; k++) reinterpret_cast<float*>(panel)[k * PANEL + column] = row[k];
            return;
        }
        int32_t extreme = 0;
        for (int64_t k = 0; k < inputs; k++) extreme = std::max(extreme, magnitude(row[k]));
        float scale = scale_of(extreme);
        scales.data[output] = scale;
        // All weights round to 0, or one is not finite and the scale, NaN, tells so.
        if (precision == INT8 && !(scale > 0)) return;
        char* tile = panel + column / 16 * TILE_BYTES + column % 16 * 4;
        for (int64_t k = 0; k < inputs; k++) {
            int64_t group = k / per_group, within = k % per_group;
            char* place = tile + group / 16 * STEP_BYTES + group % 16 * 64;
            if (precision == INT8) {
                int rounded = static_cast<int>(std::nearbyint(row[k] / scale));
                reinterpret_cast<int8_t*>(place)[within] = rounded;
                // Rows of x are shifted by 128 to be unsigned; `sums` is what this adds to the product.
                sums.data[output] += 128 * rounded;
            } else {
                reinterpret_cast<uint16_t*>(place)[within] = to_bfloat16(row[k]);
            }
        }
    }

    // The bits of a float without its sign. As integers they are ordered like the magnitudes, and NaN comes after
    // infinity: the largest one shows whether all are finite.
    static int32_t magnitude(float x) {
        int32_t bits;
        memcpy(&bits, &x, 4);
        return bits & 0x7fffffff;
    }

    // The scale that maps the largest magnitude to 127: NaN if that is not finite, 0 if it is so small that its inverse
    // would overflow.
    static float scale_of(int32_t extreme) {
        float bound;
        memcpy(&bound, &extreme, 4);
        if (!std::isfinite(bound)) return NAN;
        return bound < 1e-35f ? 0 : bound / 127;
    }

    // Round a row to integers from -127 to 127 on its own scale, add 128, and return the scale.
    float round_row(const float* x, uint8_t* out, size_t stride) const {
        typedef uint8_t Bytes __attribute__((vector_size(16), aligned(1)));
        Ints extremes = {};
        int64_t whole = inputs / WIDTH * WIDTH;
        for (int64_t k = 0; k < whole; k += WIDTH) {
            Ints bits = (Ints)load(x + k) & 0x7fffffff;
            extremes = bits > extremes ? bits : extremes;
        }
        int32_t extreme = largest(extremes);
        for (int64_t k = whole; k < inputs; k++) extreme = std::max(extreme, magnitude(x[k]));
        float scale = scale_of(extreme);
        if (!(scale > 0)) {
            memset(out, 0, stride);
            return scale;
        }
        float bound;
        memcpy(&bound, &extreme, 4);
        float factor = 127 / bound;
        for (int64_t k = 0; k < whole; k += WIDTH) {
            // Adding 1.5 * 2^23 leaves the rounded integer in the lowest bits.
            Ints rounded = (Ints)(load(x + k) * factor + (12582912.0f + 128.0f));
            *reinterpret_cast<Bytes*>(out + k) = __builtin_convertvector(rounded & 255, Bytes);
        }
        for (int64_t k = whole; k < inputs; k++) out[k] = static_cast<int>(std::nearbyint(x[k] * factor)) + 128;
        memset(out + inputs, 0, stride - inputs);
        return scale;
    }

    // Round a row to bfloat16, and fill it up with zeros to `stride` elements.
    void halve_row(const float* x, uint16_t* out, size_t stride) const {
        int64_t whole = inputs / WIDTH * WIDTH;
        for (int64_t k = 0; k < whole; k += WIDTH) store(out + k, load(x + k));
        for (int64_t k = whole; k < inputs; k++) out[k] = to_bfloat16(x[k]);
        memset(out + inputs, 0, (stride - inputs) * 2);
    }

    // Write 16 outputs of one row, with bias and ReLU; those beyond the last output are left out.
    template <typename T>
    void put(T* out, Floats value, int64_t output, bool relu) const {
        value += load(bias.data + output);
        if (relu) value = ::relu(value);
        if (output + WIDTH <= outputs) {
            store(out + output, value);
        } else {
            T rest[WIDTH];
            store(rest, value);
            if (output < outputs) memcpy(out + output, rest, (outputs - output) * sizeof(T));
        }
    }

    // Scale and write the totals of `count` rows from `row` on, `per_row` vectors each, from `output` on.
    template <int KIND, typename T>
    void put_totals(const Ints* totals, int per_row, const Rows& rows, int64_t row, int64_t count, T* out,
                    int64_t out_stride, bool relu, int64_t output) const {
        for (int64_t i = 0; i < count; i++)
            for (int j = 0; j < per_row; j++) {
                Ints total = totals[i * per_row + j];
                int64_t place = output + j * WIDTH;
                Floats value;
                if constexpr (KIND == INT8) {
                    total -= *reinterpret_cast<const Ints*>(sums.data + place);
                    value = __builtin_convertvector(total, Floats) * load(scales.data + place) * rows.scales[row + i];
                } else {
                    value = (Floats)total;
                }
                put(out + (row + i) * out_stride, value, place, relu);
            }
    }

    template <int KIND, typename T>
    void multiply_groups(const Rows& rows, T* out, int64_t out_stride, bool relu, int64_t first, int64_t last) const {
#if defined(__AVX512VNNI__) || defined(__AVX512BF16__)
        alignas(64) Ints totals[64];
        out -= first;
        for (int64_t output = first; output < last; output += PANEL) {
            const char* panel = weights.data + output / PANEL * panel_bytes;
#ifdef __AMX_TILE__
            if (rows.count <= 16) {
                multiply_tiles_1x4<KIND>(rows.data, rows.stride, panel, steps, totals);
                put_totals<KIND>(totals, 4, rows, 0, rows.count, out, out_stride, relu, output);
                continue;
            }
            for (int half = 0; half < 2; half++)
                for (int64_t row = 0; row < rows.count; row += 32) {
                    multiply_tiles_2x2<KIND>(rows.data + row * rows.stride, rows.stride,
                                             panel + half * 2 * TILE_BYTES, steps, totals);
                    put_totals<KIND>(totals, 2, rows, row, std::min<int64_t>(32, rows.count - row), out, out_stride,
                                     relu, output + half * 32);
                }
#else
            int64_t row = 0;
            for (; row + 4 <= rows.count; row += 4) {
                multiply_vectors<KIND, 4, 4>(rows.data + row * rows.stride, rows.stride, panel, steps, totals);
                put_totals<KIND>(totals, 4, rows, row, 4, out, out_stride, relu, output);
            }
            for (; row < rows.count; row++) {
                multiply_vectors<KIND, 1, 4>(rows.data + row * rows.stride, rows.stride, panel, steps, totals);
                put_totals<KIND>(totals, 4, rows, row, 1, out, out_stride, relu, output);
            }
#endif
        }
#endif
    }

    template <int ROWS, typename T>
    void multiply_floats(const Rows& rows, int64_t row, const float* panel, T* out, int64_t out_stride, bool relu,
                         int64_t output) const {
        Floats totals[ROWS][4] = {};
        const float* x[ROWS];
        for (int i = 0; i < ROWS; i++) x[i] = reinterpret_cast<const float*>(rows.data + (row + i) * rows.stride);
        for (int64_t k = 0; k < inputs; k++, panel += PANEL)
            for (int i = 0; i < ROWS; i++)
                for (int j = 0; j < 4; j++) totals[i][j] += load(panel + j * WIDTH) * x[i][k];
        for (int i = 0; i < ROWS; i++)
            for (int j = 0; j < 4; j++) put(out + (row + i) * out_stride, totals[i][j], output + j * WIDTH, relu);
    }

    template <typename T>
    void multiply_floats(const Rows& rows, T* out, int64_t out_stride, bool relu, int64_t first, int64_t last) const {
        out -= first;
        for (int64_t output = first; output < last; output += PANEL) {
            const float* panel = reinterpret_cast<const float*>(weights.data + output / PANEL * panel_bytes);
            int64_t row = 0;
            for (; row + 6 <= rows.count; row += 6)
                multiply_floats<6>(rows, row, panel, out, out_stride, relu, output);
            for (; row < rows.count; row++)
                multiply_floats<1>(rows, row, panel, out, out_stride, relu, output);
        }
    }
};
