"""A sampler whose "policy" is a Python generator: tests, demonstrations and first steps without a model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Mapping
from typing import Any

import numpy as np

from lib.policy import ChatFormat
from lib.sampling import Completion, Gate, RngKey, SamplingParams

Script = Callable[[str, np.random.Generator], Generator[str, str, None]]


class ScriptedSampler:
    """Plays one script per node.

    Args:
        script: called with the node's prompt text and a private random generator; yields actions and is sent
            observations. When it returns, the node's further actions are empty.
        chat: tokenizer and turn format.
        seconds_per_token: pretend that sampling takes time, to show what runs at once.
    """

    deterministic = True

    def __init__(self, script: Script, chat: ChatFormat, seconds_per_token: float = 0.0):
        self.gate = Gate()
        self.version = 0
        self._script, self._chat, self._pause = script, chat, seconds_per_token
        self._nodes: dict[tuple[Any, ...], tuple[Generator[str, str, None], int]] = {}

    async def sample(self, ids: list[int], params: SamplingParams, key: RngKey) -> Completion:
        """The script's next action as tokens; its log-probabilities are 0, since a script is certain."""
        decode = self._chat.tokenizer.decode
        if key.node not in self._nodes:
            script = self._script(decode(ids), key.generator())
            action = next(script, "")
        else:
            script, seen = self._nodes[key.node]
            try:
                action = script.send(decode(ids[seen:]))
            except StopIteration:
                action = ""
        new = [*self._chat.tokenizer.encode(action, add_special_tokens=False), self._chat.stop_ids[0]]
        finish = "stop" if len(new) <= params.max_tokens else "length"
        new = new[: params.max_tokens]
        self._nodes[key.node] = (script, len(ids) + len(new))
        if self._pause:
            await asyncio.sleep(self._pause * len(new))
        return Completion(new, [0.0] * len(new), finish, self.version)

    def release(self, key: RngKey) -> None:
        """Forget the node's script."""
        self._nodes.pop(key.node, None)

    async def load_weights(self, state: Mapping[str, Any], version: int) -> None:
        """A script has no weights; only the version changes."""
        self.version = version
