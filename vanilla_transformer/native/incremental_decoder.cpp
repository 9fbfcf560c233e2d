// Decoding with the Transformer of Vaswani et al. (2017): one call encodes a batch, one call takes a step through all
// layers of the decoder.
//
// The sentences of a batch are packed, without padding. A row is a hypothesis. Reordering the rows copies no keys and
// values: each row has a list of the rows that wrote its past positions.

#include <cstddef>
#include <memory>

#include "prepacked_products.h"

namespace {

// Rows that go through all layers together, so that activations stay in the cache.
constexpr int64_t GROUP = 256;
// Logits of the last product that are scored together, for the same reason.
constexpr int64_t CHUNK = 512;

struct Norm {
    const float *weight, *bias;
    int64_t width;
    float epsilon;

    // Layer normalisation of one row, in place.
    void apply(float* x) const {
        Floats total = {};
        for (int64_t i = 0; i < width; i += WIDTH) total += load(x + i);
        float mean = sum(total) / width;
        Floats squares = {};
        for (int64_t i = 0; i < width; i += WIDTH) {
            Floats centred = load(x + i) - mean;
            squares += centred * centred;
        }
        float factor = 1 / std::sqrt(sum(squares) / width + epsilon);
        for (int64_t i = 0; i < width; i += WIDTH)
            store(x + i, (load(x + i) - mean) * factor * load(weight + i) + load(bias + i));
    }
};

// Number of heads, and elements of a key and of a value in each.
struct Widths {
    int64_t heads, key, value;
    int64_t keys() const { return heads * key; }
    int64_t values() const { return heads * value; }
    int64_t joined() const { return keys() + values(); }
};

// One query row attends to `count` positions; `at(position)` points to the position's keys, which its values follow.
template <typename T, typename At>
void attend(const Widths& widths, const float* query, int64_t count, At at, float* out) {
    static thread_local Buffer<float> all_scores;
    int64_t padded = (count + WIDTH - 1) / WIDTH * WIDTH;
    float* scores = all_scores.reserve(product(widths.heads, padded));
    float factor = 1 / std::sqrt(static_cast<float>(widths.key));
    for (int64_t position = 0; position < count; position++) {
        const T* key = at(position);
        for (int64_t head = 0; head < widths.heads; head++) {
            Floats total = {};
            for (int64_t i = 0; i < widths.key; i += WIDTH)
                total += load(query + head * widths.key + i) * load(key + head * widths.key + i);
            scores[head * padded + position] = sum(total) * factor;
        }
    }
    for (int64_t head = 0; head < widths.heads; head++) {
        float* mine = scores + head * padded;
        for (int64_t i = count; i < padded; i++) mine[i] = -INFINITY;
        softmax(mine, padded);
    }
    std::fill_n(out, widths.values(), 0.0f);
    for (int64_t position = 0; position < count; position++) {
        const T* value = at(position) + widths.keys();
        for (int64_t head = 0; head < widths.heads; head++) {
            float weight = scores[head * padded + position];
            for (int64_t i = head * widths.value; i < (head + 1) * widths.value; i += WIDTH)
                store(out + i, load(out + i) + load(value + i) * weight);
        }
    }
}

// Reads the model's tensors in the order of `tensors_of` in incremental_decoder.py, and checks the number of elements of
// each.
struct Reader {
    const float* const* next;
    const int64_t* sizes;
    int64_t left;
    Precision precision;
    float epsilon;

    const float* take(int64_t size) {
        if (left-- == 0 || (*next && *sizes != size)) throw std::invalid_argument("a tensor");
        sizes++;
        return *next++;
    }

    const float* needed(int64_t size) {
        const float* tensor = take(size);
        if (!tensor) throw std::invalid_argument("a tensor");
        return tensor;
    }

    Matrix matrix(int64_t inputs, std::vector<int64_t> outputs) {
        std::vector<std::pair<const float*, int64_t>> matrices;
        std::vector<const float*> biases;
        for (int64_t count : outputs) {
            matrices.emplace_back(needed(product(inputs, count)), count);
            biases.push_back(take(count));
        }
        return Matrix(precision, inputs, matrices, biases);
    }

    Norm norm(int64_t width) {
        const float* weight = needed(width);
        return {weight, needed(width), width, epsilon};
    }
};

// Sizes of the model; `_Dimensions` of incremental_decoder.py has the same layout.
struct Dimensions {
    int64_t precision, model, encoder_layers, decoder_layers, encoder_ffn, decoder_ffn, source_vocabulary, vocabulary,
        pre_norm;
    Widths encoder, decoder;
};

// A thread's activations of a group of rows.
struct Work {
    Buffer<float> hidden, normed, joined, outputs, inner;
};

struct Layer {
    Matrix self_in, self_out, source_queries, source_joined, source_out, first, second;
    Norm self_norm, source_norm, last_norm;

    Layer(Reader& reader, const Dimensions& of, bool decodes) {
        const Widths& widths = decodes ? of.decoder : of.encoder;
        int64_t ffn = decodes ? of.decoder_ffn : of.encoder_ffn;
        self_in = reader.matrix(of.model, {widths.keys(), widths.keys(), widths.values()});
        self_out = reader.matrix(widths.values(), {of.model});
        self_norm = reader.norm(of.model);
        if (decodes) {
            source_queries = reader.matrix(of.model, {widths.keys()});
            source_joined = reader.matrix(of.model, {widths.keys(), widths.values()});
            source_out = reader.matrix(widths.values(), {of.model});
            source_norm = reader.norm(of.model);
        }
        first = reader.matrix(of.model, {ffn});
        second = reader.matrix(ffn, {of.model});
        last_norm = reader.norm(of.model);
    }
};

struct Stack {
    const float* embeddings;
    float scale;
    std::vector<Layer> layers;
    Norm norm;
    bool pre_norm;
    int64_t width;

    Stack(Reader& reader, const Dimensions& of, bool decodes, float scale)
        : embeddings(reader.needed(product(decodes ? of.vocabulary : of.source_vocabulary, of.model))), scale(scale),
          pre_norm(of.pre_norm), width(of.model) {
        for (int64_t i = 0; i < (decodes ? of.decoder_layers : of.encoder_layers); i++)
            layers.emplace_back(reader, of, decodes);
        if (pre_norm) norm = reader.norm(width);
    }

    void embed(int64_t token, const float* position, float* out) const {
        for (int64_t i = 0; i < width; i += WIDTH)
            store(out + i, load(embeddings + token * width + i) * scale + load(position + i));
    }

    // A sub-layer's input: the hidden states, normalised if the model is pre-norm.
    const float* before(const Norm& norm, Work& work, int64_t count) const {
        if (!pre_norm) return work.hidden.data;
        float* normed = work.normed.reserve(product(count, width));
        std::copy_n(work.hidden.data, count * width, normed);
        for (int64_t i = 0; i < count; i++) norm.apply(normed + i * width);
        return normed;
    }

    // The sub-layer's last product, the residual connection and the normalisation.
    void after(const Norm& norm, const Matrix& last, const float* x, Work& work, int64_t count) const {
        float* outputs = work.outputs.reserve(product(count, width));
        last.multiply(x, last.inputs, count, outputs, width);
        for (int64_t i = 0; i < count; i++) {
            float* row = work.hidden.data + i * width;
            for (int64_t j = 0; j < width; j += WIDTH) store(row + j, load(row + j) + load(outputs + i * width + j));
            if (!pre_norm) norm.apply(row);
        }
    }

    void feed_forward(const Layer& layer, Work& work, int64_t count) const {
        int64_t ffn = layer.first.outputs;
        float* inner = work.inner.reserve(product(count, ffn));
        layer.first.multiply(before(layer.last_norm, work, count), width, count, inner, ffn, true);
        after(layer.last_norm, layer.second, inner, work, count);
    }

    void finish(Work& work, int64_t count) const {
        if (pre_norm)
            for (int64_t i = 0; i < count; i++) norm.apply(work.hidden.data + i * width);
    }
};

struct Model {
    Dimensions of;
    Stack encoder, decoder;
    Matrix output;

    Model(Reader reader, const Dimensions& of, const float* scales)
        : of(of), encoder(reader, of, false, scales[0]), decoder(reader, of, true, scales[1]),
          output(reader.matrix(of.model, {of.vocabulary})) {
        if (reader.left != 0) throw std::invalid_argument("tensors");
    }
};

Work& work() {
    static thread_local Work mine;
    return mine;
}

// The largest `count` of the values offered, largest first, equal ones in the order in which they were offered.
struct Best {
    float* values;
    int64_t* ids;
    int64_t count;

    void start() const { std::fill_n(values, count, -INFINITY), std::fill_n(ids, count, 0); }

    void offer(float value, int64_t id) const {
        if (!(value > values[count - 1])) return;
        int64_t place = count - 1;
        for (; place > 0 && value > values[place - 1]; place--) {
            values[place] = values[place - 1];
            ids[place] = ids[place - 1];
        }
        values[place] = value;
        ids[place] = id;
    }
};

// The hypotheses of a search: `beams` rows for each sentence that is left.
struct State {
    const Model& model;
    int64_t beams = 1, length = 0;
    std::vector<int64_t> sentences;  // indices of the sentences that are left, in the order of the rows
    std::vector<int64_t> offsets;    // index of each sentence's first token, and of the end
    Buffer<char> source;             // keys and values of the source [layers, tokens, joined]
    struct Past {
        Buffer<char> cache;  // keys and values [layers, rows, joined]
        int64_t rows;
    };
    std::vector<Past> past;                       // one for each target position
    std::vector<std::vector<int32_t>> ancestors;  // for each row, the row that wrote each of its positions
    bool whole = true;                            // no step has failed half-way

    State(const Model& model, const int64_t* offsets, int64_t count)
        : model(model), offsets(offsets, offsets + count + 1), ancestors(count) {
        for (int64_t i = 0; i < count; i++) {
            if (offsets[i] >= offsets[i + 1]) throw std::invalid_argument("a source without tokens");
            sentences.push_back(i);
        }
    }

    size_t cache_bytes() const { return model.of.precision == FLOAT32 ? 4 : 2; }
    int64_t rows() const { return ancestors.size(); }

    bool knows(const int64_t* tokens) const {
        return std::all_of(tokens, tokens + rows(), [&](int64_t token) {
            return token >= 0 && token < model.of.vocabulary;
        });
    }

    template <typename T>
    void encode(const int64_t* ids, const float* positions) {
        const Dimensions& of = model.of;
        int64_t tokens = offsets.back(), joined = of.decoder.joined();
        source.reserve(product(of.decoder_layers, tokens, joined, sizeof(T)));
        int64_t count = offsets.size() - 1;
        for (int64_t first = 0, last; first < count; first = last) {
            // As many sentences as fit into a group, at least one.
            last = first + 1;
            while (last < count && offsets[last + 1] - offsets[first] <= GROUP) last++;
            encode<T>(ids, positions, first, last);
        }
    }

    template <typename T>
    void encode(const int64_t* ids, const float* positions, int64_t first, int64_t last) {
        const Dimensions& of = model.of;
        const Stack& stack = model.encoder;
        const Widths& widths = of.encoder;
        Work& w = work();
        int64_t begin = offsets[first], count = offsets[last] - begin;
        float* hidden = w.hidden.reserve(product(count, of.model));
        for (int64_t sentence = first; sentence < last; sentence++)
            for (int64_t token = offsets[sentence]; token < offsets[sentence + 1]; token++)
                stack.embed(ids[token], positions + (token - offsets[sentence]) * of.model,
                            hidden + (token - begin) * of.model);
        int64_t stride = widths.keys() + widths.joined();
        float* joined = w.joined.reserve(product(count, stride));
        float* heads = w.inner.reserve(product(count, std::max(widths.values(), of.encoder_ffn)));
        for (const Layer& layer : stack.layers) {
            layer.self_in.multiply(stack.before(layer.self_norm, w, count), of.model, count, joined, stride);
            for (int64_t sentence = first; sentence < last; sentence++) {
                const float* start = joined + (offsets[sentence] - begin) * stride;
                auto at = [&](int64_t position) { return start + position * stride + widths.keys(); };
                int64_t length = offsets[sentence + 1] - offsets[sentence];
                for (int64_t i = 0; i < length; i++)
                    attend<float>(widths, start + i * stride, length, at,
                                  heads + (offsets[sentence] - begin + i) * widths.values());
            }
            stack.after(layer.self_norm, layer.self_out, heads, w, count);
            stack.feed_forward(layer, w, count);
        }
        stack.finish(w, count);
        int64_t number = 0;
        for (const Layer& layer : model.decoder.layers) {
            T* out = reinterpret_cast<T*>(source.data) + (number++ * offsets.back() + begin) * of.decoder.joined();
            layer.source_joined.multiply(hidden, of.model, count, out, of.decoder.joined());
        }
    }

    // Take a step with all rows, and pass the hidden states of each group to `finish(first row, count, states)`.
    template <typename T, typename Finish>
    void step(const int64_t* tokens, const float* position, Finish finish) {
        const Dimensions& of = model.of;
        past.push_back({Buffer<char>(product(of.decoder_layers, rows(), of.decoder.joined(), sizeof(T))), rows()});
        for (int64_t row = 0; row < rows(); row++) ancestors[row].push_back(row);
        length++;
        for (int64_t first = 0; first < rows(); first += GROUP) {
            int64_t count = std::min(GROUP, rows() - first);
            float* hidden = work().hidden.reserve(product(count, of.model));
            for (int64_t i = 0; i < count; i++)
                model.decoder.embed(tokens[first + i], position, hidden + i * of.model);
            for (size_t layer = 0; layer < model.decoder.layers.size(); layer++) pass<T>(layer, first, count);
            model.decoder.finish(work(), count);
            finish(first, count, hidden);
        }
    }

    template <typename T>
    void pass(int64_t number, int64_t first, int64_t count) {
        const Dimensions& of = model.of;
        const Widths& widths = of.decoder;
        const Stack& stack = model.decoder;
        const Layer& layer = stack.layers[number];
        Work& w = work();
        int64_t stride = widths.keys() + widths.joined();
        float* joined = w.joined.reserve(product(count, stride));
        float* heads = w.inner.reserve(product(count, std::max(widths.values(), of.decoder_ffn)));

        layer.self_in.multiply(stack.before(layer.self_norm, w, count), of.model, count, joined, stride);
        T* now = reinterpret_cast<T*>(past.back().cache.data) + number * past.back().rows * widths.joined();
        for (int64_t i = 0; i < count; i++) {
            T* mine = now + (first + i) * widths.joined();
            const float* theirs = joined + i * stride + widths.keys();
            for (int64_t j = 0; j < widths.joined(); j += WIDTH) store(mine + j, load(theirs + j));
        }
        for (int64_t i = 0; i < count; i++) {
            const std::vector<int32_t>& writers = ancestors[first + i];
            auto at = [&](int64_t position) {
                const Past& then = past[position];
                return reinterpret_cast<const T*>(then.cache.data) +
                       (number * then.rows + writers[position]) * widths.joined();
            };
            attend<T>(widths, joined + i * stride, length, at, heads + i * widths.values());
        }
        stack.after(layer.self_norm, layer.self_out, heads, w, count);

        layer.source_queries.multiply(stack.before(layer.source_norm, w, count), of.model, count, joined, widths.keys());
        for (int64_t i = 0; i < count; i++) {
            int64_t sentence = sentences[(first + i) / beams];
            const T* start = reinterpret_cast<const T*>(source.data) +
                             (number * offsets.back() + offsets[sentence]) * widths.joined();
            auto at = [&](int64_t position) { return start + position * widths.joined(); };
            attend<T>(widths, joined + i * widths.keys(), offsets[sentence + 1] - offsets[sentence], at,
                      heads + i * widths.values());
        }
        stack.after(layer.source_norm, layer.source_out, heads, w, count);
        stack.feed_forward(layer, w, count);
    }

    template <typename Finish>
    void step(const int64_t* tokens, const float* position, Finish finish) {
        if (!whole) throw std::logic_error("a step failed");
        whole = false;
        MatrixUnit unit;
        if (model.of.precision == FLOAT32)
            step<float>(tokens, position, finish);
        else
            step<uint16_t>(tokens, position, finish);
        whole = true;
    }

    // The likeliest tokens of each row with their log-probabilities, or with their logits unless `with_sums`. If a logit
    // of a row is NaN, so are all of its values.
    void score(const float* hidden, int64_t rows, const int64_t* banned, int64_t num_banned, int64_t best_count,
               bool with_sums, float* values, int64_t* ids) {
        static thread_local Buffer<float> logits, sums, bounds;
        int64_t vocabulary = model.of.vocabulary;
        logits.reserve(product(rows, CHUNK)), sums.reserve(rows), bounds.reserve(rows);
        Matrix::Rows converted = model.output.convert(hidden, model.of.model, rows);
        for (int64_t first = 0; first < vocabulary; first += CHUNK) {
            int64_t count = std::min(CHUNK, vocabulary - first), padded = (count + WIDTH - 1) / WIDTH * WIDTH;
            model.output.multiply(converted, logits.data, CHUNK, false, first, first + count);
            for (int64_t row = 0; row < rows; row++) {
                float* mine = logits.data + row * CHUNK;
                std::fill(mine + count, mine + padded, -INFINITY);
                for (int64_t i = 0; i < num_banned; i++)
                    if (banned[i] >= first && banned[i] < first + count) mine[banned[i] - first] = -INFINITY;
                Best best{values + row * best_count, ids + row * best_count, best_count};
                if (first == 0) best.start(), sums.data[row] = 0, bounds.data[row] = -INFINITY;
                Floats peak = fill(-INFINITY);
                for (int64_t i = 0; i < padded; i += WIDTH) {
                    Floats some = load(mine + i);
                    peak = max(peak, some);
                    if (!any_above(some, best.values[best_count - 1])) continue;
                    for (int64_t j = i; j < i + WIDTH; j++) {
                        if (std::isnan(mine[j])) bounds.data[row] = NAN;
                        best.offer(mine[j], first + j);
                    }
                }
                if (!with_sums || std::isnan(bounds.data[row])) continue;
                float bound = std::max(bounds.data[row], largest(peak));
                if (bound == -INFINITY) continue;
                Floats total = {};
                for (int64_t i = 0; i < padded; i += WIDTH) total += exponential(load(mine + i) - bound);
                sums.data[row] = sums.data[row] * std::exp(bounds.data[row] - bound) + sum(total);
                bounds.data[row] = bound;
            }
        }
        for (int64_t row = 0; row < rows; row++) {
            float* mine = values + row * best_count;
            if (std::isnan(bounds.data[row])) std::fill_n(mine, best_count, NAN);
            for (int64_t i = 0; with_sums && i < best_count; i++) mine[i] -= bounds.data[row] + std::log(sums.data[row]);
        }
    }

    // Whether a value is above the bound, or NaN.
    static bool any_above(Floats values, float bound) {
#ifdef __AVX512F__
        return _mm512_cmp_ps_mask((__m512)values, _mm512_set1_ps(bound), _CMP_NLE_UQ) != 0;
#else
        return largest(~(values <= bound) & 1) != 0;
#endif
    }

    void select(const int64_t* kept, int64_t num_kept, const int64_t* rows, int64_t num_rows) {
        int64_t before = sentences.size(), after = kept ? num_kept : before;
        auto is_below = [](int64_t bound) { return [=](int64_t i) { return i >= 0 && i < bound; }; };
        if (num_rows > INT32_MAX) throw std::bad_alloc();
        bool fits = after > 0 && num_rows >= after && num_rows % after == 0;
        fits = fits && (!kept || std::all_of(kept, kept + after, is_below(before)));
        if (!fits || !std::all_of(rows, rows + num_rows, is_below(this->rows()))) throw std::invalid_argument("rows");
        std::vector<std::vector<int32_t>> selected;
        selected.reserve(num_rows);
        for (int64_t i = 0; i < num_rows; i++) selected.push_back(ancestors[rows[i]]);
        std::vector<int64_t> left;
        for (int64_t i = 0; i < after; i++) left.push_back(sentences[kept ? kept[i] : i]);
        // All allocations are done: running out of memory leaves the state as it was.
        ancestors.swap(selected), sentences.swap(left);
        beams = num_rows / after;
    }
};

template <typename Work>
int guarded(Work work) {
    try {
        work();
        return DONE;
    } catch (...) {
        return outcome_of_exception();
    }
}

}  // namespace

extern "C" {

int supports_precision(int64_t precision) { return supports(precision); }

// The constants that Python also defines, in its order, after their number; library.py compares them.
const int64_t* shared_constants() {
    static const int64_t table[] = {
        25, WIDTH, FLOAT32, BFLOAT16, INT8, DONE, UNKNOWN_TOKEN, NO_MEMORY, FAILED, BAD_ARGUMENT,
        offsetof(Dimensions, precision), offsetof(Dimensions, model), offsetof(Dimensions, encoder_layers),
        offsetof(Dimensions, decoder_layers), offsetof(Dimensions, encoder_ffn), offsetof(Dimensions, decoder_ffn),
        offsetof(Dimensions, source_vocabulary), offsetof(Dimensions, vocabulary), offsetof(Dimensions, pre_norm),
        offsetof(Dimensions, encoder.heads), offsetof(Dimensions, encoder.key), offsetof(Dimensions, encoder.value),
        offsetof(Dimensions, decoder.heads), offsetof(Dimensions, decoder.key), offsetof(Dimensions, decoder.value),
        sizeof(Dimensions),
    };
    static_assert(sizeof table == 26 * sizeof *table);
    return table;
}

int new_model(const Dimensions* dimensions, const float* scales, float epsilon, const float* const* tensors,
              const int64_t* sizes, int64_t num_tensors, Model** made) {
    return guarded([&] {
        Dimensions of = *dimensions;
        if (!supports(of.precision)) throw std::invalid_argument("the precision");
        *made = new Model(Reader{tensors, sizes, num_tensors, static_cast<Precision>(of.precision), epsilon}, of, scales);
    });
}

void delete_model(Model* model) { delete model; }

int new_state(const Model* model, const int64_t* ids, const int64_t* offsets, int64_t sentences,
              const float* positions, State** made) {
    for (int64_t i = 0; i < offsets[sentences]; i++)
        if (ids[i] < 0 || ids[i] >= model->of.source_vocabulary) return UNKNOWN_TOKEN;
    return guarded([&] {
        MatrixUnit unit;
        auto state = std::make_unique<State>(*model, offsets, sentences);
        if (model->of.precision == FLOAT32)
            state->encode<float>(ids, positions);
        else
            state->encode<uint16_t>(ids, positions);
        *made = state.release();
    });
}

void delete_state(State* state) { delete state; }

int step_logits(State* state, const int64_t* tokens, const float* position, float* logits) {
    if (!state->knows(tokens)) return UNKNOWN_TOKEN;
    const Matrix& output = state->model.output;
    return guarded([&] {
        state->step(tokens, position, [&](int64_t first, int64_t count, const float* hidden) {
            output.multiply(hidden, state->model.of.model, count, logits + first * output.outputs, output.outputs);
        });
    });
}

int step_best(State* state, const int64_t* tokens, const float* position, const int64_t* banned, int64_t num_banned,
              int64_t best_count, int with_sums, float* values, int64_t* ids) {
    if (!state->knows(tokens)) return UNKNOWN_TOKEN;
    if (best_count < 1) return BAD_ARGUMENT;
    return guarded([&] {
        state->step(tokens, position, [&](int64_t first, int64_t count, const float* hidden) {
            state->score(hidden, count, banned, num_banned, best_count, with_sums, values + first * best_count,
                         ids + first * best_count);
        });
    });
}

int select_rows(State* state, const int64_t* sentences, int64_t num_sentences, const int64_t* rows, int64_t num_rows) {
    return guarded([&] { state->select(sentences, num_sentences, rows, num_rows); });
}
}
