"""Rollouts under way: parts of steps are generated, scored as they arrive, and handed over as whole steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import setitem

import numpy as np

from ebbflow.data.prompts import Prompt
from ebbflow.data.sampling import prompt_batch
from ebbflow.flow.noise import SampleKeys
from ebbflow.flow.windows import Plan, plan
from ebbflow.models import Conditioning
from ebbflow.models.encoding import Embeddings
from ebbflow.online.placement import Call, Handle, Placement
from ebbflow.online.pool import Desk, Job, Pool
from ebbflow.online.work import Busy, Generated, Lesson, Part, Scored
from ebbflow.recipe.stages import OnlineStageConfig
from ebbflow.rewards.combine import RewardError, ScoreTable
from ebbflow.rollouts.weights import WeightsVersion
from ebbflow.stage import StageContext


@dataclass
class Harvest:
    """What became of a part: where its rollouts and images are, and their scores."""

    part: Part
    rollouts: Handle
    images: Handle
    generated: Generated
    scores: ScoreTable
    busy: list[Busy]


@dataclass
class Step:
    """The rollouts of a step.

    Attributes:
        step: its number.
        harvest: by the number of the part; whole when all are there.
        dropped: samples that were too old when they were wanted, and were generated again.
    """

    step: int
    parts: list[Part]
    harvest: dict[int, Harvest] = field(default_factory=dict)
    dropped: int = 0

    @property
    def whole(self) -> bool:
        return len(self.harvest) == len(self.parts)

    @property
    def rows(self) -> list[Harvest]:
        """In the order of the parts."""
        return [self.harvest[index] for index in range(len(self.parts))]

    @property
    def scores(self) -> ScoreTable:
        return ScoreTable.cat([harvest.scores for harvest in self.rows])

    @property
    def busy(self) -> list[Busy]:
        return [busy for harvest in self.rows for busy in harvest.busy]

    @property
    def prompts(self) -> list[Prompt]:
        return [prompt for part in self.parts for prompt in part.prompts]

    def staleness(self, version: int) -> list[int]:
        """For every sample, the training steps that the policy is ahead of the one that generated it."""
        return [version - harvest.generated.version for harvest in self.rows for _ in harvest.part.prompts]


class Ahead:
    """The steps whose rollouts are under way, and the workers that see to them.

    Attributes:
        desk: keeps them at work while something else is waited for.
        newest: the weights that generate from now on.
        busy: what the workers said of their time, also over samples that were dropped.
    """

    def __init__(
        self, ctx: StageContext, placement: Placement, prompts: list[Prompt], embeddings: Embeddings, first: int = 0
    ) -> None:
        """``prompts``: the training split; ``first``: the step that the stage goes on with."""
        config = ctx.online
        self.ctx, self.placement, self.prompts, self.embeddings = ctx, placement, prompts, embeddings
        self.rollout = Pool(placement, "rollout", config.resources.rollout.count)
        self.reward = Pool(placement, "reward", config.resources.reward.count, config.scoring.timeout, config.scoring.retries)
        self.desk = Desk(placement, [self.reward, self.rollout])
        self.newest = WeightsVersion(0)
        self.busy: list[Busy] = []
        self.waiting = deque(range(first, ctx.online.steps))
        self.open: list[Step] = []

    def fill(self, at_least: int = 0) -> None:
        """Begin with as many steps as may be under way while another one trains, and ``at_least`` so many."""
        while self.waiting and len(self.open) < max(at_least, lead(self.ctx.online)):
            self._begin(self.waiting.popleft())

    def prepared(self, step: int) -> Step:
        """A step of which nothing is generated yet."""
        return Step(step, parts_of(self.ctx, self.prompts, self.embeddings, step, self._plan(step)))

    def _begin(self, step: int) -> None:
        begun = self.prepared(step)
        self.open.append(begun)
        for index in range(len(begun.parts)):
            self._generate(begun, index)
        self.desk.dispatch()

    def take(self, version: int) -> Step:
        """A step that is whole, with samples of weights not too old for a policy of ``version``; waits for it.

        On Ray it is the first that is ready. In one process, where nothing is gained by that, it is the next one, so that the
        same stage gives the same bytes.
        """

        def ready() -> list[Step]:
            return [step for step in (self.open if self.ctx.online.placement == "ray" else self.open[:1]) if step.whole]

        def there() -> bool:
            self._drop_stale(version)
            return bool(ready())

        self.desk.until(there)
        taken = ready()[0]
        self.open.remove(taken)
        return taken

    def _plan(self, step: int) -> Plan | None:
        window, before = self.ctx.config.window, self.placement.steps_before
        return plan(window, self.ctx.config.sampler.steps, before + step, self.ctx.seed) if window else None

    def _generate(self, step: Step, index: int) -> None:
        """Newest weights count when a worker takes the part if the mode is ``async``, and otherwise now."""
        now, late = self.newest, self.ctx.online.mode == "async"
        self.sample(step.parts[index], lambda: self.newest if late else now, partial(setitem, step.harvest, index))

    def sample(
        self, part: Part, weights: Callable[[], WeightsVersion], done: Callable[[Harvest], None], guardrails: bool = False
    ) -> None:
        """Let a part be generated and scored, and ``done`` have what became of it.

        Args:
            weights: asked for when a worker takes the part.
            guardrails: whether to score with them too, as a validation does.
        """

        def generated(call: Call, report: Generated) -> None:
            self.busy += report.busy
            self._score(part, call, report, done, guardrails)

        self.rollout.submit(Job("generate", lambda: (part, weights()), generated))

    def _score(self, part: Part, call: Call, generated: Generated, done: Callable[[Harvest], None], guardrails: bool) -> None:
        rollouts, images = call.values
        traced = self.ctx.online.traces("reward", part.step) and not guardrails

        def scored(_: Call | None, report: Scored) -> None:
            self.busy += report.busy
            scores = report.table.where(generated.finite)
            done(Harvest(part, rollouts, images, generated, scores, generated.busy + report.busy))

        def failed(reason: str) -> None:
            scored(None, Scored(ScoreTable.none(len(part), list(self.placement.reward_weights), reason), []))

        self.reward.submit(
            Job("score", lambda: (images, part.prompts, part.step, guardrails, traced), scored, failed, fatal=(RewardError,))
        )

    @property
    def replaced(self) -> int:
        """Workers that died or hung so far."""
        return self.rollout.replaced + self.reward.replaced

    def _drop_stale(self, version: int) -> None:
        """Begin again with those parts of whole steps that are too old for a policy of ``version``."""
        if self.ctx.online.mode != "async":
            return
        bound = version - self.ctx.online.staleness
        for step in [step for step in self.open if step.whole]:
            for index in [index for index, harvest in step.harvest.items() if harvest.generated.version < bound]:
                step.dropped += len(step.harvest.pop(index).part)
                self._generate(step, index)
        self.desk.dispatch()


def lead(config: OnlineStageConfig) -> int:
    """Steps whose rollouts are under way while another one trains."""
    return {"sync": 0, "one_step_off": 1, "async": config.staleness}[config.mode]


def parts_of(ctx: StageContext, prompts: Sequence[Prompt], embeddings: Embeddings, step: int, chosen: Plan | None) -> list[Part]:
    """The rollouts of a step in parts of whole groups, about a micro-batch each, whoever generates them."""
    config = ctx.online
    mine = prompt_batch(prompts, config.prompts_per_step, step, ctx.seed)
    at_once = max(1, config.micro_batch // config.group_size)
    return [_part(ctx, mine[start : start + at_once], embeddings, step, chosen) for start in range(0, len(mine), at_once)]


def _part(ctx: StageContext, prompts: list[Prompt], embeddings: Embeddings, step: int, chosen: Plan | None) -> Part:
    repeated, keys = ctx.groups(prompts, step)
    sample_index = np.repeat(np.arange(len(prompts)), ctx.config.group_size)
    traced = ctx.online.traces("rollout", step)
    return Part(step, repeated, embeddings(prompts), sample_index, keys, ctx.config.sampler, chosen, traced=traced)


def lesson_of(step: Step, advantages: np.ndarray, keep: np.ndarray, traced: bool = False) -> Lesson:
    """What training is told of a step beside its rollouts."""
    parts = step.parts
    first = np.cumsum([0] + [len(part.conditioning) for part in parts])
    return Lesson(
        step=step.step,
        conditioning=Conditioning.cat([part.conditioning for part in parts]),
        sample_index=np.concatenate([part.sample_index + start for part, start in zip(parts, first[:-1], strict=True)]),
        keys=SampleKeys.cat([part.keys for part in parts]),
        advantages=advantages,
        keep=keep,
        traced=traced,
    )
