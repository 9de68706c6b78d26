"""Batches over kill −9 of worker, gateway or both at random moments: `python tests/cpu/batch_kills.py FOLDER [ROUNDS]`
with the folder of a tiny model. Each round is a batch of 1,000 lines and one kill; prints what became of each.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from server_fixture import Server, running_server
from test_server_batch_restarts import CONFIG, kill, texts, workers
from test_server_batches import completion, ended, submit

NUM_LINES = 1000
LINES = [completion(number, max_tokens=12) for number in range(NUM_LINES)]
VICTIMS = ("worker", "gateway", "both")


def main(folder: str, rounds: int) -> None:
    draw = random.Random(39)
    with tempfile.TemporaryDirectory(prefix="dtb-") as home, ExitStack() as servers:
        config = Path(home) / "dovetail.yaml"
        config.write_text(CONFIG.format(folder=folder, state=Path(home) / "state"))

        def start() -> Server:
            return servers.enter_context(running_server("--config", config, log=Path(home) / "log"))

        server = start()
        began_s = time.monotonic()
        alone = ended(server.client(), submit(server.client(), LINES).id, 600)
        seconds = time.monotonic() - began_s
        wanted = texts(server.client(), alone.output_file_id)
        assert len(wanted) == NUM_LINES
        print(f"undisturbed: {NUM_LINES} lines in {seconds:.1f} s", flush=True)
        for number in range(rounds):
            victim = VICTIMS[number % 3]
            batch_id = submit(server.client(), LINES).id
            time.sleep(draw.uniform(0.05, seconds))
            before = server.client().batches.retrieve(batch_id).request_counts
            assert before is not None
            kill(*workers(server) * (victim != "gateway"), *[server.process.pid] * (victim != "worker"))
            if victim != "worker":
                server = start()
            batch = ended(server.client(), batch_id, 600)
            found = texts(server.client(), batch.output_file_id)
            assert (batch.status, batch.request_counts.completed) == ("completed", NUM_LINES), batch
            assert found == wanted
            print(f"{number + 1}: {victim} killed at {before.completed}, all {len(found)} once, equal", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 20)
