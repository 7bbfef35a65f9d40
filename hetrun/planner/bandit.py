"""Which plan passes run by: a bandit. It knows what each plan takes now, and how sure that is.

A plan is an arm, with its number of threads. What a pass takes is compared with a yardstick, the time that
the fixed order is predicted to take for the same tokens on a quiet machine, so passes of all sizes and of
all plans can be compared. Each arm has the logarithm of that ratio, and a doubt: first what the planner says,
then what passes took. A plan that looks better than the one in force, or might be within its doubt, runs for
a pass, in turn with the other (A B A B), and takes its place once its passes were faster by more than noise.
A pass that was slower ends its turn.

When the machine changes, passes by the plan in force show it: then all arms are as doubtful as they were at
first, and fewer threads may be better than many. What trying costs is booked, and stays below a share of any
minute. So the worst that a wrong plan costs is that share, and the passes in which it is found out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from math import exp, hypot, log, pow, sqrt

from hetrun.planner.plan import Plan
from hetrun.system.ema import smoothed

WORTH = 0.03  # of a time: plans that are closer than this are as good as each other
CERTAIN, ROUGH = 0.15, 0.5  # standard deviations of logarithms: of a time measured in quiet, and of a guess
LIKELY = 0.25  # of what parts of passes, or passes of other sizes, have shown
SHIFTED = 0.1  # of what was true of plans against each other before the machine changed
COLD = 0.1  # what the first run of a shape may take longer
STEADY = 10  # passes that count: older ones fade
NOISE, LEAST_NOISE = 0.1, 0.02  # of passes: at first, and at least
NOISE_RATE = 0.1
OFF = 3.0  # standard deviations: a pass that is further off was disturbed, or the machine has changed
JUMP = 0.3  # a logarithm: less is no other machine
EVENT = 0.69  # a logarithm: passes take twice as long as they did
AGREE = 2  # passes in a row that are off the same way: the machine has changed
PROVEN, LONG = 3, 12  # passes by which a plan is judged: at least, and until the better one is taken
SURE = 1.5  # standard deviations, by which it is better
SHARE, WINDOW_S = 0.02, 60.0  # of any minute may be spent on trying...
PASSES = 0.5  # ...and so much of it on passes that took longer than they had to
SELDOM = 0.01  # of the time for what was slower the last time
REST_S, LONGEST_REST_S = 2.0, 600.0
REMEMBERED = 8  # plans that were in force
SETTLED_S, MOST_SETTLED_S = 0.5, 60.0  # until the next trial once another plan is in force
STALE_S = 20.0  # after which passes by a plan begin to be forgotten
HALF_S = 60.0  # in which what one unlucky pass has shown is believed half
DRIFT, MOST_DRIFT = 0.1, 4.0  # doubt that comes with a minute, and minutes in which it grows
MOST_ARMS, MOST_GONE = 8, 32
NEVER = -1e9
LEAST_S = 1e-9
FEWER_SUFFER, OTHER_THREADS = 0.5, 0.6  # of a slowdown: what fewer threads feel of it, and how sure that is
ALIKE = 0.7  # of what passes of one size show, for those of another


@dataclass(slots=True)
class Arm:
    """A plan, and what passes by it take: the logarithm of the yardstick's multiple."""

    key: Hashable
    plan: Plan
    prior: float  # in quiet, as predicted
    mean: float
    doubt: float
    bias: float = 0.0  # what its passes took beyond what was predicted, against the plan then in force
    runs: int = 0  # since the machine changed
    last: float = 0.0  # of the last pass
    at: float = NEVER  # when that was
    since: float | None = None  # when its trial began
    failed: int = 0  # turns in a row that were slower
    off: int = 0  # passes in a row that were far off, signed

    def forget(self, doubt: float) -> None:
        """Something has changed: what is known is less sure."""
        self.doubt = hypot(self.doubt, doubt)
        self.runs = self.failed = self.off = 0


class TrialBudget:
    """Seconds that trying has cost in the last minute."""

    def __init__(self) -> None:
        self._spent: deque[tuple[float, float, float]] = deque()
        self._total = self._passes = 0.0

    def book(self, at: float, seconds: float, passes: float = 0.0) -> None:
        """So much was spent on parts of passes, or on passes."""
        if seconds or passes:
            self._spent.append((at, seconds + passes, passes))
            self._total += seconds + passes
            self._passes += passes

    def remaining_s(self, at: float) -> float:
        """What may still be spent now."""
        while self._spent and self._spent[0][0] < at - WINDOW_S:
            _, total, passes = self._spent.popleft()
            self._total -= total
            self._passes -= passes
        return SHARE * WINDOW_S - self._total

    def left_for_passes(self, at: float) -> float:
        """What of that may be spent on passes."""
        return min(self.remaining_s(at), PASSES * SHARE * WINDOW_S - self._passes)


@dataclass(slots=True)
class Verdict:
    """How the trial of a plan ended."""

    bucket: str
    plan: Plan
    before: Plan
    ratio: float  # of the times of a pass: by this plan to the one before...
    expected: float  # ...and as it was predicted
    spread: float
    passes: int
    kept: bool


Tell = Callable[[Verdict], None]


@dataclass(slots=True)
class Race:
    """The plans of one bucket."""

    bucket: str
    budget: TrialBudget
    tell: Tell
    fixed: Hashable = None  # the arm of the fixed order, which is always there
    blind: bool = False  # it is not known what other programs do
    crowded: bool = False  # they take cores, for sure
    arms: dict[Hashable, Arm] = field(default_factory=dict)
    gone: dict[Hashable, Arm] = field(default_factory=dict)  # plans that made room for others
    force: Hashable = None  # the arm in force
    running: Hashable = None  # the arm of the next pass
    noise: float = NOISE
    yard: float = 0.0  # seconds, of the last pass
    before: deque[Hashable] = field(default_factory=lambda: deque(maxlen=REMEMBERED))  # were in force
    backs: int = 0  # of these came back...
    rests: float = NEVER  # ...so there is no trial before this moment
    event: bool = False  # passes have become far slower just now
    began: float = NEVER  # when the arm on trial was chosen
    unsure: bool = False  # the machine has changed, as other passes have shown, and none ran here since

    @property
    def now(self) -> Arm:
        """What the next pass runs by."""
        return self.arms[self.running]

    @property
    def standing(self) -> Arm:
        """What is in force, and what others have to beat."""
        return self.arms[self.force]

    def offer(self, key: Hashable, plan: Plan, prior: float, doubt: float) -> Arm:
        """One more plan, or news of one by which no pass has run so far."""
        arm = self.arms.get(key)
        if arm is None:
            self._make_room()
            arm = self.gone.pop(key, None) or Arm(key, plan, prior, prior, doubt)
            arm.plan, arm.prior, arm.mean, arm.doubt = plan, prior, prior + self._level + arm.bias, doubt
            arm.runs = arm.off = 0
            self.arms[key] = arm
        return arm

    def knows(self, key: Hashable) -> bool:
        """Whether a plan was offered before."""
        return key in self.arms or key in self.gone

    def refresh(self, priors: Mapping[Hashable, float], doubts: Mapping[Hashable, float], at: float) -> None:
        """What is predicted now for a quiet machine. Of plans that run passes know better; of those that ran,
        how much longer they took than predicted, against the one in force."""
        for key, prior in priors.items():
            self.arms[key].prior = prior
        for key, arm in self.arms.items():
            if arm is not self.standing and not arm.runs:
                arm.mean = arm.prior + self._level + arm.bias * self._believed(arm, at)
                arm.doubt = hypot(doubts[key], doubts[self.force])

    def _fade(self, at: float) -> None:
        """What passes showed long ago may have been bad luck: predictions count again, more and more. What
        other numbers of threads take is different while others compute, which predictions know nothing of."""
        for arm in self.arms.values():
            if arm is self.standing or arm is self.now or arm.at == NEVER:
                continue
            if arm.plan.threads != self.standing.plan.threads and not self.blind:
                continue
            if arm.runs and at - arm.at > STALE_S:
                arm.runs = 0
            if not arm.runs:
                arm.mean = arm.prior + self._level + arm.bias * self._believed(arm, at)
                arm.doubt = max(arm.doubt, CERTAIN)

    def _believed(self, arm: Arm, at: float) -> float:
        """How much a pass still says that ran so long ago: it may have been unlucky."""
        half = HALF_S * 2 ** min(arm.failed, 10) / 2
        return pow(0.5, min((at - arm.at) / half, 60.0))

    @property
    def _level(self) -> float:
        """How many times as long as in quiet passes take now, as a logarithm."""
        return self.standing.mean - self.standing.prior if self.force in self.arms else 0.0

    def rebase(self, longer: float) -> None:
        """The yardstick is another one, by which everything is so much longer, as a logarithm."""
        for arm in self.arms.values():
            arm.mean, arm.prior, arm.last = arm.mean + longer, arm.prior + longer, arm.last + longer

    def hear_elsewhere(self, key: Hashable, off: float) -> None:
        """A plan took longer than predicted, by `off` as a logarithm, in passes of other sizes."""
        arm = self.arms.get(key)
        if arm and arm.at == NEVER and arm is not self.standing:
            arm.mean += ALIKE * off
            arm.bias += ALIKE * off
            arm.doubt = min(arm.doubt, LIKELY)

    def _make_room(self) -> None:
        idle = [a for a in self.arms.values() if a.key not in (self.fixed, self.force, self.running)]
        if len(self.arms) >= MOST_ARMS:
            key = min(idle, key=lambda a: (a.at, -a.mean)).key
            self.gone[key] = self.arms.pop(key)
            while len(self.gone) > MOST_GONE:
                del self.gone[next(iter(self.gone))]

    def put_in_force(self, key: Hashable) -> None:
        """From the next pass on, without a trial."""
        self.force = self.running = key

    def wanted(self) -> list[Arm]:
        """What is in force, and what may take its place: it has not run yet, or its passes were no slower."""
        return [arm for arm in self.arms.values() if arm is self.standing or not arm.failed]

    def best(self, allowed: Callable[[Plan], bool]) -> Arm:
        """The best of some plans; the fixed order is always one of them."""
        some = [arm for arm in self.arms.values() if allowed(arm.plan)]
        return min(some, key=lambda arm: arm.mean, default=self.standing)

    def remove(self, gone: Callable[[Plan], bool]) -> None:
        """Plans cannot run any more; if the one in force is among them, the best of the others takes its
        place. The fixed order stays."""
        self.arms = {key: a for key, a in self.arms.items() if not gone(a.plan) or key == self.fixed}
        if self.force not in self.arms:
            self.force = min(self.arms.values(), key=lambda a: a.mean).key
        if self.running not in self.arms:
            self.running = self.force

    def learn(self, key: Hashable, than: Arm, ratio: float, at: float) -> None:
        """An arm takes `ratio`, as a logarithm, times as long as another: by what was seen elsewhere."""
        arm = self.arms[key]
        if arm is not than:
            arm.mean = arm.last = than.mean + ratio
            arm.bias = (arm.mean - arm.prior) - (than.mean - than.prior)
            arm.doubt, arm.failed, arm.at = LIKELY, int(ratio > 0), at

    def replace_standing(self, key: Hashable, ratio: float) -> None:
        """An arm takes `ratio`, as a logarithm, times as long as the one in force, and takes its place."""
        arm = self.arms[key]
        arm.mean, arm.doubt, arm.failed = self.standing.mean + ratio, LIKELY, 0
        self.put_in_force(key)

    # --- a pass

    def observe(self, seconds: float, yard: float, cold: bool, at: float) -> float:
        """A pass by the arm that runs took so long; by how much the machine has changed, if it has."""
        arm, standing = self.now, self.standing
        x, self.yard = log(max(seconds, LEAST_S) / yard), yard
        if arm is not standing:
            self.budget.book(at, 0.0, max(0.0, seconds - yard * exp(standing.mean)))
        noise = hypot(self.noise, COLD) if cold else self.noise
        sure, off = hypot(arm.doubt, noise), x - arm.mean
        if arm is standing and (self.unsure or not any(a.runs for a in self.arms.values())):
            self._set_level(off)
            off = 0.0
        shift = 0.0
        if off < -OFF * sure and arm is not standing:
            arm.mean, off = x, 0.0  # nothing makes work faster than it is
        if abs(off) > max(OFF * sure, JUMP) and arm.runs:
            arm.off = arm.off + 1 if off > 0 else min(arm.off, 0) - 1
            # Nothing makes work faster than it is: once is enough for that.
            if abs(arm.off) >= AGREE or (off < 0 and arm is standing):
                shift, off = off, 0.0
                arm.mean, arm.off = arm.mean + shift, 0
            else:  # it was disturbed, or the next one agrees
                off = OFF * sure if off > 0 else -OFF * sure
                noise = hypot(noise, sure)
        else:
            arm.off = 0
        self._hear_noise(arm, off)
        self._learn(arm, off, noise, alone=bool(shift))
        before, arm.at = arm.at, at
        arm.runs, arm.last = arm.runs + 1, x
        if shift and arm is standing:
            self._others_changed(shift, before)
            self.event = shift > EVENT
            return shift
        return 0.0

    def _set_level(self, off: float) -> None:
        """How busy the machine is shows in the first pass, and concerns all plans alike. Where no other
        program is known to compute, the backends of this plan may as well be slower than was predicted."""
        mine = self.standing.plan.backends
        maybe = 0.0 if self.crowded or off < JUMP else off / 2
        for arm in self.arms.values():
            other = maybe if arm.plan.backends != mine else 0.0
            arm.mean += off - other
            arm.doubt = hypot(arm.doubt, other)
        self.unsure = False

    def _hear_noise(self, arm: Arm, off: float) -> None:
        if arm.runs > 1:
            seen = min(1.25 * abs(off), OFF * self.noise)  # a normal mean distance is 0.8 deviations
            self.noise = max(LEAST_NOISE, smoothed(self.noise, seen, NOISE_RATE))

    def _learn(self, arm: Arm, off: float, noise: float, alone: bool) -> None:
        """A pass that was off by so much. What is well known changes with the machine, and the others with
        it."""
        gain = arm.doubt**2 / (arm.doubt**2 + noise**2)
        together = arm is self.standing and not alone and arm.runs > PROVEN
        for other in self.arms.values() if together else (arm,):
            other.mean += gain * off
        arm.doubt = max(arm.doubt * sqrt(1 - gain), noise / sqrt(STEADY))

    def _others_changed(self, shift: float, since: float) -> None:
        """The machine has become slower or faster: so, presumably, have the other plans. If other
        programs are the cause, which is not known, threads that wait for each other suffer most, so fewer may
        be slower by less."""
        mine = self.standing.plan.threads
        for arm in self.arms.values():
            if arm is self.standing or (shift < 0 and arm.at > since):
                continue  # it has shown the same already
            fewer = self.blind and arm.plan.threads < mine and shift > 0
            arm.mean += FEWER_SUFFER * shift if fewer else shift
            if self.blind and arm.plan.threads != mine:
                arm.forget(OTHER_THREADS * abs(shift))
            else:
                arm.doubt = min(hypot(arm.doubt, SHIFTED), max(arm.doubt, ROUGH))

    def crowd(self) -> None:
        """Others take cores from now on, or other ones: fewer threads may be better by far."""
        standing = self.standing
        for arm in self.arms.values():
            arm.forget(CERTAIN)
            if arm.plan.threads < standing.plan.threads:
                arm.mean = min(arm.mean, standing.mean)
                arm.bias = (arm.mean - arm.prior) - self._level
                arm.forget(ROUGH)

    def quiet(self, doubt: float) -> None:
        """No other program computes any more: it is presumably as it was predicted. What other
        numbers of threads have shown in the crowd says nothing now."""
        threads = self.standing.plan.threads
        for arm in self.arms.values():
            if arm.plan.threads != threads:
                arm.bias = 0.0
            if arm is not self.standing or arm.mean > arm.prior:
                arm.mean = min(arm.mean, arm.prior)
                arm.forget(doubt)

    # --- what the next pass runs by

    def choose(self, at: float) -> bool:
        """Whether the next pass runs by another plan than the last."""
        before = self.running
        self._fade(at)
        if self.running != self.force:
            if self.now.at > self.began:
                self._judge(self.now, self.standing)
        elif self.standing.runs and not self.unsure and at >= self.rests:
            if arm := self._another(at) or self._candidate(at):
                self.running, self.began = arm.key, at
                arm.since = arm.since if arm.since is not None and arm.runs else at
        return self.running != before

    def _judge(self, arm: Arm, standing: Arm) -> None:
        """A plan on trial has had a pass."""
        better = standing.mean - arm.mean
        if better < WORTH / 2:
            self._take_back(arm, standing)
        elif arm.last > standing.mean + self.noise:
            self.running = self.force  # in turn: perhaps all has become slower
        elif self._proven(arm, standing, better):
            if self._is_odd(arm, standing, better):
                self.running = self.force  # in turn: perhaps all has become faster
                return
            self._say(arm, standing, True)
            self._settle(arm, arm.at)
            self.force, arm.failed, arm.since = arm.key, 0, None
            standing.bias, arm.bias = (standing.mean - standing.prior) - self._level, 0.0
        else:
            arm.failed = 0
            if arm.runs >= AGREE and arm.runs % AGREE == 0:
                self.running = self.force  # in turn: perhaps all has become faster

    def _is_odd(self, arm: Arm, standing: Arm, better: float) -> bool:
        """Whether a plan is far better than was predicted, against one that has not run since: for all one
        knows, what made that one slow is over."""
        if (self.blind or self.crowded) and arm.plan.threads < standing.plan.threads:
            return False  # threads that wait for each other are far worse indeed
        odd = better - (standing.prior - arm.prior) > JUMP
        return odd and arm.since is not None and standing.at < arm.since

    def _settle(self, arm: Arm, at: float) -> None:
        """Another plan is in force from now on. One that was in force before makes the next trials wait,
        longer and longer, or plans that take turns in being fast would be followed endlessly."""
        self.backs = self.backs + 1 if arm.key in self.before else max(0, self.backs - 1)
        self.before.append(self.force)
        self.rests = at + min(SETTLED_S * 2**self.backs, MOST_SETTLED_S)

    def _take_back(self, arm: Arm, standing: Arm) -> None:
        arm.failed, arm.since = arm.failed + 1, None
        self.running = self.force
        arm.bias = (arm.mean - arm.prior) - self._level
        if arm.failed == 1:
            self._say(arm, standing, False)

    def _proven(self, arm: Arm, standing: Arm, better: float) -> bool:
        """Whether passes of a plan were better than those of the one in force, by more than their spread."""
        sure = SURE * hypot(arm.doubt, standing.doubt)
        if better > 2 * sure and arm.last < standing.mean - self.noise:
            return True
        return arm.runs >= PROVEN and better > (max(WORTH, sure) if arm.runs < LONG else WORTH)

    def _say(self, arm: Arm, standing: Arm, kept: bool) -> None:
        ratio, spread = exp(arm.mean - standing.mean), hypot(arm.doubt, standing.doubt)
        expected = exp(arm.prior - standing.prior)
        self.tell(Verdict(self.bucket, arm.plan, standing.plan, ratio, expected, spread, arm.runs, kept))

    def _another(self, at: float) -> Arm | None:
        """After passes have become far slower: whether it is the machine or the plan in force, another plan
        tells."""
        if not self.event:
            return None
        self.event, standing = False, self.standing
        others = [a for a in self.arms.values() if a.plan.threads == standing.plan.threads]
        other = min((a for a in others if a is not standing), key=lambda a: a.mean, default=None)
        if other is None:
            return None
        loss = self.yard * (exp(other.mean) - exp(standing.mean))
        return other if loss <= max(0.0, self.budget.left_for_passes(at)) else None

    def _candidate(self, at: float) -> Arm | None:
        """A plan that is worth a pass now: the one that may be best."""
        worth = [arm for arm in self.arms.values() if arm is not self.standing and self._worth(arm, at)]
        return min(worth, key=lambda arm: arm.mean - arm.doubt, default=None)

    def _worth(self, arm: Arm, at: float) -> bool:
        standing = self.standing
        loss = max(0.0, self.yard * (exp(self._feared(arm, at)) - exp(standing.mean)))
        if loss > max(0.0, self.budget.left_for_passes(at)):
            return False
        drift = DRIFT * sqrt(min((at - arm.at) / 60, MOST_DRIFT))
        hopeful = arm.mean - hypot(arm.doubt, drift) < standing.mean - WORTH
        if hopeful and not arm.failed:
            return True
        seldom = loss / SELDOM
        rest = min(max(REST_S, seldom) * 2 ** min(arm.failed, 10), max(LONGEST_REST_S, seldom))
        return bool(arm.failed or arm.runs) and at - arm.at >= rest

    def _feared(self, arm: Arm, at: float) -> float:
        """What a pass may take: what it took the last time, or all that is thought possible."""
        if arm.failed:
            return arm.mean + max(0.0, arm.last - arm.mean) * self._believed(arm, at)
        return arm.mean if arm.runs else arm.mean + arm.doubt / 2
