"""Tasks of the library verifiers (`verifiers.v1`): `rollout.environment: "verifiers:gsm8k"`, or with the options of the
taskset as JSON after its name: `'verifiers:gsm8k {"split": "test"}'`.

`rollout.environment_python` is a Python that has verifiers and the taskset. In each row, the column `task` is the
task's `key`, and `prompt` is its prompt. The model gets the tools of the task and of the taskset; harnesses of
verifiers do not run, since they would call a model themselves. At the end of an episode, its conversation becomes a
trace, which is passed to the task's `finalize` and `score`. The reward is the sum of the task's weighted rewards;
`rewards` and `metrics`, by name, are attributes of the environment.

Tools run in the process of the episode, and share `trace.state` with the task. Task and tools get a SubprocessRuntime.
"""

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rloo_pipeline.errors import UserError, one_line
from rloo_pipeline.user_code import contract
from rloo_pipeline.user_code.completion_text import THINK_END


class VerifiersEpisode:
    """An episode of one task, with one method for each tool."""

    _id = ""
    _taskset: Any = None
    _tasks: dict[str, Any] = {}  # noqa: RUF012 - of the class: all episodes read it

    def __init__(self) -> None:
        self.rewards: dict[str, float] = {}
        self.metrics: dict[str, float] = {}
        self._servers: dict[str, Any] = {}

    async def reset(self, prompt: list[dict[str, Any]], task: str) -> None:
        """Sets the task up.

        Args:
            prompt: the messages of the row.
            task: the key of the task.

        Raises:
            UserError: the taskset does not have this task, or the task has a different prompt.
        """
        from verifiers.v1 import AgentConfig, AgentInfo, SubprocessConfig, Trace, TraceTask
        from verifiers.v1.runtimes import make_runtime
        from verifiers.v1.state import state_cls
        from verifiers.v1.utils.decorators import invoke

        if task not in self._tasks:
            raise UserError(
                f"rollout.environment: 'verifiers:{self._id}' has no task with the key {task!r:.80}; write the rows "
                "again, with the same taskset options"
            )
        self._task = self._tasks[task]
        self._prompt = prompt_of(self._task.data)
        if [(one["role"], one["content"]) for one in prompt] != [(one["role"], one["content"]) for one in self._prompt]:
            raise UserError(
                f"rollout.environment: the prompt of a row differs from that of its task {task!r:.80} of "
                f"'verifiers:{self._id}'; write the rows again, and set neither dataset.system_prompt nor user_prompt"
            )
        data = self._task.data
        self._trace = Trace(
            task=TraceTask(type=type(self._task).__name__, data=data, key=self._task.key, hash=self._task.hash),
            state=state_cls(type(self._task))(),
            agent=AgentInfo(config=AgentConfig()),
        )
        self._runtime = make_runtime(SubprocessConfig(), name=self._trace.id)
        await self._runtime.start()
        await invoke(self._task.setup, {"trace": self._trace, "runtime": self._runtime})
        for toolset, of_task in _toolsets(self._taskset):
            self._share_state(toolset)
            await toolset.setup()
            if of_task:
                await toolset.setup_task(data)
            self._servers[toolset.server_name] = _server(toolset)

    def _share_state(self, toolset: Any) -> None:
        async def pull() -> Any:
            return self._trace.state

        async def push(_before: bytes) -> None:
            pass

        # the methods through which a toolset in a process of its own shares the state of the task
        for name, method in (("_pull_state", pull), ("_push_state", push)):
            if not hasattr(toolset, name):
                raise UserError(f"rollout.environment: this verifiers has no Toolset.{name}; install verifiers 0.4")
            setattr(toolset, name, method)

    async def _call(self, server: str, tool: str, arguments: dict[str, Any]) -> str:
        from mcp import Client

        async with Client(self._servers[server]) as client:
            result = await client.call_tool(tool, arguments)
        text = "".join(getattr(block, "text", "") for block in result.content)
        if result.is_error:
            raise ValueError(text)
        return text

    async def get_reward(self, completion: list[dict[str, Any]]) -> float:
        """Scores the conversation.

        Args:
            completion: the messages after the prompt; none if the episode was only reset, and is not scored.
        """
        if not completion:
            await self._runtime.stop()
            return 0.0
        from verifiers.v1.utils.decorators import invoke

        trace = self._trace
        _add_nodes(trace, self._prompt, completion)
        trace.is_completed = trace.ok = True
        await invoke(self._task.finalize, {"trace": trace, "runtime": self._runtime})
        await self._task.score(trace, self._runtime)
        await self._runtime.stop()
        self.rewards = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
        self.metrics = {name: value for name, value in trace.metrics.items() if value is not None}
        return float(trace.reward)


def prompt_of(data: Any) -> list[dict[str, str]]:
    """The messages that a task starts with.

    Raises:
        UserError: the task has no such messages, for example because a simulated user opens the conversation.
    """
    system = [] if data.system_prompt is None else [{"role": "system", "content": data.system_prompt}]
    if isinstance(data.prompt, str):
        return [*system, {"role": "user", "content": data.prompt}]
    if not data.prompt or any(not isinstance(message.content, str) for message in data.prompt):
        raise UserError(f"rollout.environment: task {data.idx} of verifiers has no text prompt; use another taskset")
    return [*system, *({"role": message.role, "content": message.content} for message in data.prompt)]


def environment(argument: str) -> type:
    """The class of the episodes of a taskset.

    Args:
        argument: the taskset's id, and its options as JSON.

    Raises:
        UserError: the taskset does not exist, or needs something that is not supported here.
    """
    name = argument.partition(" ")[0]
    taskset, tasks, single = _load(argument)
    if not tasks:
        raise UserError(f"rollout.environment: 'verifiers:{argument}' has no tasks, or infinitely many")
    if needed := _needed(type(taskset).task_type(), next(iter(tasks.values())), single):
        raise UserError(
            f"rollout.environment: 'verifiers:{name}' needs {needed}, not supported here; use another "
            "taskset, or write a class with its tools (docs/environments.md)"
        )
    methods = asyncio.run(_tools(taskset))
    return contract.with_tools(VerifiersEpisode, methods, _id=argument, _taskset=taskset, _tasks=tasks)


def _needed(kind: Any, task: Any, single: bool) -> str | None:
    """The first thing that tasks need but that is not supported here."""
    from verifiers.v1.utils.decorators import discover_decorated

    needs = {
        "an environment with its own agents": not single,
        "a container": kind.NEEDS_CONTAINER or task.data.image is not None,
        "stops or intercepts": task.hooks("stop") or discover_decorated(task, "intercept"),
    }
    return next((thing for thing, needed in needs.items() if needed), None)


def _load(argument: str) -> tuple[Any, dict[str, Any], bool]:
    """A taskset, its tasks by key (none if there are infinitely many), and True if one agent plays them."""
    name, _, options = argument.partition(" ")
    try:
        import verifiers.v1 as vf
    except ImportError as error:
        raise UserError(
            f"rollout.environment: verifiers:{name} needs verifiers 0.4 ({error}); set "
            "rollout.environment_python to the Python of a virtual environment that has it"
        ) from None
    try:
        taskset = vf.load_taskset(vf.taskset_config_type(name)(id=name, **json.loads(options or "{}")))
        tasks = list(taskset) if taskset.bounded else []
        by_key = {task.key: task for task in tasks}
        if len(by_key) < len(tasks):
            raise ValueError("two of its tasks have the same key, so rows do not tell them apart")
        return taskset, by_key, vf.environment_class(name) is vf.SingleAgentEnv
    except Exception as error:  # can be anything, such as a data set that is not on this machine
        reason = one_line(error) or type(error).__name__
        raise UserError(f"rollout.environment: 'verifiers:{argument}' cannot be loaded: {reason}") from error


def _toolsets(taskset: Any) -> Iterator[tuple[Any, bool]]:
    """New toolsets, and True for those of a task, whose `setup_task` must be called."""
    yield from ((toolset, False) for toolset in taskset.toolsets(taskset.config))
    yield from ((toolset, True) for toolset in type(taskset).task_type().toolsets(taskset.config.task))


def _server(toolset: Any) -> Any:
    from mcp.server.mcpserver import MCPServer

    server = MCPServer(toolset.server_name or type(toolset).__name__)
    toolset.register(server)
    return server


async def _tools(taskset: Any) -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    """The method and schema of each tool, by the name that harnesses of verifiers give it."""
    from mcp import Client

    methods: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {}
    for toolset, _ in _toolsets(taskset):
        async with Client(_server(toolset)) as client:
            for tool in (await client.list_tools()).tools:
                full = f"{toolset.server_name}_{tool.name}" if toolset.server_name else tool.name
                about = {"description": tool.description or full, "parameters": tool.input_schema}
                methods[full] = _method(toolset.server_name, tool.name), {"name": full, **about}
    return methods


def _method(server: str, tool: str) -> Callable[..., Any]:
    async def method(self: VerifiersEpisode, /, **arguments: Any) -> str:
        return await self._call(server, tool, arguments)

    return method


def _add_nodes(trace: Any, prompt: Sequence[dict[str, Any]], completion: Sequence[dict[str, Any]]) -> None:
    """Fills a trace with the messages of an episode; assistant messages in the completion are marked as sampled."""
    from pydantic import TypeAdapter
    from verifiers.v1 import Message, MessageNode

    adapter: TypeAdapter[Any] = TypeAdapter(Message)
    waiting: list[str] = []
    for place, message in enumerate([*prompt, *completion]):
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        fields = {"role": message["role"], "content": message["content"]}
        if message["role"] == "assistant":
            thoughts, end, answer = message["content"].rpartition(THINK_END)
            fields |= {"content": answer.strip(), "reasoning_content": thoughts.strip()} if end else {}
        if calls:
            ids = [f"call-{place}-{number}" for number in range(len(calls))]
            waiting = [*ids]
            fields["tool_calls"] = [
                {"id": id_, "name": call["name"], "arguments": json.dumps(call["arguments"])}
                for id_, call in zip(ids, calls, strict=True)
            ]
        elif message["role"] == "tool":
            fields |= {"tool_call_id": waiting.pop(0) if waiting else f"call-{place}", "name": message.get("name")}
        sampled = place >= len(prompt) and message["role"] == "assistant"
        parent = place - 1 if place else None
        trace.nodes.append(MessageNode(parent=parent, message=adapter.validate_python(fields), sampled=sampled))
