"""Which faults a simulated run meets, and how often. Plain values, drawn from the run's seed."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tensorbus.testing._simloop import seeded


@dataclass(frozen=True, slots=True, kw_only=True)
class Wave:
    """A fault that comes and goes: on average ``every_s`` seconds between two (0 is never), each ``length_s`` long."""

    every_s: float = 0.0
    length_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultPlan:
    """How a simulated world misbehaves. The default is calm: short delays and nothing else.

    Attributes:
        delay_s: Least and most time that a message takes in one direction.
        slow: Share of messages that take up to ``slow_s_max`` instead.
        loss: Share of messages, in either direction, that vanish.
        lost_ack: Share of requests that succeed and whose answer vanishes.
        duplicate: Share of publishes that arrive twice.
        partition: A node is cut off from the bus; messages are dropped, or arrive once it is mended.
        bus_pause: The bus answers nobody for a while.
        pause: A node stands still, as after SIGSTOP.
        crash: A node loses all it had in memory; its main starts again after the wave's length.
        skew_s_max: Most that a node's wall clock is off, either way.
        drift_ppm_max: Most that a node's clocks run fast or slow, in millionths.
    """

    delay_s: tuple[float, float] = (0.0002, 0.002)
    slow: float = 0.0
    slow_s_max: float = 3.0
    loss: float = 0.0
    lost_ack: float = 0.0
    duplicate: float = 0.0
    partition: Wave = Wave()
    bus_pause: Wave = Wave()
    pause: Wave = Wave()
    crash: Wave = Wave()
    skew_s_max: float = 0.0
    drift_ppm_max: float = 0.0

    @classmethod
    def drawn(cls, seed: int) -> FaultPlan:
        """A plan of its own for each seed: each fault is present in about half of them, so rare mixes occur as well."""
        rng = seeded("plan", seed)

        def share(most: float) -> float:
            return rng.uniform(0.0, most) if rng.random() < 0.5 else 0.0

        def wave(every_s: float, length_s: float) -> Wave:
            if rng.random() < 0.5:
                return Wave()
            return Wave(every_s=rng.uniform(every_s / 3, every_s * 3), length_s=rng.uniform(length_s / 3, length_s * 3))

        return cls(
            slow=share(0.1),
            loss=share(0.05),
            lost_ack=share(0.1),
            duplicate=share(0.1),
            partition=wave(20.0, 5.0),
            bus_pause=wave(40.0, 3.0),
            pause=wave(20.0, 5.0),
            crash=wave(20.0, 2.0),
            skew_s_max=share(30.0),
            drift_ppm_max=share(200.0),
        )

    def calmed(self) -> FaultPlan:
        """The plan after healing: no more faults, and the clocks as wrong as before."""
        return replace(
            self,
            slow=0.0,
            loss=0.0,
            lost_ack=0.0,
            duplicate=0.0,
            partition=Wave(),
            bus_pause=Wave(),
            pause=Wave(),
            crash=Wave(),
        )
