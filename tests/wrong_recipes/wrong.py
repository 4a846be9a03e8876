"""Every line marked with a rule is a mistake in the wiring, and the checker must say so by that rule."""

from __future__ import annotations

from rolecall import Graph

from .right import Scorer, Shelf, Worker

graph = Graph("wrong")
shelf = graph.add("shelf", Shelf, capacity=4)
scorer = graph.add("scorer", Scorer)

graph.add("worker", Worker, shelf=scorer)  # reportArgumentType: another role
graph.add("worker", Worker, shelf=Shelf(4))  # reportArgumentType: the actor itself, not its ref
graph.add("worker", Worker, shelv=shelf)  # reportCallIssue: a misspelt argument
graph.add("worker", Worker)  # reportCallIssue: nobody wired
graph.add("shelf", Shelf, capacity="4")  # reportArgumentType: text for a number
graph.add("text", str)  # reportArgumentType: no actor at all
graph.until("shelf")  # reportArgumentType: a name instead of a ref

shelf.ask(Scorer.score, 1)  # reportArgumentType: another role's message
shelf.ask(Shelf.put, "1")  # reportArgumentType: text for a number
shelf.ask(Shelf.put)  # reportCallIssue: nothing to put
shelf.ask(Shelf.take, before=3)  # reportCallIssue: a misspelt argument
shelf.tell(Scorer.score, 1)  # reportArgumentType: another role's message
shelf.ask("put", 1)  # reportArgumentType: a name instead of a message
shelf.put(1)  # reportAttributeAccessIssue: a call instead of a message
text: str = shelf.ask(Shelf.take, after=3)  # reportAssignmentType: the answer is a number
texts: list[str] = scorer.ask_each(Scorer.score, 1)  # reportAssignmentType: the answers are numbers
