"""How long the cost model itself takes: `python -m schedlab.experiments.bench.cost_model`. Microseconds, best of many.

Its results are for reading; nothing passes or fails by them.
"""

from __future__ import annotations

import timeit
from collections.abc import Callable

from schedlab import core
from schedlab.experiments.engines import hardware_preset, model_preset
from schedlab.framework.batch import Batch, Prefill
from schedlab.framework.content import TokenContent
from schedlab.framework.cost.model import CostExecutor
from schedlab.framework.request import EngineRequest


def main(num_decodes: int = 64, context: int = 600, prompt: int = 500) -> None:
    executor = CostExecutor(model_preset("llama3.1-8b")[0], hardware_preset("h100"))
    executor.allocate(1000, 16, 0, 1024)
    requests = [EngineRequest(str(i), 0, prompt, TokenContent([])) for i in range(num_decodes + 1)]
    decodes, total = requests[1:], num_decodes * context
    decode_only = Batch(decodes=decodes, decode_context=total)
    mixed = Batch([Prefill(requests[0], 0, prompt)], decodes, prefill_tokens=prompt, decode_context=total)
    cost = executor.decode_cost(num_decodes)
    calls: dict[str, Callable[[], object]] = {
        "an empty call": lambda: None,
        f"duration_ns of {num_decodes} decodes": lambda: cost.duration_ns(total),
        "execute, decodes only": lambda: executor.execute(decode_only),
        "execute, one prefill beside them": lambda: executor.execute(mixed),
    }
    print(f"core: {core.mode()}")
    for name, call in calls.items():
        print(f"{best_us(call):8.3f} us  {name}")


def best_us(call: Callable[[], object], number: int = 20_000, repeats: int = 50) -> float:
    return min(timeit.repeat(call, number=number, repeat=repeats)) / number * 1e6


if __name__ == "__main__":
    main()
