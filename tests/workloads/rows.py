"""A small valid file of every format: what readers must take, and what mutations begin with."""

import json
from pathlib import Path

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,8
2023-11-16 18:17:04.0781490,110,27
"""
AZURE_2024 = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,2162,5
2024-05-10 00:00:01+00:00,2399,6
2024-05-10 00:00:01.017335+00:00,76,15
"""
AZURE_2025 = """TIMESTAMP,NumImages,ContextTokens,GeneratedTokens
2025-01-01 00:00:00.5,2,1000,10
2025-01-01 00:00:01,0,20,3
"""
BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
5,GPT-4,1087,230,1317,API log
118,GPT-4,0,0,0,Conversation log
119,GPT-4,417,276,693,Conversation log
"""
BURSTGPT_3 = """Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
19440110.0,a,43,GPT-4,906,446,1352,Conversation log
19440161.5,b,2,ChatGPT,36,29,65,Conversation log
19440301.0,a,26,GPT-4,1631,282,1913,Conversation log
19440302.0,,,GPT-4,100,20,120,API log
"""
VIDUR = """arrived_at,num_prefill_tokens,num_decode_tokens
0.0,374,44
4.314579,396,109
4.541877,879,55
"""
SPLITWISE = """request_id,request_type,application_id,arrival_timestamp,batch_size,prompt_size,token_size
0,2,0,1,1,4096,32
1,2,0,3,1,2048,8
"""
TRACELAB = """session_id,arrival_time,round_idx,prefix_len,input_len,output_len,tool_wait_after_ms
0,0,0,0,512,64,100
0,0,1,576,128,64,0
1,200,0,0,400,48,80
"""


def lines(*records: object) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


MOONCAKE = lines(
    {"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [0, 1]},
    {"timestamp": 27, "input_length": 1100, "output_length": 1, "hash_ids": [0, 1, 2]},
    {"timestamp": 27.5, "input_length": 512, "output_length": 9, "hash_ids": [0]},
)
MOONCAKE_SESSIONS = lines(
    {"session_id": "s", "timestamp": 10, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]},
    {"session_id": "s", "delay": 250, "input_length": 1100, "output_length": 1, "hash_ids": [0, 1, 2]},
    {"session_id": "t", "timestamp": 12, "input_length": 512, "output_length": 9, "hash_ids": [7]},
)
BAILIAN = lines(
    {"chat_id": 1, "parent_chat_id": -1, "timestamp": 0.5, "input_length": 20, "output_length": 3, "type": "text",
     "turn": 1, "hash_ids": [5, 6]},
    {"chat_id": 2, "parent_chat_id": 1, "timestamp": 1.25, "input_length": 40, "output_length": 3, "type": "text",
     "turn": 2, "hash_ids": [5, 8, 9]},
    {"chat_id": 3, "parent_chat_id": -1, "timestamp": 2, "input_length": 16, "output_length": 3, "type": "search",
     "turn": 1, "hash_ids": [5]},
)  # fmt: skip
WEKA = lines(
    {"id": "w", "models": ["m"], "block_size": 64, "hash_id_scope": "local", "requests": [
        {"t": 0.0, "type": "n", "model": "m", "in": 130, "out": 4, "hash_ids": [1, 2], "api_time": 2.0},
        {"t": 3.0, "type": "subagent", "agent_id": "x", "requests": [
            {"t": 0.0, "type": "n", "model": "h", "in": 64, "out": 4, "hash_ids": [9], "api_time": 1.0},
            {"t": 4.0, "type": "n", "model": "h", "in": 70, "out": 4, "hash_ids": [9]}]},
        {"t": 10.0, "type": "s", "model": "m", "in": 200, "out": 4, "hash_ids": [1, 2, 3], "think_time": 7.5},
        {"t": 30.0, "type": "n", "model": "m", "in": 210, "out": 0, "hash_ids": [1, 2, 3]}]},
)  # fmt: skip
RAGPULSE = lines(
    {"timestamp": "82", "input_length": 120, "output_length": 19, "session_id": "a", "hash_ids": {
        "sys_prompt": [1], "passages_ids": [10, 11], "history": [20], "web_search": [], "user_input": [30]}},
    {"timestamp": "93", "input_length": 120, "output_length": 8, "session_id": "b", "hash_ids": {
        "sys_prompt": [1], "passages_ids": [11, 10], "history": [20], "web_search": [], "user_input": [31]}},
)  # fmt: skip
RAGPULSE_BESIDE = {
    "1_sys_prompt.jsonl": lines({"sys_prompt_id": 1, "token_length": 50}),
    "2_passages.jsonl": lines({"passage_id": 10, "token_length": 20}, {"passage_id": 11, "token_length": 20}),
    "3_history.jsonl": lines({"history_id": 20, "token_length": 10}),
    "4_user_input.jsonl": lines({"user_input_id": 30, "token_length": 12}, {"user_input_id": 31, "token_length": 12}),
    "5_web_search.jsonl": lines({"web_search_id": 40, "token_length": 5}),
}
LLMSERVINGSIM = lines(
    {"input_toks": 3, "output_toks": 7, "arrival_time_ns": 46926808, "input_tok_ids": [1, 2, 3], "output_tok_ids": [4]},
    {"input_toks": 2, "output_toks": 4, "arrival_time_ns": 347938952, "input_tok_ids": [1, 2]},
)
ROUNDS = lines(
    {"session_id": "s", "round_index": 0, "input_tokens_total": 100, "prefix_tokens": 0, "output_tokens": 10,
     "timing_events": [
        {"event_type": "user_message", "timestamp": "2026-06-01T05:40:20.151Z"},
        {"event_type": "tool_call", "timestamp": "2026-06-01T05:40:31.647Z"}]},
    {"session_id": "s", "round_index": 1, "input_tokens_total": 150, "prefix_tokens": 100, "output_tokens": 10,
     "timing_events": [
        {"event_type": "tool_result", "timestamp": "2026-06-01T05:40:50.938Z"},
        {"event_type": "text", "timestamp": "2026-06-01T05:41:04.862Z"}]},
)  # fmt: skip
OFFERED = lines(
    {"request_id": "0", "source_row": 0, "arrival_ns": 5, "prompt_tokens": 40, "output_tokens": 3,
     "session": "s", "turn": 0, "content": {"ids": [1, 2, 3], "width": 16, "scope": "", "seed": 0},
     "slo": {"name": "fast", "ttft_s": 0.5}},
    {"request_id": "1", "source_row": 1, "arrival_ns": 9, "prompt_tokens": 50, "output_tokens": 3,
     "session": "s", "turn": 1, "after": "0", "think_ns": 4,
     "content": {"ids": [1, 2, 3, 4], "width": 16, "scope": "", "seed": 0}},
    {"request_id": "x", "source_row": 2, "arrival_ns": 9, "prompt_tokens": 7, "output_tokens": None, "priority": -1,
     "content": {"row": 2, "seed": 0}},
)  # fmt: skip

AGENTIC = lines(
    {"request_id": "root", "session_id": "s", "input_length": 1024, "output_length": 20, "hash_ids": [1, 2],
     "timestamp": 0, "branches": ["a", "b"], "prefix_reset": True},
    {"request_id": "join", "session_id": "s", "input_length": 2048, "output_length": 20, "hash_ids": [1, 2, 5, 6],
     "wait_for": ["root", "a", "b"], "delay": 0, "tool_wait_ms": 500},
    {"request_id": "a", "session_id": "s::a", "input_length": 1024, "output_length": 200, "hash_ids": [1, 3],
     "wait_for": ["root"], "delay": 2, "tool_wait_ms": 3},
    {"request_id": "b", "session_id": "s::b", "input_length": 1024, "output_length": 10, "hash_ids": [1, 4],
     "wait_for": ["root"], "delay": 2},
)  # fmt: skip
DYNAMO_EVENT = {"schema": "dynamo.request.trace.v1", "event_time_unix_ms": 0, "event_source": "dynamo"}
DYNAMO = lines(
    {**DYNAMO_EVENT, "event_type": "request_end", "agent_context": {"session_id": "p"}, "request": {
        "request_id": "p1", "model": "m", "input_tokens": 128, "output_tokens": 16, "request_received_ms": 1000,
        "total_time_ms": 100, "replay": {"trace_block_size": 64, "input_length": 128,
                                         "input_sequence_hashes": [14879255164371896291, 2]}}},
    {**DYNAMO_EVENT, "event_type": "tool_end", "agent_context": {"session_id": "p"}, "tool": {"tool_class": "web"}},
    {**DYNAMO_EVENT, "event_type": "request_end",
     "agent_context": {"session_id": "c", "parent_session_id": "p"}, "request": {
        "request_id": "c1", "model": "m", "input_tokens": 100, "output_tokens": 16, "request_received_ms": 1150,
        "total_time_ms": 350.5, "replay": {"trace_block_size": 64, "input_length": 100,
                                           "input_sequence_hashes": [14879255164371896291]}}},
    {**DYNAMO_EVENT, "event_type": "request_end", "agent_context": {"session_id": "p"}, "request": {
        "request_id": "p2", "model": "m", "input_tokens": 192, "output_tokens": 16, "request_received_ms": 1600,
        "total_time_ms": 100, "replay": {"trace_block_size": 64, "input_length": 192,
                                         "input_sequence_hashes": [14879255164371896291, 2, 5]}}},
)  # fmt: skip


def otel_span(name: str, start: str, end: str, prompt: int, output: int) -> dict[str, object]:
    usage = {"gen_ai.usage.input_tokens": prompt, "gen_ai.usage.output_tokens": output}
    return {"trace_id": "t", "span_id": name, "start_time": f"2026-02-25T10:00:{start}",
            "end_time": f"2026-02-25T10:00:{end}", "attributes": {"app.session.id": "s", **usage}}  # fmt: skip


OTEL = lines(
    {"spans": [otel_span("a", "00.000000", "02.000000", 50, 5), otel_span("b", "02.500000", "04.500000", 60, 5),
               {"trace_id": "t", "span_id": "tool", "start_time": "x", "attributes": {"tool.name": "search"}}]},
    {"spans": [otel_span("c", "03.000000", "05.000000", 70, 5), otel_span("d", "06.000000", "09.000000", 80, 5)]},
)  # fmt: skip


def copilot_call(stamp: str, duration_ms: float, prompt: int, completion: int, cached: int) -> dict[str, object]:
    tokens = {"prompt": prompt, "completion": completion, "cached": cached}
    return {"timestamp": stamp, "duration_ms": duration_ms, "model": "m", "initiator_type": "user", "tokens": tokens}


COPILOT = lines(
    {"session_id": "s1", "date": "2026-06-01", "turns": [{"turn_id": "t1", "tool_batches": [], "llm_calls": [
        copilot_call("2026-06-01T00:00:00.000Z", 2000.0, 1000, 100, 0),
        copilot_call("2026-06-01T00:00:05.000Z", 1500.0, 1300, 50, 1000)]}]},
    {"session_id": "s2", "date": "2026-06-01", "turns": [{"turn_id": "t1", "tool_batches": [], "llm_calls": [
        copilot_call("2026-06-01T00:00:01.000Z", 10.0, 700, 10, 0)]}]},
)  # fmt: skip

FILES = {
    "azure": ("csv", AZURE),
    "azure-2024": ("csv", AZURE_2024),
    "azure-2025": ("csv", AZURE_2025),
    "burstgpt": ("csv", BURSTGPT),
    "burstgpt-3": ("csv", BURSTGPT_3),
    "vidur": ("csv", VIDUR),
    "splitwise_sim": ("csv", SPLITWISE),
    "tracelab": ("csv", TRACELAB),
    "mooncake": ("jsonl", MOONCAKE),
    "mooncake-sessions": ("jsonl", MOONCAKE_SESSIONS),
    "bailian": ("jsonl", BAILIAN),
    "weka": ("jsonl", WEKA),
    "ragpulse": ("jsonl", RAGPULSE),
    "llmservingsim": ("jsonl", LLMSERVINGSIM),
    "tracelab_rounds": ("jsonl", ROUNDS),
    "offered": ("jsonl", OFFERED),
    "mooncake-agentic": ("jsonl", AGENTIC),
    "dynamo": ("jsonl", DYNAMO),
    "otel_genai": ("jsonl", OTEL),
    "copilot": ("jsonl", COPILOT),
}


def write(folder: Path, name: str, text: str | None = None) -> Path:
    """A file of FILES (or `text` in its stead) with what belongs beside it."""
    kind, content = FILES[name]
    if name == "ragpulse":
        for file, beside in RAGPULSE_BESIDE.items():
            (folder / file).write_text(beside)
    path = folder / f"{name}.{kind}"
    path.write_text(content if text is None else text)
    return path
