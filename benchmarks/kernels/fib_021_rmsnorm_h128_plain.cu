// FIB/021_rmsnorm_h128 in plain CUDA, without torch headers: half a warp a row, 16 bytes a lane.

#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <stdint.h>

constexpr int kHidden = 128;
constexpr int kPerLane = 8;
constexpr int kLanesPerRow = kHidden / kPerLane;
constexpr int kThreads = 256;
constexpr int kRowsPerBlock = kThreads / kLanesPerRow;
constexpr float kEps = 1e-6f;

union Bf16x8 {
  uint4 bits;
  __nv_bfloat162 pairs[kPerLane / 2];
};

__global__ void rmsnorm_kernel(const uint4* __restrict__ hidden, const uint4* __restrict__ weight,
                               uint4* __restrict__ output, int64_t num_rows) {
  const int lane = threadIdx.x % kLanesPerRow;
  const int64_t row =
      static_cast<int64_t>(blockIdx.x) * kRowsPerBlock + threadIdx.x / kLanesPerRow;
  // Rows past the end take part in the shuffles with zeros.
  const bool inside = row < num_rows;

  Bf16x8 x, w;
  x.bits = inside ? hidden[row * kLanesPerRow + lane] : make_uint4(0, 0, 0, 0);
  w.bits = weight[lane];
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kPerLane / 2; ++i) {
    const float2 pair = __bfloat1622float2(x.pairs[i]);
    sum += pair.x * pair.x + pair.y * pair.y;
  }
#pragma unroll
  for (int offset = kLanesPerRow / 2; offset > 0; offset /= 2) {
    sum += __shfl_xor_sync(0xffffffffu, sum, offset);
  }
  const float rstd = rsqrtf(sum / kHidden + kEps);
#pragma unroll
  for (int i = 0; i < kPerLane / 2; ++i) {
    const float2 pair = __bfloat1622float2(x.pairs[i]);
    const float2 scale = __bfloat1622float2(w.pairs[i]);
    x.pairs[i] = __floats2bfloat162_rn(pair.x * rstd * scale.x, pair.y * rstd * scale.y);
  }
  if (inside) output[row * kLanesPerRow + lane] = x.bits;
}

extern "C" void run(const void* hidden_states, const void* weight, void* output,
                    int64_t batch_size, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>((batch_size + kRowsPerBlock - 1) / kRowsPerBlock);
  if (blocks == 0) return;
  rmsnorm_kernel<<<blocks, kThreads, 0, stream>>>(static_cast<const uint4*>(hidden_states),
                                                  static_cast<const uint4*>(weight),
                                                  static_cast<uint4*>(output), batch_size);
}
