"""One engine of another environment, run by that environment's Python and spoken to in lines of JSON.

    python -I peer_worker.py vllm|llama.cpp MODEL_DIRECTORY float32|bfloat16 THREADS

It writes `{}` once the model is loaded. Each line that it reads, `{"prompts": [[token, …], …], "count": n}`, it answers
with `{"tokens": [[token, …], …], "stamps": [seconds, …], "seconds": s}`: greedy tokens of forced length, when each step
ended that gave every sequence a token, and when the last one did, since all prompts were offered. Seconds are CPU time
of this process with one thread, else wall time. Needs nothing of schedlab; `elsewhere.py` starts it.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Tokens = list[list[int]]
Steps = Callable[[Tokens, int], Iterator[dict[int, list[int]]]]
"""Of prompts and a count: an empty step when all is prepared, then the new tokens of each step by sequence."""


def vllm(directory: Path, dtype: str, threads: int) -> Steps:
    """Eager, without prefix caching, and with room to prefill 32 prompts of 128 in one step."""
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", HF_HUB_OFFLINE="1")
    from vllm import EngineArgs, LLMEngine, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    engine = LLMEngine.from_engine_args(
        EngineArgs(
            model=str(directory), dtype=dtype, enforce_eager=True, enable_prefix_caching=False, max_model_len=1024,
            max_num_seqs=32, max_num_batched_tokens=4096, skip_tokenizer_init=True, disable_log_stats=True,
        )
    )  # fmt: skip

    def steps(prompts: Tokens, count: int) -> Iterator[dict[int, list[int]]]:
        yield {}
        forced = SamplingParams(
            temperature=0, max_tokens=count, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA
        )
        for i, prompt in enumerate(prompts):
            engine.add_request(str(i), {"prompt_token_ids": prompt}, forced)
        while engine.has_unfinished_requests():
            yield {int(out.request_id): list(out.outputs[0].token_ids) for out in engine.step()}

    return steps


def llama(directory: Path, dtype: str, threads: int) -> Steps:
    """llama.cpp with its default settings: one batch for all prompts, then one token of each sequence a step."""
    import llama_cpp as lib
    import numpy as np

    with tempfile.TemporaryDirectory() as folder:
        write_gguf(directory, dtype, Path(folder) / "model.gguf")
        file = os.fsencode(f"{folder}/model.gguf")
        model = lib.llama_model_load_from_file(file, lib.llama_model_default_params())
    vocabulary = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))

    def steps(prompts: Tokens, count: int) -> Iterator[dict[int, list[int]]]:
        params = lib.llama_context_default_params()
        params.n_seq_max, params.n_batch = len(prompts), sum(map(len, prompts))
        params.n_ctx = len(prompts) * (max(map(len, prompts)) + count)
        params.n_threads = params.n_threads_batch = threads
        context = lib.llama_init_from_model(model, params)
        batch = lib.llama_batch_init(params.n_batch, 0, 1)
        done, new = [0] * len(prompts), prompts
        yield {}
        for _ in range(count):
            fill(batch, new, done)
            if code := lib.llama_decode(context, batch):
                raise RuntimeError(f"llama_decode returned {code}")
            logits = np.ctypeslib.as_array(lib.llama_get_logits(context), (len(prompts), vocabulary))
            done = [begin + len(tokens) for begin, tokens in zip(done, new, strict=True)]
            new = [[int(token)] for token in logits.argmax(1)]
            yield dict(enumerate(new))
        lib.llama_batch_free(batch)
        lib.llama_free(context)

    return steps


def fill(batch: Any, new: Tokens, done: list[int]) -> None:
    """The `new` tokens of each sequence after those that are `done`; logits for the last."""
    rows = [(seq, done[seq] + k, token) for seq, tokens in enumerate(new) for k, token in enumerate(tokens)]
    batch.n_tokens = len(rows)
    for i, (seq, position, token) in enumerate(rows):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = token, position, 1, seq
        batch.logits[i] = position == done[seq] + len(new[seq]) - 1


def write_gguf(directory: Path, dtype: str, file: Path) -> None:
    """The float32 checkpoint of a Llama as llama.cpp reads it, matrices in `dtype`, without a vocabulary.

    Its rotary embedding turns neighbours in a head, the checkpoint's the head's two halves: Q and K change their rows.
    """
    import gguf
    from safetensors.numpy import load_file

    config = json.loads((directory / "config.json").read_text())
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_tokenizer_model("none")
    writer.add_vocab_size(config["vocab_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads["q_proj"])
    writer.add_head_count_kv(heads["k_proj"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    types = gguf.GGMLQuantizationType
    for name, tensor in load_file(directory / "model.safetensors").items():
        if count := heads.get(name.split(".")[-2]):
            tensor = tensor.reshape(count, 2, -1, tensor.shape[1]).swapaxes(1, 2).reshape(tensor.shape)
        kind = types.BF16 if dtype == "bfloat16" and tensor.ndim > 1 else types.F32
        writer.add_tensor(names.get_name(name, (".weight",)), gguf.quants.quantize(tensor, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def served(steps: Steps, timer: Callable[[], float], prompts: Tokens, count: int) -> dict[str, Any]:
    """What is answered to one line."""
    tokens: Tokens = [[] for _ in prompts]
    stamps: list[float] = []
    running = steps(prompts, count)
    next(running)
    begin = end = timer()
    for new in running:
        end = timer()
        for seq, more in new.items():
            tokens[seq] += more
        if len(new) == len(prompts):
            stamps.append(end - begin)
    return {"tokens": tokens, "stamps": stamps, "seconds": end - begin}


def main() -> None:
    name, directory, dtype, threads = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the engines print what is no answer
    os.environ["OMP_NUM_THREADS"] = threads
    steps = {"vllm": vllm, "llama.cpp": llama}[name](Path(directory), dtype, int(threads))
    timer = time.process_time if threads == "1" else time.perf_counter
    print("{}", file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(served(steps, timer, **json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
