cimport cython

from schedlab.framework.request cimport EngineRequest


@cython.locals(
    lines=list, at=Py_ssize_t, index=cython.longlong, repeat=cython.longlong, now_ns=cython.longlong,
    duration_ns=cython.longlong, prefill_tokens=cython.longlong, decode_tokens=cython.longlong,
    prefill_requests=cython.longlong, decode_requests=cython.longlong, context_tokens=cython.longlong,
    running=cython.longlong, waiting=cython.longlong, free_blocks=cython.longlong, cached_blocks=cython.longlong,
    copied_blocks=cython.longlong
)
cpdef str step_lines(list rows)
cpdef tuple request_row(EngineRequest request)
@cython.locals(
    lines=list, at=Py_ssize_t, prompt_tokens=cython.longlong, output_tokens=cython.longlong,
    resumed_tokens=cython.longlong, preemptions=cython.longlong, swaps=cython.longlong,
    recomputed_tokens=cython.longlong
)
cpdef str request_lines(list rows)
@cython.locals(n=cython.longlong, second=cython.longlong)
cdef str _seconds(ns)
@cython.locals(index=cython.longlong, repeat=cython.longlong, now_ns=cython.longlong, batch=str, refusals=str, idle_s=str)
cpdef str decision_line(row)
