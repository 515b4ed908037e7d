"""A schedlab policy as the scheduler of a vLLM engine (`--scheduler-cls schedlab.vllm.Scheduler`).

vLLM allocates, builds its scheduler output, samples and frees; the policy says what each step computes, through the
same `Step` as in schedlab's own engine. Only modules of this package import vllm; at import they need numpy besides.
"""
