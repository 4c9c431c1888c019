"""Quant/001 without its FP8 rounding: a plain product of the given operands. Must be rejected."""


def run(attn_output, o_proj_weight, o_proj_bias):
    return attn_output @ o_proj_weight.T + o_proj_bias
