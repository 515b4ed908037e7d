cimport cython

from schedlab.framework.block_pool cimport HostPool
from schedlab.framework.books cimport Books, Quote
from schedlab.framework.ordered_requests cimport OrderedRequests
from schedlab.framework.prefix_cache cimport PrefixCache
from schedlab.framework.request cimport EngineRequest


cdef class Ledger(Books):
    cdef public object pool, waiting_view
    cdef public bint prefix_caching
    cdef public PrefixCache cache
    cdef public HostPool host
    cdef public OrderedRequests queue, prompts
    cdef public list waiting, prefilling, free_slots, copies_out, copies_in
    cdef public dict running, held
    cdef public Py_ssize_t _admissions, _arrivals

    @cython.locals(request=EngineRequest)
    cpdef grow(self, requests)
    cpdef Py_ssize_t blocks_for(self, Py_ssize_t tokens)
    cpdef bint next_tick_fits(self)
    cpdef arrive(self, EngineRequest request)
    cdef str _save(self, EngineRequest request, str mode)
    cdef _stash_preempted(self, EngineRequest request)
    cdef Py_ssize_t _identify_computed(self, EngineRequest request)
    cdef _vacate(self, EngineRequest request)
    cdef _give_slot_back(self, EngineRequest request)
    cdef _hold(self, EngineRequest request)
    cdef _drop_received(self, EngineRequest request)
    cpdef enter_running(self, EngineRequest request)
    cpdef enter_waiting(self, EngineRequest request)
    cpdef enter_decoding(self, EngineRequest request)
    cpdef publish(self, EngineRequest request)
    cdef _leave_running(self, EngineRequest request, bint keep, bint hold)
    cpdef commit(self)
