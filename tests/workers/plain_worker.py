"""A rollout worker without Rolecall: HTTP and JSON are all it knows, and any language has those.

    python plain_worker.py URL TOKEN_FILE TOKENIZER_JSON NAME

URL and token file are what the run prints when it is started with --proxy. Every route, with all its fields, is
described at URL/v1/docs. `complete` guesses instead of sampling: put your model there, with the adapter of the version
that the lease names, which lies in the run's bucket as policy/vNNNNNN beside its manifest.
"""

import json
import math
import random
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

URL, TOKEN_FILE, TOKENIZER_JSON, NAME = sys.argv[1:]
HEADERS = {"X-Rolecall-Token": Path(TOKEN_FILE).read_text().strip(), "Content-Type": "application/json"}
VOCABULARY = json.loads(Path(TOKENIZER_JSON).read_text())["model"]["vocab"]
END_OF_SEQUENCE = 1


def call(verb, path, **body):
    """Ask until there is an answer, which every route allows: what is asked twice happens once."""
    give_up_at = time.monotonic() + 120
    while True:
        try:
            data = json.dumps(body).encode() if body else None
            request = urllib.request.Request(URL + path, data, HEADERS, method=verb)
            return json.load(urllib.request.urlopen(request, timeout=60))
        except urllib.error.HTTPError as refusal:
            if refusal.code == 410:
                sys.exit(0)  # the run has ended
            if refusal.code not in (429, 503):
                sys.exit(f"{verb} {path}: {refusal.code} {refusal.read().decode()}")
            time.sleep(float(refusal.headers.get("Retry-After", 1)))  # something is full, empty or restarting
            give_up_at = time.monotonic() + 120
        except (OSError, ValueError) as error:  # the network's, or an answer that was cut off
            if time.monotonic() > give_up_at:
                sys.exit(f"{verb} {path}: {error}")
            time.sleep(1)


def encode(text):
    """Token ids in the tokenizer's byte-level alphabet, one a character: enough for a guesser."""
    return [VOCABULARY[character if ord(character) > 32 else chr(256 + ord(character))] for character in text]


def complete(prompt, version):
    """One completion: ids, and the log-probability of each under the distribution it was drawn from."""
    guess = random.randrange(10)
    text = f"#### {guess}"
    ids = [*encode(text), END_OF_SEQUENCE]
    logprobs = [0.0] * (len(ids) - 2) + [-math.log(10), 0.0]
    reward = float(prompt["answer"].rpartition("####")[2].strip() == str(guess))
    return {"ids": ids, "logprobs": logprobs, "versions": [version] * len(ids), "finish_reason": "stop",
            "text": text, "reward": reward}  # fmt: skip


siblings = call("GET", "/v1/run")["config"].get("group_size", 2)
me = {"worker": NAME, "incarnation": time.time_ns()}  # of two with one name the newer is believed
number, delivered = 0, {}
while True:
    lease = call(
        "POST", "/v1/prompts", **me, lease=number, holding={}, delivered=delivered, count=4, wait=True
    )
    if lease["finished"]:
        break
    number, version, delivered = lease["number"], lease["version"], {}
    digest = call("GET", f"/v1/policy/digest?version={version}")
    holding = {prompt["id"]: number for prompt in lease["prompts"]}
    for prompt in lease["prompts"]:
        # At least every lease["hold_s"] seconds, or others are lent what this worker is still at.
        call("POST", "/v1/prompts/hold", **me, lease=number, holding=holding, delivered=delivered)
        completions = [complete(prompt, version) for _ in range(siblings)]
        group = {"prompt": prompt, "prompt_ids": encode(prompt["text"]), "completions": completions,
                 "digests": {version: digest}, "worker": NAME}  # fmt: skip
        if call("POST", "/v1/groups", group=group) in ("accepted", "duplicate"):
            delivered[prompt["id"]] = holding.pop(prompt["id"])
call("POST", "/v1/prompts/leave", **me, delivered=delivered)
