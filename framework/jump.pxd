cimport cython

from schedlab.framework.chain cimport Chains
from schedlab.framework.commit cimport Commit
from schedlab.framework.decode_set cimport DecodeSet
from schedlab.framework.journal cimport Journal, Stretch
from schedlab.framework.ledger cimport Ledger
from schedlab.framework.prefix_cache cimport PrefixCache
from schedlab.framework.request cimport EngineRequest
from schedlab.framework.step cimport Decision


cdef class Jump:
    cdef Ledger _ledger
    cdef Chains _chains
    cdef Commit _commit
    cdef Journal _journal
    cdef object _decode_cost

    @cython.locals(
        ledger=Ledger, decode_set=DecodeSet, n=Py_ssize_t, steps=Py_ssize_t, context=Py_ssize_t, stretch=Stretch
    )
    cpdef run(self, long long now, stop_ns, Decision decision)
    @cython.locals(ledger=Ledger, decode_set=DecodeSet, n=Py_ssize_t, steps=Py_ssize_t, context=Py_ssize_t)
    cpdef _extend_by_chains(self, Stretch stretch, cost, stop_ns)
    @cython.locals(
        ledger=Ledger, decode_set=DecodeSet, cache=PrefixCache, buckets=list, size=Py_ssize_t, n=Py_ssize_t, pool=list,
        gaps=list, now=cython.longlong, tick=Py_ssize_t, context=Py_ssize_t, first=Py_ssize_t, last=Py_ssize_t,
        growth=cython.longlong, shift=Py_ssize_t, scaled=cython.longlong, free=Py_ssize_t, spare=Py_ssize_t,
        since=cython.longlong, stop=cython.longlong, free_block_ns=object, elapsed=object, duration=cython.longlong,
        needing=dict, need=Py_ssize_t, request=EngineRequest
    )
    cpdef _extend_by_steps(self, Stretch stretch, cost, stop_ns)
    cpdef Py_ssize_t _last_tick(self, cost, Py_ssize_t context, Py_ssize_t growth, bound)
