cimport cython

from schedlab.framework.cost.coefficients cimport DecodeCost, shares_ns


cdef class CostExecutor:
    cdef public object roofline, hardware, window, explained, coefficients, profile, scheduler_us, vocab_size
    cdef public bint jumpable
    cdef object _activations, _utilization, _block_bytes, _rated
    cdef tuple _rates
    cdef dict _decode_costs
    cdef dict __dict__

    cpdef DecodeCost decode_cost(self, num_decodes)
    @cython.locals(decodes=Py_ssize_t, prefills=Py_ssize_t, rows=Py_ssize_t, start=Py_ssize_t, count=Py_ssize_t)
    cdef _mixed(self, batch)
    cdef tuple _rates_of(self, explained)
