"""Continuous batching for any Llama-architecture policy in plain PyTorch: the performance heart on CPU.

Every live node of every tree is a row. One *tick* is one forward pass over a ragged list of tokens: one token for each
row that is generating and a chunk of tokens for each row that still has prompt or observation to read. All tokens share
the linear layers; attention runs over groups of rows of similar length. Nothing is padded but the keys of a group, no
token is computed for a row that does not need one, and the output head runs only on rows that sample.

Keys and values stay in one slot per node between turns, so a turn costs its new tokens only. A node without a slot
waits (deepest nodes are admitted first, so a tree always finishes); a node that waits for its children may lose its
slot, least recently used first, and is rebuilt when it comes back. First prompts are kept and forked into new nodes.

Schedule "lockstep" (default) ticks only when every live node waits: two runs with one seed give equal trees. "free"
ticks as soon as anything waits and promises nothing.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F

from lib.errors import UserError
from lib.sampling import Completion, Gate, Parking, RngKey, SamplingParams

ROWS_PER_GROUP = 32  # rows of similar length that share one attention call
CHUNK = 256  # most tokens one row may read in one tick
TICK_TOKENS = 1024  # most tokens in one tick
KEPT_PROMPTS = 16  # first prompts kept for forking


@dataclass
class _Row:
    """One request: what is left to read, what was sampled so far, where its agent sleeps."""

    key: RngKey
    ids: list[int]
    params: SamplingParams
    parking: Parking
    uniforms: np.ndarray
    slot: int = -1
    done: int = 0  # tokens of `ids` whose keys and values are in the slot
    new: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: Literal["stop", "length"] | None = None


class _Layer:
    """The weights of one decoder layer, with the projections that share an input fused."""

    def __init__(self, state: Mapping[str, torch.Tensor], i: int, dtype: torch.dtype):
        def get(name: str) -> torch.Tensor:
            return state[f"model.layers.{i}.{name}.weight"].to(dtype)

        # the norms' weights are folded into the projections that follow them
        self.qkv = torch.cat([get(f"self_attn.{x}_proj") for x in "qkv"]) * get("input_layernorm")
        self.o = get("self_attn.o_proj").clone()
        self.gate_up = torch.cat([get("mlp.gate_proj"), get("mlp.up_proj")]) * get("post_attention_layernorm")
        self.down = get("mlp.down_proj").clone()


def slots_within(kv_bytes: int, model: torch.nn.Module, max_len: int) -> int:
    """How many nodes of `max_len` tokens a key-value store of `kv_bytes` holds.

    Raises:
        UserError: see `TorchEngine`.
    """
    config = model.config
    if config.model_type != "llama":
        raise UserError(f"torch_engine runs Llama-architecture models, not {config.model_type!r}; choose one of those")
    if config.attention_bias or config.mlp_bias or config.hidden_act != "silu":
        raise UserError("torch_engine runs Llama models with SiLU and without biases; this one differs")
    if max_len > config.max_position_embeddings:
        raise UserError(f"max_len={max_len} exceeds the model's context of {config.max_position_embeddings} tokens")
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * _head_dim(config)
    per_slot = per_token * max_len * model.dtype.itemsize
    if kv_bytes < per_slot:
        raise UserError(f"kv_bytes={kv_bytes} holds no slot of {per_slot} bytes; raise kv_bytes or lower max_len")
    return kv_bytes // per_slot


def _head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


class TorchEngine:
    """A `Sampler` over a `transformers` Llama model.

    Args:
        model: LlamaForCausalLM; only its config and weights are used. Equal logits to 1e-4 in fp32.
        max_len: most tokens of one node, at most the model's context.
        slots: nodes whose keys and values are kept at once; reduced to what `kv_bytes` allows.
        kv_bytes: memory budget of the key-value store.
        schedule: "lockstep" or "free".
        timeout: seconds after which a wait for the engine raises TimeoutError.

    Raises:
        UserError: the model is not a Llama, `max_len` exceeds its context, or the budget holds no slot.
    """

    deterministic = True

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        max_len: int,
        slots: int = 96,
        kv_bytes: int = 1 << 30,
        schedule: Literal["lockstep", "free"] = "lockstep",
        timeout: float = 600.0,
    ):
        self.slots = min(slots, slots_within(kv_bytes, model, max_len))
        self.config = config = model.config
        self.max_len, self.timeout, self.version = max_len, timeout, 0
        self.dtype, self.dim = model.dtype, _head_dim(config)
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        shape = (config.num_hidden_layers, self.slots, self.kv_heads, max_len, self.dim)
        self._k, self._v = torch.zeros(shape, dtype=self.dtype), torch.zeros(shape, dtype=self.dtype)
        self._rope(model)
        self.gate = Gate()
        self.schedule = schedule
        self._waiting: dict[RngKey, _Row] = {}  # submitted, no slot yet
        self._active: dict[RngKey, _Row] = {}  # in a slot, reading or sampling
        self._kept: OrderedDict[tuple, tuple[int, list[int]]] = OrderedDict()  # node -> (slot, ids in it), oldest first
        self._free = list(range(self.slots))
        self._prompts: OrderedDict[tuple[int, ...], tuple[torch.Tensor, torch.Tensor]] = OrderedDict()
        self._driver: asyncio.Task[None] | None = None
        self.stats = {"ticks": 0, "tokens_processed": 0, "tokens_sampled": 0, "tokens_rebuilt": 0, "tokens_forked": 0}
        self._set_weights(model.state_dict())

    def _rope(self, model: torch.nn.Module) -> None:
        rotary = model.model.rotary_emb
        positions = torch.arange(self.max_len)[None]
        with torch.no_grad():
            cos, sin = rotary(torch.zeros(1, 1, dtype=torch.float32), positions)
        self._cos, self._sin = cos[0, :, None].to(self.dtype), sin[0, :, None].to(self.dtype)  # (max_len, 1, dim)

    def _set_weights(self, state: Mapping[str, torch.Tensor]) -> None:
        state = {k: v.detach() for k, v in state.items()}
        try:
            self._embed = state["model.embed_tokens.weight"].to(self.dtype).clone()
            layers = [_Layer(state, i, self.dtype) for i in range(self.config.num_hidden_layers)]
        except KeyError as error:
            raise UserError(f"weights lack {error}: not the architecture this engine was made for") from error
        self._layers = layers
        head = self._embed if self.config.tie_word_embeddings else state["lm_head.weight"].to(self.dtype)
        self._head = head * state["model.norm.weight"].to(self.dtype)

    async def load_weights(self, state: Mapping[str, torch.Tensor], version: int) -> None:
        """Replace the weights; caches of the old ones are dropped.

        Raises:
            RuntimeError: nodes are still being sampled (a tree must not mix versions).
        """
        if self._waiting or self._active:
            raise RuntimeError("load_weights while nodes are being sampled would mix policy versions in a tree")
        self._set_weights(state)
        self.version = version
        self.forget()

    def forget_nodes(self) -> None:
        """Free every slot, after a rollout or a failed one; kept prompts stay."""
        self._waiting.clear()
        self._active.clear()
        self._kept.clear()
        self._free = list(range(self.slots))
        self._driver = None
        self.gate = Gate()

    def forget(self) -> None:
        """Drop every cached key and value."""
        self.forget_nodes()
        self._prompts.clear()

    # -- the Sampler protocol -----------------------------------------------------------------------------------------

    async def sample(self, ids: list[int], params: SamplingParams, key: RngKey) -> Completion:
        """Continue `ids` (prompt and everything since, exactly as recorded) under `key`'s random numbers.

        Raises:
            UserError: `ids` leave no room for a token within `max_len`.
            TimeoutError: the engine did not answer in time.
        """
        if not ids or len(ids) >= self.max_len:
            raise UserError(f"{len(ids)} tokens of prompt leave no room in a context of {self.max_len}")
        if key in self._waiting or key in self._active:
            raise RuntimeError(f"two nodes sample under one random number key {key}: give their trees different groups")
        if self._driver is None or self._driver.done():
            self._driver = asyncio.get_running_loop().create_task(self._drive())
        limit = min(params.max_tokens, self.max_len - len(ids))
        row = _Row(key, ids, params, Parking(self.gate), key.generator().random(limit))
        self._waiting[key] = row
        try:
            async with asyncio.timeout(self.timeout):
                await row.parking.wait()
        except TimeoutError:
            where = f"node {'.'.join(map(str, key.path))} of {key.task}"
            raise TimeoutError(f"sampling: no answer from torch_engine for {where} in {self.timeout:g} s") from None
        finally:
            self._waiting.pop(key, None)
            if self._active.pop(key, None) is not None:  # given up half-way
                self._free.append(row.slot)
        return Completion(row.new, row.logprobs, row.finish or "length", self.version)

    def release(self, key: RngKey) -> None:
        """The node has ended: free its slot."""
        slot = self._kept.pop(key.node, None)
        if slot is not None:
            self._free.append(slot[0])

    async def _drive(self) -> None:
        """Tick until nobody waits; an error ends every wait with that error."""
        while self._waiting or self._active:
            if self.schedule == "lockstep":
                await self.gate.idle()
            else:
                await asyncio.sleep(0)
            if not (self._waiting or self._active):
                continue
            try:
                finished = self.tick()
            except Exception as error:
                for row in [*self._active.values(), *self._waiting.values()]:
                    row.parking.wake(error)
                return
            for row in finished:
                row.parking.wake()

    # -- one tick -----------------------------------------------------------------------------------------------------

    def tick(self) -> list[_Row]:
        """One forward pass; returns the rows that finished, in key order."""
        self._admit()
        rows = sorted(self._active.values(), key=lambda r: r.key)
        plan, budget = [], TICK_TOKENS
        for row in sorted(rows, key=lambda r: len(r.ids) + len(r.new) - r.done):  # generating rows first
            todo = len(row.ids) + len(row.new) - row.done
            take = min(todo, CHUNK, budget)
            if take > 0:
                plan.append((row, take, take == todo))
                budget -= take
        hidden = self._forward([(r, n) for r, n, _ in plan])
        ends = np.cumsum([n for _, n, _ in plan]) - 1
        chosen = [(row, int(end)) for (row, _, ready), end in zip(plan, ends, strict=True) if ready]
        for row, n, _ in plan:
            row.done += n
        self.stats["ticks"] += 1
        self.stats["tokens_processed"] += TICK_TOKENS - budget
        finished = []
        if chosen:
            self._choose([r for r, _ in chosen], hidden[torch.tensor([e for _, e in chosen])])
            for row, _ in chosen:
                if row.new[-1] in row.params.stop_ids:
                    row.finish = "stop"
                elif len(row.new) == len(row.uniforms):
                    row.finish = "length"
                if row.finish:
                    del self._active[row.key]
                    self._kept[row.key.node] = (row.slot, (row.ids + row.new)[: row.done])
                    finished.append(row)
        return sorted(finished, key=lambda r: r.key)

    def _admit(self) -> None:
        """Give slots to waiting rows, deepest first; rows that have their cache come back for free."""
        order = sorted(self._waiting.values(), key=lambda r: (r.key.node not in self._kept, -len(r.key.path), r.key))
        for row in order:
            kept = self._kept.pop(row.key.node, None)
            if kept is not None:
                row.slot, ids = kept
                if row.ids[: len(ids)] != ids:
                    raise RuntimeError(f"node {row.key.path}: the new prompt does not continue what was sampled before")
                row.done = len(ids)
            else:
                if not self._free and self._kept:  # evict whoever has been parked longest
                    self._free.append(self._kept.popitem(last=False)[1][0])
                if not self._free:
                    return
                row.slot = self._free.pop()
                row.done = self._fork(row)
                if row.key.turn > 0:
                    self.stats["tokens_rebuilt"] += len(row.ids) - row.done
            del self._waiting[row.key]
            self._active[row.key] = row

    def _fork(self, row: _Row) -> int:
        """Copy the longest kept prompt that `row` starts with into its slot; returns its length."""
        best, length = None, 0
        for ids in self._prompts:
            n = 0
            for a, b in zip(ids, row.ids[:-1], strict=False):
                if a != b:
                    break
                n += 1
            if n > length:
                best, length = ids, n
        if best is not None:
            k, v = self._prompts[best]
            self._k[:, row.slot, :, :length] = k[:, :, :length]
            self._v[:, row.slot, :, :length] = v[:, :, :length]
            self._prompts.move_to_end(best)
            self.stats["tokens_forked"] += length
        return length

    def _keep_prompt(self, row: _Row) -> None:
        n = len(row.ids)
        if tuple(row.ids) in self._prompts:
            return
        self._prompts[tuple(row.ids)] = (self._k[:, row.slot, :, :n].clone(), self._v[:, row.slot, :, :n].clone())
        if len(self._prompts) > KEPT_PROMPTS:
            self._prompts.popitem(last=False)

    @torch.inference_mode()
    def _forward(self, plan: list[tuple[_Row, int]]) -> torch.Tensor:
        """Hidden states (N, hidden) of the next tokens of every row; writes their keys and values."""
        ids, slots, positions = [], [], []
        for row, n in plan:
            start, read = row.done, len(row.ids)
            ids += row.ids[start : start + n] if start < read else row.new[start - read : start - read + n]
            slots += [row.slot] * n
            positions += range(start, start + n)
        slot_N, pos_N = torch.tensor(slots), torch.tensor(positions)
        cos, sin = self._cos[pos_N], self._sin[pos_N]
        groups = self._groups(plan)
        x = self._embed[torch.tensor(ids)]
        n_q, n_kv, eps = self.heads, self.kv_heads, self.config.rms_norm_eps
        for i, w in enumerate(self._layers):
            qkv = F.linear(_rms_norm(x, eps), w.qkv).view(len(ids), n_q + 2 * n_kv, self.dim)
            qk = qkv[:, : n_q + n_kv]
            half = self.dim // 2
            qk = qk * cos + torch.cat((-qk[..., half:], qk[..., :half]), -1) * sin
            self._k[i][slot_N, :, pos_N] = qk[:, n_q:]
            self._v[i][slot_N, :, pos_N] = qkv[:, n_q + n_kv :]
            out = torch.empty(len(ids), n_q * self.dim, dtype=x.dtype)
            for g in groups:
                g.attend(qk, self._k[i], self._v[i], out, n_q, n_kv)
            x = x + F.linear(out, w.o)
            gate, up = F.linear(_rms_norm(x, eps), w.gate_up).chunk(2, -1)
            x = x + F.linear(F.silu(gate).mul_(up), w.down)
        for row, n in plan:
            if row.key.turn == 0 and not row.new and row.done + n == len(row.ids):
                self._keep_prompt(row)
        return _rms_norm(x, eps)

    def _groups(self, plan: list[tuple[_Row, int]]) -> list[_Group]:
        """Rows that read one token and rows that read many, each sorted by length and cut into groups."""
        first, items = 0, []
        for row, n in plan:
            items.append((row.slot, first, n, row.done))
            first += n
        one = sorted((x for x in items if x[2] == 1), key=lambda x: x[3])
        many = sorted((x for x in items if x[2] > 1), key=lambda x: (x[2], x[3]))
        rep = self.heads // self.kv_heads
        groups = [_Group(one[i : i + ROWS_PER_GROUP], rep, self.dtype) for i in range(0, len(one), ROWS_PER_GROUP)]
        start = 0
        for i in range(1, len(many) + 1):  # a group of readers holds chunks within 1.5x of each other
            if i == len(many) or i - start == ROWS_PER_GROUP // 2 or many[i][2] > 1.5 * many[start][2]:
                groups.append(_Group(many[start:i], rep, self.dtype))
                start = i
        return groups

    @torch.inference_mode()
    def _choose(self, rows: list[_Row], hidden: torch.Tensor) -> None:
        """Sample one token for each row by inverting its distribution at the row's own uniform number."""
        logits = F.linear(hidden, self._head).float()
        temperature = torch.tensor([r.params.temperature for r in rows])
        u = torch.tensor([r.uniforms[len(r.new)] for r in rows], dtype=torch.float64)
        logp = F.log_softmax(logits / temperature.clamp_min(1e-6)[:, None], -1)
        cdf = logp.double().exp().cumsum(-1)
        token = torch.searchsorted(cdf, (u * cdf[:, -1])[:, None], right=True).squeeze(1).clamp_max(logits.shape[1] - 1)
        greedy = temperature == 0
        token = torch.where(greedy, logits.argmax(-1), token)
        chosen = logp.gather(1, token[:, None]).squeeze(1).masked_fill(greedy, 0.0)  # a greedy choice is certain
        for row, t, p in zip(rows, token.tolist(), chosen.tolist(), strict=True):
            row.new.append(t)
            row.logprobs.append(p)
        self.stats["tokens_sampled"] += len(rows)

    def logprobs(self, ids: list[int]) -> list[float]:
        """Log-probability of every token of `ids` after the first, shape (T-1,), at temperature 1, without touching
        anything that is being sampled: the probe that shows which weights the engine really runs."""
        if not self._free:
            raise RuntimeError("logprobs: every slot is taken; probe the engine between rollouts")
        key = RngKey(0, 0, "probe", 0, (), turn=1)  # turn 1, so it is not kept as a first prompt
        row = _Row(key, list(ids), SamplingParams(), Parking(self.gate), np.zeros(1), slot=self._free[-1])
        hidden = []
        while row.done < len(ids):
            n = min(CHUNK, len(ids) - row.done)
            hidden.append(self._forward([(row, n)]))
            row.done += n
        logp = F.log_softmax(F.linear(torch.cat(hidden), self._head).float(), -1)
        return logp[:-1].gather(1, torch.tensor(ids[1:])[:, None]).squeeze(1).tolist()


def _rms_norm(x: torch.Tensor, eps: float) -> torch.Tensor:
    """x over its root mean square; the learned weight is in the projection that follows."""
    return x * (x * x).mean(-1, keepdim=True).add_(eps).rsqrt_()


class _Group:
    """Rows whose attention is computed in one call: keys padded to the longest, queries to the most tokens read."""

    def __init__(self, items: list[tuple[int, int, int, int]], rep: int, dtype: torch.dtype):
        slots, first, count, done = (torch.tensor(x) for x in zip(*items, strict=True))
        self.slots = slots
        self.length = int((done + count).max())
        self.T = int(count.max())
        t = torch.arange(self.T)
        self.valid = t < count[:, None]  # (B, T)
        self.rows = (first[:, None] + t.clamp_max(count[:, None] - 1)).flatten()  # (B*T,) into the ragged list
        visible = torch.arange(self.length) <= (done[:, None] + t)[..., None]  # (B, T, L)
        bias = torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, float("-inf"))[:, None]
        self.bias = bias.repeat(1, 1, rep, 1)  # (B, 1, rep*T, L)
        self.whole = bool(self.valid.all())

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, n_q: int, n_kv: int) -> None:
        """Write the attention output of this group's tokens into `out`; query heads share their key head by being
        passed to attention as more queries of it."""
        B, T, rep, dim = len(self.slots), self.T, n_q // n_kv, k.shape[-1]
        q = q[self.rows, :n_q].view(B, T, n_kv, rep, dim).permute(0, 2, 3, 1, 4).reshape(B, n_kv, rep * T, dim)
        keys = k[:, :, : self.length].index_select(0, self.slots)
        values = v[:, :, : self.length].index_select(0, self.slots)
        y = F.scaled_dot_product_attention(q, keys, values, attn_mask=self.bias)
        y = y.view(B, n_kv, rep, T, dim).permute(0, 3, 1, 2, 4).reshape(B * T, n_q * dim)
        if self.whole:
            out[self.rows] = y
        else:
            keep = self.valid.flatten()
            out[self.rows[keep]] = y[keep]
