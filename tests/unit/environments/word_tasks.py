"""A taskset of verifiers for the tests, run by its own Python: a tool with a state, two rewards and a metric."""

from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["Words"]


class WordData(vf.TaskData):
    word: str


class Looks(vf.State):
    looks: int = 0


class Dictionary(vf.Toolset[vf.ToolsetConfig, Looks]):
    async def setup_task(self, task: WordData) -> None:
        self.word = task.word

    @vf.tool
    def letter(self, place: int) -> str:
        """The letter at a place of the word, from 1 on."""
        self.state.looks += 1
        return self.word[place - 1]


class WordTask(vf.Task[WordData, Looks]):
    @classmethod
    def toolsets(cls, config: vf.TaskConfig) -> list[vf.Toolset]:
        return [Dictionary(vf.ToolsetConfig())]

    async def setup(self, trace: vf.Trace) -> None:
        self.is_set_up = True

    @vf.reward(weight=2.0)
    async def exact(self, trace: vf.Trace) -> float:
        return float(self.is_set_up and trace.last_reply == self.data.word)

    @vf.reward
    async def short(self, trace: vf.Trace) -> float:
        return 0.5**trace.state.looks

    @vf.metric
    async def turns(self, trace: vf.Trace) -> int:
        return trace.num_turns


class WordsConfig(vf.TasksetConfig):
    count: int = 4
    stops: bool = False
    offline: bool = False
    alike: bool = False


class StoppedTask(WordTask):
    @vf.stop
    async def late(self, trace: vf.Trace) -> bool:
        return trace.num_turns > 3


class WordTaskAlike(WordTask):
    key = "word"


class Words(vf.Taskset[WordTask, WordsConfig]):
    def load(self) -> Iterator[WordTask]:
        if self.config.offline:
            raise ConnectionError("the data set is not on this machine")
        kind = StoppedTask if self.config.stops else WordTaskAlike if self.config.alike else WordTask
        for word in ["hat", "sun", "cup", "fox"][: self.config.count]:
            prompt = f"Which word of {len(word)} letters do I think of?"
            yield kind(WordData(prompt=prompt, system_prompt="Be brief.", word=word), self.config.task)
