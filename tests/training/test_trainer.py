"""The trainer against naive computations with full logits, and the training pitfalls by number."""

from __future__ import annotations

import copy
import json
import math
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from torch.nn.functional import cross_entropy

from lib.errors import UserError
from lib.training import losses
from lib.training.advantages import assign, leave_one_out, reinforce
from lib.training.batch import collate, recompute_logprobs, token_logprobs
from lib.training.trainer import NonFinite, NoSignal, RatioMismatch, Trainer, TrainerConfig
from lib.tree import Node, Segment, Tree
from tests.training.policies import fill_logprobs, random_trees, score, tiny_llama

TRL = json.loads(Path(__file__).with_name("trl_losses.json").read_text())


def config(**changes: object) -> TrainerConfig:
    return TrainerConfig(**{"cpu": True, "lr": 1e-2, "weight_decay": 0.0, **changes})


def prepared(trees: list[Tree]) -> list[Tree]:
    return assign(trees)[0]


def parameters(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def naive_loss(model: torch.nn.Module, trees: list[Tree], loss: str, aggregation: str) -> torch.Tensor:
    """Whole batch, node by node, full logits, no padding, no micro-batches, no skipping."""
    total, nodes = 0.0, [n for tree in trees for n in tree]
    tokens = sum(n.tokens_out for n in nodes)
    for node in nodes:
        keep = torch.tensor(node.mask[1:])
        logp, old = score(model, node.ids)[keep], torch.tensor(node.logprobs[1:])[keep]
        per_token, _ = getattr(losses, loss)(logp, old, torch.full_like(logp, node.advantage * node.weight))
        total = total + per_token.sum() / {"token_mean": tokens, "sequence_mean": len(nodes) * len(logp)}[aggregation]
    return total


# -- collate ----------------------------------------------------------------------------------------------------------


def test_collate_keeps_recorded_tokens_and_marks_predicted_positions():
    node = Node("0", "t", [Segment([5, 6], False, None, "p"), Segment([7], True, [-0.5], "a")], "finished")
    node.segments += [Segment([8], False, None, "o"), Segment([9, 10], True, [-0.25, -0.125], "a")]
    node.advantage, node.weight = 2.0, 1.5
    short = Node("0", "t", [Segment([5], False, None, "p"), Segment([11], True, [-1.0], "a")], "finished")
    short.advantage = -1.0
    trees = [Tree("x", "g", 0, nodes={"0": node}), Tree("x", "g", 1, nodes={"0": short})]
    (batch,) = collate(trees)
    assert batch.ids.tolist() == [[5, 11, 0, 0, 0, 0], [5, 6, 7, 8, 9, 10]]  # sorted by length, padded on the right
    assert batch.mask.tolist() == [[False, True] + [False] * 4, [False, False, True, False, True, True]]
    assert batch.old_logp.tolist() == [-1.0, -0.5, -0.25, -0.125]
    assert batch.adv.tolist() == [-1.0, 3.0, 3.0, 3.0]
    assert batch.coef.tolist() == [0.25] * 4
    assert batch.names == ("x/1/0", "x/0/0") and batch.name(1) == "x/0/0"


def test_pitfall_02_rows_continue_the_prompt_that_the_engine_saw_at_every_turn():
    observations, seen = [[1, 2, 3], [4, 4], [9]], []
    node = Node("0", "t", status="finished", advantage=1.0)
    for turn, observation in enumerate(observations):
        node.segments.append(Segment(observation, False, None, "host"))
        seen.append(list(node.ids))  # what an engine is given
        node.segments.append(Segment([10 + turn, 0], True, [-1.0, -1.0], "action"))
    (batch,) = collate([Tree("x", "g", nodes={"0": node})])
    row, mask = batch.ids[0].tolist(), batch.mask[0].tolist()
    for turn, prompt in enumerate(seen):
        assert row[: len(prompt)] == prompt
        action = slice(len(prompt), len(prompt) + 2)
        assert row[action] == [10 + turn, 0] and mask[action] == [True, True]
    assert sum(mask) == 6


@given(seed=st.integers(0, 10_000), micro=st.integers(1, 7), drop=st.booleans(), cut=st.integers(0, 3))
def test_pitfall_03_mask_logprobs_and_advantages_have_one_length(seed: int, micro: int, drop: bool, cut: int):
    trees = random_trees(2, 3, seed)
    leave_one_out(trees)
    for tree in trees[:cut]:
        tree.root.status = "context_full"
    batches = collate(trees, drop_truncated=drop, micro_batch=micro)
    for batch in batches:
        n = int(batch.mask.sum())
        assert batch.old_logp.shape == batch.adv.shape == batch.coef.shape == (n,)
        assert batch.ids.shape == batch.mask.shape and len(batch.ids) == len(batch.names) <= micro
    nodes = [n for tree in trees for n in tree if n.advantage and not (drop and n.status == "context_full")]
    assert sum(int(b.mask.sum()) for b in batches) == sum(n.tokens_out for n in nodes)


def test_pitfall_03_wrong_lengths_name_the_node(trees: list[Tree]):
    prepared(trees)
    trees[0].root.segments[1].logprobs.append(-1.0)
    with pytest.raises(ValueError, match="node 0: .* sampled ids but .* log-probabilities"):
        collate(trees)


def test_pitfall_04_truncated_node_counts_nowhere(trees: list[Tree], model: torch.nn.Module):
    prepared(trees)
    cut, info_cut = trees[0].root, trees[1].root
    cut.status, info_cut.info["truncated"] = "context_full", True
    assert any(cut.advantage * cut.weight for cut in (cut, info_cut))
    without = copy.deepcopy(trees)
    for tree in without[:2]:
        tree.root.segments = [Segment([1], False, None, "p")]  # the same batch with these nodes empty
    expected, got = collate(without), collate(trees, drop_truncated=True)
    for a, b in zip(expected, got, strict=True):
        assert a.names == b.names and a.ids.equal(b.ids) and a.coef.equal(b.coef) and a.adv.equal(b.adv)
    assert sum(len(b.names) for b in collate(trees)) > sum(len(b.names) for b in got)  # by default they train
    metrics = Trainer(model, config(drop_truncated=True)).step(trees)
    assert metrics["tokens"] == sum(int(b.mask.sum()) for b in got)


def test_pitfall_19_every_sampled_token_of_a_node_has_its_advantage(trees: list[Tree]):
    prepared(trees)
    nodes = {f"{t.task_id}/{t.sample}/{n.id}": n for t in trees for n in t}
    for batch in collate(trees, micro_batch=3):
        full = torch.zeros(batch.mask.shape).masked_scatter(batch.mask, batch.adv)
        for row, name in enumerate(batch.names):
            node = nodes[name]
            expected = [node.advantage * node.weight * trainable for trainable in node.mask]
            assert full[row, : len(expected)].tolist() == pytest.approx(expected)
            assert not full[row, len(expected) :].any()


def test_pitfall_20_tokens_of_the_host_are_never_trained(trees: list[Tree]):
    node = prepared(trees)[0].root
    node.segments.append(Segment([63], False, None, "<eos> appended by the host"))
    batches = collate(trees, micro_batch=1)
    (batch,) = [b for b in batches if b.names == (f"{trees[0].task_id}/0/0",)]
    assert batch.ids[0, -1] == 63 and not batch.mask[0, -1]
    node.segments[-1] = Segment([63], True, None, "claims to be sampled")
    with pytest.raises(ValueError, match="node 0: log-probabilities must be present exactly on trainable segments"):
        collate(trees)


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), None])
def test_pitfall_09_recorded_logprob_must_be_finite(trees: list[Tree], value: float | None):
    prepared(trees)
    deep = next(n for t in trees for n in t if n.depth == 2)
    deep.segments[1].logprobs[0] = value
    with pytest.raises(ValueError, match=f"node {deep.id}: log-probability"):
        collate(trees)


def test_collate_refuses_text_without_ids_and_missing_advantages(trees: list[Tree]):
    with pytest.raises(UserError, match="node task0/0/0 has no advantage; call"):
        collate(trees)
    prepared(trees)
    trees[0].root.segments.append(Segment([], False, None, "lost"))
    with pytest.raises(UserError, match="node task0/0/0 has a segment with text but without token ids"):
        collate(trees)
    trees[0].root.segments = [Segment([3], True, [-1.0], "no prompt")]
    with pytest.raises(UserError, match="needs a prompt to be predicted from"):
        collate(trees)


# -- log-probabilities ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("lora", [False, True])
def test_token_logprobs_equal_full_logits(trees: list[Tree], model: torch.nn.Module, lora: bool, temperature: float):
    if lora:
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False))
        model.eval()
    prepared(trees)
    for batch in collate(trees, micro_batch=4):
        got = token_logprobs(model, batch, temperature)
        expected = [
            score(model, ids.tolist(), temperature)[mask[1:]] for ids, mask in zip(batch.ids, batch.mask, strict=True)
        ]
        assert torch.allclose(got, torch.cat(expected), atol=1e-5)


def test_gaps_in_the_positions_do_not_cut_the_sequence(trees: list[Tree], model: torch.nn.Module):
    (batch, *_) = collate(prepared(trees), micro_batch=1)
    width = batch.ids.shape[1]
    positions = torch.arange(width) + 5 * (torch.arange(width) >= 3)
    mask = torch.full((1, 1, width, width), float("-inf")).triu(1)
    logits = model(batch.ids, attention_mask=mask, position_ids=positions[None]).logits[0, :-1]
    expected = logits.log_softmax(-1).gather(1, batch.ids[0, 1:, None])[:, 0][batch.mask[0, 1:]]
    assert torch.allclose(token_logprobs(model, batch, positions=positions[None]), expected, atol=1e-5)
    assert not torch.allclose(token_logprobs(model, batch), expected, atol=1e-2)


def test_models_that_change_logits_after_the_head_are_refused(trees: list[Tree], model: torch.nn.Module):
    model.config.final_logit_softcapping = 30.0
    with pytest.raises(UserError, match="final_logit_softcapping=30.0"):
        token_logprobs(model, collate(prepared(trees))[0])


def test_pitfall_08_old_logprobs_can_be_recomputed(trees: list[Tree], model: torch.nn.Module):
    recorded, fresh = recompute_logprobs(model, trees, micro_batch=5)
    assert len(recorded) == sum(n.tokens_out for t in trees for n in t)
    assert torch.allclose(recorded, fresh, atol=1e-5)
    fill_logprobs(model, trees, temperature=0.6)  # a sampling path that records something else shows at once
    recorded, fresh = recompute_logprobs(model, trees)
    assert (recorded - fresh).abs().max() > 0.1


# -- one step ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", ["reinforce", "ppo_clip", "cispo"])
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_one_step_equals_the_naive_whole_batch(trees: list[Tree], loss: str, aggregation: str):
    model, naive = tiny_llama(), tiny_llama()
    kept, report = assign(trees)
    optimizer = torch.optim.AdamW(naive.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.017)
    expected = naive_loss(naive, kept, loss, aggregation)
    expected.backward()
    norm = torch.nn.utils.clip_grad_norm_(naive.parameters(), 0.1)
    optimizer.step()
    settings = config(loss=loss, aggregation=aggregation, micro_batch=3, max_grad_norm=0.1, weight_decay=0.017)
    metrics = Trainer(model, settings).step(kept, report)
    assert metrics["loss"] == pytest.approx(expected.item(), abs=1e-6)
    assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    # Adam's first step is about lr * sign(gradient): compare where the gradient is not rounding noise
    assert torch.allclose(parameters(model), parameters(naive), atol=2e-4)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant"])
def test_micro_batch_size_never_changes_the_result(trees: list[Tree], aggregation: str):
    gradients = []
    for size in (1, 4, 64):
        model = tiny_llama()
        batches = collate(prepared(trees), micro_batch=size, aggregation=aggregation, max_length=20)
        for batch in batches:
            per_token, _ = losses.cispo(token_logprobs(model, batch), batch.old_logp, batch.adv)
            (batch.coef * per_token).sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    for gradient in gradients[1:]:
        assert torch.allclose(gradient, gradients[0], atol=1e-6)


def test_nodes_of_zero_advantage_cost_no_forward_but_stay_in_the_denominator(trees: list[Tree]):
    prepared(trees)
    silent = [n for t in trees[::2] for n in t]
    for node in silent:
        node.advantage = 0.0
    live = [n for t in trees for n in t if n not in silent]
    batches = collate(trees)
    assert sum(len(b.names) for b in batches) == len(live)
    everyone = sum(n.tokens_out for t in trees for n in t)
    assert sum(n.tokens_out for n in live) < everyone
    assert batches[0].coef[0].item() == pytest.approx(1 / everyone)
    metrics = Trainer(tiny_llama(), config()).step(trees)
    assert metrics["loss"] == pytest.approx(naive_loss(tiny_llama(), trees, "cispo", "token_mean").item(), abs=1e-6)


@pytest.mark.parametrize("kind", sorted(TRL["types"]))
def test_flat_groups_through_the_trainer_equal_trl(kind: str):
    rows = [r for m in TRL["types"][kind]["micro"] for r in zip(m["logp"], m["old_logp"], m["advantage"], strict=True)]
    rows = [r for r in rows if r[0]]
    trees, table = [], {}
    for i, (logp, old, advantage) in enumerate(rows):
        segments = [Segment([i], False, None, "p"), Segment([i] * len(old), True, old, "a")]
        trees.append(Tree("x", "g", i, nodes={"0": Node("0", "t", segments, "finished", advantage=advantage)}))
        table[i] = torch.tensor(logp)
    policy = torch.nn.Linear(1, 1)

    def recorded(model: torch.nn.Module, batch, temperature: float) -> torch.Tensor:
        values = torch.cat([table[int(ids[0])] for ids in batch.ids])
        return values + 0 * sum(p.sum() for p in model.parameters())

    aggregation = {"grpo": "sequence_mean", "bnpo": "bnpo", "dr_grpo": "constant"}.get(kind, "token_mean")
    settings = config(
        loss="cispo" if kind == "cispo" else "ppo_clip", aggregation=aggregation, check_ratio=False,
        micro_batch=TRL["micro_batch"], max_length=TRL["max_tokens"],
    )  # fmt: skip
    metrics = Trainer(policy, settings, logprobs=recorded).step(trees)
    assert metrics["loss"] == pytest.approx(TRL["types"][kind]["loss"], abs=1e-5)


def test_imitation_is_the_same_path_and_equals_cross_entropy(trees: list[Tree], model: torch.nn.Module):
    for node in (n for t in trees for n in t):
        node.reward = 1.0
        for segment in node.segments:
            segment.logprobs = segment.logprobs and [0.0] * len(segment.ids)  # a demonstrator has none to tell
    reinforce(trees)
    nodes = [n for t in trees for n in t]
    logits = torch.cat([model(torch.tensor([n.ids])).logits[0, :-1][torch.tensor(n.mask[1:])] for n in nodes])
    target = torch.tensor([i for n in nodes for i, m in zip(n.ids, n.mask, strict=True) if m])
    trainer = Trainer(model, config(loss="reinforce", check_ratio=False))
    metrics = trainer.step(trees)
    expected = pytest.approx(cross_entropy(logits, target).item(), abs=1e-5)
    assert metrics["loss"] == expected and metrics["entropy"] == expected
    for _ in range(5):
        later = trainer.step(trees)
    assert later["loss"] < metrics["loss"] - 0.1


def test_learning_raises_the_probability_of_better_trees(trees: list[Tree], model: torch.nn.Module):
    kept = prepared(trees)
    trainer = Trainer(model, config(lr=3e-3))
    for _ in range(3):
        trainer.step(kept)
    recorded, fresh = recompute_logprobs(model, kept)
    rows = sorted(((n.advantage, n) for t in kept for n in t), key=lambda r: len(r[1].ids))
    sign = torch.tensor([a for a, n in rows for _ in range(n.tokens_out)])
    assert ((fresh - recorded) * sign).mean() > 0


# -- pitfalls of the loop ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_pitfall_05_ratio_before_the_first_update_is_one(temperature: float):
    model = tiny_llama()
    kept = prepared(fill_logprobs(model, random_trees(), temperature))
    metrics = Trainer(model, config(temperature=temperature)).step(kept)
    assert 0.98 <= metrics["ratio_mean"] <= 1.02
    assert metrics["ratio_max"] - metrics["ratio_min"] < 1e-4 and metrics["kl"] == pytest.approx(0, abs=1e-8)
    other = tiny_llama()
    before = parameters(other).clone()
    trainer = Trainer(other, config(temperature=1.6 - temperature))
    with pytest.raises(RatioMismatch, match="mean importance ratio is .*, not within"):
        trainer.step(kept)
    assert parameters(other).equal(before), "a refused update must not change the policy"
    assert trainer.updates == 0


def test_pitfall_05_only_the_very_first_update_is_checked(trees: list[Tree], model: torch.nn.Module):
    kept = prepared(trees)
    metrics = Trainer(model, config(lr=0.1, epochs=4)).step(kept)
    assert not 0.98 <= metrics["ratio_mean"] <= 1.02


def test_pitfall_07_ratios_are_logged_before_clipping(trees: list[Tree], model: torch.nn.Module):
    kept = prepared(trees)
    first = next(n for n in kept[0] if n.advantage)
    first.segments[1].logprobs[0] -= math.log(40)  # one token of the batch has ratio 40
    metrics = Trainer(model, config(check_ratio=False)).step(kept)
    scored = sum(n.tokens_out for t in kept for n in t if n.advantage)
    assert metrics["tokens"] == scored
    assert metrics["ratio_max"] == pytest.approx(40, rel=1e-4)
    assert metrics["ratio_mean"] == pytest.approx((scored - 1 + 40) / scored, rel=1e-4)
    assert metrics["clip_share"] == pytest.approx(1 / scored)
    assert metrics["kl"] == pytest.approx((40 - 1 - math.log(40)) / scored, rel=1e-3)


def test_pitfall_09_policy_that_gives_nan_is_named_and_not_updated(trees: list[Tree], model: torch.nn.Module):
    kept = prepared(trees)
    with torch.no_grad():
        model.lm_head.weight[3] = float("nan")
    with pytest.raises(NonFinite, match=r"the policy gives node task\d/\d/0\S* a log-probability of nan"):
        Trainer(model, config()).step(kept)


def test_infinite_gradient_is_an_error_and_not_an_update(trees: list[Tree], model: torch.nn.Module):
    kept = prepared(trees)
    before = parameters(model).clone()
    for node in (n for t in kept for n in t):
        node.weight = 1e38
    with pytest.raises(NonFinite, match="the gradient norm is (inf|nan), so this update was not made"):
        Trainer(model, config(max_grad_norm=1e30)).step(kept)
    assert parameters(model).equal(before)


def test_pitfall_15_run_without_signal_logs_what_it_dropped_and_ends_with_a_named_error(model: torch.nn.Module):
    trees = fill_logprobs(model, random_trees())
    for node in (n for t in trees for n in t):
        node.reward = 0.0
    before = parameters(model).clone()
    trainer = Trainer(model, config(max_silent_steps=3))
    for expected in (1, 2):
        kept, report = assign(trees)
        metrics = trainer.step(kept, report)
        assert metrics["updates"] == 0 and metrics["dropped"] == 3 and metrics["effective_batch"] == 0
        assert trainer.silent_steps == expected
    with pytest.raises(NoSignal, match="3 steps in a row had no group whose rewards differ"):
        trainer.step(kept, report)
    assert parameters(model).equal(before), "no signal: not even weight decay moves the policy"


def test_pitfall_13_a_step_with_signal_resets_the_count(trees: list[Tree], model: torch.nn.Module):
    trainer = Trainer(model, config(max_silent_steps=2))
    kept = prepared(trees)
    for _ in range(3):
        trainer.step([])
        trainer.step(kept)
    assert trainer.silent_steps == 0 and trainer.steps == 6 and trainer.updates == 3


def test_pitfall_14_only_the_mixed_group_enters_the_loss(trees: list[Tree], model: torch.nn.Module):
    for tree in trees[:8]:
        for node in tree:
            node.reward = 1.0
    kept, report = assign(trees)
    assert {name.split("/")[0] for b in collate(kept) for name in b.names} == {"task2"}
    metrics = Trainer(model, config()).step(kept, report)
    assert (metrics["groups"], metrics["dropped"], metrics["kept"], metrics["effective_batch"]) == (3, 2, 1, 4)


def test_pitfall_22_ratio_moves_after_one_update_of_two_epochs(trees: list[Tree], model: torch.nn.Module):
    kept = prepared(trees)
    one = Trainer(tiny_llama(), config(epochs=1)).step(kept)
    two = Trainer(model, config(epochs=2)).step(kept)
    assert one["updates"] == 1 and two["updates"] == 2
    assert one["ratio_max"] == pytest.approx(1, abs=1e-4) and two["ratio_max"] > 1.01


def test_minibatches_are_one_update_each(trees: list[Tree], model: torch.nn.Module):
    kept = prepared(trees)
    metrics = Trainer(model, config(minibatches=3, epochs=2)).step(kept)
    live = [n for t in kept for n in t if n.advantage]
    assert metrics["updates"] == 6
    assert metrics["sequences"] == 2 * len(live) and metrics["tokens"] == 2 * sum(n.tokens_out for n in live)


# -- settings ---------------------------------------------------------------------------------------------------------


def test_warmup_rises_linearly_and_moves_from_the_first_update(trees: list[Tree], model: torch.nn.Module):
    kept = prepared(trees)
    trainer = Trainer(model, config(lr=1e-3, warmup=4))
    assert [trainer.step(kept)["lr"] for _ in range(6)] == pytest.approx([2.5e-4, 5e-4, 7.5e-4, 1e-3, 1e-3, 1e-3])


def test_gradient_checkpointing_changes_nothing_but_memory(trees: list[Tree]):
    kept = prepared(trees)
    plain, frugal = tiny_llama(), tiny_llama()
    calls = []
    frugal.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    a, b = (Trainer(m, config(gradient_checkpointing=m is frugal)).step(kept) for m in (plain, frugal))
    assert a["loss"] == b["loss"] and a["grad_norm"] == b["grad_norm"] and parameters(plain).equal(parameters(frugal))
    assert len(calls) == 2 * len(collate(kept)), "the layer must have run again in the backward pass"


def test_only_the_adapter_moves_under_lora(trees: list[Tree], model: torch.nn.Module):
    lora = LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.5, init_lora_weights=False)
    policy = get_peft_model(model, lora).eval()
    fill_logprobs(policy, trees)
    before = {name: p.detach().clone() for name, p in policy.named_parameters()}
    policy.train()
    metrics = Trainer(policy, config()).step(prepared(trees))
    assert metrics["ratio_max"] == pytest.approx(1, abs=1e-4), "dropout must be off"
    moved = {name for name, p in policy.named_parameters() if not p.equal(before[name])}
    assert moved == {name for name in before if "lora_" in name}


def test_nothing_to_train_is_an_error(model: torch.nn.Module):
    model.requires_grad_(False)
    with pytest.raises(UserError, match="LlamaForCausalLM has no parameter that requires a gradient"):
        Trainer(model, config())


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lr": 0}, "training setting lr=0 is not accepted: Input should be greater than 0"),
        ({"loss": "dpo"}, "training setting loss='dpo' is not accepted"),
        ({"learning_rate": 1e-5}, "training setting learning_rate=1e-05 is not accepted.*known settings: loss"),
        ({"betas": (0.9,)}, "training setting betas.1"),
        ({"temperature": 0.0}, "training setting temperature=0.0"),
    ],
)
def test_bad_settings_get_one_sentence(values: dict, message: str):
    with pytest.raises(UserError, match=message):
        TrainerConfig(**values)


def test_training_touches_no_global_state(trees: list[Tree], model: torch.nn.Module):
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    Trainer(model, config(epochs=2)).step(prepared(trees))
    assert torch.get_num_threads() == threads and torch.get_rng_state().equal(state)


# -- several processes ------------------------------------------------------------------------------------------------


def _process(rank: int, folder: str) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # Accelerate insists on them
    # they meet through a file: a free port may be taken by another test before it is used
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    model = tiny_llama()
    kept = prepared(fill_logprobs(model, random_trees()))
    metrics = Trainer(model, config(micro_batch=5, epochs=2)).step(kept)
    torch.save((metrics, parameters(model)), f"{folder}/{rank}.pt")


@pytest.mark.slow
def test_two_processes_make_the_same_step_as_one(tmp_path: Path, trees: list[Tree], model: torch.nn.Module):
    kept = prepared(trees)
    assert len(collate(kept, micro_batch=5)) % 2 == 1, "an odd number makes one process wait for the other"
    alone = Trainer(model, config(micro_batch=5, epochs=2)).step(kept)
    torch.multiprocessing.spawn(_process, (str(tmp_path),), nprocs=2)
    (first, a), (second, b) = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    assert a.equal(b) and torch.allclose(a, parameters(model), atol=1e-5)
    for metrics in (alone, first, second):
        del metrics["seconds"]
    assert first == second == pytest.approx(alone, rel=1e-4)
