"""The operations written down as extended einsums, one small example each.

This is what the rules in `dependence`, `work` and `indexing` are held to: the tests execute every
entry and compare it with torch, then compare what the rules say is needed (and multiplied) with what
the entry touches. An entry is for one rank and one set of options; the rules are general.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Example:
    """A call of an operation, and the same as an extended einsum."""

    call: str
    """Python source; `aten` is torch.ops.aten. Its first tensor result is `out` of the rule."""
    tensors: dict[str, Shape]
    """Floating-point arguments, by the operation's own names."""
    rule: str
    sizes: dict[str, str] = field(default_factory=dict)
    constants: dict[str, Any] = field(default_factory=dict)
    """Integer or boolean tensors (as lists) and scalars."""
    complex: tuple[str, ...] = ()
    """Which of the tensors are complex."""


def _e(call: str, rule: str, tensors: Mapping[str, Shape], **more: Any) -> Example:
    sizes = {k: v for k, v in more.items() if k not in ("constants", "complex")}
    return Example(
        call, dict(tensors), rule, sizes, more.get("constants", {}), more.get("complex", ())
    )


_X = {"self": (3, 4)}
_X3 = {"self": (2, 3, 4)}
_RANK = "rank[i, j] = sum(k)(where(self[i, k] < self[i, j], 1, 0))"
_FALLING = "rank[i, j] = sum(k)(where(self[i, k] > self[i, j], 1, 0))"
_K = {"k": "size(self, 1)"}
_MEAN = "mean[i] = sum(j)(self[i, j]) / size(self, 1)"
_VAR = (
    _MEAN
    + "; var[i] = sum(j)((self[i, j] - mean[i]) * (self[i, j] - mean[i])) / (size(self, 1) - 1)"
)
_LAYER = (
    "m[i] = sum(j)(input[i, j]) / 4; v[i] = sum(j)(pow(input[i, j] - m[i], 2)) / 4;"
    "out[i, j] = (input[i, j] - m[i]) * rsqrt(v[i] + 1e-5) * weight[j] + bias[j]"
)
_POOL = {
    "t": "(size(self, 2) - 2) // 2 + 1",
    "u": "(size(self, 3) - 2) // 2 + 1",
    "p": "2",
    "q": "2",
}


TABLE: dict[str, tuple[Example, ...]] = {
    # ---- Contractions
    "mm": (_e("aten.mm(self, mat2)", "out[m, n] = sum(k)(self[m, k] * mat2[k, n])",
              {"self": (3, 4), "mat2": (4, 5)}),),
    "addmm": (_e("aten.addmm(self, mat1, mat2)",
                 "out[m, n] = self[n] + sum(k)(mat1[m, k] * mat2[k, n])",
                 {"self": (5,), "mat1": (3, 4), "mat2": (4, 5)}),),
    "bmm": (_e("aten.bmm(self, mat2)", "out[b, m, n] = sum(k)(self[b, m, k] * mat2[b, k, n])",
               {"self": (2, 3, 4), "mat2": (2, 4, 5)}),),
    "baddbmm": (_e("aten.baddbmm(self, batch1, batch2)",
                   "out[b, m, n] = self[b, 0, n] + sum(k)(batch1[b, m, k] * batch2[b, k, n])",
                   {"self": (2, 1, 5), "batch1": (2, 3, 4), "batch2": (2, 4, 5)}),),
    "addbmm": (_e("aten.addbmm(self, batch1, batch2)",
                  "out[m, n] = self[m, n] + sum(b, k)(batch1[b, m, k] * batch2[b, k, n])",
                  {"self": (3, 5), "batch1": (2, 3, 4), "batch2": (2, 4, 5)}),),
    "mv": (_e("aten.mv(self, vec)", "out[m] = sum(k)(self[m, k] * vec[k])",
              {"self": (3, 4), "vec": (4,)}),),
    "addmv": (_e("aten.addmv(self, mat, vec)", "out[m] = self[m] + sum(k)(mat[m, k] * vec[k])",
                 {"self": (3,), "mat": (3, 4), "vec": (4,)}),),
    "dot": (_e("aten.dot(self, tensor)", "out = sum(k)(self[k] * tensor[k])",
               {"self": (4,), "tensor": (4,)}),),
    "vdot": (_e("aten.vdot(self, other)", "out = sum(k)(self[k] * other[k])",
                {"self": (4,), "other": (4,)}),),
    "convolution": (
        _e("aten.convolution(input, weight, bias, [2], [1], [1], False, [0], 1)",
           "out[b, o, t] = bias[o] + sum(c, k)(input[b, c, 2 * t + k - 1] * weight[o, c, k])",
           {"input": (2, 3, 7), "weight": (4, 3, 3), "bias": (4,)},
           t="(size(input, 2) + 2 - size(weight, 2)) // 2 + 1"),
        _e("aten.convolution(input, weight, None, [1, 1], [0, 1], [2, 1], False, [0, 0], 2)",
           "out[b, o, t, u] = sum(c, k, l)(input[b, o // 2 * 2 + c, t + 2 * k, u + l - 1]"
           " * weight[o, c, k, l])",
           {"input": (1, 4, 6, 4), "weight": (4, 2, 2, 3)},
           t="size(input, 2) - 2", u="size(input, 3)"),
        _e("aten.convolution(input, weight, None, [2], [1], [1], True, [0], 1)",
           "out[b, o, t] = sum(c, k)(where((t + 1 - k) % 2 == 0,"
           " input[b, c, (t + 1 - k) // 2] * weight[c, o, k], 0))",
           {"input": (1, 2, 4), "weight": (2, 3, 3)}, t="(size(input, 2) - 1) * 2 + 1"),
    ),
    # ---- Reductions
    "sum": (_e("aten.sum.dim_IntList(self, [1], True)", "out[i, o] = sum(j)(self[i, j])", _X, o="1"),
            _e("aten.sum(self)", "out = sum(i, j)(self[i, j])", _X),
            _e("aten.sum.dim_IntList(self, [0, 2])", "out[j] = sum(i, k)(self[i, j, k])", _X3)),
    "nansum": (_e("aten.nansum(self, [1])", "out[i] = sum(j)(self[i, j])", _X),),
    "mean": (_e("aten.mean.dim(self, [0])", "out[j] = sum(i)(self[i, j]) / size(self, 0)", _X),),
    "amax": (_e("aten.amax(self, [1])", "out[i] = max(j)(self[i, j])", _X),),
    "amin": (_e("aten.amin(self, [1])", "out[i] = min(j)(self[i, j])", _X),),
    "max": (_e("aten.max.dim(self, 1)", "out[i] = max(j)(self[i, j])", _X),),
    "min": (_e("aten.min.dim(self, 1)", "out[i] = min(j)(self[i, j])", _X),),
    "aminmax": (_e("aten.aminmax(self, dim=1)", "out[i] = min(j)(self[i, j])", _X),),
    "argmax": (_e("aten.argmax(self, 1)", "top[i] = max(j)(self[i, j]);"
                  "out[i] = sum(j)(where(self[i, j] == top[i], j, 0))", _X),),
    "argmin": (_e("aten.argmin(self, 1)", "low[i] = min(j)(self[i, j]);"
                  "out[i] = sum(j)(where(self[i, j] == low[i], j, 0))", _X),),
    "prod": (_e("aten.prod.dim_int(self, 1)", "out[i] = prod(j)(self[i, j])", _X),),
    "any": (_e("aten.any.dim(self, 1)", "out[i] = any(j)(self[i, j] != 0)", _X),),
    "all": (_e("aten.all.dim(self, 1)", "out[i] = all(j)(self[i, j] != 0)", _X),),
    "count_nonzero": (_e("aten.count_nonzero.dim_IntList(self, [1])",
                         "out[i] = sum(j)(where(self[i, j] != 0, 1, 0))", _X),),
    "logsumexp": (_e("aten.logsumexp(self, [1])", "out[i] = log(sum(j)(exp(self[i, j])))", _X),),
    "var": (_e("aten.var.correction(self, [1], correction=1)", _VAR + "; out[i] = var[i]", _X),),
    "std": (_e("aten.std.correction(self, [1], correction=1)", _VAR + "; out[i] = sqrt(var[i])", _X),),
    "var_mean": (_e("aten.var_mean.correction(self, [1], correction=1)", _VAR + "; out[i] = var[i]", _X),),
    "std_mean": (_e("aten.std_mean.correction(self, [1], correction=1)",
                    _VAR + "; out[i] = sqrt(var[i])", _X),),
    "linalg_vector_norm": (_e("aten.linalg_vector_norm(self, 2, [1])",
                              "out[i] = sqrt(sum(j)(self[i, j] * self[i, j]))", _X),),
    "norm": (_e("aten.norm.ScalarOpt_dim(self, 2, [1])",
                "out[i] = sqrt(sum(j)(pow(self[i, j], 2)))", _X),),
    "kthvalue": (_e("aten.kthvalue(self, 2, 1)",
                    _RANK + "; out[i] = sum(j)(where(rank[i, j] == 1, self[i, j], 0))", _X, **_K),),
    "median": (_e("aten.median.dim(self, 1)",
                  _RANK + "; out[i] = sum(j)(where(rank[i, j] == 1, self[i, j], 0))", _X, **_K),),
    # ---- Along an axis
    **{
        name: (_e(f"aten.{name}(self, 1{tail})",
                  "top[i] = max(j)(self[i, j]); e[i, j] = exp(self[i, j] - top[i]);"
                  f"s[i] = sum(j)(e[i, j]); out[i, j] = {end}", _X),)
        for name, tail, end in (
            ("_softmax", ", False", "e[i, j] / s[i]"), ("_safe_softmax", "", "e[i, j] / s[i]"),
            ("_log_softmax", ", False", "self[i, j] - top[i] - log(s[i])"),
        )
    },
    "_softmax_backward_data": (
        _e("aten._softmax_backward_data(grad_output, output, 1, torch.float64)",
           "s[i] = sum(j)(grad_output[i, j] * output[i, j]);"
           "out[i, j] = output[i, j] * (grad_output[i, j] - s[i])",
           {"grad_output": (3, 4), "output": (3, 4)}),),
    "_log_softmax_backward_data": (
        _e("aten._log_softmax_backward_data(grad_output, output, 1, torch.float64)",
           "s[i] = sum(j)(grad_output[i, j]);"
           "out[i, j] = grad_output[i, j] - exp(output[i, j]) * s[i]",
           {"grad_output": (3, 4), "output": (3, 4)}),),
    "sort": (_e("aten.sort(self, 1)",
                _RANK + "; out[i, r] = sum(j)(where(rank[i, j] == r, self[i, j], 0))",
                _X, r="size(self, 1)"),),
    "topk": (_e("aten.topk(self, 2, 1)",
                _FALLING + "; out[i, r] = sum(j)(where(rank[i, j] == r, self[i, j], 0))", _X, r="2"),),
    "_fft_r2c": (_e("aten._fft_r2c(self, [1], 0, True)",
                    "out[i, f] = sum(j)(self[i, j] * exp(-2 * pi * I * f * j / size(self, 1)))",
                    _X, f="size(self, 1) // 2 + 1"),),
    "_fft_c2c": (_e("aten._fft_c2c(self, [1], 0, True)",
                    "out[i, f] = sum(j)(self[i, j] * exp(-2 * pi * I * f * j / size(self, 1)))",
                    _X, f="size(self, 1)", complex=("self",)),),
    "_fft_c2r": (_e("aten._fft_c2r(self, [1], 0, 6)",
                    "out[i, t] = real(sum(f)(where(f % 3 == 0, 1, 2) * self[i, f]"
                    " * exp(2 * pi * I * f * t / 6)))", _X, t="6", complex=("self",)),),
    "cumsum": (_e("aten.cumsum(self, 1)",
                  "out[i, j] = sum(k)(where(k <= j, self[i, k], 0))", _X, j="size(self, 1)"),),
    "cumprod": (_e("aten.cumprod(self, 1)",
                   "out[i, j] = prod(k)(where(k <= j, self[i, k], 1))", _X, j="size(self, 1)"),),
    "cummax": (_e("aten.cummax(self, 1)",
                  "out[i, j] = max(k)(where(k <= j, self[i, k], -inf))", _X, j="size(self, 1)"),),
    "cummin": (_e("aten.cummin(self, 1)",
                  "out[i, j] = min(k)(where(k <= j, self[i, k], inf))", _X, j="size(self, 1)"),),
    "logcumsumexp": (_e("aten.logcumsumexp(self, 1)",
                        "out[i, j] = log(sum(k)(where(k <= j, exp(self[i, k]), 0)))",
                        _X, j="size(self, 1)"),),
    # ---- Norms
    "native_layer_norm": (_e("aten.native_layer_norm(input, [4], weight, bias, 1e-5)", _LAYER,
                             {"input": (3, 4), "weight": (4,), "bias": (4,)}),),
    "native_group_norm": (
        _e("aten.native_group_norm(input, weight, bias, 2, 4, 3, 2, 1e-5)",
           "m[b, g] = sum(d, t)(input[b, 2 * g + d, t]) / 6;"
           "v[b, g] = sum(d, t)(pow(input[b, 2 * g + d, t] - m[b, g], 2)) / 6;"
           "out[b, c, t] = (input[b, c, t] - m[b, c // 2]) * rsqrt(v[b, c // 2] + 1e-5)"
           " * weight[c] + bias[c]",
           {"input": (2, 4, 3), "weight": (4,), "bias": (4,)}, g="2", d="2"),),
    "native_layer_norm_backward": (
        _e("aten.native_layer_norm_backward(grad_out, input, [4], mean, rstd, weight, bias,"
           " [True, False, False])",
           "n[i, j] = (input[i, j] - mean[i, 0]) * rstd[i, 0];"
           "g[i, j] = grad_out[i, j] * weight[j]; a[i] = sum(j)(g[i, j]);"
           "b[i] = sum(j)(g[i, j] * n[i, j]);"
           "out[i, j] = rstd[i, 0] * (g[i, j] - a[i] / 4 - n[i, j] * b[i] / 4)",
           {"grad_out": (3, 4), "input": (3, 4), "mean": (3, 1), "rstd": (3, 1), "weight": (4,),
            "bias": (4,)}),),
    # ---- Moving elements
    "cat": (_e("aten.cat([self, other], 1)",
               "out[i, j] = where(j < 4, self[i, j], other[i, j - 4])",
               {"self": (3, 4), "other": (3, 2)}, j="size(self, 1) + size(other, 1)"),),
    "stack": (_e("aten.stack([self, other], 1)",
                 "out[i, s, j] = where(s == 0, self[i, j], other[i, j])",
                 {"self": (3, 4), "other": (3, 4)}, s="2"),),
    "constant_pad_nd": (_e("aten.constant_pad_nd(self, [2, -1, 1, 0])",
                           "out[i, j] = where(j < 5, self[i - 1, j - 2], 0)", _X,
                           i="size(self, 0) + 1", j="size(self, 1) + 1"),),
    "tril": (_e("aten.tril(self, -1)", "out[i, j] = where(j <= i - 1, self[i, j], 0)", _X),),
    "triu": (_e("aten.triu(self, 1)", "out[i, j] = where(j >= i + 1, self[i, j], 0)", _X),),
    "repeat": (_e("aten.repeat(self, [2, 1, 3])", "out[r, i, j] = self[i, j % 4]", _X,
                  r="2", j="12"),),
    "flip": (_e("aten.flip(self, [1])", "out[i, j] = self[i, size(self, 1) - 1 - j]", _X,
                j="size(self, 1)"),),
    "roll": (_e("aten.roll(self, [1], [1])", "out[i, j] = self[i, (j - 1) % size(self, 1)]", _X,
                j="size(self, 1)"),),
    "copy": (_e("aten.copy(self, src)", "out[i, j] = src[0, j] + 0 * size(self, 0)",
                {"self": (3, 4), "src": (1, 4)}, i="size(self, 0)"),),
    "_to_copy": (_e("aten._to_copy(self)", "out[i, j] = self[i, j]", _X),),
    "where": (_e("aten.where.self(condition, self, other)",
                 "out[i, j] = where(condition[i, j], self[i, j], other[0, j])",
                 {"self": (2, 3), "other": (1, 3)},
                 constants={"condition": [[True, False, True], [False, False, True]]}),),
    "slice_backward": (_e("aten.slice_backward(grad_output, [6, 4], 0, 1, 6, 2)",
                          "out[i, j] = where(i % 2 == 1, grad_output[i // 2, j], 0)",
                          {"grad_output": (3, 4)}, i="6"),),
    "select_backward": (_e("aten.select_backward(grad_output, [3, 4], 0, 1)",
                           "out[i, j] = where(i == 1, grad_output[j], 0)",
                           {"grad_output": (4,)}, i="3"),),
    "slice_scatter": (_e("aten.slice_scatter(self, src, 1, 1, 3)",
                         "out[i, j] = where((j >= 1) and (j < 3), src[i, j - 1], self[i, j])",
                         {"self": (3, 4), "src": (3, 2)}),),
    "select_scatter": (_e("aten.select_scatter(self, src, 1, 2)",
                          "out[i, j] = where(j == 2, src[i], self[i, j])",
                          {"self": (3, 4), "src": (3,)}),),
    # ---- Gathers and scatters
    "index": (_e("aten.index(self, [index])", "out[i, j] = self[index[i], j]", _X,
                 constants={"index": [2, 0, 2]}),
              _e("aten.index(self, [None, index])", "out[i, j] = self[i, index[j]]", _X,
                 constants={"index": [3, 1]})),
    "index_select": (_e("aten.index_select(self, 1, index)", "out[i, j] = self[i, index[j]]", _X,
                        constants={"index": [3, 1, 3]}),),
    "embedding": (_e("aten.embedding(weight, indices)", "out[a, b, j] = weight[indices[a, b], j]",
                     {"weight": (5, 2)}, constants={"indices": [[1, 1], [3, 0]]}),),
    "gather": (_e("aten.gather(self, 1, index)", "out[i, j] = self[i, index[i, j]]", _X,
                  constants={"index": [[0, 2], [1, 1], [3, 0]]}),),
    "index_add": (_e("aten.index_add(self, 0, index, source)",
                     "out[r, j] = self[r, j] + sum(i)(where(index[i] == r, source[i, j], 0))",
                     {"self": (3, 4), "source": (3, 4)}, constants={"index": [0, 2, 0]}),),
    "index_copy": (_e("aten.index_copy(self, 0, index, source)",
                      "hit[r] = sum(i)(where(index[i] == r, 1, 0));"
                      "out[r, j] = where(hit[r] > 0,"
                      " sum(i)(where(index[i] == r, source[i, j], 0)), self[r, j])",
                      {"self": (3, 4), "source": (2, 4)}, constants={"index": [2, 0]},
                      r="size(self, 0)"),),
    "index_put": (_e("aten.index_put(self, [index], values)",
                     "hit[r] = sum(i)(where(index[i] == r, 1, 0));"
                     "out[r, j] = where(hit[r] > 0,"
                     " sum(i)(where(index[i] == r, values[i, j], 0)), self[r, j])",
                     {"self": (3, 4), "values": (2, 4)}, constants={"index": [2, 0]},
                     r="size(self, 0)"),
                  _e("aten.index_put(self, [index], values, True)",
                     "out[r, j] = self[r, j] + sum(i)(where(index[i] == r, values[i, j], 0))",
                     {"self": (3, 4), "values": (2, 4)}, constants={"index": [2, 2]})),
    "scatter": (_e("aten.scatter.src(self, 1, index, src)",
                   "hit[i, j] = sum(k)(where(index[i, k] == j, 1, 0));"
                   "out[i, j] = where(hit[i, j] > 0,"
                   " sum(k)(where(index[i, k] == j, src[i, k], 0)), self[i, j])",
                   {"self": (2, 3), "src": (2, 2)}, constants={"index": [[1, 0], [2, 1]]},
                   j="size(self, 1)"),),
    "scatter_add": (_e("aten.scatter_add(self, 1, index, src)",
                       "out[i, j] = self[i, j] + sum(k)(where(index[i, k] == j, src[i, k], 0))",
                       {"self": (2, 3), "src": (2, 2)}, constants={"index": [[1, 1], [2, 0]]}),),
    "scatter_reduce": (_e("aten.scatter_reduce.two(self, 1, index, src, 'sum')",
                          "out[i, j] = self[i, j] + sum(k)(where(index[i, k] == j, src[i, k], 0))",
                          {"self": (2, 3), "src": (2, 2)}, constants={"index": [[1, 1], [2, 0]]}),),
    "index_fill": (_e("aten.index_fill.int_Scalar(self, 0, index, 2)",
                      "hit[r] = sum(i)(where(index[i] == r, 1, 0));"
                      "out[r, j] = where(hit[r] > 0, 2, self[r, j])", _X,
                      constants={"index": [2, 0]}, r="size(self, 0)"),),
    "index_reduce": (_e("aten.index_reduce(self, 0, index, source, 'prod')",
                        "out[r, j] = self[r, j]"
                        " * prod(i)(where(index[i] == r, source[i, j], 1))",
                        {"self": (3, 4), "source": (3, 4)}, constants={"index": [0, 2, 0]}),),
    "masked_scatter": (_e("aten.masked_scatter(self, mask, source)",
                          "place[i, j] = sum(k)(where(k < j, where(mask[i, k], 1, 0), 0))"
                          " + sum(p, k)(where(p < i, where(mask[p, k], 1, 0), 0));"
                          "out[i, j] = where(mask[i, j], source[int(place[i, j])], self[i, j])",
                          {"self": (2, 3), "source": (6,)},
                          constants={"mask": [[True, False, True], [False, False, True]]},
                          i="size(self, 0)", j="size(self, 1)"),),
    "embedding_dense_backward": (
        _e("aten.embedding_dense_backward(grad_output, indices, 5, -1, False)",
           "out[r, j] = sum(i)(where(indices[i] == r, grad_output[i, j], 0))",
           {"grad_output": (3, 2)}, constants={"indices": [1, 4, 1]}, r="5"),),
    # ---- Neighbours
    "avg_pool2d": (_e("aten.avg_pool2d(self, [2, 2], [2, 2])",
                      "out[b, c, t, u] = sum(p, q)(self[b, c, 2 * t + p, 2 * u + q]) / 4",
                      {"self": (1, 2, 5, 4)}, **_POOL),
                   _e("aten.avg_pool2d(self, [1, 1], [2, 2])",
                      "out[b, c, t, u] = self[b, c, 2 * t, 2 * u]",
                      {"self": (1, 2, 5, 4)}, t="3", u="2")),
    "max_pool2d_with_indices": (
        _e("aten.max_pool2d_with_indices(self, [2, 2], [2, 2])",
           "out[b, c, t, u] = max(p, q)(self[b, c, 2 * t + p, 2 * u + q])",
           {"self": (1, 2, 5, 4)}, **_POOL),),
    "_adaptive_avg_pool2d": (
        _e("aten._adaptive_avg_pool2d(self, [2, 2])",
           "out[b, c, t, u] = sum(p, q)(self[b, c, 3 * t + p, 2 * u + q]) / 6",
           {"self": (1, 2, 6, 4)}, t="2", u="2", p="3", q="2"),),
    "upsample_nearest2d": (_e("aten.upsample_nearest2d(self, [6, 8])",
                              "out[b, c, t, u] = self[b, c, t // 2, u // 2]",
                              {"self": (1, 2, 3, 4)}, t="6", u="8"),
                           _e("aten.upsample_nearest2d(self, [3, 2])",
                              "out[b, c, t, u] = self[b, c, 2 * t, 2 * u]",
                              {"self": (1, 2, 6, 4)}, t="3", u="2")),
    "upsample_nearest1d": (_e("aten.upsample_nearest1d(self, [6])",
                              "out[b, c, t] = self[b, c, t // 2]", {"self": (1, 2, 3)}, t="6"),),
    "reflection_pad1d": (_e("aten.reflection_pad1d(self, [2, 1])",
                            "out[b, c, t] = self[b, c, where(t < 2, 2 - t,"
                            " where(t > 5, 8 - t, t - 2))]", {"self": (1, 2, 4)}, t="7"),),
    "replication_pad1d": (_e("aten.replication_pad1d(self, [2, 1])",
                             "out[b, c, t] = self[b, c, minimum(maximum(t - 2, 0), 3)]",
                             {"self": (1, 2, 4)}, t="7"),),
    "avg_pool2d_backward": (
        _e("aten.avg_pool2d_backward(grad_output, self, [2, 2], [2, 2], [0, 0], False, True, None)",
           "out[b, c, x, y] = grad_output[b, c, x // 2, y // 2] / 4",
           {"grad_output": (1, 2, 2, 2), "self": (1, 2, 4, 4)}, x="4", y="4"),),
    "upsample_nearest2d_backward": (
        _e("aten.upsample_nearest2d_backward(grad_output, [2, 2], [1, 2, 2, 2])",
           "out[b, c, x, y] = grad_output[b, c, x, y]", {"grad_output": (1, 2, 2, 2)}),),
    # ---- Others
    "linalg_solve_triangular": (
        _e("aten.linalg_solve_triangular(self, B, upper=False)",
           "out[i, n] = (B[i, n] - where(i == 1, self[1, 0] * B[0, n] / self[0, 0], 0))"
           " / self[i, i]", {"self": (2, 2), "B": (2, 3)}),),
    "bincount": (_e("aten.bincount(index, None, 5)",
                    "out[r] = sum(i)(where(index[i] == r, 1, 0))", {"other": (2,)},
                    constants={"index": [1, 4, 1]}, r="5"),),
}  # fmt: skip
"""Examples by operation; contractions first."""

WITHOUT_EXAMPLE: dict[str, str] = {
    **dict.fromkeys(
        (
            *("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like"),
            *(
                "new_zeros",
                "new_ones",
                "new_empty",
                "new_full",
                "new_empty_strided",
                "fill",
                "zero",
            ),
            *("normal", "uniform", "random"),
        ),
        "reads no element of its arguments",
    ),
    "_int_mm": "as mm, on integers",
    "_scaled_mm": "as mm; its formats need a GPU",
    "argsort": "recorded as sort",
    "_fused_rms_norm": "recorded as its parts",
    "rms_norm": "recorded as its parts",
    "_local_scalar_dense": "recorded as a control read",
    "nonzero": "its shape depends on values; recorded as a control read",
    **dict.fromkeys(
        (
            *("upsample_bilinear2d", "upsample_bicubic2d", "upsample_bilinear2d_backward"),
            *("grid_sampler_2d", "im2col", "col2im", "avg_pool3d", "max_pool3d_with_indices"),
            *("adaptive_max_pool2d", "max_pool2d_with_indices_backward", "reflection_pad2d"),
            *("replication_pad2d", "native_group_norm_backward", "native_batch_norm"),
            *("searchsorted", "bucketize"),
        ),
        "its formula says less than changing one element at a time; the tests do that",
    ),
}
"""Rules that no example proves, and why."""
