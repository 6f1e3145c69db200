"""Small Hugging Face folders with random weights and a tokenizer, and text to train on."""

from __future__ import annotations

import random
from pathlib import Path

import torch
import transformers

WORDS = ("the", "cat", "sat", "on", "a", "mat", "and", "saw", "its", "dog")


def save_llama(folder: Path, *, tie: bool = False, vocabulary: int = 256) -> Path:
    """Two layers, 32 wide."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=vocabulary,
        max_position_embeddings=64,
        tie_word_embeddings=tie,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def save_gpt2(folder: Path) -> Path:
    """Two layers, 32 wide, tied, without dropout; its linear layers are ``Conv1D``."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_embd=32,
        n_layer=2,
        n_head=2,
        vocab_size=256,
        n_positions=64,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


def save_tokenizer(folder: Path, text: str) -> None:
    """A byte-level BPE of 300 tokens, trained on ``text``."""
    from tokenizers import ByteLevelBPETokenizer

    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator([text], vocab_size=300, special_tokens=["<end>"])
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=trained._tokenizer, eos_token="<end>"
    ).save_pretrained(folder)


def words(num_lines: int = 200) -> str:
    """Lines of twelve words."""
    choose = random.Random(0).choice
    return "\n".join(" ".join(choose(WORDS) for _ in range(12)) for _ in range(num_lines))
