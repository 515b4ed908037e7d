"""A tiny model with a tokenizer of its own: bytes, a few merges, three marks, and a chat template."""

import json
from pathlib import Path

import tokenizers
import torch
import transformers

VOCAB = 400
CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "once upon a time there was a tokenizer",
    "naïve café, 東京 🙂",
]
TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}\n{{ m['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


def save_tokenizer(directory: Path, *, template: str | None = TEMPLATE, extra: int = 0) -> Path:
    """A byte-level BPE of at most `VOCAB` ids, plus `extra` added tokens."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<pad>", "<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([f"<extra{i}>" for i in range(extra)])
    tokenizer.save(str(directory / "tokenizer.json"))
    stated = {"tokenizer_class": "TokenizersBackend", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(stated))
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)
    return directory


def tiny_model() -> transformers.PreTrainedModel:
    """Random weights whose greedy streams wander."""
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=12, max_position_embeddings=256, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * noise if "norm" in name else 2 * noise / parameter.shape[-1] ** 0.5)
    return model
