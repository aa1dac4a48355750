"""An experiment's file becomes runs, and files that equal settings decide are shared."""

import pytest
import yaml
from helpers import mini

from rloo_pipeline.config.loading import load
from rloo_pipeline.config.run_set import read_runs
from rloo_pipeline.errors import UserError


@pytest.fixture
def runs(tmp_path):
    """Reads an experiment with these keys, whose base is the configuration of the tests."""

    def read(changes=(), **keys):
        (tmp_path / "base.yaml").write_text(yaml.safe_dump(mini()))
        file = tmp_path / "lr.yaml"
        file.write_text(yaml.safe_dump({"base": "base.yaml", **keys}, sort_keys=False))
        return read_runs(file, changes)

    return read


def test_a_grid_is_every_combination_with_every_seed(runs) -> None:
    run_set = runs(vary={"algorithm.preset": ["rloo", "grpo"], "update.learning_rate": [1e-6, 3e-6]}, seeds=[4, 7])
    assert list(run_set.configs)[:3] == [
        "lr/rloo_learning_rate-1e-06/4",
        "lr/rloo_learning_rate-1e-06/7",
        "lr/rloo_learning_rate-3e-06/4",
    ]
    assert len(run_set.configs) == 8
    config = run_set.configs["lr/grpo_learning_rate-3e-06/7"]
    assert (config.run, config.seed) == ("lr-grpo_learning_rate-3e-06-7", 7)
    assert (config.algorithm.preset, config.update.learning_rate) == ("grpo", 3e-6)


def test_arms_change_keys_of_any_depth_and_leave_the_others(runs) -> None:
    run_set = runs(arms={"plain": {}, "kl": {"algorithm": {"beta": 0.5}, "rollout.temperature": 0.7}}, seeds=[0])
    plain, kl = run_set.configs.values()
    assert (plain.algorithm.beta, kl.algorithm.beta, kl.rollout.temperature) == (0.05, 0.5, 0.7)
    assert kl.algorithm.steps_per_generation == plain.algorithm.steps_per_generation == 2


def test_a_key_of_the_base_needs_an_effect_in_one_arm_only(runs) -> None:
    """`epsilon` beside `clip: none` is refused in a run."""
    epsilon = {"algorithm.epsilon": 0.1}
    run_set = runs(arms={"none": {"algorithm.clip": "none", **epsilon}, "ppo": epsilon}, seeds=[0])
    assert [config.algorithm.epsilon for config in run_set.configs.values()] == [0.1, 0.1]
    with pytest.raises(UserError, match=r"lr.yaml, arm none: algorithm: epsilon has no effect with clip: none"):
        runs(arms={"none": {"algorithm.clip": "none", **epsilon}}, seeds=[0])
    with pytest.raises(UserError, match=r"lr.yaml, arm none: unknown key 'algorithm.gama'"):
        runs(arms={"none": {"algorithm.clip": "none", "algorithm.gama": 1, **epsilon}, "ppo": epsilon}, seeds=[0])


def shared(run_set, group: str) -> int:
    return len({homes[group] for run, homes in run_set.homes.items() if run in run_set.configs})


def test_the_arms_of_truth_values_are_named_as_yaml_writes_them(runs) -> None:
    run_set = runs(vary={"algorithm.normalize_advantages": [True, False]}, seeds=[0])
    assert [*run_set.configs] == ["lr/normalize_advantages-true/0", "lr/normalize_advantages-false/0"]


@pytest.mark.parametrize(
    ("key", "values", "own"),
    [
        ("update.learning_rate", [1e-6, 3e-6], set()),
        ("algorithm.preset", ["rloo", "grpo"], set()),
        ("checks.limits", [{}, {"truncated": [0.8, 0.9]}], {"checks"}),
        ("rollout.num_generations", [4, 8], {"checks", "rollout", "score", "reference"}),
        ("evaluation.each_round", [0, 8], {"rollout", "score", "reference"}),
        ("evaluation.num_prompts", [2, 50], {"rollout", "score", "reference", "evaluate"}),
        ("evaluation.temperature", [0.5, 1.0], {"rollout", "score", "reference", "evaluate"}),
        ("evaluation.every", [1, 2], set()),
    ],
)
def test_what_the_changed_key_does_not_decide_is_shared(runs, key, values, own) -> None:
    run_set = runs(vary={key: values}, seeds=[0, 1])
    groups = next(iter(run_set.homes.values()))
    assert {group for group in groups if shared(run_set, group) == 4} == own
    assert {group for group in groups if shared(run_set, group) == 2} == groups.keys() - own


def test_another_arm_or_seed_or_order_moves_no_shared_file(runs) -> None:
    few = runs(arms={"a": {}}, seeds=[1])
    many = runs(arms={"b": {"update.learning_rate": 1e-6}, "a": {}}, seeds=[0, 1])
    assert few.homes["lr/a/1"] == many.homes["lr/a/1"]


def test_files_of_round_2_are_the_runs_own(runs) -> None:
    run_set = runs(arms={"a": None, "b": {"update.learning_rate": 1e-6}}, seeds=[0])

    class Job:
        run = "lr/b/0"

    assert run_set.path(Job, "rounds/00002/rollouts/000.parquet") == "results/lr/b/0/rounds/00002/rollouts/000.parquet"
    first = run_set.path(Job, "rounds/00001/rollouts/000.parquet")
    assert first == f"results/{run_set.homes['lr/a/0']['rollout']}/rounds/00001/rollouts/000.parquet"
    assert run_set.path(Job, "policies/00000").startswith("results/lr/shared/warmstart-")
    assert run_set.path(Job, "policies/00001") == "results/lr/b/0/policies/00001"


def test_shared_files_name_the_runs_that_use_them(runs) -> None:
    run_set = runs(arms={"a": {}, "b": {"update.learning_rate": 1e-6}, "c": {"rollout.temperature": 0.9}}, seeds=[0])
    homes_of_a, homes_of_c = run_set.homes["lr/a/0"], run_set.homes["lr/c/0"]
    assert run_set.users[homes_of_a["warmstart"]] == "lr/a/0 and 2 more"
    assert run_set.users[homes_of_a["rollout"]] == "lr/a/0 and 1 more"
    assert run_set.users[homes_of_c["rollout"]] == "lr/c/0"


def test_a_configuration_of_one_run_is_one_run(tmp_path) -> None:
    file = tmp_path / "one.yaml"
    file.write_text(yaml.safe_dump(mini()))
    run_set = read_runs(file, ("rounds=7",))
    assert run_set.experiment is None
    assert {name: config.rounds for name, config in run_set.configs.items()} == {"mini": 7}
    assert run_set.file("prompts") == "results/mini/prompts"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"arms": {"a": {}}, "vary": {"seed": [1]}}, "leave one of the two out"),
        ({"vary": {"seed": [1]}}, "list the seeds under `seeds`"),
        ({"arms": {"a": {"seed.x": 1}}}, "seed.x: an arm cannot change it; list the seeds under `seeds`"),
        ({"arms": {"a": {"update": {"lora": None}, "update.lora": {"r": 8}}}}, "update.lora: arm 'a' sets it twice"),
        ({"vary": {"update.lora.r": [8], "update.lora": [None]}}, "update.lora: arm 'r-8_lora-none' sets it twice"),
        ({"base": "lr.yaml"}, "lr.yaml: an experiment of several runs, where one run is needed"),
        ({"vary": {"update.learning_rat": [1]}}, "did you mean 'learning_rate'"),
        ({"vary": {"algorithm.preset": []}}, "vary.algorithm.preset: the list is empty"),
        ({"vary": {"rounds": 3}}, "lr.yaml: vary.rounds: Input should be a valid list, got 3"),
        ({"vary": ["rounds"]}, "vary: Input should be a valid dictionary, got ['rounds']"),
        ({"arms": ["a", "b"]}, "arms: Input should be a valid dictionary, got ['a', 'b']"),
        ({"arms": {"a": 3}}, "arms.a: Input should be a valid dictionary, got 3"),
        ({"seeds": [0, -1]}, "seeds.1: Input should be greater than or equal to 0"),
        ({"arms": {"shared": {}}}, "'shared' cannot be the name of an arm"),
        ({"arms": {"a/b": {}}}, "'a/b' cannot be the name of an arm"),
        ({"seeds": [1, 1]}, "a seed occurs twice"),
        ({"seed": [1]}, "unknown key 'seed'; did you mean 'seeds'?"),
        ({"vary": {"workers": ["never", "always"]}}, "workers: all arms of an experiment need the same value"),
        ({"base": "no.yaml"}, "no.yaml"),
        (
            {"vary": {"update.learning_rate": [1, 1.0]}},
            "vary.update.learning_rate: 1 and 1.0 would be the same arm; leave one out",
        ),
        ({"vary": {"title": ["a b", "a-b"]}}, "vary: two arms would be named 'a-b'; name them under `arms` instead"),
    ],
)
def test_a_wrong_key_gives_a_one_line_error(runs, keys, message) -> None:
    with pytest.raises(UserError, match=r"^[^\n]+$") as refused:
        runs(**keys)
    assert message in str(refused.value)


DEV = {"generator": "rloo_pipeline.demo.arithmetic:problems", "options": {"split": "dev"}}


def test_all_runs_get_the_choice_of_the_experiment(runs) -> None:
    run_set = runs(arms={"a": {"dataset.dev": DEV}, "b": {"dataset.dev": DEV, "rounds": 3}}, seeds=[0], select={})
    assert [config.select.by for config in run_set.configs.values()] == ["dev.pass@1"] * 2
    assert [config.candidates for config in run_set.configs.values()] == [{"final": 2}, {"final": 3}]


@pytest.mark.parametrize(
    ("arms", "select", "message"),
    [
        ({"a": {}, "b": {"rounds": 3}}, {}, "select: dev.pass@1 needs rows to choose by"),
        ({"a": {"dataset.dev": DEV}}, {}, "there is one arm with one evaluated round"),
        ({"a": {"dataset.dev": DEV}}, {"by": "dev.pass@4"}, "set one of dev.pass@1, dev.pass@2, dev.greedy"),
        ({"a": {"dataset.dev": DEV}}, {"by": "test.pass@1"}, "evaluations on dataset.dev do not report 'test.pass@1'"),
        (
            {"a": {"dataset.dev": DEV}, "b": {"dataset.dev": DEV | {"max_rows": 9}}},
            {},
            "dataset.dev: all arms of an experiment need the same value",
        ),
        (
            {"a": {"dataset.dev": DEV}, "b": {"dataset.dev": DEV, "correct.reward": "worked"}},
            {},
            "correct.reward: all arms of an experiment need the same value",
        ),
        (
            {"a": {"dataset.dev": DEV}, "b": {"dataset.dev": DEV, "rollout.max_completion_length": 40}},
            {},
            "evaluation.max_completion_length: all arms of an experiment need the same value; set it in the base",
        ),
    ],
)
def test_a_choice_that_cannot_be_made_gives_a_one_line_error(runs, arms, select, message) -> None:
    with pytest.raises(UserError, match=r"^[^\n]+$") as refused:
        runs(arms=arms, select=select, seeds=[0])
    assert message in str(refused.value)


def test_where_one_run_is_needed_an_experiment_is_refused(tmp_path) -> None:
    file = tmp_path / "lr.yaml"
    file.write_text("base: my-run.yaml\n")
    with pytest.raises(UserError, match=r"lr.yaml: an experiment of several runs.*that of its base, my-run.yaml"):
        load(file)
