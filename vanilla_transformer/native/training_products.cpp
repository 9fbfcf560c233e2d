// Products of matrices in bfloat16 with sums in float32, in the tiles of AMX: 16 rows of 64 bytes.
//
// Both factors are laid out in panels first: 32 rows of the left factor or 32 columns of the right one. A panel is a
// series of steps along the sums; a step has 32 numbers of each sum, in two tiles. Rows of a tile are rows of the left
// factor, and in the right factor pairs of successive rows, as the instruction wants them. What is missing of a last
// panel or step is zero.
//
// A call works on a range of panels. Sums are added up in the same order whatever the range is.

#include "simd.h"

#if defined(__linux__) && defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__AVX512BW__) && \
    defined(__AVX512VL__)

#include <sys/syscall.h>
#include <unistd.h>

namespace {

constexpr int64_t EDGE = 32, TILE = 16 * 32, STEP = 2 * TILE, BLOCK = EDGE * EDGE;
// Steps whose tiles of one panel stay in the first cache while panels of the other factor pass.
constexpr int64_t NEAR_STEPS = 16;
// Steps, and numbers, of the left factor that are laid out at a time, for the second cache.
constexpr int64_t FAR_STEPS = 32, FAR_NUMBERS = 1 << 19, FAR_ROWS = 1024;

enum Kind { WIDE = 1, TRANSPOSED = 2, ADDED = 4, RELU = 8 };

struct alignas(64) TileConfiguration {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
const TileConfiguration WHOLE_TILES;

int64_t panels_of(int64_t count) { return (count + EDGE - 1) / EDGE; }

__mmask16 first_16(int64_t n) { return n >= 16 ? 0xffff : n <= 0 ? 0 : (1u << n) - 1; }
__mmask32 first_32(int64_t n) { return n >= 32 ? 0xffffffff : n <= 0 ? 0 : (1u << n) - 1; }

// 32 or 16 numbers in bfloat16, of which `n` are there.
__m512i load_32(const uint16_t* p, int64_t n) { return _mm512_maskz_loadu_epi16(first_32(n), p); }
__m256i load_16(const uint16_t* p, int64_t n) { return _mm256_maskz_loadu_epi16(first_16(n), p); }
__m512i load_32(const float* p, int64_t n) {
    __m512 low = _mm512_maskz_loadu_ps(first_16(n), p), high = _mm512_maskz_loadu_ps(first_16(n - 16), p + 16);
    return (__m512i)_mm512_cvtne2ps_pbh(high, low);
}
__m256i load_16(const float* p, int64_t n) {
    return (__m256i)_mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(first_16(n), p));
}

void transpose_tiles(uint16_t* tiles, int64_t count) {
    for (; count > 0; count--, tiles += TILE) {
        __m512 rows[16];
        for (int i = 0; i < 16; i++) rows[i] = _mm512_load_ps(tiles + 32 * i);
        transpose_tile(rows);
        for (int i = 0; i < 16; i++) _mm512_store_ps(tiles + 32 * i, rows[i]);
    }
}

// Rows of 32 numbers of tiles, of `count` sums whose numbers lie side by side; panels begin `panel` numbers apart.
template <typename T>
void lay_out_rows(const T* numbers, int64_t row, int64_t count, int64_t depth, uint16_t* out, int64_t panel) {
    for (int64_t i = 0; i < panels_of(count) * EDGE; i++, numbers += row) {
        uint16_t* to = out + i / EDGE * panel + i / 16 % 2 * TILE + i % 16 * 32;
        for (int64_t k = 0; k < depth; k += EDGE, to += STEP)
            _mm512_store_si512(to, i < count ? load_32(numbers + k, depth - k) : _mm512_setzero_si512());
    }
}

// Rows of 16 pairs of tiles, of sums whose numbers lie `row` apart.
template <typename T>
void lay_out_pairs(const T* numbers, int64_t row, int64_t count, int64_t depth, uint16_t* out, int64_t panel) {
    for (int64_t k = 0; k < panels_of(depth) * EDGE; k += 2, numbers += 2 * row) {
        uint16_t* to = out + k / EDGE * STEP + k % EDGE / 2 * 32;
        int64_t first = k < depth ? count : 0, second = k + 1 < depth ? count : 0;
        for (int64_t i = 0; i < panels_of(count) * EDGE; i += 16) {
            __m512i low = _mm512_cvtepu16_epi32(load_16(numbers + i, first - i));
            __m512i high = _mm512_cvtepu16_epi32(load_16(numbers + row + i, second - i));
            __m512i pairs = _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
            _mm512_store_si512(to + i / EDGE * panel + i / 16 % 2 * TILE, pairs);
        }
    }
}

// A block of 32 x 32 sums of two panels, as four tiles, on top of what `sums` has. `ahead` is what will be read next.
template <bool AHEAD>
void add_block(const uint16_t* left, const uint16_t* right, int64_t steps, bool added, float* sums, const char* ahead) {
    // The compiler does not know that loading a tile reads memory.
    asm volatile("" ::: "memory");
    if (added) {
        _tile_loadd(0, sums, 64);
        _tile_loadd(1, sums + 256, 64);
        _tile_loadd(2, sums + 512, 64);
        _tile_loadd(3, sums + 768, 64);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t k = 0; k < steps; k++, left += STEP, right += STEP, ahead += 256) {
        // The left factor passes by without taking the right one's place in the first cache.
        _tile_loadd(6, right, 64);
        _tile_stream_loadd(4, left, 64);
        _tile_loadd(7, right + TILE, 64);
        _tile_stream_loadd(5, left + TILE, 64);
        if (AHEAD)
            for (int line = 0; line < 256; line += 64) _mm_prefetch(ahead + line, _MM_HINT_T1);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sums, 64);
    _tile_stored(1, sums + 256, 64);
    _tile_stored(2, sums + 512, 64);
    _tile_stored(3, sums + 768, 64);
}

struct Output {
    void* numbers;
    int64_t row, kind;
    const float* bias;
};

// Both halves of a row of 32 numbers.
__m512 half_of(__m512i row, int half) {
    __m256i numbers = half ? _mm512_extracti64x4_epi64(row, 1) : _mm512_castsi512_si256(row);
    return (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(numbers), 16);
}

// Writes those `rows` and `columns` of a block that are there. Whole cache lines go past the caches: reading before
// writing what is written whole would cost more than the product.
void write_block(const Output& output, float* sums, int64_t row, int64_t column, int64_t rows, int64_t columns) {
    if (output.kind & TRANSPOSED) {
        transpose_tiles((uint16_t*)sums, 4);
        std::swap_ranges(sums + 256, sums + 512, sums + 512);
        std::swap(row, column), std::swap(rows, columns);
    }
    __mmask16 first = first_16(columns), second = first_16(columns - 16);
    bool relu = output.kind & RELU, added = output.kind & ADDED;
    __m512 bias[2] = {};
    if (output.bias) {
        bias[0] = _mm512_maskz_loadu_ps(first, output.bias + column);
        bias[1] = _mm512_maskz_loadu_ps(second, output.bias + column + 16);
    }
    for (int64_t i = 0; i < rows; i++) {
        const float* from = sums + i / 16 * 512 + i % 16 * 16;
        __m512 low = _mm512_add_ps(_mm512_load_ps(from), bias[0]);
        __m512 high = _mm512_add_ps(_mm512_load_ps(from + 256), bias[1]);
        // What is no number stays none as the second operand.
        if (relu) low = _mm512_max_ps(_mm512_setzero_ps(), low), high = _mm512_max_ps(_mm512_setzero_ps(), high);
        int64_t at = (row + i) * output.row + column;
        if (output.kind & WIDE) {
            float* to = (float*)output.numbers + at;
            if (added) {
                low = _mm512_add_ps(low, _mm512_maskz_loadu_ps(first, to));
                high = _mm512_add_ps(high, _mm512_maskz_loadu_ps(second, to + 16));
            }
            if (!added && columns == 32 && (uintptr_t)to % 64 == 0) {
                _mm512_stream_ps(to, low), _mm512_stream_ps(to + 16, high);
            } else {
                _mm512_mask_storeu_ps(to, first, low), _mm512_mask_storeu_ps(to + 16, second, high);
            }
        } else {
            uint16_t* to = (uint16_t*)output.numbers + at;
            if (added) {
                __m512i before = load_32(to, columns);
                low = _mm512_add_ps(low, half_of(before, 0)), high = _mm512_add_ps(high, half_of(before, 1));
            }
            __m512i result = (__m512i)_mm512_cvtne2ps_pbh(high, low);
            if (!added && columns == 32 && (uintptr_t)to % 64 == 0)
                _mm512_stream_si512((__m512i*)to, result);
            else
                _mm512_mask_storeu_epi16(to, first_32(columns), result);
        }
    }
}

}  // namespace

extern "C" {

// Whether the system permits the use of tiles, which has to be asked for.
int supports_products() {
    constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}

// What Python has as well, in its order, after the number of values.
const int64_t* shared_constants() {
    static const int64_t table[] = {8, EDGE, WIDE, TRANSPOSED, ADDED, RELU, DONE, NO_MEMORY, FAILED};
    return table;
}

// Lays out a right factor of `count` columns, each a sum over `depth` rows: numbers of a column lie side by side
// (`down`) or `row` apart, in float32 or in bfloat16. Panels begin `panel` numbers apart.
int lay_out_right(const void* numbers, int64_t row, int64_t down, int64_t is_float, int64_t count, int64_t depth,
                  uint16_t* out, int64_t panel, int64_t first, int64_t last) try {
    int64_t start = first * EDGE, columns = std::min(count, last * EDGE) - start, at = down ? start * row : start;
    out += first * panel;
    auto lay_out = [&](const auto* from) {
        if (down)
            lay_out_rows(from, row, columns, depth, out, panel);
        else
            lay_out_pairs(from, row, columns, depth, out, panel);
    };
    if (is_float)
        lay_out((const float*)numbers + at);
    else
        lay_out((const uint16_t*)numbers + at);
    if (down)
        for (int64_t i = 0; i < panels_of(columns); i++) transpose_tiles(out + i * panel, 2 * panels_of(depth));
    return DONE;
} catch (...) {
    return outcome_of_exception();
}

// Products of `rows` rows in bfloat16, whose numbers lie side by side or (`down`) `row` apart, with a right factor that
// has been laid out.
int multiply(const uint16_t* numbers, int64_t row, int64_t down, int64_t rows, int64_t depth, const uint16_t* right,
             int64_t columns, const float* bias, int64_t kind, void* out, int64_t out_row, int64_t first,
             int64_t last) try {
    static thread_local Buffer<uint16_t> left_buffer;
    static thread_local Buffer<float> sums_buffer;
    int64_t steps = panels_of(depth), num_far = std::min(steps, FAR_STEPS), end = std::min(rows, last * EDGE);
    int64_t height = std::min(FAR_ROWS, FAR_NUMBERS / (num_far * EDGE) / EDGE * EDGE);
    // Sums stay until their last step: those of one block, of a column of blocks, or all.
    int64_t panel_blocks = steps > NEAR_STEPS, column_blocks = steps > FAR_STEPS ? height / EDGE : 0;
    uint16_t* left = left_buffer.reserve(height * num_far * EDGE);
    float* sums = sums_buffer.reserve((column_blocks * panels_of(columns) + height / EDGE) * BLOCK);
    Output output{out, out_row, kind, bias};
    // Nothing that follows throws, so that the tiles are released.
    _tile_loadconfig(&WHOLE_TILES);
    for (int64_t top = first * EDGE; top < end; top += height) {
        int64_t here = std::min(height, end - top), here_panels = panels_of(here);
        for (int64_t far = 0; far < steps; far += FAR_STEPS) {
            int64_t far_end = std::min(steps, far + FAR_STEPS), panel = (far_end - far) * STEP;
            int64_t far_depth = std::min(depth, far_end * EDGE) - far * EDGE;
            if (down) {
                lay_out_pairs(numbers + far * EDGE * row + top, row, here, far_depth, left, panel);
                transpose_tiles(left, here_panels * panel / TILE);
            } else {
                lay_out_rows(numbers + top * row + far * EDGE, row, here, far_depth, left, panel);
            }
            for (int64_t column = 0; column < columns; column += EDGE)
                for (int64_t near = far; near < far_end; near += NEAR_STEPS) {
                    int64_t near_end = std::min(far_end, near + NEAR_STEPS);
                    const uint16_t* factor = right + (column / EDGE * steps + near) * STEP;
                    // The next column of blocks begins again at `far`.
                    const uint16_t* next = factor + (near_end < far_end ? near_end - near : steps - near + far) * STEP;
                    for (int64_t i = 0; i < here_panels; i++) {
                        float* block = sums + (column / EDGE * column_blocks + i * panel_blocks) * BLOCK;
                        const uint16_t* panels = left + i * panel + (near - far) * STEP;
                        const char* ahead = (const char*)next + i * (near_end - near) * 256;
                        auto add = i * 256 < STEP * 2 ? add_block<true> : add_block<false>;
                        add(panels, factor, near_end - near, near > 0, block, ahead);
                        if (near_end == steps)
                            write_block(output, block, top + i * EDGE, column, std::min(EDGE, here - i * EDGE),
                                        std::min(EDGE, columns - column));
                    }
                }
        }
    }
    _mm_sfence();
    _tile_release();
    return DONE;
} catch (...) {
    return outcome_of_exception();
}
}

#else

extern "C" int supports_products() { return 0; }

#endif
