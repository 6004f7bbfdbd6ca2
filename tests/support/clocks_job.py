"""One rank of a job whose ranks read different clocks: records until its clock was measured, or its children's were.

Run as `-m tests.support.clocks_job RANK STORE RING ENDING`: a rank that is measured prints "measured", and then ends by
ENDING: "stop" in good order, "kill" by SIGKILL.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

import torch.distributed as dist

import modtrace
from tests.support.own_output import keep_own_output


def main() -> None:
    rank, store, ring, ending = sys.argv[1:]
    keep_own_output()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=2)
    with modtrace.record(ring=ring, engine="python") as recording:
        names = recording._require_capture().ring.names
        job_store = dist.distributed_c10d._get_default_store()
        while not job_store.check(["measured"]):
            if any(record["kind"] == "offset" for record in list(names.records)):
                job_store.set("measured", rank)
                break
            time.sleep(0.01)
        print("measured", time.monotonic_ns(), flush=True)
        if ending == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
    print("threads", *(thread.name for thread in threading.enumerate()), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
