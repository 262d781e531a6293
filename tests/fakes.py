"""Small stand-ins for the real parts: quick to make, with nothing to download."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from opd.engine_pool import EngineInfo
from opd.errors import StepAborted
from opd.loop import Evaluation, StepReport
from opd.rollout.requests import Answer, PumpReply, RolloutRequest
from opd.types import LossStats, OptimStats, Prompt, Sample, SyncStats, TeacherScore, TrainBatch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CHATML_WITH_BOS = "{{ bos_token }}" + CHATML
CHATML_WITHOUT_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + CHATML
)
CHATML_THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'].split('</think>')[-1] + "
    "'<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think></think>' }}{% endif %}{% endif %}"
)
"""Strips reasoning from past turns; an empty think block when `enable_thinking` is false."""

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>")
"""Ids 0 to 3."""
ENDOFTEXT, IM_START, IM_END, BOS = range(4)
PLAIN_TOKENS = ("<think>", "</think>")
"""Added tokens that are not special; their ids are the last."""


def byte_tokenizer(
    chat_template: str | None = CHATML,
    *,
    eos_token: str = "<|im_end|>",
    adds_bos: bool = False,
    extra_special: Sequence[AddedToken] = (),
) -> PreTrainedTokenizerFast:
    """Give a byte-level BPE tokenizer of about 300 ids, in which a few common words are one token.

    Args:
        chat_template: None for a model without one.
        eos_token: one of `SPECIAL_TOKENS`.
        adds_bos: whether its post-processor puts `<s>` before a text.
        extra_special: more special tokens, with ids after the others.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        show_progress=False,
        special_tokens=[*SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(["user assistant system what does a fruit mean? banana\n\n"] * 4, trainer)
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in PLAIN_TOKENS])
    tokenizer.add_special_tokens(list(extra_special))
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    from transformers import PreTrainedTokenizerFast  # here: it takes seconds, and most tests need none

    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos_token, bos_token="<s>")
    wrapped.chat_template = chat_template
    return wrapped


class Script:
    """What happened, in order, and what a test wants to happen with it."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.acts: dict[str, Callable[[], Awaitable[None]]] = {}
        """Event → what to do when it happens; what it raises is raised by the fake."""

    async def happens(self, event: str) -> None:
        """Note an event, and do what was asked for."""
        self.events.append(event)
        await asyncio.sleep(0)
        if event in self.acts:
            await self.acts[event]()


def numbered_sample(number: int) -> Sample:
    """Give an unscored sample that can be told from others by its first id."""
    return Sample(
        sample_id=f"s{number}",
        prompt_ids=np.array([number, 7], np.int32),
        response_ids=np.array([8, 9, 1], np.int32),
        loss_mask=np.ones(3, np.bool_),
        finish_reason="stop",
        source="dataset",
        teacher="teacher",
    )


class ListSource:
    """A `SampleSource` that gives a list once."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self._samples = samples
        self.index = 0

    async def next_samples(self, count: int) -> list[Sample]:
        given = list(self._samples[self.index : self.index + count])
        self.index += len(given)
        return given

    def state(self) -> Mapping[str, Any]:
        return {"index": self.index}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.index = state["index"]


class TableScorer:
    """A `Scorer` with the same score for every token."""

    def __init__(self, script: Script) -> None:
        self._script = script

    async def score(self, samples: Sequence[Sample]) -> list[Sample]:
        names = "+".join(s.sample_id for s in samples)
        await self._script.happens(f"score {names}")
        await self._script.happens(f"scored {names}")
        return [s.with_score(self._score(len(s.response_ids))) for s in samples]

    @staticmethod
    def _score(length: int) -> TeacherScore:
        return TeacherScore(
            token_logprobs=np.full(length, -0.5, np.float32),
            topk_ids=np.tile(np.array([8, 9], np.int32), (length, 1)),
            topk_logprobs=np.full((length, 2), -1.0, np.float32),
            covered=np.ones(length, np.bool_),
        )

    async def close(self) -> None: ...


class RecordingLearner:
    """A `Learner` whose weights are the names of what it has learned; needs samples of `numbered_sample`."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._gradient: list[str] = []
        self._aborted = asyncio.Event()
        self.weights: list[str] = []
        self.losses: dict[str, float] = {}
        """Names of a batch → sum of its loss, where it is not to be 3 a sample."""

    async def forward_backward(self, batch: TrainBatch) -> LossStats:
        names = self._names(batch)
        await self._at_work(f"learn {names}")
        self._gradient.append(names)
        await self._script.happens(f"learned {names}")
        return self._loss(batch, names)

    async def optim_step(self) -> OptimStats:
        self.weights, self._gradient = self.weights + self._gradient, []
        await self._script.happens(f"optim {len(self.weights)}")
        return OptimStats(grad_norm=1.0, lr=0.1)

    async def evaluate(self, batch: TrainBatch) -> LossStats:
        await self._at_work(f"evaluate {len(self.weights)}")
        return self._loss(batch, self._names(batch))

    async def abort(self) -> None:
        self._aborted.set()
        await self._script.happens("abort")

    async def export_hf(self, folder: Path) -> None:
        (folder / "weights").write_text(" ".join(self.weights))

    async def close(self) -> None: ...

    async def _at_work(self, event: str) -> None:
        """Do what the script says meanwhile; `abort` ends it."""
        work = asyncio.ensure_future(self._script.happens(event))
        aborted = asyncio.ensure_future(self._aborted.wait())
        try:
            await asyncio.wait({work, aborted}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise StepAborted
            work.result()
        finally:
            work.cancel()
            aborted.cancel()
            await asyncio.gather(work, aborted, return_exceptions=True)

    def _loss(self, batch: TrainBatch, names: str) -> LossStats:
        total = self.losses.get(names, 3.0 * batch.num_samples)
        return LossStats(sums={"loss/total": total, "loss/forward_kl": total / 2}, tokens=batch.trained_tokens)

    @staticmethod
    def _names(batch: TrainBatch) -> str:
        microbatches = [m for rank in batch.ranks for m in rank]
        return "+".join(f"s{m.input_ids[start]}" for m in microbatches for start in m.cu_seqlens[:-1])


class RecordingCheckpoints:
    """`loop.Checkpoints` that remember what they were given, and the weights at that time."""

    def __init__(self, script: Script, learner: RecordingLearner) -> None:
        self._script, self._learner = script, learner
        self.saved: dict[int, tuple[float | None, Mapping[str, Any], list[str]]] = {}
        """Step → held-out KL, state of the source, weights."""

    async def save(self, step: int, heldout_kl: float | None, source_state: Mapping[str, Any]) -> None:
        await self._script.happens(f"save {step}")
        assert step not in self.saved, f"step {step} was saved already"
        self.saved[step] = (heldout_kl, source_state, list(self._learner.weights))


class RecordingObserver:
    """A `loop.Observer` that notes what it hears."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self.reports: list[StepReport] = []

    def step(self, report: StepReport) -> None:
        self._script.events.append(f"step {report.step}")
        self.reports.append(report)

    def first_sync(self, sync: SyncStats) -> None:
        self._script.events.append(f"first sync {sync.version}")

    def evaluation(self, step: int, evaluation: Evaluation) -> None:
        self._script.events.append(f"heldout {step}")


def numbered_prompt(number: int, length: int = 4) -> Prompt:
    """Give a prompt that can be told from others by its first id."""
    ids = (np.arange(length, dtype=np.int32) * 7 + number) % 90
    ids[0] = number
    return Prompt(sample_id=f"s{number}", prompt_ids=ids, teacher="teacher", meta={"row": f"s{number}"})


def written(prompt_ids: np.ndarray, seed: int) -> np.ndarray:
    """Give what every `FakeStudent` answers."""
    return np.array([prompt_ids[0], seed % 100, len(prompt_ids) % 100, 1], np.int32)


@dataclass(eq=False)
class FakeStudent:
    """A rollout engine that answers `written`, a request after as many pumps as `starts` says for its first id."""

    index: int
    starts: FakeStudents
    script: list[Callable[[], Awaitable[PumpReply]] | None]
    """What the next pumps do; None: answer."""
    held: dict[str, tuple[RolloutRequest, list[int]]] = field(default_factory=dict)
    """Requests under way, and the weight version of each pump that they have seen."""
    taken: list[RolloutRequest] = field(default_factory=list)
    given: list[Answer] = field(default_factory=list)
    version: int = 0
    pumps: int = 0
    pumping: bool = False
    killed: bool = False

    @property
    def name(self) -> str:
        return f"rollout engine {self.index}"

    @property
    def info(self) -> EngineInfo:
        return EngineInfo(pid=7, window=400, vocab_size=100, load_s=0.1)

    async def pump(self, new: Sequence[RolloutRequest], cancel: Sequence[str]) -> PumpReply:
        assert not self.killed, "a killed engine was asked"
        assert not self.pumping, "an engine was asked while it was at work"
        self.pumping = True
        self.pumps += 1
        self.starts.while_pumping()
        await asyncio.sleep(0)
        self.pumping = False
        self.taken += new
        self.held |= {request.key: (request, []) for request in new}
        for key in cancel:
            del self.held[key]
        act = self.script.pop(0) if self.script else None
        if act is not None:
            return await act()
        answers = []
        for key, (request, versions) in list(self.held.items()):
            versions.append(self.version)
            if len(versions) >= self.starts.pumps_per_answer.get(int(request.prompt_ids[0]), 1):
                del self.held[key]
                answers.append(self.starts.tamper(self._answer(request, versions)))
        self.given += answers
        tokens = sum(len(answer.response_ids) for answer in answers)
        return PumpReply(answers=answers, generated_tokens=tokens, busy_s=0.1, memory_gib=1.5)

    async def open_channel(self, init_info: Mapping[str, Any], *, timeout_s: float) -> None: ...

    async def receive(self, version: int, *, timeout_s: float) -> None:
        assert not self.pumping, "weights changed in a step"
        self.version = version

    async def close(self) -> None:
        self.killed = True

    async def kill(self) -> None:
        self.killed = True

    def _answer(self, request: RolloutRequest, versions: Sequence[int]) -> Answer:
        ids = written(request.prompt_ids, request.seed)
        return Answer(
            key=request.key,
            prompt_ids=request.prompt_ids.copy(),
            response_ids=ids,
            sampling_logprobs=np.full(len(ids), -0.5, np.float32),
            weight_versions=np.array([versions[0]] + [versions[-1]] * (len(ids) - 1), np.int32),
            finish_reason="length" if int(request.prompt_ids[0]) in self.starts.cut_off else "stop",
        )


@dataclass
class FakeStudents:
    """Starts fakes; each start takes the next script of its index, a start whose script is an exception fails."""

    scripts: dict[int, list[list[Callable[[], Awaitable[PumpReply]] | None] | Exception]] = field(default_factory=dict)
    pumps_per_answer: Mapping[int, int] = field(default_factory=dict)
    """First id of a prompt → pumps until it is answered, where it is not 1."""
    cut_off: Collection[int] = ()
    """First ids of prompts whose answers are cut off."""
    tamper: Callable[[Answer], Answer] = lambda answer: answer
    while_pumping: Callable[[], None] = lambda: None
    engines: list[FakeStudent] = field(default_factory=list)

    async def __call__(self, index: int) -> FakeStudent:
        await asyncio.sleep(0)
        pending = self.scripts.get(index, [])
        script = pending.pop(0) if pending else []
        if isinstance(script, Exception):
            raise script
        self.engines.append(FakeStudent(index, self, list(script)))
        return self.engines[-1]
