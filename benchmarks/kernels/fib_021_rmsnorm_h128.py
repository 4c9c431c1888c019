"""FIB/021_rmsnorm_h128 in Triton, destination-passing: several short rows a program."""

import triton
import triton.language as tl


@triton.jit
def rms_norm_rows_kernel(
    hidden_ptr,
    weight_ptr,
    output_ptr,
    num_rows,
    hidden_size,
    EPS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    offset = row[:, None] * hidden_size + column[None, :]
    inside = (row < num_rows)[:, None] & (column < hidden_size)[None, :]
    x = tl.load(hidden_ptr + offset, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=column < hidden_size, other=0.0).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x, axis=1) / hidden_size + EPS)
    y = (x * rstd[:, None]) * weight[None, :]
    tl.store(output_ptr + offset, y.to(tl.bfloat16), mask=inside)


def run(hidden_states, weight, output):
    num_rows, hidden_size = hidden_states.shape
    # Small batches are spread over more programs, large ones read more a program.
    rows = 4 if num_rows <= 4096 else 32
    rms_norm_rows_kernel[(triton.cdiv(num_rows, rows),)](
        hidden_states,
        weight,
        output,
        num_rows,
        hidden_size,
        EPS=1e-6,
        ROWS=rows,
        BLOCK=triton.next_power_of_2(hidden_size),
        num_warps=1 if rows == 4 else 4,
    )
