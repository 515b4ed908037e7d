cimport cython

from schedlab.framework.request cimport EngineRequest
from schedlab.framework.results.decision_rows cimport DecisionRows
from schedlab.framework.results.token_gaps cimport TokenGaps


cdef class Recorder:
    cdef public object measurement
    cdef public Py_ssize_t _limit, _step_rows, _num_ended
    cdef public list _step_buffer, _request_buffer, _demanded_buffer, _free_buffer, _kept_decisions
    cdef public bint _windowed
    cdef public DecisionRows _decisions
    cdef public TokenGaps _gaps
    cdef public object _totals, _requests, _reasons, _attempts, _programs, _served, _demanded, _pressure
    cdef public dict _kept

    cpdef step(self, row, free_block_ns=*, free_blocks_min=*)
    cpdef decision(
        self, index, now_ns, preempted, grants, decodes, decodes_at, refusals, idle_until_ns, starts=*, rejected=*
    )
    cpdef decode_all(self, index, now_ns, repeat=*)
    cpdef gap(self, gap_ns, count)
    cpdef gaps(self, gaps_ns, count)
    cpdef request(self, EngineRequest request)
