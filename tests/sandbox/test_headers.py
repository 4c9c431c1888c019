"""Torch bindings built with light headers: what they convert, and when torch's own are tried."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from sol_gym.sandbox.worker import building, headers

SOURCE = """
#include <torch/extension.h>

torch::Tensor scaled(const torch::Tensor& x, double factor, std::optional<torch::Tensor> bias) {
  TORCH_CHECK(x.dim() == 2, "x must be 2-D");
  auto y = torch::empty_like(x);
  y.copy_(x * factor);
  return bias ? y + *bias : y;
}
void fill(torch::Tensor& out, int64_t value) { out.fill_(value); }
std::vector<torch::Tensor> parts(std::vector<torch::Tensor> all) { return {all.back(), all.front()}; }
std::tuple<torch::Tensor, int64_t, double, bool, std::string> all_kinds(
    const torch::Tensor& x, int count, float weight, bool flag, const std::string& text) {
  return {x.to(torch::kFloat64), count + 1, weight * 2, !flag, text + "!"};
}
std::vector<int64_t> shape(torch::Tensor x) { return x.sizes().vec(); }
torch::Tensor undefined() { return {}; }
torch::Tensor usual_things(const torch::Tensor& x) {
  torch::NoGradGuard guard;
  auto y = torch::zeros({x.numel()}, x.options());
  AT_DISPATCH_FLOATING_TYPES(x.scalar_type(), "usual_things", [&] {
    auto from = x.data_ptr<scalar_t>(), to = y.data_ptr<scalar_t>();
    at::parallel_for(0, x.numel(), 2, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) to[i] = from[i];
    });
  });
  if (y.dim() != 1) std::cout << y << std::endl;
  return torch::cat({y.view(x.sizes()), torch::softmax(x, -1)}, 0);
}
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.doc() = "functions to convert by";
  m.def("scaled", &scaled, "scale x", py::arg("x"), py::arg("factor") = 2.0,
        py::arg("bias") = py::none());
  m.def("fill", &fill);
  m.def("parts", &parts);
  m.def("all_kinds", &all_kinds);
  m.def("shape", &shape);
  m.def("undefined", &undefined);
  m.def("usual_things", &usual_things);
  m.def("twice", [](torch::Tensor x) { return x + x; });
}
"""


def request(folder, text):
    (folder / "src").mkdir(parents=True)
    (folder / "src" / "k.cpp").write_text(text)
    return {
        "dir": str(folder), "sources": ["k.cpp"], "binding": "torch", "device": "cpu", "arch_flags": [],
        "cflags": [], "cuda_cflags": [], "ld_flags": [], "timeout_s": 120.0,
    }  # fmt: skip


@pytest.fixture(scope="module")
def module(tmp_path_factory):
    library = building.build(request(tmp_path_factory.mktemp("light"), SOURCE))
    spec = importlib.util.spec_from_file_location(building.MODULE_NAME, library)
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def test_tensors_numbers_and_texts_are_converted(module):
    x = torch.randn(3, 4)
    y, count, weight, flag, text = module.all_kinds(x, 3, 0.5, True, "ä")
    assert torch.equal(y, x.double())
    assert (count, weight, flag, text) == (4, 1.0, False, "ä!")
    assert module.shape(x) == [3, 4]
    assert module.undefined() is None


def test_arguments_have_names_and_defaults(module):
    x, bias = torch.randn(2, 2), torch.randn(2, 2)
    assert torch.equal(module.scaled(x), x * 2)
    assert torch.equal(module.scaled(x, bias=bias, factor=3), x * 3 + bias)
    for wrong in ({"factors": 3}, {"x": x}):
        with pytest.raises(TypeError, match="incompatible function arguments"):
            module.scaled(x, **wrong)
    with pytest.raises(TypeError, match="incompatible"):
        module.scaled()


def test_a_tensor_is_passed_and_returned_without_a_copy(module):
    x, y = torch.zeros(2, 2), torch.ones(3)
    assert module.fill(x, 7) is None
    assert x.eq(7).all()
    back, front = module.parts([x, y])
    assert back is y and front is x
    assert torch.equal(module.twice(y), y + y)


def test_what_sources_usually_use_is_there(module):
    x = torch.randn(3, 4)
    assert torch.equal(module.usual_things(x), torch.cat([x, x.softmax(-1)]))


def test_errors_are_pythons(module):
    with pytest.raises(RuntimeError, match="x must be 2-D"):
        module.scaled(torch.zeros(3), 1.0)
    for arguments in (
        (3, 1),
        (torch.zeros(1), 1.5),
        (torch.zeros(1), 2**70),
        (torch.zeros(1), None),
    ):
        with pytest.raises(TypeError, match="incompatible function arguments, expected"):
            module.fill(*arguments)


def test_no_reference_is_lost_or_kept(module):
    import sys

    x = torch.zeros(2, 2)
    module.twice(x)
    before = sys.getrefcount(x)
    for _ in range(100):
        module.twice(x)
        module.scaled(x, 2.0, x)
        module.parts([x])
    assert sys.getrefcount(x) == before


def test_the_signature_tells_how_many_arguments_there_are(module):
    first = module.scaled.__doc__.splitlines()[0]
    assert (
        first
        == "scaled(x: torch.Tensor, factor: float, bias: Optional[torch.Tensor]) -> torch.Tensor"
    )
    assert module.fill.__doc__.splitlines()[0] == "fill(arg0: torch.Tensor, arg1: int) -> None"


RUN = "#include <torch/extension.h>\ntorch::Tensor run(torch::Tensor x) {{ {body} }}\n"


@pytest.mark.parametrize(
    "errors, helps",
    [
        ("k.cpp:2:3: error: 'zero' was not declared in this scope", False),
        ("k.cpp:2:3: error: expected ';' before 'return'", False),
        ('k.cu(10): error: identifier "row_nr" is undefined', False),
        ("k.cpp:2:3: error: 'nn' is not a member of 'torch'", True),
        ("k.cpp:2:3: error: 'Slice' was not declared in this scope", True),
        ("k.cpp:2:3: error: 'THPDevice_New' was not declared in this scope", True),
        ("light/torch/extension.h:9:3: error: static assertion failed", True),
        ("k.cpp:(.text+0x1): undefined reference to `somewhere'", True),
        ("ld: killed", True),
    ],
)
def test_torchs_own_headers_are_tried_where_they_might_help(tmp_path, errors, helps):
    message = request(tmp_path, RUN.format(body="return x;"))
    headers.write_light(message)
    command = [building._compiler(), *building._torch_flags(message, None)["host"]]
    assert headers.full_might_help(errors, message, command) is helps


@pytest.mark.parametrize(
    "more",
    ["using namespace torch;", 'void f(M& m) { m.def("g", &a); m.def("g", &b); }'],
    ids=["all-names", "overloads"],
)
def test_sources_that_light_headers_would_read_otherwise_get_torchs_own(tmp_path, more):
    text = f"#include <torch/extension.h>\n{more}\n"
    assert headers.write_light(request(tmp_path, text)) is None
