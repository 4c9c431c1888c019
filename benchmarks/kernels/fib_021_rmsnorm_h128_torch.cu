// FIB/021_rmsnorm_h128 in CUDA C++ with a torch binding: one warp a row of 128 elements.

#include <c10/cuda/CUDAStream.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <torch/extension.h>

namespace {

constexpr int kHidden = 128;
constexpr int kWarpsPerBlock = 8;
constexpr float kEps = 1e-6f;

struct alignas(8) Bf16x4 {
  __nv_bfloat162 low, high;
};

__global__ void rmsnorm_kernel(const __nv_bfloat16* __restrict__ hidden,
                               const __nv_bfloat16* __restrict__ weight,
                               __nv_bfloat16* __restrict__ output, int64_t num_rows) {
  const int lane = threadIdx.x % 32;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarpsPerBlock + threadIdx.x / 32;
  if (row >= num_rows) return;

  const auto packed = reinterpret_cast<const Bf16x4*>(hidden + row * kHidden)[lane];
  const float2 x01 = __bfloat1622float2(packed.low), x23 = __bfloat1622float2(packed.high);
  float sum = x01.x * x01.x + x01.y * x01.y + x23.x * x23.x + x23.y * x23.y;
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
  const float rstd = rsqrtf(sum / kHidden + kEps);

  const auto packed_weight = reinterpret_cast<const Bf16x4*>(weight)[lane];
  const float2 w01 = __bfloat1622float2(packed_weight.low);
  const float2 w23 = __bfloat1622float2(packed_weight.high);
  Bf16x4 result;
  result.low = __floats2bfloat162_rn(x01.x * rstd * w01.x, x01.y * rstd * w01.y);
  result.high = __floats2bfloat162_rn(x23.x * rstd * w23.x, x23.y * rstd * w23.y);
  reinterpret_cast<Bf16x4*>(output + row * kHidden)[lane] = result;
}

}  // namespace

torch::Tensor run(torch::Tensor hidden_states, torch::Tensor weight) {
  TORCH_CHECK(hidden_states.is_cuda() && hidden_states.is_contiguous(),
              "hidden_states: expected a contiguous CUDA tensor");
  TORCH_CHECK(hidden_states.dim() == 2 && hidden_states.size(1) == kHidden,
              "hidden_states: expected [batch_size, 128], found ", hidden_states.sizes());
  auto output = torch::empty_like(hidden_states);
  const int64_t num_rows = hidden_states.size(0);
  const auto blocks = static_cast<unsigned>((num_rows + kWarpsPerBlock - 1) / kWarpsPerBlock);
  if (blocks == 0) return output;
  rmsnorm_kernel<<<blocks, kWarpsPerBlock * 32, 0, c10::cuda::getCurrentCUDAStream()>>>(
      reinterpret_cast<const __nv_bfloat16*>(hidden_states.data_ptr()),
      reinterpret_cast<const __nv_bfloat16*>(weight.data_ptr()),
      reinterpret_cast<__nv_bfloat16*>(output.data_ptr()), num_rows);
  return output;
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("run", &run); }
