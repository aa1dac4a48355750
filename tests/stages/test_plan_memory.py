"""The memory that `rloo plan` predicts on CPUs agrees with the measured peak memory of the stages."""

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers import Round, write_prompts

from rloo_pipeline.artifacts import tables
from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.before_run import memory
from rloo_pipeline.before_run.memory import RunMemory
from rloo_pipeline.config.loading import load

pytestmark = [pytest.mark.slow, pytest.mark.long]

SIZES = {
    "small": {"hidden_size": 256, "layers": 4, "heads": 4, "key_value_heads": 2, "intermediate_size": 768},
    "large": {"hidden_size": 768, "layers": 8, "heads": 12, "key_value_heads": 4, "intermediate_size": 2304},
}
VOCABULARY, PROMPT, COMPLETION, GROUPS = 2048, 12, 36, 8
WITHIN = 0.15


def make_model(folder: Path, size: str) -> Path:
    """A model of random weights."""
    from rloo_pipeline.demo.character_model import character_tokenizer, write_qwen3

    tokenizer = character_tokenizer(512)
    tokenizer.add_tokens([f"<word {number}>" for number in range(VOCABULARY - len(tokenizer))])
    write_qwen3(folder, 1, tokenizer, head_dim=64, **SIZES[size])
    return folder


CHANGES = {
    "dataset": {"max_prompt_length": PROMPT},
    "rollout": {"generation_batch_size": GROUPS * 4, "max_completion_length": COMPLETION, "shards": 1},
    "algorithm": {"steps_per_generation": 1, "beta": 0},
}


class FullRound(Round):
    """Rounds in which all prompts and completions have their maximum length, in one shard and one step."""

    shards = 1

    def write(self, number: int) -> Round:
        """Writes the tables of a round."""
        rows, scores, reference = [], [], []
        for place in range(GROUPS * 4):
            key = {"prompt_id": f"p{place // 4}", "sample": place % 4}
            ids = [4 + (place * step + number) % 16 for step in range(COMPLETION)]
            rows.append({**key, "prompt_ids": [4 + place // 4] * PROMPT, "completion_ids": ids, "completion": ""})
            rows[-1] |= {"sampling_logps": [-7.0] * COMPLETION, "finish_reason": "stop", "seed": 0}
            score = {"scores/answer": float(place % 2), "reward": float(place % 2), "seconds": 0.0, "error": None}
            scores.append({**key, **score})
            reference.append({**key, "reference_logps": [-7.0] * COMPLETION})
        about = {"run": "mini", "round": number, "shard": 0, "seed": 1, "policy_round": number - 1}
        about["policy"] = Policy(self.model).digest
        self._save(number, 0, tables.build(rows, tables.ROLLOUTS, "rollouts", **about), scores, reference)
        return self


def peak_of(*arguments: object) -> float:
    """Peak bytes of a stage, sampled while it runs, without pages of files: Linux drops those when it needs memory, and
    maps libraries in pieces whose size depends on how their files were written.
    """
    command, peak = [sys.executable, "-m", "rloo_pipeline", *map(str, arguments)], 0
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            status = Path(f"/proc/{process.pid}/status").read_text()
            peak = max(peak, sum(int(kilobytes) for kilobytes in re.findall(r"Rss(?:Anon|Shmem):\s+(\d+)", status)))
            time.sleep(0.01)
    assert process.returncode == 0, arguments
    return peak * 1024.0


def check(stage: str, measured: float, terms: memory.Terms) -> None:
    """Checks that the prediction is within `WITHIN` of the measurement."""
    predicted = memory.total(terms)
    message = f"{stage}: predicted {predicted / 1e6:.0f} MB, measured {measured / 1e6:.0f} MB"
    print(message, {name: round(size / 1e6) for name, size in terms.items()})
    assert abs(predicted - measured) <= WITHIN * measured, message


def test_predicted_memory_is_near_the_measured_one(tmp_path) -> None:
    """The rehearsal of `make gpu` measures an update of the small model."""
    model = make_model(tmp_path / "model", "large")
    run = FullRound(tmp_path / "run", model, **CHANGES)
    predicted = RunMemory(load(run.run / "config.yaml"), Policy(model).dimensions, "cpu")
    check("first update", peak_of(*run.write(1).update_arguments(1)), predicted.update(first=True))
    check("later update", peak_of(*run.write(2).update_arguments(2)), predicted.update())
    rows = [{"prompt_id": f"p{number}", "prompt": "", "prompt_ids": [4 + number] * PROMPT} for number in range(GROUPS)]
    write_prompts(tmp_path / "prompts", rows)
    inputs = ("--prompts", tmp_path / "prompts", "--policy", model, "--round", 3, "--shard", 0)
    arguments = (*inputs, "--output", run._table(3, "rollouts", 0))
    check("rollout", peak_of("rollout", *arguments), predicted.rollout())
