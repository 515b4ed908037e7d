cimport cython


@cython.locals(
    idle_ns=double, step_ns=double, request_ns=double, prefill_ns=double, prefill_step_ns=double, decode_step_ns=double,
    matrix_ns=double, weights_ns=double, linear_ns=double, linear_ridge=double, token_ns=double, head_ns=double,
    logits_ns=double, logits_ridge=double, row_ns=double, key_ns=double, pair_ns=double, pair_ridge=double,
    decode_key_ns=double, decode_computes=cython.bint, copy_ns=double, copied_byte_ns=double, compute=double,
    memory=double, overhead=double, ridge=double, expert_token_ns=double, num_experts=double, computed=double,
)
cpdef tuple shares_ns(
    tuple rates, double tokens, double rows, double decodes, double prefills, double pairs, double keys,
    double decode_keys, double copied, double read_ns=*
)


cdef class DecodeCost:
    cdef public object base, further, slope
    cdef tuple _envelope

    cpdef duration_ns(self, context_sum)
    cpdef bound(self, context_sum)
