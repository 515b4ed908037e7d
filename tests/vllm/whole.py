"""vLLM's whole engine in this process, under one policy after another: what `engine=vllm` runs in its own."""

from contextlib import closing

import rig

from schedlab.framework.clock import WallClock
from schedlab.framework.limits import EngineConfig
from schedlab.framework.results.metrics import Measurement
from schedlab.framework.results.record import Recorder
from schedlab.framework.source import ListSource
from schedlab.framework.vllm import replay
from schedlab.framework.vllm.scheduler import Steered
from schedlab.framework.vllm.settings import Settings


class Watched(ListSource):
    """A source that keeps how its requests ended: (name, state, tokens)."""

    def __init__(self, requests):
        super().__init__(requests)
        self.ended = []

    def finished(self, request, now_ns):
        self.ended.append((request.request_id, request.state, list(request.output_token_ids)))


class Whole:
    """One engine, as starting one takes seconds; each policy gets a fresh scheduler in it. Close it at the end."""

    def __init__(self, model, limits, **more):
        self.limits = limits
        self._replay = replay.Replay(replay.engine_arguments(str(model), limits, {"enforce_eager": True, **more}))
        self._started = False

    def under(self, policy):
        """The engine, its scheduler one of `policy`."""
        predictor = rig.predictor_for(policy)
        if not self._started:
            assert self._replay.start(policy, predictor, "raise", "commit") == self.limits["num_blocks"]
            self._started = True
        core = self._replay._llm.engine_core.engine_core
        Steered.settings, old = Settings(policy, predictor), core.scheduler
        self._replay._scheduler = core.scheduler = type(old)(
            vllm_config=core.vllm_config, kv_cache_config=old.kv_cache_config, block_size=old.block_size,
            structured_output_manager=core.structured_output_manager,
        )  # fmt: skip
        return self._replay

    def serve(self, policy, *requests):
        """Serve all of `requests`; the source, the tables, and the scheduler that did it."""
        config = EngineConfig(**self.limits)
        recorder = self.recorder = Recorder(Measurement(config.max_num_seqs, config.num_blocks))
        source = Watched(list(requests))
        engine = self.under(policy).attach(source, config, WallClock(), recorder)
        with closing(engine):
            engine.run()
            tables = recorder.close(backlog_end=engine.num_unfinished, counters=engine.counters())
        return source, tables, engine._scheduler

    def close(self):
        Steered.settings = None
        if self._started:
            self._replay._llm.engine_core.shutdown()
