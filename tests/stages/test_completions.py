"""Completions equal vLLM's own output: tokens, log-probs, and the text to the last character."""

import os
import shutil

import forks
import pytest

from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.demo.character_model import START
from rloo_pipeline.demo.text_model import text_qwen3
from rloo_pipeline.rollout.engine_arguments import EngineSettings
from rloo_pipeline.rollout.requests import Request, SamplingConfig
from rloo_pipeline.rollout.sampler import Sampler

pytestmark = [pytest.mark.slow, pytest.mark.holds_vllm]

START_ID = 1
SIZES = {"hidden_size": 32, "layers": 1, "heads": 2, "key_value_heads": 1, "head_dim": 32, "intermediate_size": 64}


@pytest.fixture(scope="module")
def sampler(tmp_path_factory) -> Sampler:
    """A sampler with random weights, so that completions have parts of words and of multi-byte characters."""
    folder = tmp_path_factory.mktemp("model")
    corpus = folder / "corpus.jsonl"
    corpus.write_text('{"text": "naïve café, 日本語 and 😀 — and so on"}\n' * 20)
    text_qwen3(folder / "model", 0, corpus=str(corpus), columns=["text"], vocab_size=300, context=128, **SIZES)
    return Sampler(Policy(folder / "model"), EngineSettings("float32", 0.5, 1, 1), 128, 0)


def test_a_completion_is_vllms_own_output(sampler) -> None:
    from vllm import SamplingParams, TokensPrompt

    how = SamplingConfig(1.0, 1.0, 0, None, 24)
    requests = [Request([5 + number % 250 for number in range(seed % 7 + 1)], seed, how) for seed in range(96)]
    samples = sampler.sample(requests, "completions")
    # with a stop token that is sampled sometimes, since it has no text
    sampler.stop_ids = [*sampler.stop_ids, *range(40, 50)]
    samples += sampler.sample(requests, "completions")
    plain = [
        SamplingParams(max_tokens=24, seed=request.seed, logprobs=0, stop_token_ids=stop)
        for stop in ([2], sampler.stop_ids)
        for request in requests
    ]
    prompts = [TokensPrompt(prompt_token_ids=request.prompt_ids) for request in requests * 2]
    outputs = [output.outputs[0] for output in sampler.llm.generate(prompts, plain, use_tqdm=False)]
    assert [[*one.ids] for one in samples] == [list(output.token_ids) for output in outputs]
    spoken = [START_ID in one.ids for one in samples]
    plain_texts = [
        (one.text, output.text) for one, output, shown in zip(samples, outputs, spoken, strict=True) if not shown
    ]
    assert [ours for ours, _ in plain_texts] == [theirs for _, theirs in plain_texts]
    assert any(spoken)
    assert [START in one.text for one in samples] == spoken, "a special token that vLLM leaves out of the text"
    assert [[*one.logps] for one in samples] == [
        [place[token].logprob for token, place in zip(output.token_ids, output.logprobs, strict=True)]
        for output in outputs
    ]
    assert {one.finish_reason for one in samples} == {"stop", "length"}
    assert any("\ufffd" in one.text for one in samples), "else the prompts are no test of broken characters"


SAMPLE = """
import sys
from pathlib import Path
from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.rollout.requests import SamplingConfig, Request
from rloo_pipeline.rollout.engine_arguments import EngineSettings
from rloo_pipeline.rollout.sampler import Sampler
sampler = Sampler(Policy(Path(sys.argv[1])), EngineSettings("float32", 0.5, 1, 1), 128, 0)
assert len(sampler.sample([Request([5, 6], 1, SamplingConfig(1.0, 1.0, 0, None, 4))], "completions")) == 1
"""


@pytest.mark.skipif(forks.HAS_GPU, reason="on a GPU, Triton needs a compiler")
def test_no_compiler_is_needed_to_sample(sampler, tmp_path) -> None:
    """vLLM compiles its ranking of the sampled token, which nobody reads, as soon as it samples the first token."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "lscpu").symlink_to(shutil.which("lscpu"))
    without = {"PATH": str(programs), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}
    environment = {name: value for name, value in os.environ.items() if name not in ("CXX", "CC")}
    program = tmp_path / "sample.py"
    program.write_text(SAMPLE)
    outcome = forks.run(program, [sampler.settings["model"]], environment | without)
    assert outcome.returncode == 0, outcome.stderr[-3000:]
    assert not list((tmp_path / "cache").rglob("*.so"))
