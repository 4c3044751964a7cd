"""One rank of a multi-process test: runs jobs one after another and saves this rank's results.

Arguments: JSON list of [model directory, job fields]; output directory.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from tests.support.launch import die_with_parent
from tests.support.policies import Job, run_job


def main() -> None:
    die_with_parent()
    torch.set_num_threads(1)
    jobs, out = json.loads(sys.argv[1]), Path(sys.argv[2])
    for path, fields in jobs:
        job = Job(**fields)
        torch.save(run_job(job, path), out / f"{job.name}.{os.environ['RANK']}.pt")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
