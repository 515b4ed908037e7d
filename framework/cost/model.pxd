from schedlab.framework.cost.coefficients cimport DecodeCost


cdef class CostExecutor:
    cdef public object roofline, hardware, window, explained, coefficients, profile, scheduler_us, vocab_size
    cdef public bint jumpable
    cdef object _activations, _utilization, _block_bytes
    cdef dict _decode_costs
    cdef dict __dict__

    cpdef DecodeCost decode_cost(self, num_decodes)
