"""The actor runtime: supervised processes with mailboxes. It imports no torch and knows nothing of learning."""

from .actor import Actor, Down, idempotent, max_run_s
from .errors import (
    ActorDied,
    ActorStopped,
    AskTimeout,
    DeadlockError,
    Finished,
    NotYet,
    RolecallError,
    Unrecoverable,
)
from .graph import Graph, Restart, Strategy
from .ref import Answer, Ref

__all__ = [
    "Actor",
    "ActorDied",
    "ActorStopped",
    "Answer",
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
