// RMSNorm over rows of `hidden` bfloat16 values, float32 statistics: one pass per row and thread.
// Convention (docs/solutions.md): pointers in call order, then the workload's variable axes.
#include <cmath>
#include <cstdint>
#include <cstring>

static constexpr int64_t kHidden = 128;

static inline float from_bf16(uint16_t bits) {
    uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float value;
    std::memcpy(&value, &wide, sizeof value);
    return value;
}

static inline uint16_t to_bf16(float value) {  // round to nearest even
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

extern "C" void run(const void* hidden_states, const void* weight, void* output, int64_t batch_size) {
    const uint16_t* x = static_cast<const uint16_t*>(hidden_states);
    const uint16_t* w = static_cast<const uint16_t*>(weight);
    uint16_t* y = static_cast<uint16_t*>(output);
    float scale[kHidden];
    for (int64_t i = 0; i < kHidden; ++i) scale[i] = from_bf16(w[i]);
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < batch_size; ++row) {
        float values[kHidden], partial[16] = {};
        for (int64_t i = 0; i < kHidden; ++i) values[i] = from_bf16(x[row * kHidden + i]);
        for (int64_t i = 0; i < kHidden; i += 16)
            for (int64_t j = 0; j < 16; ++j) partial[j] += values[i + j] * values[i + j];
        float sum = 0;
        for (int64_t j = 0; j < 16; ++j) sum += partial[j];
        const float r = 1.0f / std::sqrt(sum / kHidden + 1e-6f);
        for (int64_t i = 0; i < kHidden; ++i) y[row * kHidden + i] = to_bf16(values[i] * r * scale[i]);
    }
}
