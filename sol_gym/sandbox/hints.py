"""What to do about compile errors whose cause is the machine and not the solution."""

from __future__ import annotations

import re
import sys

_PACKAGES = {
    "cutlass": "CuTe DSL solutions need nvidia-cutlass-dsl and a GPU",
    "cuda": "cuda.tile comes with cuda-tile (cuTile), cuda.bindings with cuda-bindings",
    "cudnn": "cuDNN frontend solutions need nvidia-cudnn-frontend and a GPU",
    "triton": "Triton solutions need triton (on a CPU too, for its interpreter)",
}
_FILES = (
    (r"(cutlass|cute)/", "set CUTLASS_DIR to a checkout of CUTLASS for whoever starts the judge"),
    (r"cudnn(_\w+)?\.h", "put the folder of cuDNN's headers on CPATH for whoever starts the judge"),
    (r"cuda\w*\.h", "CUDA's headers must be there: set CUDA_HOME to the toolkit"),
)


def with_hint(message: str) -> str:
    """The message of a compile error, with a line about what is missing here, if that is the cause."""
    if found := re.search(r"ModuleNotFoundError: No module named '(\w+)", message):
        what = _PACKAGES.get(found[1], f"no package gives the module {found[1]!r} here")
        return f"{message.rstrip()}\nhint: {what}; packages are those of {sys.executable} and PYTHONPATH"
    for line in re.findall(r".*(?:No such file|cannot open source file).*", message):
        for pattern, what in _FILES:
            if re.search(rf"error: .*?\b{pattern}", line):
                return f"{message.rstrip()}\nhint: {what}"
    return message
