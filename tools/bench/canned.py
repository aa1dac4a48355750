"""An executor of vLLM without a model: its tokens and log-probs are drawn before, as vLLM's model runner returns them.

Scheduler, engine core, messages between processes and output processing are vLLM's own. It is an extension point:
`distributed_executor_backend="canned.CannedExecutor"`.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import numpy as np
import torch
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput

STEPS, MOST = 64, 1024
"""Steps of canned tokens, which repeat, and requests of a step."""
CACHE = 2**30


class CannedExecutor(Executor):
    """Returns the next canned tokens for whatever is scheduled."""

    def _init_executor(self) -> None:
        draw = np.random.default_rng(0)
        vocabulary = self.model_config.get_vocab_size()
        self.ids = draw.integers(vocabulary // 4, vocabulary, (STEPS, MOST, 1), dtype=np.int32)
        self.logps = -draw.random((STEPS, MOST, 1), dtype=np.float32)
        self.lists = [step.tolist() for step in self.ids]
        self.ranks = np.zeros(MOST, dtype=np.int32)
        self.step, self.scheduled = 0, [""]

    def collective_rpc(self, method: Any, *_: Any, **__: Any) -> list[Any]:  # type: ignore[override]
        """The answers of a worker while the engine starts."""
        block = self.cache_config.block_size
        answers: dict[str, Any] = {
            "get_kv_cache_spec": {"layer": FullAttentionSpec(block, num_kv_heads=1, head_size=32, dtype=torch.float32)},
            "get_supported_kv_cache_layouts": ["NHD"],
            "determine_available_memory": CACHE,
            "get_supported_tasks": ("generate",),
        }
        return [answers[method]] if method in answers else []

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        """Remembers which requests have a token in this step."""
        self.scheduled = list(scheduler_output.num_scheduled_tokens)
        return _maybe_future(None, non_block)

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:  # noqa: ARG002
        """The tokens of the step."""
        step, count = self.step % STEPS, len(self.scheduled)
        self.step += 1
        output = ModelRunnerOutput(
            self.scheduled,
            {name: index for index, name in enumerate(self.scheduled)},
            self.lists[step][:count],
            LogprobsLists(self.ids[step, :count], self.logps[step, :count], self.ranks[:count]),
        )
        return _maybe_future(output, non_block)

    def check_health(self) -> None:
        """It cannot be ill."""

    def shutdown(self) -> None:
        """Nothing to end."""


def _maybe_future(value: Any, wanted: bool) -> Any:
    if not wanted:
        return value
    future: Future[Any] = Future()
    future.set_result(value)
    return future
