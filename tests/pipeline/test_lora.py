"""A LoRA run: vLLM samples from the adapter of the previous round."""

import pyarrow.parquet as pq
import pytest
from helpers import Project

from rloo_pipeline.artifacts.policy import Policy

pytestmark = pytest.mark.slow

AFTER_FIRST_SCORES = (
    *("policies/0000[12]", "rounds/00001/*.*", "rounds/00002", "trainer", "tensorboard", "evaluation", "pages"),
    *("summary.json", "report.html"),
)


@pytest.mark.long
def test_vllm_samples_from_the_adapter_that_the_round_before_made(tmp_path, finished) -> None:
    """The first round is sampled and scored without an adapter, so it is that of any run."""
    project = Project(tmp_path / "project").take(finished, *AFTER_FIRST_SCORES)
    update = {"learning_rate": 0.05, "lora": {"r": 8}}
    changes = {"update": update, "algorithm": {"beta": 0, "steps_per_generation": 1}}
    target = "results/mini/rounds/00002/rollouts/000.parquet"
    outcome = project.snakemake("--cores", "1", "--", target, "results/mini/policies/00002", **changes)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    run = project.folder / "results" / "mini"
    assert (run / "policies" / "00001" / "adapter_model.safetensors").exists()
    rollouts = pq.read_table(project.folder / target).to_pylist()
    assert_trainer_agrees(project, rollouts)


def assert_trainer_agrees(project: Project, rollouts: list[dict]) -> None:
    """The sampler's log-probs equal those of the adapter under PEFT in the trainer's code."""
    import peft
    import torch

    from rloo_pipeline.training import packing, policy_model
    from rloo_pipeline.training.logprobs import TokenLogProbs

    run = project.folder / "results" / "mini" / "policies"
    model = policy_model.load(Policy(run / "00000"), "float32")
    plain = TokenLogProbs(model, 1.0)
    pack = packing.pack([row["prompt_ids"] for row in rollouts], [row["completion_ids"] for row in rollouts])
    sampled = torch.tensor([logp for row in rollouts for logp in row["sampling_logps"]])
    with torch.no_grad():
        assert (plain(pack).logps - sampled).abs().max() > 0.01
        adapted = TokenLogProbs(peft.PeftModel.from_pretrained(model, run / "00001"), 1.0)
        torch.testing.assert_close(adapted(pack).logps, sampled, atol=1e-4, rtol=0)
