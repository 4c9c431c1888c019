"""Solutions as data: from a text, from files, and the errors of malformed ones."""

import json

import pytest
from pydantic import ValidationError

from sol_gym.errors import SolutionError
from sol_gym.solution import BuildSpec, Solution, SourceFile, load_solution, strip_code_fence

TORCH = "import torch\n\ndef run(x):\n    return x * 2\n"
TRITON = "import triton\nimport triton.language as tl\n\ndef run(x):\n    return x\n"
CUDA = "#include <cuda_fp16.h>\n__global__ void k(float* x) {}\nvoid run() {}\n"
CPP = '#include <vector>\nextern "C" void run(float* x) {}\n'
CUDA_IN_PYTHON = (
    'import torch\nSOURCE = """\n__global__ void k() {}\n"""\ndef run(x):\n    return x\n'
)


@pytest.mark.parametrize(
    ("text", "language", "entry_point"),
    [
        (TORCH, "pytorch", "solution.py::run"),
        (TRITON, "triton", "solution.py::run"),
        ("def run(x):\n    from triton import jit\n", "triton", "solution.py::run"),
        (CUDA, "cuda_cpp", "solution.cu::run"),
        (CPP, "cpp", "solution.cpp::run"),
        (CUDA_IN_PYTHON, "pytorch", "solution.py::run"),
        ("def run(x: return", "pytorch", "solution.py::run"),
    ],
)
def test_the_language_is_told_from_the_text(text, language, entry_point):
    solution = Solution.from_text(text)
    assert solution.spec.languages == [language]
    assert solution.spec.entry_point == entry_point
    assert solution.spec.destination_passing_style is None
    assert solution.source_text == text


def test_a_stated_language_and_function_win():
    solution = Solution.from_text(TORCH, language="triton", entry_function="forward", name="mine")
    assert solution.spec.languages == ["triton"]
    assert solution.spec.entry_function == "forward"
    assert solution.name == "mine"


@pytest.mark.parametrize("fence", ["```python\n{}```", "```\n{}\n```\n", "  ```py\n{}``` "])
def test_a_code_fence_around_the_whole_text_is_removed(fence):
    source = Solution.from_text(fence.format(TORCH)).source_text
    assert source.strip() == TORCH.strip()


def test_text_beside_a_fence_is_left_alone():
    text = "Here it is:\n```python\nx\n```"
    assert strip_code_fence(text) == text


@pytest.mark.parametrize("text", ["", "  \n", None])
def test_an_empty_text_is_refused(text):
    with pytest.raises(SolutionError, match="empty; expected source code"):
        Solution.from_text(text)


def spec(**changes):
    return {"languages": ["pytorch"], "entry_point": "a.py::run"} | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"entry_point": "a.py"}, "expected 'file::function'"),
        ({"entry_point": "a.py::"}, "expected 'file::function'"),
        ({"entry_point": "a::b::c"}, "expected 'file::function'"),
        ({"languages": []}, "at least 1 item"),
        ({"languages": ["fortran"]}, "fortran"),
        ({"languages": ["pytorch", "cuda_cpp"]}, "cannot be mixed"),
        ({"entry_point": "a.cu::run"}, "need a .py entry file"),
        ({"languages": ["cuda_cpp"]}, r"need a C\+\+/CUDA entry file"),
    ],
)
def test_a_build_spec_that_cannot_be_built_is_refused(changes, message):
    with pytest.raises(ValidationError, match=message):
        BuildSpec.model_validate(spec(**changes))


@pytest.mark.parametrize(
    ("alias", "language"), [("python", "pytorch"), ("cuda", "cuda_cpp"), ("c++", "cpp")]
)
def test_common_language_names_are_understood(alias, language):
    suffix = ".py" if alias == "python" else ".cu"
    assert BuildSpec.model_validate(
        spec(languages=[alias], entry_point=f"a{suffix}::run")
    ).languages == [language]


@pytest.mark.parametrize("path", ["/etc/passwd", "../a.py", "a/../../b.py", "a\\b.py", ""])
def test_a_source_path_cannot_leave_the_folder(path):
    with pytest.raises(ValidationError):
        SourceFile(path=path, content="x")


def solution(*paths, **changes):
    sources = [{"path": path, "content": f"# {path}\n"} for path in paths]
    return {"name": "s", "spec": spec(), "sources": sources} | changes


def test_the_entry_file_must_be_among_the_sources():
    with pytest.raises(ValidationError, match=r"'a.py' is not among the sources \['b.py'\]"):
        Solution.model_validate(solution("b.py"))


def test_duplicate_paths_are_refused():
    with pytest.raises(ValidationError, match="duplicate paths"):
        Solution.model_validate(solution("a.py", "a.py"))


def test_the_hash_follows_what_is_built_and_run():
    base = Solution.model_validate(solution("a.py", "b.py"))
    same = Solution.model_validate(solution("b.py", "a.py", name="other", author="me"))
    assert base.content_hash == same.content_hash
    assert base.content_hash != Solution.model_validate(solution("a.py", "c.py")).content_hash
    other_entry = solution("a.py", "b.py", spec=spec(entry_point="b.py::run"))
    assert base.content_hash != Solution.model_validate(other_entry).content_hash


def test_several_files_read_as_one_text_with_their_names():
    text = Solution.model_validate(solution("a.py", "b.py")).source_text
    assert text.index("# ---- a.py") < text.index("# ---- b.py")


@pytest.mark.parametrize(
    ("name", "text", "language"),
    [("k.py", TRITON, "triton"), ("k.cu", CUDA, "cuda_cpp"), ("k.cpp", CPP, "cpp")],
)
def test_a_source_file_is_a_solution(tmp_path, name, text, language):
    file = tmp_path / name
    file.write_text(text)
    loaded = load_solution(file)
    assert (loaded.name, loaded.spec.languages) == ("k", [language])


def test_a_json_solution_takes_missing_content_from_beside_it(tmp_path):
    data = solution("a.py")
    del data["sources"][0]["content"]
    (tmp_path / "solution.json").write_text(json.dumps(data))
    with pytest.raises(SolutionError, match=r"'a\.py' has no content and .*a\.py does not exist"):
        load_solution(tmp_path)
    (tmp_path / "a.py").write_text(TORCH)
    assert load_solution(tmp_path).source_text == TORCH
    assert load_solution(tmp_path / "solution.json").source_text == TORCH


def test_a_solution_survives_its_json(tmp_path):
    original = Solution.model_validate(solution("a.py", note="kept"))
    (tmp_path / "solution.json").write_text(original.model_dump_json())
    assert load_solution(tmp_path) == original


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "expected an object, found list"),
        (json.dumps({"name": "s", "sources": [], "spec": spec()}), "field sources"),
        (json.dumps(solution("a.py", spec=spec(languages="x"))), r"field spec\.languages"),
    ],
)
def test_a_malformed_file_is_named_with_its_field(tmp_path, text, message):
    file = tmp_path / "solution.json"
    file.write_text(text)
    with pytest.raises(SolutionError, match=rf"solution\.json: .*{message}"):
        load_solution(file)


def test_a_folder_needs_exactly_one_solution(tmp_path):
    with pytest.raises(SolutionError, match=r"expected one solution\*\.json, found \[\]"):
        load_solution(tmp_path)


def test_a_file_that_is_no_text_is_named(tmp_path):
    (tmp_path / "k.py").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SolutionError, match=r"k\.py: cannot be read"):
        load_solution(tmp_path / "k.py")
    with pytest.raises(SolutionError, match="cannot be read"):
        load_solution(tmp_path / "none.py")
