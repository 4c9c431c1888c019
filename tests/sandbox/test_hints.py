import pytest

from sol_gym.evaluation import Status
from sol_gym.sandbox.hints import with_hint


@pytest.mark.parametrize(
    "message, expected",
    [
        ("ModuleNotFoundError: No module named 'cutlass'", "nvidia-cutlass-dsl"),
        ("ModuleNotFoundError: No module named 'cuda.tile'", "cuda-tile"),
        ("ModuleNotFoundError: No module named 'abc_xyz'", "'abc_xyz' here"),
        ("k.cu:3:10: fatal error: cutlass/gemm/device/gemm.h: No such file or directory", "CUTLASS_DIR"),
        ("k.cu(3): error: cannot open source file \"cute/tensor.hpp\"", "CUTLASS_DIR"),
        ("main.cu:1:10: fatal error: cudnn.h: No such file or directory", "cuDNN"),
        ("x.h:10:10: fatal error: cuda_runtime.h: No such file or directory", "CUDA_HOME"),
    ],
)  # fmt: skip
def test_what_the_machine_lacks_is_named(message, expected):
    first, hint = with_hint(message).split("\nhint: ")
    assert first == message and expected in hint


@pytest.mark.parametrize(
    "message", ["k.cpp:3:1: error: 'cutlass' was not declared", "SyntaxError: invalid syntax", ""]
)
def test_errors_of_the_solution_get_none(message):
    assert with_hint(message) == message


def test_a_missing_package_is_a_compile_error_with_a_hint(judged):
    outcome = judged("import cutlass.cute\n\ndef run(x, w):\n    return x\n")
    assert outcome.status is Status.COMPILE_ERROR
    assert "hint: CuTe DSL solutions need nvidia-cutlass-dsl" in outcome.message
