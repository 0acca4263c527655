"""What all replicas hold is compared before a state is written, which rank 0 writes for all of them."""

from __future__ import annotations

from hf_parallel.engine.run.engine import Engine
from hf_parallel.engine.weights import alike_on_replicas
from hf_parallel.guards.weights.drift import refuse_drift


def refuse_drift_of(engine: Engine) -> str:
    """Refuse weights that the replicas changed differently; collective over the world. Parts of weights are on one rank only.

    Args:
        engine: Engine of the model.

    Returns:
        What to say of small differences, "" if there are none.

    Raises:
        RankMismatchError: They differ; on every rank.
    """
    mesh, replicas, attachment = engine.mesh, engine.gradients.replicas, engine.attachment
    if mesh.copies_group is None or replicas.local is not None:
        return ""
    replicas.synchronise()
    held = attachment.parameters
    alike = list(alike_on_replicas(mesh, attachment.ledger, held).values())
    if replicas.sharded is not None:
        alike = [(mesh.dp_replicate_group, list(held))]  # the parts of one copy are all others
    with attachment.watchdog.waiting("waits for the other replicas to compare weights"):
        said = refuse_drift([({name: held[name] for name in names}, group) for group, names in alike])
        engine.gradients.told.compare_weights(attachment.device)  # and what updates have overwritten
    return said
