"""Rolecall: asynchronous LoRA-GRPO as a graph of supervised actors. This is the public door."""

from .runtime import (
    Actor,
    ActorDied,
    ActorStopped,
    AskTimeout,
    DeadlockError,
    Down,
    Finished,
    Graph,
    NotYet,
    Ref,
    Restart,
    RolecallError,
    Strategy,
    Unrecoverable,
    idempotent,
    max_run_s,
)

__all__ = [
    "Actor",
    "ActorDied",
    "ActorStopped",
    "AskTimeout",
    "DeadlockError",
    "Down",
    "Finished",
    "Graph",
    "NotYet",
    "Ref",
    "Restart",
    "RolecallError",
    "Strategy",
    "Unrecoverable",
    "idempotent",
    "max_run_s",
]
