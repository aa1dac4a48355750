"""RLOO in one process: what a run of this package does, without its files, jobs and engines.

A model with a quarter of a million random weights first learns from demonstrations to add two numbers, then from its
own samples. `generate` takes vLLM's place and torch DeepSpeed's; the mathematics is the package's.
"""

import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rloo_pipeline.algorithm import kl
from rloo_pipeline.algorithm.advantages import rloo
from rloo_pipeline.algorithm.loss import Bounds, Totals, aggregate, losses
from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.demo import arithmetic, character_model
from rloo_pipeline.rewards.answer import exact_answer_reward
from rloo_pipeline.training import policy_model
from rloo_pipeline.training.logprobs import TokenLogProbs
from rloo_pipeline.training.packing import Sequences

PROMPTS, K = 48, 8  # K samples of each prompt
LONGEST = 6  # tokens of a completion
BETA = 0.02  # weight of the KL from the reference policy
BOUNDS = Bounds(epsilon=0.2, epsilon_high=0.2)


def prompt_ids(tokenizer, rows):
    """Prompts by the chat template: lists of token ids, all of one length here."""
    return [tokenizer.apply_chat_template(r["prompt"], add_generation_prompt=True, return_dict=False) for r in rows]


def train_on_demonstrations(model, tokenizer, steps):
    """SFT: makes right answers more probable."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, betas=(0.9, 0.98))
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.02, total_iters=50)
    policy = TokenLogProbs(model, temperature=1.0)
    for step in range(steps):
        rows = arithmetic.demonstrations("train", 64, seed=step, worked_share=0, digits=2, signs="+")
        answers = [tokenizer(row["completion"][0]["content"] + tokenizer.eos_token)["input_ids"] for row in rows]
        pack = Sequences(prompt_ids(tokenizer, rows), answers).pick(range(len(rows)))
        (-policy(pack).logps.mean()).backward()
        optimizer.step(), warm_up.step(), optimizer.zero_grad()


@torch.no_grad()
def sample(sampler, prompts):
    """One completion of each prompt, with its end token."""
    output = sampler.generate(torch.tensor(prompts), do_sample=True, max_new_tokens=LONGEST)[:, len(prompts[0]) :]
    end = sampler.generation_config.eos_token_id
    return [ids[: ids.index(end) + 1] if end in ids else ids for ids in output.tolist()]


def train(rounds=20, sft_steps=300):
    """Trains, and returns the mean reward of each round."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        character_model.tiny_qwen3(Path(folder), seed=0)
        tokenizer, sampler = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
        model, first = (policy_model.load(Policy(Path(folder)), "float32") for _ in range(2))
    train_on_demonstrations(model, tokenizer, sft_steps)
    first.load_state_dict(model.state_dict())  # policy 0, which stays as the reference
    policy, reference = TokenLogProbs(model, temperature=1.0), TokenLogProbs(first, temperature=1.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    problems = arithmetic.problems("train", rounds * PROMPTS, digits=2, signs="+")
    history = []
    for number in range(rounds):
        # 1. rollout: the sampler gets the policy; a group is K neighbouring rows with the same prompt
        sampler.load_state_dict(model.state_dict())
        rows = [row for row in problems[number * PROMPTS : (number + 1) * PROMPTS] for _ in range(K)]
        prompts = prompt_ids(tokenizer, rows)
        completions = sample(sampler, prompts)

        # 2. score: a reward function, called as TRL calls it
        texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in completions]
        rewards = torch.tensor(exact_answer_reward(texts, [row["answer"] for row in rows]), dtype=torch.float64)

        # 3. log-probs of the sampled tokens under the policy before the update and under the reference
        pack = Sequences(prompts, completions).pick(range(len(rows)))
        with torch.no_grad():
            old, mask = pack.unpack(policy(pack).logps)
            reference_logps, _ = pack.unpack(reference(pack).logps)

        # 4. advantages: R' = R − β·KL of the completion, minus the mean R' of its K − 1 siblings
        divergence = kl.estimate("k1", old, reference_logps, mask).double().sum(-1)
        advantages = rloo((rewards - BETA * divergence).view(PROMPTS, K)).flatten().float()

        # 5. update: a completion is one action, whose ratio is clipped as in PPO; here twice on the same samples
        totals = Totals(completions=len(rows), tokens=int(mask.sum()), longest=LONGEST)
        for _ in range(2):
            logps, _ = pack.unpack(policy(pack).logps)
            actions = losses(logps, old, advantages, mask, level="sequence", clip="ppo", bounds=BOUNDS)
            aggregate(actions.loss, mask, "sequence", totals).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step(), optimizer.zero_grad()
        history.append(float(rewards.mean()))
        print(f"round {number + 1}: reward {history[-1]:.3f}, KL {float(divergence.mean()):.3f}")
    return history


if __name__ == "__main__":
    torch.set_num_threads(1)  # faster here
    train()
