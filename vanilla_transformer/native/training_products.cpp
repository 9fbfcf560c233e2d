// Matrix products in bfloat16 with sums in float32, by the tiles of AMX: 16 rows of 64 bytes.
//
// Both factors are first copied into panels: 32 rows of the left factor, or 32 columns of the right one. A panel is a
// sequence of steps along the depth (the dimension that is summed over). A step holds 32 elements of the depth for each
// row or column of the panel, in two tiles. A row of a tile is a row of the left factor, or 16 pairs of two successive
// rows of the right factor, as the instruction requires. Zeros fill up the last panel and the last step.
//
// A call works on the range [first, last) of panels. The order of summation does not depend on the range.

#include "simd.h"

#if defined(__linux__) && defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__AVX512BW__) && \
    defined(__AVX512VL__)

#include <sys/syscall.h>
#include <unistd.h>

namespace {

constexpr int64_t EDGE = 32, TILE = 16 * 32, STEP = 2 * TILE, BLOCK = EDGE * EDGE;
static_assert(STEP == BLOCK, "Python counts the elements of a panel's steps as blocks");
// Steps of a right panel that stay in the L1 cache while the panels of the left factor pass.
constexpr int64_t NEAR_STEPS = 16;
// Limits of the section of the left factor that is laid out at a time, so that it fits into the L2 cache: steps,
// elements and rows.
constexpr int64_t FAR_STEPS = 32, FAR_ELEMENTS = 1 << 19, FAR_ROWS = 1024;

// Bits of `kind`: the output is float32, not bfloat16; it is the product's transpose; the product is added to what it
// holds; negative results become 0.
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

// Loads 32 or 16 elements as bfloat16; those from `n` on are not read and become 0.
__m512i load_32(const uint16_t* p, int64_t n) { return _mm512_maskz_loadu_epi16(first_32(n), p); }
__m256i load_16(const uint16_t* p, int64_t n) { return _mm256_maskz_loadu_epi16(first_16(n), p); }
__m512i load_32(const float* p, int64_t n) {
    __m512 low = _mm512_maskz_loadu_ps(first_16(n), p), high = _mm512_maskz_loadu_ps(first_16(n - 16), p + 16);
    return (__m512i)_mm512_cvtne2ps_pbh(high, low);
}
__m256i load_16(const float* p, int64_t n) {
    return (__m256i)_mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(first_16(n), p));
}

// Transposes tiles as 16 x 16 elements of 4 bytes, in place.
void transpose_tiles(uint16_t* tiles, int64_t count) {
    for (; count > 0; count--, tiles += TILE) {
        __m512 rows[16];
        for (int i = 0; i < 16; i++) rows[i] = _mm512_load_ps(tiles + 32 * i);
        transpose_tile(rows);
        for (int i = 0; i < 16; i++) _mm512_store_ps(tiles + 32 * i, rows[i]);
    }
}

// Lays out `count` rows of `depth` contiguous elements each, 32 elements to a row of a tile. Rows are `row` elements
// apart and panels `panel` elements.
template <typename T>
void lay_out_rows(const T* from, int64_t row, int64_t count, int64_t depth, uint16_t* out, int64_t panel) {
    for (int64_t i = 0; i < panels_of(count) * EDGE; i++, from += row) {
        uint16_t* to = out + i / EDGE * panel + i / 16 % 2 * TILE + i % 16 * 32;
        for (int64_t k = 0; k < depth; k += EDGE, to += STEP)
            _mm512_store_si512(to, i < count ? load_32(from + k, depth - k) : _mm512_setzero_si512());
    }
}

// Lays out `count` columns of `depth` elements each, 16 pairs to a row of a tile. Elements of a column are `row`
// elements apart and panels `panel` elements.
template <typename T>
void lay_out_pairs(const T* from, int64_t row, int64_t count, int64_t depth, uint16_t* out, int64_t panel) {
    for (int64_t k = 0; k < panels_of(depth) * EDGE; k += 2, from += 2 * row) {
        uint16_t* to = out + k / EDGE * STEP + k % EDGE / 2 * 32;
        int64_t first = k < depth ? count : 0, second = k + 1 < depth ? count : 0;
        for (int64_t i = 0; i < panels_of(count) * EDGE; i += 16) {
            __m512i low = _mm512_cvtepu16_epi32(load_16(from + i, first - i));
            __m512i high = _mm512_cvtepu16_epi32(load_16(from + row + i, second - i));
            __m512i pairs = _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
            _mm512_store_si512(to + i / EDGE * panel + i / 16 % 2 * TILE, pairs);
        }
    }
}

// The block of 32 x 32 sums of a left and a right panel, as four tiles: added to `sums` if `added`, else written over
// it. Prefetches from `ahead` if AHEAD.
template <bool AHEAD>
void add_block(const uint16_t* left, const uint16_t* right, int64_t steps, bool added, float* sums, const char* ahead) {
    // The compiler does not know that _tile_loadd reads memory: finish all writes first.
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
        // Stream the left factor, so that it does not evict the right panel from the L1 cache.
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
    void* data;
    int64_t row, kind;
    const float* bias;
};

// The lower (0) or upper (1) half of 32 elements in bfloat16, as float32.
__m512 half_of(__m512i row, int half) {
    __m256i elements = half ? _mm512_extracti64x4_epi64(row, 1) : _mm512_castsi512_si256(row);
    return (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(elements), 16);
}

// Writes the first `rows` rows and `columns` columns of a block of sums to the output, at (row, column). Whole cache
// lines bypass the caches: reading them before they are overwritten would cost more than the product.
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
        // _mm512_max_ps returns its second operand if either is NaN, so NaN stays.
        if (relu) low = _mm512_max_ps(_mm512_setzero_ps(), low), high = _mm512_max_ps(_mm512_setzero_ps(), high);
        int64_t at = (row + i) * output.row + column;
        if (output.kind & WIDE) {
            float* to = (float*)output.data + at;
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
            uint16_t* to = (uint16_t*)output.data + at;
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

// Asks Linux for permission to use the tiles; whether it was granted.
int supports_products() {
    constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}

// The constants that Python also defines, in its order, after their number; library.py compares them.
const int64_t* shared_constants() {
    static const int64_t table[] = {
        11, EDGE, BLOCK, WIDE, TRANSPOSED, ADDED, RELU, DONE, UNKNOWN_TOKEN, NO_MEMORY, FAILED, BAD_ARGUMENT,
    };
    static_assert(sizeof table == 12 * sizeof *table);
    return table;
}

// Lays out a right factor [depth, count] in float32 or bfloat16. With `down` the elements of a column are contiguous and
// columns are `row` elements apart; else the elements of a row are contiguous and rows are `row` elements apart. Panels
// of `out` are `panel` elements apart.
int lay_out_right(const void* matrix, int64_t row, int64_t down, int64_t is_float, int64_t count, int64_t depth,
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
        lay_out((const float*)matrix + at);
    else
        lay_out((const uint16_t*)matrix + at);
    if (down)
        for (int64_t i = 0; i < panels_of(columns); i++) transpose_tiles(out + i * panel, 2 * panels_of(depth));
    return DONE;
} catch (...) {
    return outcome_of_exception();
}

// The product of a left factor [rows, depth] in bfloat16 and a right factor that `lay_out_right` has laid out. With
// `down` the elements of a left column are contiguous and columns are `row` elements apart; else rows are.
int multiply(const uint16_t* matrix, int64_t row, int64_t down, int64_t rows, int64_t depth, const uint16_t* right,
             int64_t columns, const float* bias, int64_t kind, void* out, int64_t out_row, int64_t first,
             int64_t last) try {
    static thread_local Buffer<uint16_t> left_buffer;
    static thread_local Buffer<float> sums_buffer;
    int64_t steps = panels_of(depth), num_far = std::min(steps, FAR_STEPS), end = std::min(rows, last * EDGE);
    int64_t height = std::min(FAR_ROWS, FAR_ELEMENTS / (num_far * EDGE) / EDGE * EDGE);
    // Sums are kept until their last step. `sums` holds one block if a panel is done in one pass, a column of blocks if
    // the left factor's section has the whole depth, and else all blocks of the section.
    int64_t panel_blocks = steps > NEAR_STEPS, column_blocks = steps > FAR_STEPS ? height / EDGE : 0;
    uint16_t* left = left_buffer.reserve(height * num_far * EDGE);
    float* sums = sums_buffer.reserve((column_blocks * panels_of(columns) + height / EDGE) * BLOCK);
    Output output{out, out_row, kind, bias};
    // Nothing below throws, so the tiles are always released.
    _tile_loadconfig(&WHOLE_TILES);
    for (int64_t top = first * EDGE; top < end; top += height) {
        int64_t here = std::min(height, end - top), here_panels = panels_of(here);
        for (int64_t far = 0; far < steps; far += FAR_STEPS) {
            int64_t far_end = std::min(steps, far + FAR_STEPS), panel = (far_end - far) * STEP;
            int64_t far_depth = std::min(depth, far_end * EDGE) - far * EDGE;
            if (down) {
                lay_out_pairs(matrix + far * EDGE * row + top, row, here, far_depth, left, panel);
                transpose_tiles(left, here_panels * panel / TILE);
            } else {
                lay_out_rows(matrix + top * row + far * EDGE, row, here, far_depth, left, panel);
            }
            for (int64_t column = 0; column < columns; column += EDGE)
                for (int64_t near = far; near < far_end; near += NEAR_STEPS) {
                    int64_t near_end = std::min(far_end, near + NEAR_STEPS);
                    const uint16_t* factor = right + (column / EDGE * steps + near) * STEP;
                    // What the next pass reads of the right factor; the next column of blocks starts at `far` again.
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
