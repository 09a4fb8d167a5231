"""Policies: loading them, making a micro one, and turning conversations into tokens without ever encoding twice."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lib.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

MICRO_TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
PIECE_WEIGHT = 5_000  # how often a required piece is shown to the tokenizer trainer; more than any phrase occurs
_MARK = "\u2063mark\u2063"  # stands for an assistant turn while the template is taken apart


class ChatFormat:
    """Token-in/token-out rendering of a conversation in any tokenizer's own chat template.

    A node's tokens only grow: `prompt` opens the conversation, the policy samples an action, `observation` gives the
    tokens that belong between that action and the next one. Nothing sampled is decoded and encoded again (pitfall 1),
    and the separators of the template are never lost (pitfall 2). Special tokens are the template's alone: text that
    spells one (a task, something printed) is broken up, so nobody can forge a turn.

    Args:
        tokenizer: a Hugging Face tokenizer with a chat template.

    Raises:
        UserError: the tokenizer has no chat template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        name = tokenizer.name_or_path
        if not tokenizer.chat_template:
            raise UserError(f"tokenizer {name!r} has no chat template; use an instruction-tuned model")
        self.tokenizer = tokenizer
        special = [re.escape(token.content) for token in tokenizer.added_tokens_decoder.values() if token.special]
        self._special = re.compile("|".join(special) or r"(?!)")
        text = self._render([{"role": "user", "content": "?"}, {"role": "assistant", "content": _MARK}], generate=False)
        tail = text.rpartition(_MARK)[2]
        # what closes an assistant turn begins with the token that the policy samples to stop
        ids = self._encode(tail)
        if not ids:
            raise UserError(f"the chat template of tokenizer {name!r} has no token that ends a turn")
        self._close = ids[0]
        eos = tokenizer.eos_token_id
        self.stop_ids: tuple[int, ...] = (ids[0],) if eos in (None, ids[0]) else (ids[0], eos)

    def _render(self, messages: list[dict[str, str]], generate: bool) -> str:
        return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generate)

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def _plain(self, content: str) -> str:
        """Text without special tokens: a space goes into each word that spells one."""
        return self._special.sub(lambda match: f"{match[0][0]} {match[0][1:]}", content)

    def prompt(self, user: str, system: str | None = None) -> tuple[list[int], str]:
        """Ids and text that open a conversation, up to where the policy begins."""
        messages = [{"role": "system", "content": system}] if system else []
        text = self._render([*messages, {"role": "user", "content": self._plain(user)}], generate=True)
        return self._encode(text), text

    def observation(self, content: str, action: list[int]) -> tuple[list[int], str]:
        """Ids and text between an action and the next one.

        Args:
            content: what the agent is told.
            action: the sampled ids. If they stop short of a stop id (cut by a length limit) the template's own closing
                tokens are added by the host, so they are never trained on (pitfall 20).
        """
        asked = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _MARK}]
        messages = [*asked, {"role": "user", "content": self._plain(content)}]
        text = self._render(messages, generate=True).rpartition(_MARK)[2]
        ids = self._encode(text)
        if action and action[-1] in self.stop_ids and ids[0] == self._close:
            ids = ids[1:]
        return ids, text


@dataclass
class Policy:
    """A model with its tokenizer and conversation format."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    chat: ChatFormat
    path: str

    @property
    def context(self) -> int:
        """Most tokens the model was built for."""
        return self.model.config.max_position_embeddings


def load_policy(path: str | Path, dtype: str = "float32") -> Policy:
    """Load a policy from a Hugging Face directory or hub id.

    Raises:
        UserError: there is nothing to load, or it is not a causal language model with a chat template.
    """
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    if Path(path).exists() and not (Path(path) / "config.json").is_file():
        raise UserError(f"no policy in {path}: the folder has no config.json (give the folder of a Hugging Face model)")
    if str(path).startswith((".", "/")) and not Path(path).exists():
        raise UserError(f"no policy at {path}: the folder does not exist")
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
        kind = getattr(torch, dtype)
        model, report = AutoModelForCausalLM.from_pretrained(path, dtype=kind, output_loading_info=True)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"cannot load a policy from {path}: {reason}") from error
    finally:
        if bars:
            logging.enable_progress_bar()
    if report["missing_keys"]:  # transformers would go on with random numbers in their place
        names = sorted(report["missing_keys"])
        raise UserError(f"cannot load a policy from {path}: it lacks {len(names)} weights, among them {names[0]}")
    return Policy(model.eval(), tokenizer, ChatFormat(tokenizer), str(path))


def train_micro_tokenizer(
    texts: Iterable[str], vocab_size: int, atoms: str, pieces: Sequence[str] = ()
) -> PreTrainedTokenizerBase:
    """A byte-level BPE for a micro policy.

    Args:
        texts: transcripts to learn merges from.
        vocab_size: entries, with the 256 bytes and 4 special tokens.
        atoms: regular expression of what never merges with its surroundings, such as digits and parts of names.
            Everything between atoms may merge freely, across spaces too, so that fixed phrases of an environment cost
            a token or two.
        pieces: strings whose atoms become single tokens whether or not the texts hold them often.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    special = ["<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(atoms), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([*texts, *(piece for piece in pieces for _ in range(PIECE_WEIGHT))], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|end|>", chat_template=MICRO_TEMPLATE
    )


def make_micro_policy(tokenizer: PreTrainedTokenizerBase, context: int, seed: int, **sizes: Any) -> Policy:
    """A freshly initialised Llama of about a million parameters with one key-value head.

    The head is wide: all query heads share its keys, which must tell apart every token of a context. With 64 dimensions
    copying is learned in half the updates that 32 take. Embeddings start five times as large as usual: they are tied,
    and a name that occurs once in a thousand tokens could not be predicted from a tiny one.

    Args:
        context: longest node in tokens.
        seed: of the initial weights; torch's global generator is left as it was.
        sizes: overrides of `hidden_size`, `intermediate_size`, `num_hidden_layers`, `num_attention_heads`, `head_dim`.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4,
             "head_dim": 64} | sizes  # fmt: skip
    config = LlamaConfig(
        vocab_size=len(tokenizer), num_key_value_heads=1, max_position_embeddings=context, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, **shape,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
        torch.nn.init.normal_(model.get_input_embeddings().weight, std=0.1)
    return Policy(model.eval(), tokenizer, ChatFormat(tokenizer), "micro")
