"""The command line: `rolecall run` and its siblings; those with many flags are in modules of their own."""

from __future__ import annotations

import argparse
import dataclasses
import io
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from msgspec import json
from msgspec.structs import replace

from .compare import add_compare_flags, compare
from .console import Console, actors_table, say, terminal_width
from .errors import RolecallError, Unrecoverable
from .forecasts import add_forecast_commands
from .graph import Graph
from .launch.commands import add_launch_commands
from .launch.credentials import TOKEN
from .logs import log_names, read_logs
from .recipe import configure, load_recipe, settings_of
from .remote import CA, is_own_authority
from .runs import RunFolder, create_run, find_run, named, nobody, resume_run, run_to_resume
from .show import difference, picture
from .supervisor import Outcome, Supervisor
from .svg import draw
from .tokens import SCOPES, change, seconds, write_private

if TYPE_CHECKING:
    from .join import Joining

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> int:
    """Run one command. Returns the exit code.

    0 finished, 1 failed, 2 a mistake in what was given, 130 stopped by request.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # an ASCII terminal must not end a run
    try:
        options = _parser().parse_args(arguments)
        return options.command(options)
    except RolecallError as error:
        say(f"rolecall: {error}", sys.stderr)
        return error.exit_code if isinstance(error, Unrecoverable) else 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rolecall", description="Reinforcement learning as a graph of actors."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(
        name: str, function: Callable[[argparse.Namespace], int], help: str
    ) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=help, description=help)
        added.set_defaults(command=function)
        return added

    def with_recipe(added: argparse.ArgumentParser) -> argparse.ArgumentParser:
        added.add_argument("recipe", help="a recipe's name, or the path of a .py file")
        added.add_argument(
            "--set", action="append", default=[], metavar="FIELD=VALUE", help="change one of its settings"
        )
        return added

    def with_run(added: argparse.ArgumentParser, **how: Any) -> argparse.ArgumentParser:
        added.add_argument("run", help="a run's folder, or its name in --runs", **how)
        return _with_runs(added)

    run = _with_runs(with_recipe(command("run", _run, "start a recipe and see it through")))
    run.add_argument("--json", action="store_true", help="print the result as one JSON object on stdout")
    run.add_argument(
        "--resume", metavar="RUN", help="go on with this run from its last checkpoint, with its settings"
    )
    run.add_argument("--name", help="call the new run so, instead of by its recipe and the time")
    run.add_argument("--proxy", metavar="HOST:PORT", help="let other machines join here, over HTTP")
    run.add_argument(
        "--tls-cert", type=Path, metavar="FILE", help="the proxy's certificate: then it speaks HTTPS"
    )
    run.add_argument("--tls-key", type=Path, metavar="FILE", help="and its key")
    show = with_recipe(command("show", _show, "draw a recipe's graph and list its settings"))
    show.add_argument("--svg", type=Path, metavar="FILE", help="draw it into this file instead")
    diff = command("diff", _diff, "what two recipes do differently")
    diff.add_argument("a", help="a recipe")
    diff.add_argument("b", help="another")
    add_compare_flags(command("compare", compare, "run recipes side by side, or set runs side by side"))
    ps = with_run(command("ps", _ps, "list the actors of a live run"), nargs="?")
    ps.add_argument("--json", action="store_true", help="print it as one JSON object")
    logs = command("logs", _logs, "print what a role has written to its log")
    logs.add_argument("role", help="a role, one of its replicas (as in rollout-1), or forkserver")
    with_run(logs, nargs="?")
    logs.add_argument("-f", "--follow", action="store_true", help="go on until the run has ended")
    restart = command("restart", _restart, "stop a role of a live run in order, and start it again")
    restart.add_argument("role", help="a role, or one of its replicas (as in rollout-1)")
    with_run(restart, nargs="?")
    with_run(command("stop", _stop, "end a live run in order"), nargs="?")
    sample = with_run(
        command("sample", _sample, "let base and trained model complete a prompt, side by side")
    )
    sample.add_argument("prompt")
    _add_join_flags(_with_runs(command("join", _join, "add this machine's rollout workers to a run")))
    _add_token_flags(
        with_run(command("token", _token, "write a new token of a run, or change what its tokens are worth"))
    )
    add_forecast_commands(command)
    launch = commands.add_parser("launch", help="rent machines for a run, or let them join one")
    add_launch_commands(launch)
    return parser


def _add_join_flags(join: argparse.ArgumentParser) -> None:
    join.add_argument("url", help="the run's proxy, as http://host:port")
    join.add_argument("--token-file", type=Path, required=True, help="a copy of the run's token file")
    join.add_argument("--workers", type=int, help="how many (default: 1, or one for each GPU of --gpus)")
    join.add_argument(
        "--gpus", default="", help="give each worker one: how many there are, or which, as in 0,1,3"
    )
    join.add_argument("--engine", help="what they sample with here, instead of the run's own setting")
    join.add_argument("--engine-python", help="the interpreter they run in here")
    join.add_argument("--ca", type=Path, metavar="FILE", help="certificates to check the run's by")


def _add_token_flags(token: argparse.ArgumentParser) -> None:
    token.add_argument("--scope", choices=SCOPES, default="worker", help="what it allows (default: worker)")
    token.add_argument("--expires", metavar="TIME", help="as in 12h (default: with the run)")
    token.add_argument(
        "--rotate", action="store_true", help="sign with a new key; writes the run's token anew"
    )
    token.add_argument(
        "--grace", metavar="TIME", default="10m", help="and let the old one hold for (default: 10m)"
    )
    token.add_argument("--revoke", metavar="ID", help="write none: this one holds no longer")


def _with_runs(added: argparse.ArgumentParser) -> argparse.ArgumentParser:
    added.add_argument("--runs", type=Path, default=Path("runs"), help="where runs lie (default: ./runs)")
    return added


def _run(options: argparse.Namespace) -> int:
    recipe = load_recipe(options.recipe)
    name = str(Path(options.recipe).resolve()) if options.recipe.endswith(".py") else options.recipe
    old = run_to_resume(options.runs, options.resume, name) if options.resume else None
    had = old.info.config if old and (old.path / "run.json").exists() else {}
    config = configure(recipe, options.recipe, options.set, had)
    graph = _build(recipe, options.recipe, config)
    absent = [role.name for role in graph if not role.replicas]
    if absent and not options.proxy:
        raise Unrecoverable(
            f"nobody would do {', '.join(absent)}: ask for at least one here, or let other machines join, with --proxy",
            exit_code=2,
        )
    address = _address(options.proxy) if options.proxy else None
    tls = _tls_files(options)
    ca = tls[0] if tls and is_own_authority(tls[0]) else None
    if old:
        resume_run(old, name, dataclasses.asdict(config))
    run = old or create_run(options.runs, name, dataclasses.asdict(config), name=options.name)
    if address:
        _add_proxy(graph, run, *address, tls)
    console = Console(run, recipe, to_stderr=options.json, awaited=absent, ca=ca)
    with console:
        outcome = _supervise(graph, run, name, console)
    if outcome.exit_code:
        run.write_info(replace(run.info, story=outcome.story))
        say(f"rolecall: {outcome.story}", sys.stderr)
        say(f"rolecall: the run's folder is {run.path}", sys.stderr)
        return outcome.exit_code
    result = {"recipe": graph.name, "restarts": outcome.restarts}
    if hasattr(recipe, "outcome"):
        result |= recipe.outcome.report(run)
    if options.json:
        say(json.encode(result).decode(), sys.stdout)
    else:
        console.show_result(result)
    return 0


def _supervise(graph: Graph, run: RunFolder, recipe: str, console: Console, **machine: Any) -> Outcome:
    supervisor = Supervisor(graph, run.info.id, run.path, recipe, console, **machine)
    run.write_info(replace(run.info, sockets=str(supervisor.sockets)))

    def stop(signum: int, frame: FrameType | None) -> None:
        supervisor.stop()

    # Who ignores one (nohup, a shell's background) wants the run to live through it.
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    heeded = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, stop) for number in heeded}
    try:
        return supervisor.run()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _build(recipe: Any, name: str, config: Any) -> Graph:
    try:
        return recipe.build(config)
    except ValueError as error:
        raise Unrecoverable(f"{name} can't be built from these settings: {error}", exit_code=2) from error


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise Unrecoverable(f"--proxy {text}: write it as HOST:PORT, as in 127.0.0.1:8700", exit_code=2)
    return host, int(port)


def _tls_files(options: argparse.Namespace) -> tuple[Path, Path] | None:
    files = [file.resolve() for file in (options.tls_cert, options.tls_key) if file]
    if not files:
        return None
    if len(files) < 2 or not options.proxy:
        raise Unrecoverable("--tls-cert and --tls-key belong together, and to --proxy", exit_code=2)
    for file in files:
        if not os.access(file, os.R_OK):
            raise Unrecoverable(f"can't read {file}: check --tls-cert and --tls-key", exit_code=2)
    return files[0], files[1]


def _add_proxy(graph: Graph, run: RunFolder, host: str, port: int, tls: tuple[Path, Path] | None) -> None:
    from .proxy import add_proxy

    token_file = run.path / "token"
    # Whoever launches a run gives it the token that its workers have; no child needs it.
    if given := os.environ.pop(TOKEN, ""):
        write_private(token_file, f"{given}\n".encode())
    info = run.info
    about = {"run": info.id, "recipe": info.recipe, "config": info.config}
    add_proxy(graph, host=host, port=port, token_file=token_file, about=about, tls=tls)


def _show(options: argparse.Namespace) -> int:
    recipe = load_recipe(options.recipe)
    config = configure(recipe, options.recipe, options.set)
    graph = _build(recipe, options.recipe, config)
    if options.svg:
        try:
            options.svg.write_text(draw(graph))
        except OSError as error:
            raise Unrecoverable(f"can't write {options.svg}: {error.strerror}", exit_code=2) from error
        return 0
    say(picture(graph), sys.stdout)
    say("\nSettings:", sys.stdout)
    for name, value in settings_of(config).items():
        say(f"  {name} = {value!r}", sys.stdout)
    return 0


def _diff(options: argparse.Namespace) -> int:
    graphs = []
    for name in (options.a, options.b):
        recipe = load_recipe(name)
        graphs.append(_build(recipe, name, configure(recipe, name, [])))
    say(difference(*graphs), sys.stdout)
    return 0


def _ps(options: argparse.Namespace) -> int:
    run = find_run(options.runs, options.run, live=True)
    status = run.status()
    if options.json:
        say(json.encode(status).decode(), sys.stdout)
        return 0
    say(run.path.name, sys.stdout)
    say(actors_table(status.actors, terminal_width(sys.stdout)), sys.stdout)
    if status.dead_letters:
        letters = "1 dead letter" if status.dead_letters == 1 else f"{status.dead_letters} dead letters"
        say(f"{letters}: {run.path / 'dead_letters.jsonl'}", sys.stdout)
    return 0


def _logs(options: argparse.Namespace) -> int:
    run = find_run(options.runs, options.run)
    folder = run.path / "logs"
    actors = log_names(folder)
    if not named(options.role, actors) and run.live:
        actors += [actor.name for actor in run.status().actors]  # it may not have been started yet
    if not named(options.role, actors):
        raise nobody(f"run {run.path.name} has no log of {options.role!r}", options.role, actors)
    for line in read_logs(folder, options.role, ended=lambda: not (options.follow and run.live)):
        if not say(line, sys.stdout):
            break  # nobody reads it: `rolecall logs -f trainer | head`
    return 0


def _restart(options: argparse.Namespace) -> int:
    run = find_run(options.runs, options.run, live=True)
    say(f"restarting {', '.join(run.restart(options.role))} of {run.path.name}", sys.stdout)
    return 0


def _stop(options: argparse.Namespace) -> int:
    run = find_run(options.runs, options.run, live=True)
    run.stop()
    say(f"asked {run.path.name} to stop", sys.stdout)
    return 0


def _sample(options: argparse.Namespace) -> int:
    run = find_run(options.runs, options.run)
    recipe = load_recipe(run.info.recipe)
    if not hasattr(recipe, "outcome"):
        raise Unrecoverable(f"recipe {run.info.recipe} has no `outcome` that could sample", exit_code=2)
    say(recipe.outcome.sample(run, options.prompt), sys.stdout)
    return 0


def _token(options: argparse.Namespace) -> int:
    run, now = find_run(options.runs, options.run).path, time.time()
    expires = None if options.expires is None else now + seconds("--expires", options.expires)
    grace_s = seconds("--grace", options.grace)
    with change(run) as ring:
        if options.revoke:
            ring.revoked.append(options.revoke)
        if options.rotate:
            ring.rotate(now, grace_s)
        token, text = ring.issue(options.scope, expires)
    if options.revoke:
        say(f"{options.revoke} holds no longer", sys.stdout)
        return 0
    path = run / ("token" if options.rotate else f"token-{token.id}")
    write_private(path, f"{text}\n".encode())
    say(f"{path}: {token.scope}, id {token.id}, holds {_how_long(options.expires)}", sys.stdout)
    if options.rotate:
        say(f"tokens from before hold for {options.grace}", sys.stdout)
    return 0


def _how_long(expires: str | None) -> str:
    return f"for {expires}" if expires else "as long as the run"


def _join(options: argparse.Namespace) -> int:
    from .join import chosen_gpus, prepare, prepare_again
    from .link import FENCED

    if options.ca:
        os.environ[CA] = str(options.ca.resolve())  # for the link's process, too
    prepared = partial(
        prepare,
        options.url.rstrip("/"),
        options.token_file.resolve(),
        options.runs,
        gpus=chosen_gpus(options.gpus),
        workers=options.workers,
        settings={"engine": options.engine, "engine_python": options.engine_python},
    )
    joining = prepared()
    while (outcome := _supervise_part(joining)).exit_code == FENCED and not outcome.asked:
        say(f"the run went on without {joining.node}: this machine joins it again", sys.stdout)
        before, joining = joining.node, prepare_again(prepared, time.monotonic, time.sleep)
        say(f"{before} is {joining.node} now", sys.stdout)
    if outcome.exit_code not in (0, 130, FENCED):
        say(f"rolecall: {outcome.story}", sys.stderr)
        return outcome.exit_code
    say("the run has finished" if outcome.exit_code == 0 else "left the run", sys.stdout)
    return 0


def _supervise_part(joining: Joining) -> Outcome:
    with Console(joining.run, joining.recipe) as console:
        return _supervise(
            joining.graph, joining.run, joining.recipe_name, console, node=joining.node, number=joining.number
        )


if __name__ == "__main__":
    sys.exit(main())
