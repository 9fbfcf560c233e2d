// What training computes between its matrix products, in bfloat16 with sums in float32: softmax(Q K^T) V of attention,
// dropout with residual sum and layer normalisation, and the gradient of ReLU.
//
// A call works on the range [first, last) of heads, or of blocks of BLOCK_ROWS rows. Sums over rows are kept for each
// block, so that results do not depend on how threads divide the work.

#include "simd.h"

#include <cstddef>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)

namespace {

constexpr int64_t BLOCK_ROWS = 128;
// The smallest word of 16 random bits; the words below SMALLEST_WORD + num_dropped drop their elements.
constexpr int64_t SMALLEST_WORD = INT16_MIN;
static_assert(WIDTH == 16, "a vector's bits of kept elements fill a uint16_t");

// MR rows and 16 NR columns of factor * A B. In A, rows are `row` elements apart and columns `step` elements.
template <int MR, int NR, typename T>
inline void multiply_block(const float* a, int64_t row, int64_t step, const float* b, int64_t b_row, int64_t depth,
                           float factor, T* out, int64_t out_row) {
    Floats sums[MR][NR] = {};
    for (int64_t i = 0; i < depth; i++, a += step, b += b_row) {
        Floats right[NR];
#pragma GCC unroll 16
        for (int n = 0; n < NR; n++) right[n] = load(b + n * WIDTH);
#pragma GCC unroll 16
        for (int m = 0; m < MR; m++) {
            Floats left = fill(a[m * row]);
#pragma GCC unroll 16
            for (int n = 0; n < NR; n++) sums[m][n] += left * right[n];
        }
    }
#pragma GCC unroll 16
    for (int m = 0; m < MR; m++)
#pragma GCC unroll 16
        for (int n = 0; n < NR; n++) store(out + m * out_row + n * WIDTH, sums[m][n] * factor);
}

template <int MR, int NR, typename T>
void multiply_rows(int64_t count, const float* a, int64_t row, int64_t step, const float* b, int64_t b_row,
                   int64_t depth, float factor, T* out, int64_t out_row) {
    for (; count >= MR; count -= MR, a += MR * row, out += MR * out_row)
        multiply_block<MR, NR>(a, row, step, b, b_row, depth, factor, out, out_row);
    if constexpr (MR > 1)
        if (count > 0) multiply_rows<MR / 2, NR>(count, a, row, step, b, b_row, depth, factor, out, out_row);
}

// out = factor * A B. In A [rows, depth], rows are `row` elements apart and columns `step` elements; B [depth, columns]
// is row-major.
template <typename T>
void multiply(int64_t rows, int64_t columns, int64_t depth, const float* a, int64_t row, int64_t step, const float* b,
              float factor, T* out, int64_t out_row) {
    int64_t n = 0;
    for (; n + 64 <= columns; n += 64)
        multiply_rows<4, 4>(rows, a, row, step, b + n, columns, depth, factor, out + n, out_row);
    for (; n + 32 <= columns; n += 32)
        multiply_rows<8, 2>(rows, a, row, step, b + n, columns, depth, factor, out + n, out_row);
    for (; n < columns; n += 16)
        multiply_rows<16, 1>(rows, a, row, step, b + n, columns, depth, factor, out + n, out_row);
}

// [rows, columns] in bfloat16, with rows `row` elements apart, to a dense float32 matrix.
void widen(const uint16_t* from, int64_t rows, int64_t columns, int64_t row, float* out) {
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < columns; j += WIDTH) store(out + i * columns + j, load(from + i * row + j));
}

// The transpose [columns, padded] of the same, with zeros at the end of each row.
void widen_transposed(const uint16_t* from, int64_t rows, int64_t columns, int64_t row, int64_t padded, float* out) {
    for (int64_t i = 0; i < padded; i += WIDTH)
        for (int64_t j = 0; j < columns; j += WIDTH) {
            __m512 tile[16];
#pragma GCC unroll 16
            for (int m = 0; m < WIDTH; m++)
                tile[m] = i + m < rows ? (__m512)load(from + (i + m) * row + j) : _mm512_setzero_ps();
            transpose_tile(tile);
#pragma GCC unroll 16
            for (int m = 0; m < WIDTH; m++) store(out + (j + m) * padded + i, (Floats)tile[m]);
        }
}

float* scratch(size_t count) {
    static thread_local Buffer<float> buffer;
    return buffer.reserve(count);
}

// Dimensions of attention: number of heads, elements of a key and of a value in each head, distances between rows in
// elements, and whether a query attends only to the keys up to its own position.
struct Sizes {
    int64_t heads, key_width, value_width, query_row, key_row, mask_sentence, mask_row, causal;
};

// For each of B sentences and for the end [B + 1]: index of its first query, of its first key, and of its first
// attention weight.
struct Starts {
    const int64_t *queries, *keys, *weights;
};

int64_t padded_to_vectors(int64_t count) { return (count + WIDTH - 1) / WIDTH * WIDTH; }

// Softmax of scores + mask [padded] in place; only the first `seen` scores get a weight above 0.
void masked_softmax(int64_t seen, int64_t padded, float* scores, const uint16_t* mask) {
    for (int64_t i = 0; i < padded; i += WIDTH) {
        __mmask16 there = seen - i >= WIDTH ? 0xffff : seen <= i ? 0 : (1 << (seen - i)) - 1;
        Floats added = {};
        if (mask)
            added = (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(there, mask + i)), 16);
        added = (Floats)_mm512_mask_blend_ps(there, _mm512_set1_ps(-INFINITY), (__m512)added);
        store(scores + i, load(scores + i) + added);
    }
    softmax(scores, padded);
}

// Calls `row(block, i)` for each row of the blocks [first, last).
template <typename Row>
void each_row(int64_t first, int64_t last, int64_t rows, Row row) {
    for (int64_t block = first; block < last; block++)
        for (int64_t i = block * BLOCK_ROWS; i < std::min(rows, (block + 1) * BLOCK_ROWS); i++) row(block, i);
}

}  // namespace

extern "C" {

int supports_kernels() { return 1; }

// The constants that Python also defines, in its order, after their number; library.py compares them.
const int64_t* shared_constants() {
    static const int64_t table[] = {
        21, WIDTH, BLOCK_ROWS, SMALLEST_WORD, DONE, UNKNOWN_TOKEN, NO_MEMORY, FAILED, BAD_ARGUMENT,
        offsetof(Sizes, heads), offsetof(Sizes, key_width), offsetof(Sizes, value_width), offsetof(Sizes, query_row),
        offsetof(Sizes, key_row), offsetof(Sizes, mask_sentence), offsetof(Sizes, mask_row), offsetof(Sizes, causal),
        sizeof(Sizes), offsetof(Starts, queries), offsetof(Starts, keys), offsetof(Starts, weights), sizeof(Starts),
    };
    static_assert(sizeof table == 22 * sizeof *table);
    return table;
}

// Attention of each query to the keys of its sentence. A sentence of T queries and S keys has weights [H, T, S rounded
// up to a multiple of WIDTH]; `out` is [all queries, H V].
int attend(const Sizes* sizes, const Starts* starts, float scaling, const uint16_t* queries, const uint16_t* keys,
           const uint16_t* values, const uint16_t* mask, uint16_t* weights, uint16_t* out, int64_t first,
           int64_t last) try {
    auto [H, K, V, query_row, key_row, mask_sentence, mask_row, causal] = *sizes;
    for (int64_t i = first; i < last; i++) {
        int64_t sentence = i / H, head = i % H, start = starts->queries[sentence], key_start = starts->keys[sentence];
        int64_t T = starts->queries[sentence + 1] - start, S = starts->keys[sentence + 1] - key_start;
        int64_t padded = padded_to_vectors(S);
        float* query = scratch(T * K + K * padded + S * V + T * padded);
        float *key = query + T * K, *value = key + K * padded, *scores = value + S * V;
        uint16_t* mine = weights + starts->weights[sentence] + head * T * padded;
        widen(queries + start * query_row + head * K, T, K, query_row, query);
        widen_transposed(keys + key_start * key_row + head * K, S, K, key_row, padded, key);
        multiply(T, padded, K, query, K, 1, key, scaling, scores, padded);
        for (int64_t t = 0; t < T; t++) {
            masked_softmax(causal ? std::min(t + 1, S) : S, padded, scores + t * padded,
                           mask ? mask + sentence * mask_sentence + t * mask_row : nullptr);
            for (int64_t j = 0; j < padded; j += WIDTH) store(mine + t * padded + j, load(scores + t * padded + j));
        }
        widen(values + key_start * key_row + head * V, S, V, key_row, value);
        multiply(T, V, S, scores, padded, 1, value, 1.0f, out + start * H * V + head * V, H * V);
    }
    return DONE;
} catch (...) {
    return outcome_of_exception();
}

// The gradients of `attend`, each in the layout of what it belongs to.
int attend_backward(const Sizes* sizes, const Starts* starts, float scaling, const uint16_t* queries,
                    const uint16_t* keys, const uint16_t* values, const uint16_t* weights, const uint16_t* grad,
                    uint16_t* grad_queries, uint16_t* grad_keys, uint16_t* grad_values, int64_t first, int64_t last) try {
    auto [H, K, V, query_row, key_row, mask_sentence, mask_row, causal] = *sizes;
    for (int64_t i = first; i < last; i++) {
        int64_t sentence = i / H, head = i % H, start = starts->queries[sentence], key_start = starts->keys[sentence];
        int64_t T = starts->queries[sentence + 1] - start, S = starts->keys[sentence + 1] - key_start;
        int64_t padded = padded_to_vectors(S);
        int64_t at_query = start * query_row + head * K, at_key = key_start * key_row + head * K;
        int64_t at_value = key_start * key_row + head * V;
        float* query = scratch(T * K + S * K + V * padded + T * V + 2 * T * padded);
        float *key = query + T * K, *value = key + S * K, *grad_out = value + V * padded, *weight = grad_out + T * V;
        float* grad_scores = weight + T * padded;
        widen(grad + start * H * V + head * V, T, V, H * V, grad_out);
        widen(weights + starts->weights[sentence] + head * T * padded, T, padded, padded, weight);
        multiply(S, V, T, weight, 1, padded, grad_out, 1.0f, grad_values + at_value, key_row);
        widen_transposed(values + at_value, S, V, key_row, padded, value);
        multiply(T, padded, V, grad_out, V, 1, value, 1.0f, grad_scores, padded);
        for (int64_t t = 0; t < T; t++) {
            float *mine = grad_scores + t * padded, *share = weight + t * padded;
            Floats total = {};
            for (int64_t j = 0; j < padded; j += WIDTH) total += load(mine + j) * load(share + j);
            float mean = sum(total);
            for (int64_t j = 0; j < padded; j += WIDTH) store(mine + j, (load(mine + j) - mean) * load(share + j));
        }
        widen(keys + at_key, S, K, key_row, key);
        multiply(T, K, S, grad_scores, padded, 1, key, scaling, grad_queries + at_query, query_row);
        widen(queries + at_query, T, K, query_row, query);
        multiply(S, K, T, grad_scores, 1, padded, query, scaling, grad_keys + at_key, key_row);
    }
    return DONE;
} catch (...) {
    return outcome_of_exception();
}

// LayerNorm(residual + Dropout(output)). The sum is written over `output`. `words` holds 16 random bits for each element;
// `kept` receives one bit for each, set where the element is kept. Both are null without dropout.
int add_and_norm(int64_t rows, int64_t width, float scale, int64_t num_dropped, float epsilon, uint16_t* output,
                 const uint16_t* residual, const int16_t* words, uint16_t* kept, const float* weight,
                 const float* bias, uint16_t* normed, float* means, float* factors, int64_t first, int64_t last) try {
    float* sums = scratch(width);
    const __m256i bound = _mm256_set1_epi16(SMALLEST_WORD + num_dropped);
    each_row(first, last, rows, [&](int64_t, int64_t row) {
        Floats total = {};
        for (int64_t j = 0; j < width; j += WIDTH) {
            int64_t at = row * width + j;
            Floats added = load(output + at);
            Floats share = fill(scale);
            if (words) {
                __mmask16 bits = _mm256_cmpge_epi16_mask(_mm256_loadu_si256((const __m256i*)(words + at)), bound);
                kept[at / WIDTH] = bits;
                share = (Floats)_mm512_maskz_mov_ps(bits, (__m512)share);
            }
            store(output + at, load(residual + at) + added * share);
            Floats rounded = load(output + at);
            store(sums + j, rounded);
            total += rounded;
        }
        float mean = sum(total) / width;
        Floats squares = {};
        for (int64_t j = 0; j < width; j += WIDTH) {
            Floats centred = load(sums + j) - mean;
            squares += centred * centred;
        }
        float factor = 1 / std::sqrt(sum(squares) / width + epsilon);
        for (int64_t j = 0; j < width; j += WIDTH)
            store(normed + row * width + j, (load(sums + j) - mean) * factor * load(weight + j) + load(bias + j));
        means[row] = mean, factors[row] = factor;
    });
    return DONE;
} catch (...) {
    return outcome_of_exception();
}

// The gradients of `add_and_norm`. `sums` [blocks, 2, width] must be zero; it receives each block's gradients of weight
// and bias.
int add_and_norm_backward(int64_t rows, int64_t width, float scale, const uint16_t* grad, const uint16_t* total,
                          const uint16_t* kept, const float* weight, const float* means, const float* factors,
                          uint16_t* grad_output, uint16_t* grad_total, float* sums, int64_t first, int64_t last) try {
    float *scaled = scratch(2 * width), *standard = scaled + width;
    each_row(first, last, rows, [&](int64_t block, int64_t row) {
        float *weight_sums = sums + block * 2 * width, *bias_sums = weight_sums + width;
        Floats total_scaled = {}, total_product = {};
        for (int64_t j = 0; j < width; j += WIDTH) {
            Floats outer = load(grad + row * width + j);
            Floats unit = (load(total + row * width + j) - means[row]) * factors[row];
            Floats inner = outer * load(weight + j);
            store(scaled + j, inner), store(standard + j, unit);
            total_scaled += inner, total_product += inner * unit;
            store(weight_sums + j, load(weight_sums + j) + outer * unit);
            store(bias_sums + j, load(bias_sums + j) + outer);
        }
        float mean = sum(total_scaled) / width, slope = sum(total_product) / width;
        for (int64_t j = 0; j < width; j += WIDTH) {
            int64_t at = row * width + j;
            Floats result = (load(scaled + j) - mean - load(standard + j) * slope) * factors[row];
            store(grad_total + at, result);
            Floats share = fill(scale);
            if (kept) share = (Floats)_mm512_maskz_mov_ps(kept[at / WIDTH], (__m512)share);
            store(grad_output + at, result * share);
        }
    });
    return DONE;
} catch (...) {
    return outcome_of_exception();
}

// Sets `grad` to zero where `activations` are not positive, but leaves it where they are NaN. `sums` [blocks, width] must
// be zero; it receives the column sums of each block.
int relu_backward(int64_t rows, int64_t width, const uint16_t* activations, uint16_t* grad, float* sums,
                  int64_t first, int64_t last) try {
    const __m256i minus_infinity = _mm256_set1_epi16((int16_t)0xff80);
    each_row(first, last, rows, [&](int64_t block, int64_t row) {
        for (int64_t j = 0; j < width; j += WIDTH) {
            int64_t at = row * width + j;
            __m256i values = _mm256_loadu_si256((const __m256i*)(activations + at));
            // As signed integers, 0, every positive value and every NaN are above -inf.
            __mmask16 some = _mm256_test_epi16_mask(values, values);  // not 0
            __mmask16 bits = _mm256_mask_cmpgt_epi16_mask(some, values, minus_infinity);
            __m256i passed = _mm256_maskz_loadu_epi16(bits, grad + at);
            _mm256_storeu_si256((__m256i*)(grad + at), passed);
            store(sums + block * width + j, load(sums + block * width + j) + load(grad + at));
        }
    });
    return DONE;
} catch (...) {
    return outcome_of_exception();
}

// The sum over the blocks of [blocks, width], in their order.
int add_blocks(int64_t blocks, int64_t width, const float* sums, float* out) try {
    std::copy_n(sums, width, out);
    for (int64_t block = 1; block < blocks; block++)
        for (int64_t j = 0; j < width; j++) out[j] += sums[block * width + j];
    return DONE;
} catch (...) {
    return outcome_of_exception();
}
}

#else

extern "C" int supports_kernels() { return 0; }

#endif
