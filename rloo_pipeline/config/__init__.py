"""The configuration of a run: one pydantic model per section, a docstring under every key; `loading` reads the file."""

from rloo_pipeline.config.algorithm import Algorithm, estimator, estimators
from rloo_pipeline.config.check_limits import CheckLimits, Checks
from rloo_pipeline.config.corrections import KL, Mismatch, ResponseLength
from rloo_pipeline.config.data import Dataset, Model, ModelSource, PromptSelection, Sft, Source, Warmstart
from rloo_pipeline.config.evaluation import Correct, Evaluation, Harness
from rloo_pipeline.config.gates import Gate, Gates
from rloo_pipeline.config.rewards import REWARD_MODEL, Judge, Reward, RewardModel, Scoring
from rloo_pipeline.config.run import TABLE_COLUMNS, Config
from rloo_pipeline.config.run_keys import Container, Report
from rloo_pipeline.config.sampling import FP8, Rollout, Vllm
from rloo_pipeline.config.section import JSON, Dtype, OptimizerName, Section, flatten, merge, nest
from rloo_pipeline.config.training import Deepspeed, Lora, Offload, Update
from rloo_pipeline.stages.table import STAGES
