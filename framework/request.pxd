cdef class DecodeClock:
    cdef public Py_ssize_t tick


cdef class Request:
    cdef public object _request_id, _client, _session, _priority, _deadline_ns, _predicted, _slo, _first_token_ns, _program
    cdef public str _state
    cdef public long long _arrival_ns
    cdef public Py_ssize_t _depth, _num_prompt_tokens, _max_tokens, _num_preemptions, _base_tokens, _base_computed
    cdef public DecodeClock _clock


cdef class EngineRequest(Request):
    cdef public object content, recorded_output_tokens, abort_ns, sampling, source_row, chain, watched
    cdef public object first_scheduled_ns, finished_ns, cached_tokens, reason, tried
    cdef public long long visible_ns, delivery_ns, emitted_ns
    cdef public Py_ssize_t final_tokens, order, admission, slot, step, promised_groups, num_published
    cdef public Py_ssize_t resumed_tokens, recomputed_tokens, lost_tokens, swaps
    cdef public bint hands_over
    cdef public list block_table, host_blocks, output_token_ids
