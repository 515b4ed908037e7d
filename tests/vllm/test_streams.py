"""Every policy inside vLLM's scheduler gives every request its tokens and leaves nothing behind."""

import pytest
import rig

from policies import EVERY


@pytest.mark.parametrize("name", sorted(EVERY))
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_every_request_gets_its_tokens(name, is_async):
    load = rig.load_of(1, 32)
    for caching, blocks in ((False, 30), (True, 30), (True, 199)):
        run, _ = rig.recorded(EVERY[name](), load, caching=caching, blocks=blocks, is_async=is_async)
        run.check(load)


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(EVERY))
def test_two_steps_in_flight_for_long(name):
    for seed in range(20):
        load = rig.load_of(seed, 32)
        for caching, blocks, publish in ((False, 30, "commit"), (True, 30, "commit"), (True, 199, "schedule")):
            keys = {"caching": caching, "blocks": blocks, "publish": publish, "is_async": True}
            rig.recorded(EVERY[name](), load, **keys)[0].check(load)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_requests_that_a_token_ends(is_async):
    load = rig.load_of(2, 24, outputs=200)
    for asked in load:
        asked.stop = rig.stream_of(asked)[len(asked.prompt) % 7 :][:1][0] if asked.tokens > 7 else None
    run, _ = rig.recorded(EVERY["chunked_prefill"](), load, blocks=60, is_async=is_async)
    run.check(load)


@pytest.mark.parametrize("publish", ["commit", "schedule"])
def test_whenever_blocks_are_published(publish):
    load = rig.load_of(3, 32)
    for is_async in (False, True):
        run, _ = rig.recorded(EVERY["prefix_reuse"](), load, publish=publish, is_async=is_async)
        run.check(load)
