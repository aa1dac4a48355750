"""On-policy distillation, without any reward and beside one: from the configuration to the page, and from a kill on."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers import SECOND_ROUND, Project, mini

pytestmark = pytest.mark.slow

FEW = {"greedy": False, "num_prompts": 8}
DISTILLED = {
    "rounds": 1,
    "rollout": {"shards": 1},
    "evaluation": FEW,
    "rewards": [{**reward, "weight": 0} for reward in mini()["rewards"]],
    "algorithm": {
        "teacher": {
            "build": "rloo_pipeline.demo.trained_model:trained_qwen3",
            "build_options": {"steps": 4, "warmup_steps": 2, "hidden_size": 48},
        },
        "beta": 0,
        "importance_sampling_level": "token",
        "old_logps": "sampler",
    },
}

AFTER_ROLLOUTS = (
    *("rounds/00002/teacher", "rounds/00002/[tm]*.*", "policies/00002", "trainer/00002", "tensorboard/00002*"),
    *("evaluation/final", "summary.json", "report.html"),
)
"""Files that a run lacks after a kill before the teacher's job of the second round."""


@pytest.mark.long
def test_a_run_learns_from_its_teacher_alone(tmp_path) -> None:
    project = Project(tmp_path / "project")
    outcome = project.snakemake("--cores", "1", **DISTILLED)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    run = project.folder / "results" / "mini"
    rollouts, teacher = (read(run / f"rounds/00001/{kind}") for kind in ("rollouts", "teacher"))
    pairs = zip(rollouts["sampling_logps"].to_pylist(), teacher["teacher_logps"].to_pylist(), strict=True)
    gaps = [old - of_teacher for row in pairs for old, of_teacher in zip(*row, strict=True)]
    metrics = json.loads((run / "rounds/00001/metrics.json").read_text())
    assert metrics["teacher/kl"] == pytest.approx(sum(gaps) / len(gaps), rel=1e-5)
    assert metrics["reward"] is metrics["frac_reward_zero_std"] is None
    assert metrics["grad_norm"] > 0
    assert by_transformers(run, rollouts) == pytest.approx(teacher["teacher_logps"][0].as_py(), abs=1e-4)
    assert "Reverse KL to the teacher" in (run / "report.html").read_text()


SEVERAL = {
    "evaluation": FEW,
    "algorithm": {
        "preset": "clip_cov",
        "steps_per_generation": 1,
        "clip_cov_ratio": 0.2,
        "clip_cov_lb": 0.0,
        "top_entropy_quantile": 0.5,
        "teacher": {**DISTILLED["algorithm"]["teacher"], "top_k": 4, "beta": 0.5, "weight": 0.3},
    },
    "rollout": {"generation_kwargs": {"repetition_detection": {"max_pattern_size": 2, "min_count": 4}}},
}


@pytest.mark.long
def test_a_run_with_a_teachers_likeliest_tokens_and_a_choice_of_tokens_goes_on_to_the_same_bytes(tmp_path) -> None:
    project = Project(tmp_path / "project")
    outcome = project.snakemake("--cores", "1", **SEVERAL)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    run = project.folder / "results" / "mini"
    rollouts, teacher = (read(run / f"rounds/00002/{kind}") for kind in ("rollouts", "teacher"))
    metrics = json.loads((run / "rounds/00002/metrics.json").read_text())
    assert metrics["teacher/kl"] == pytest.approx(divergence(run, rollouts, teacher), rel=1e-4)
    assert metrics["clip_ratio/high_mean"] > 0
    assert metrics["grad_norm"] > 0
    before = project.files("policies/**/*") | project.files("rounds/**/*")
    again = Project(tmp_path / "again").take(project, *AFTER_ROLLOUTS)
    outcome = again.snakemake("--cores", "1", "--", *SECOND_ROUND, **SEVERAL)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    assert again.files("policies/**/*") | again.files("rounds/**/*") == before


def divergence(run, rollouts: pa.Table, teacher: pa.Table) -> float:
    """The Jensen–Shannon divergence of policy 1 from the teacher, per token, by plain transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    model, total, tokens = AutoModelForCausalLM.from_pretrained(run / "policies/00001"), 0.0, 0
    for row, top in zip(rollouts.to_pylist(), teacher.to_pylist(), strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([row["prompt_ids"] + row["completion_ids"]])).logits
        probs = logits[0, len(row["prompt_ids"]) - 1 : -1].double().softmax(-1)
        ids = torch.tensor(top["top_ids"]).view(-1, 4)
        q, p = probs.gather(-1, ids), torch.tensor(top["top_logps"]).double().exp().view(-1, 4)
        q, p = (torch.cat([each, (1 - each.sum(-1, keepdim=True)).clamp(min=1e-6)], -1) for each in (q, p))
        middle = (p + q) / 2
        total += 0.5 * float((p * (p / middle).log() + q * (q / middle).log()).sum())
        tokens += len(ids)
    return total / tokens


def read(folder) -> pa.Table:
    """All shards of a table."""
    return pa.concat_tables([pq.read_table(file) for file in sorted(folder.glob("*.parquet"))])


def by_transformers(run, rollouts) -> list[float]:
    """The teacher's log-probs of the first completion, by plain transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    prompt, completion = (rollouts[name][0].as_py() for name in ("prompt_ids", "completion_ids"))
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(run / "assets/teacher")(
            torch.tensor([prompt + completion])
        ).logits
    logps = logits[0, len(prompt) - 1 : -1].double().log_softmax(-1)
    return [logps[place, token].item() for place, token in enumerate(completion)]


AFTER_FIRST_SCORES = (
    *("policies/0000[12]", "rounds/00001/*.*", "rounds/00002", "trainer", "tensorboard", "evaluation", "pages"),
    *("summary.json", "report.html"),
)
"""Files that a run lacks after a kill before the first update."""


@pytest.mark.long
def test_an_update_of_gdpo_normalizes_each_reward(finished, tmp_path) -> None:
    project = Project(tmp_path / "project").take(finished, *AFTER_FIRST_SCORES)
    target = "results/mini/policies/00001"
    outcome = project.snakemake("--cores", "1", "--", target, algorithm={"preset": "gdpo", "beta": 0})
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    run = project.folder / "results" / "mini" / "rounds" / "00001"
    scores, train = read(run / "scores").to_pylist(), pq.read_table(run / "train.parquet").to_pylist()
    for first in range(0, len(scores), 4):
        group = scores[first : first + 4]
        sums = [0.0] * 4
        for name, weight in (("answer", 1.0), ("format", 0.1)):
            values = [row[f"scores/{name}"] for row in group]
            mean = sum(values) / 4
            spread = (sum((value - mean) ** 2 for value in values) / 3) ** 0.5 + 1e-4
            sums = [total + weight * (value - mean) / spread for total, value in zip(sums, values, strict=True)]
        assert [row["reward"] for row in train[first : first + 4]] == pytest.approx(sums, abs=1e-9)
