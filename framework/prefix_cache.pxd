cimport cython

from schedlab.framework.eviction cimport CachedSpan
from schedlab.framework.request cimport EngineRequest


cdef class PrefixCache:
    cdef public object pool, lru, _used
    cdef public Py_ssize_t block_size, num_unowned
    cdef public dict index, computing, changed_keys, _watchers, _stale, _changed
    cdef public list remains

    cpdef list allocate(self, Py_ssize_t count, Py_ssize_t last=*)
    cpdef make_free(self, Py_ssize_t count)
    @cython.locals(span=CachedSpan, blocks=list)
    cpdef _evict(self, Py_ssize_t count)
    @cython.locals(span=CachedSpan, blocks=list)
    cpdef list _victims(self, Py_ssize_t count)
    cpdef Py_ssize_t hit_blocks(self, EngineRequest request)
    @cython.locals(low=Py_ssize_t, high=Py_ssize_t, middle=Py_ssize_t, keys=list, ends=list, start=Py_ssize_t, span=CachedSpan)
    cpdef Py_ssize_t longest_hit(self, chain, Py_ssize_t limit)
    @cython.locals(hit=Py_ssize_t, reach=Py_ssize_t, group=Py_ssize_t, keys=list, ends=list)
    cpdef Py_ssize_t pending_blocks(self, EngineRequest request)
    cpdef Py_ssize_t _limit(self, EngineRequest request)
    @cython.locals(span=CachedSpan, count=Py_ssize_t, owned=Py_ssize_t, unowned=Py_ssize_t)
    cpdef Py_ssize_t unowned_in_hit(self, EngineRequest request, Py_ssize_t hit)
    @cython.locals(span=CachedSpan, count=Py_ssize_t, table=list)
    cpdef list adopt(self, EngineRequest request, Py_ssize_t hit)
    @cython.locals(span=CachedSpan, count=Py_ssize_t)
    cpdef release(self, EngineRequest request)
    @cython.locals(span=CachedSpan, done=Py_ssize_t, group=Py_ssize_t, start=Py_ssize_t, stop=Py_ssize_t, have=Py_ssize_t, want=Py_ssize_t, keys=list, ends=list)
    cpdef publish(self, EngineRequest request, Py_ssize_t whole)
    cpdef _drop_duplicates(self, CachedSpan span, list table, Py_ssize_t start, Py_ssize_t have, Py_ssize_t live)
    cpdef _grow(self, CachedSpan span, list blocks)
    cpdef _hold(self, CachedSpan span, Py_ssize_t have, Py_ssize_t want)
    @cython.locals(unowned=Py_ssize_t)
    cpdef _note_unowned(self, CachedSpan span, bint touch)
    cpdef CachedSpan _span_for(self, key)
    cpdef list _spans(self, chain, Py_ssize_t start, Py_ssize_t stop)
    cpdef stash_preempted_blocks(self, EngineRequest request, Py_ssize_t first, list blocks)
    cpdef commit(self)
    cpdef _publish_unowned(self, EngineRequest request, Py_ssize_t first, list blocks)
    cpdef start_computing(self, EngineRequest request)
    cpdef stop_computing(self, EngineRequest request)
    cpdef list _unpublished(self, EngineRequest request)
    cpdef _computed(self, key)
    cpdef watch(self, EngineRequest request)
    cpdef unwatch(self, EngineRequest request)
    cpdef take_changed(self)
    cpdef _refresh_stale(self)
    cpdef _refresh(self, EngineRequest request)
    cpdef _register(self, EngineRequest request, Py_ssize_t hit)
    cpdef _unregister(self, EngineRequest request)
    cpdef _notify(self, key)
    cpdef Py_ssize_t _counted(self, key, EngineRequest request)


cpdef _by_order(EngineRequest request)
@cython.locals(ends=list)
cdef Py_ssize_t _group_of(chain, Py_ssize_t block)
