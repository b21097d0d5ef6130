"""A job whose prompts are decoded by actors of a Ray cluster. The output stays one file that this process writes: the
loss of a node costs what it was decoding, and the loss of this process no more than of any other job."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from .user_errors import refuse

if TYPE_CHECKING:
    from ..jobs.lines import JobLine
    from ..serving.scheduler import Scheduler
    from .drafting import GenerateDrafts
    from .models import ModelOptions, Models
    from .options import SchedulingOptions

CALLS = 4  # blocks of lines that an actor works on at a time, so that its rows stay busy at the end of one


class Node(NamedTuple):
    cpus: int
    gpus: int


@dataclass(frozen=True)
class Cluster:
    """Where a job is decoded.

    Attributes:
        device: of each actor: "cuda", one GPU each, or "cpu".
        actors: how many there are.
        cpus: of each, which are its threads on a CPU.
    """

    device: str
    actors: int
    cpus: int


def join(address: str, device: str | None, actors: int | None, cpus: int | None) -> Cluster:
    """Connects to a cluster, and says who decodes.

    Args:
        address: of the cluster; "auto": the one that this machine belongs to; "local": one that is started here and
            ends with this process.
        device: "cuda", "cpu", or None: GPUs where there are any.
        actors: None: as many as there is room for.
        cpus: of each. None: 1 beside a GPU; otherwise as many as every node has.
    """
    try:
        import ray
    except ImportError:
        refuse("--ray", "--ray without Ray", "pip install 'specdec-kernels[ray]'")
    if device not in (None, "cpu", "cuda"):
        refuse("--device", f"{device!r} with --ray", "cpu, cuda, or none: Ray gives each decoder its own GPU")
    try:
        ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False)
    except (ConnectionError, ValueError) as error:
        refuse("--ray", f"{address!r} ({error})", "the address of a cluster, auto, or local")
    alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return place([Node(int(has.get("CPU", 0)), int(has.get("GPU", 0))) for has in alive], device, actors, cpus)


def place(nodes: list[Node], device: str | None, actors: int | None, cpus: int | None) -> Cluster:
    """Says who decodes, on nodes with so much. Refused is what would wait for ever."""
    with_gpus = [node for node in nodes if node.gpus]
    device = device or ("cuda" if with_gpus else "cpu")
    if device == "cuda":
        cpus = cpus or 1
        room = sum(min(node.gpus, node.cpus // cpus) for node in with_gpus)
    else:
        nodes = [node for node in nodes if node.cpus]
        cpus = cpus or min((node.cpus for node in nodes), default=1)
        room = sum(node.cpus // cpus for node in nodes)
    wanted = actors or max(room, 1)
    if wanted > room:
        has = ", ".join(f"{node.cpus} CPUs and {node.gpus} GPUs" for node in nodes) or "no nodes"
        given = f"{wanted} decoders with {cpus} CPUs{' and a GPU' if device == 'cuda' else ''} each"
        refuse("--actors / --actor-cpus", given, f"what the cluster has room for: {room} ({has})")
    return Cluster(device, wanted, cpus)


class Checked:
    """Makes the scheduler in an actor, if its node has the models and the version that the job began with.

    Args:
        settings: the job's, among them the version and the fingerprints of all models.
    """

    def __init__(
        self, at: ModelOptions, drafts: GenerateDrafts, options: SchedulingOptions, settings: Mapping[str, Any]
    ):
        self._at, self._drafts, self._options, self._settings = at, drafts, options, settings

    def __call__(self) -> tuple[Scheduler, Models]:
        from specdec_kernels import __version__

        from ..checks import differences
        from ..jobs.manifest import fingerprints
        from .job_decoders import scheduler_of

        here = {"specdec": __version__, **fingerprints(self._at.paths(self._drafts.drafter))}
        if other := differences({name: self._settings[name] for name in here}, here):
            raise RuntimeError(f"this node has others than the job began with: {'; '.join(other)}")
        return scheduler_of(self._at, self._drafts, self._options)


class Actors:
    """Decodes in actors of the cluster.

    Args:
        block: how many lines an actor gets at a time. Their results come together.
    """

    drafter_error: str | None = None

    def __init__(self, cluster: Cluster, make: Checked, block: int):
        self._cluster, self._make, self._block = cluster, make, block

    @property
    def load(self) -> str:
        return f"{self._cluster.actors} decoders"

    def decode(self, lines: Iterator[JobLine]) -> Iterator[dict[str, Any]]:
        import pandas
        import ray.data

        from .ray_decoder import LineDecoder

        logging.getLogger("ray.data").setLevel(logging.ERROR)  # what it tells of each job
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = context.print_on_execution_start = False
        blocks = iter(lambda: list(itertools.islice(lines, self._block)), [])
        refs: list[Any] = [ray.put(pandas.DataFrame({"line": block})) for block in blocks]
        strategy = ray.data.ActorPoolStrategy(
            size=self._cluster.actors, max_concurrent_calls_per_actor=CALLS, max_tasks_in_flight_per_actor=2 * CALLS
        )
        decoded = ray.data.from_pandas_refs(refs).map_batches(
            LineDecoder,
            batch_size=None,
            batch_format="pandas",
            fn_constructor_args=(self._make,),
            compute=strategy,
            num_cpus=self._cluster.cpus,
            num_gpus=1 if self._cluster.device == "cuda" else 0,
        )
        for batch in decoded.iter_batches(batch_size=None, batch_format="pandas", prefetch_batches=0):
            yield from map(json.loads, batch["result"])
            self.drafter_error = next(filter(None, batch["drafter_error"]), self.drafter_error)

    def close(self) -> None:
        import ray

        ray.shutdown()
