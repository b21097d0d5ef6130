"""The server as a deployment of Ray Serve: replicas on the nodes of a cluster. ``specdec.ray`` is its other name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..checks import refuse
from .models import ModelOptions
from .options import ROWS, MachineOptions
from .serve_command import CapacityOptions
from .served import ServedDrafts, make_service
from .user_errors import as_arguments

if TYPE_CHECKING:
    from fastapi import FastAPI
    from ray import serve


def serve_app(
    target: str | None = None,
    draft: str | None = None,
    *,
    drafter: Sequence[str] | None = None,
    rule: Sequence[str] | None = None,
    num_drafts: int | str = "auto",
    tree: int | None = None,
    name: str | None = None,
    api_keys: Sequence[str] = (),
    device: str | None = None,
    dtype: str | None = None,
    adapter: str | None = None,
    draft_bits: int | None = None,
    replicas: int | tuple[int, int] = 1,
    num_cpus: float = 1,
    num_gpus: float | None = None,
    drain_seconds: float = 30.0,
    **scheduling: Any,
) -> serve.Application:
    """The application of ``specdec serve``, for ``ray.serve.run``: each replica has the models, on a GPU of its own or
    on CPUs. Streams pass through; replicas that are no longer needed end after their texts have. Metrics are those of
    the replica that answers.

    Args:
        target: folder or hub name, as every node sees it, or GGUF file. None: the embedded pair.
        draft: the same of a draft model.
        drafter: names of ``specdec serve --drafter``, the first of which is the default.
        rule: the same of accept rules.
        num_drafts: K >= 0, or "auto".
        tree: N >= 1, the nodes of a tree of drafts.
        name: of the model, in requests and answers. None: the last part of ``target``.
        api_keys: of which a request needs one, if there are any.
        device: of torch. None: a GPU if the replica has one.
        dtype: of the weights, by name.
        adapter: folder of a peft adapter of the target.
        draft_bits: 8: the draft's weights are rounded to so many bits.
        replicas: how many, or the fewest and the most: Serve then adds one when as many requests are open in each as
            it has rows.
        num_cpus: of each replica, which are its threads on a CPU.
        num_gpus: of each. None: 1 if ``device`` is "cuda", otherwise 0.
        drain_seconds: in which the texts of a replica may end that is not needed any more.
        scheduling: ``rows``, ``max_waiting``, ``max_length``, ``cache_tokens``, ``cache_bytes``, ``prefill_chunk`` and
            ``prefix_reuse``, as options of ``specdec serve``.

    Raises:
        ValueError: names the argument, what was given and what is allowed. What only the models can tell is an error
            of the replica.
        ImportError: Ray is not installed.
    """
    from ray import serve

    with as_arguments():
        machine = MachineOptions(device=device, dtype=dtype)
        at = ModelOptions(target=target, draft=draft, adapter=adapter, draft_bits=draft_bits, machine=machine)
        drafts = ServedDrafts(
            drafter=None if drafter is None else [*drafter],
            rule=None if rule is None else [*rule],
            num_drafts=str(num_drafts),
            tree=tree,
        )
        capacity = CapacityOptions(**scheduling)
        capacity.scheduling()
    fewest, most = (replicas, replicas) if isinstance(replicas, int) else replicas
    if not 1 <= fewest <= most:
        refuse("replicas", replicas, "n >= 1, or (fewest, most)")
    rows = capacity.rows or ROWS
    number: dict[str, Any] = {"num_replicas": fewest}
    if fewest < most:
        scaling = {"min_replicas": fewest, "max_replicas": most, "target_ongoing_requests": rows}
        number = {"autoscaling_config": scaling}

    def build() -> FastAPI:
        from ..serving.server.app import create_app
        from ..serving.server.server_settings import ServerSettings

        settings = ServerSettings(api_keys=tuple(api_keys), drain_seconds=drain_seconds)
        return create_app(make_service(at, drafts, capacity.scheduling(), settings, name))

    replica = serve.deployment(
        name="specdec",
        max_ongoing_requests=rows + capacity.max_waiting,
        graceful_shutdown_timeout_s=drain_seconds,
        ray_actor_options={"num_cpus": num_cpus, "num_gpus": float(device == "cuda") if num_gpus is None else num_gpus},
        **number,
    )
    return replica(serve.ingress(build)()).bind()
