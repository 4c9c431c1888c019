import pytest

from sol_gym.evaluation import Status
from sol_gym.sandbox.build import FlagRefused, binding_of, checked_flags
from sol_gym.solution import BuildSpec, CompileOptions, Solution, SourceFile

PLAIN = """
#include <cmath>
#include <cstdint>
#include <cstring>
static float f(uint16_t b) { uint32_t w = uint32_t(b) << 16; float v; std::memcpy(&v, &w, 4); return v; }
static uint16_t h(float v) { uint32_t b; std::memcpy(&b, &v, 4); return (b + 0x7FFF + ((b >> 16) & 1)) >> 16; }
extern "C" void run(const void* x_, const void* w_, void* y_, int64_t rows) {
    auto x = (const uint16_t*)x_; auto w = (const uint16_t*)w_; auto y = (uint16_t*)y_;
    for (int64_t r = 0; r < rows; ++r) {
        float s = 0;
        for (int i = 0; i < 256; ++i) s += f(x[r * 256 + i]) * f(x[r * 256 + i]);
        float k = 1 / std::sqrt(s / 256 + 1e-6f);
        for (int i = 0; i < 256; ++i) y[r * 256 + i] = h(f(x[r * 256 + i]) * k * f(w[i]));
    }
}
"""


def solution(text=PLAIN, **spec):
    spec = {
        "languages": ["cpp"],
        "entry_point": "k.cpp::run",
        "destination_passing_style": None,
        **spec,
    }
    return Solution(spec=BuildSpec(**spec), sources=[SourceFile(path="k.cpp", content=text)])


def test_a_plain_c_function_is_built_called_and_cached(judge, judged):
    outcome = judged(solution())
    assert [r.status for r in outcome.results] == [Status.PASSED] * 2, outcome.message
    again = judged(solution())
    assert "fork" in again.stages_s and again.stages_s["build"] < 0.05
    assert again.results[0].status is Status.PASSED


def test_the_compilers_words_reach_the_author(judged):
    outcome = judged(solution(PLAIN.replace("float s = 0;", "float s = zero;")))
    assert outcome.status is Status.COMPILE_ERROR
    assert "'zero' was not declared" in outcome.message
    assert "k.cpp" in outcome.message and "/eval-" not in outcome.message


def test_a_missing_function_is_named(judged):
    outcome = judged(solution(entry_point="k.cpp::walk"))
    assert outcome.status is Status.COMPILE_ERROR
    assert "'walk'" in outcome.message


def test_the_build_sees_nothing_of_the_judge(judged):
    from sol_gym import problem

    outcome = judged(solution(f'#include "{problem.__file__}"\n' + PLAIN))
    assert outcome.status is Status.COMPILE_ERROR
    assert "No such file" in outcome.message


@pytest.mark.parametrize(
    "flag",
    [
        "-fplugin=evil.so",
        "-Wl,--wrap=malloc",
        "-include",
        "/etc/passwd",
        "@file",
        "-B.",
        "-specs=x",
        "-o",
        "-I/etc",
        "--compiler-bindir=.",
        "-wrapper",
        "-fuse-ld=x",
        "-fdump-tree-all=/x",
    ],
)
def test_flags_that_reach_outside_are_refused(judged, flag):
    refused = solution(compile_options=CompileOptions(cflags=[flag], cuda_cflags=[]))
    with pytest.raises(FlagRefused):
        checked_flags(refused)
    assert judged(refused).status is Status.COMPILE_ERROR


@pytest.mark.parametrize(
    "flag",
    ["-O3", "-std=c++20", "-march=native", "-ffast-math", "-fopenmp", "-DN=4", "-Wall", "-g"],
)
def test_ordinary_flags_are_taken(flag):
    assert checked_flags(solution(compile_options=CompileOptions(cflags=[flag], cuda_cflags=[])))[
        "cflags"
    ] == [flag]


@pytest.mark.parametrize(
    "flags",
    [
        ["-O3", "--use_fast_math"],
        ["-gencode=arch=compute_90a,code=sm_90a"],
        ["-Xptxas", "-O3,-v"],
        ["--expt-relaxed-constexpr", "-lineinfo", "-std=c++17"],
    ],
)
def test_ordinary_cuda_flags_are_taken(flags):
    assert (
        checked_flags(solution(compile_options=CompileOptions(cuda_cflags=flags)))["cuda_cflags"]
        == flags
    )


def test_only_known_libraries_are_linked():
    with pytest.raises(FlagRefused, match="lcrypt"):
        checked_flags(solution(compile_options=CompileOptions(ld_flags=["-lcrypt"])))


def test_the_binding_is_told_from_the_source():
    assert binding_of(solution()) == "ctypes"
    assert (
        binding_of(
            solution(
                "#include <torch/extension.h>\ntorch::Tensor run(torch::Tensor x) { return x; }"
            )
        )
        == "torch"
    )
    assert binding_of(Solution.from_text("def run(x):\n    return x\n")) == "python"


TORCH = """
#include <torch/extension.h>
torch::Tensor run(const torch::Tensor& x, const torch::Tensor& weight) {
  auto wide = x.to(torch::kFloat32);
  auto r = torch::rsqrt(wide.pow(2).mean(-1, true) + 1e-6);
  return (wide * r * weight.to(torch::kFloat32)).to(x.scalar_type());
}
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("run", &run, "RMSNorm"); }
"""


def test_a_torch_extension_is_built_called_and_its_errors_told_at_once(judged):
    outcome = judged(solution(TORCH))
    assert [r.status for r in outcome.results] == [Status.PASSED] * 2, outcome.message
    outcome = judged(solution(TORCH.replace("rsqrt(wide", "rsqrt(broad")))
    assert outcome.status is Status.COMPILE_ERROR
    assert "'broad' was not declared" in outcome.message
    assert "light" not in outcome.message.split("\n")[0]
