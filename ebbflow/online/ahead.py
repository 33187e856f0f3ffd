"""Rollouts under way: parts of steps are generated, scored as they arrive, and handed over as whole steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ebbflow.data.prompts import Prompt
from ebbflow.data.sampling import prompt_batch
from ebbflow.flow.windows import Plan, plan
from ebbflow.models.encoding import Embeddings
from ebbflow.online.placement import Call, Handle, Placement
from ebbflow.online.pool import Desk, Job, Pool
from ebbflow.online.weights import Weights
from ebbflow.online.work import Busy, Generated, Lesson, Part, Scored
from ebbflow.recipe.stages import OnlineStage
from ebbflow.rewards.combine import RewardError, ScoreTable
from ebbflow.stage import Place


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
    """

    def __init__(self, place: Place, placement: Placement, prompts: list[Prompt], embeddings: Embeddings) -> None:
        """``prompts``: the training split."""
        config = place.online
        self.place, self.placement, self.prompts, self.embeddings = place, placement, prompts, embeddings
        self.rollout = Pool(placement, "rollout", config.resources.rollout.count)
        self.reward = Pool(placement, "reward", config.resources.reward.count, config.scoring.timeout, config.scoring.retries)
        self.desk = Desk(placement, [self.reward, self.rollout])
        self.newest = Weights(0)
        self.waiting = deque(range(place.online.steps))
        self.open: list[Step] = []

    def fill(self, at_least: int = 0) -> None:
        """Begin with as many steps as the mode allows to be under way, and ``at_least`` so many."""
        while self.waiting and len(self.open) < max(at_least, lead(self.place.online)):
            self._begin(self.waiting.popleft())

    def _begin(self, step: int) -> None:
        begun = Step(step, parts_of(self.place, self.prompts, self.embeddings, step, self._plan(step)))
        self.open.append(begun)
        for index in range(len(begun.parts)):
            self._generate(begun, index)
        self.desk.dispatch()

    def take(self, version: int) -> Step:
        """The first step that is whole, with samples of weights not too old for a policy of ``version``; waits for it."""
        found: list[Step] = []

        def look() -> bool:
            found[:] = [step for step in self.open if step.whole and not self._drop_stale(step, version)][:1]
            return bool(found)

        self.desk.until(look)
        self.open.remove(found[0])
        return found[0]

    def _plan(self, step: int) -> Plan | None:
        config = self.place.config
        return (
            plan(config.window, config.sampler.steps, self.placement.steps_before + step, self.place.seed)
            if config.window
            else None
        )

    def _generate(self, step: Step, index: int) -> None:
        """Newest weights count when a worker takes the part if the mode is ``async``, and otherwise now."""
        part, now, late = step.parts[index], self.newest, self.place.online.mode == "async"

        def generated(call: Call, report: Generated) -> None:
            self._score(step, index, call, report)

        self.rollout.submit(Job("generate", lambda: (part, self.newest if late else now), generated))

    def _score(self, step: Step, index: int, call: Call, generated: Generated) -> None:
        part, (rollouts, images) = step.parts[index], call.values

        def done(_: Call | None, scored: Scored) -> None:
            busy = generated.busy + scored.busy
            step.harvest[index] = Harvest(part, rollouts, images, generated, scored.table, busy)

        def failed(reason: str) -> None:
            done(None, Scored(ScoreTable.none(len(part), list(self.placement.weights), reason), []))

        self.reward.submit(Job("score", lambda: (images, part.prompts, part.step), done, failed, fatal=(RewardError,)))

    @property
    def replaced(self) -> int:
        """Workers that died or hung so far."""
        return self.rollout.replaced + self.reward.replaced

    def _drop_stale(self, step: Step, version: int) -> bool:
        """Begin again with the parts that are too old; whether there were any."""
        if self.place.online.mode != "async":
            return False
        bound = version - self.place.online.staleness
        stale = [index for index, harvest in step.harvest.items() if harvest.generated.version < bound]
        for index in stale:
            step.dropped += len(step.harvest.pop(index).part)
            self._generate(step, index)
        self.desk.dispatch()
        return bool(stale)


def lead(config: OnlineStage) -> int:
    """Steps whose rollouts are under way while another one trains."""
    return {"sync": 0, "one_step_off": 1, "async": config.staleness}[config.mode]


def parts_of(place: Place, prompts: Sequence[Prompt], embeddings: Embeddings, step: int, chosen: Plan | None) -> list[Part]:
    """The rollouts of a step in parts of whole groups, about a micro-batch each, whoever generates them."""
    config = place.online
    mine = prompt_batch(prompts, config.prompts_per_step, step, place.seed)
    at_once = max(1, config.micro_batch // config.group_size)
    return [_part(place, mine[start : start + at_once], embeddings, step, chosen) for start in range(0, len(mine), at_once)]


def _part(place: Place, prompts: list[Prompt], embeddings: Embeddings, step: int, chosen: Plan | None) -> Part:
    repeated, keys = place.groups(prompts, step)
    owner = np.repeat(np.arange(len(prompts)), place.config.group_size)
    return Part(step, repeated, embeddings(prompts), owner, keys, place.config.sampler, chosen)


def lesson_of(step: Step, advantages: np.ndarray, keep: np.ndarray) -> Lesson:
    """What training is told of a step beside its rollouts."""
    parts = step.parts
    first = np.cumsum([0] + [len(part.conditioning) for part in parts])
    return Lesson(
        step=step.step,
        conditioning=type(parts[0].conditioning).cat([part.conditioning for part in parts]),
        owner=np.concatenate([part.owner + start for part, start in zip(parts, first[:-1], strict=True)]),
        keys=type(parts[0].keys).cat([part.keys for part in parts]),
        advantages=advantages,
        keep=keep,
    )
