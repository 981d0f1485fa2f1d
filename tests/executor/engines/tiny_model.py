"""A Llama of 100 000 random parameters, on disk: every path of the real engine at 3 ms a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

VOCAB = 160
MAX_LENGTH = 512
EOS = 2


def save_tiny_model(directory: Path) -> Path:
    """Write the model; the same weights every time."""
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_LENGTH,
        eos_token_id=EOS,
        bos_token_id=1,
        pad_token_id=0,
        initializer_range=0.15,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


def generate(directory: Path, prompt: list[int], length: int) -> list[int]:
    """What ``model.generate`` makes of the prompt, greedily."""
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    ids = torch.tensor([prompt])
    made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=length, do_sample=False)
    return [int(token) for token in made[0, len(prompt) :]]
