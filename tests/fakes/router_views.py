"""Made-up snapshots of a mesh."""

from typing import Any

from mesh.domain.block_hashes import block_hashes
from mesh.domain.kv import KVLayout
from mesh.domain.worker import WorkerInfo, WorkerLoad, WorkerRole, WorkerState
from router.admission.placement import MeshSnapshot, PlacementQuery
from router.admission.prefix_chain import PrefixChain
from router.traffic import Traffic, TrafficTable
from router.workers.membership import WorkerView

BLOCK = 4
LAYOUT = KVLayout("m", num_layers=1, num_kv_heads=1, head_dim=8, block_size=BLOCK, dtype="float32")


def make_view(name: str, role: WorkerRole, **changes: Any) -> WorkerView:
    """A READY worker; `cached` takes token ids whose blocks it has cached."""
    state = changes.pop("state", WorkerState.READY)
    cached = set(block_hashes(changes.pop("cached", ()), BLOCK, "m"))
    last_seen_s = changes.pop("last_seen_s", 0.0)
    values: dict[str, Any] = {
        "worker_id": name,
        "incarnation": name,
        "role": role,
        "address": "127.0.0.1:1",
        "model": "m",
        "tokenizer_fingerprint": "t",
        "layout": LAYOUT,
        "max_batch_tokens": 16,
        "max_num_seqs": 4,
        "num_blocks": 16,
        "max_model_len": 1000,
    }
    free_blocks = changes.pop("free_blocks", changes.get("num_blocks", 16))
    load = WorkerLoad(free_blocks=free_blocks, num_running=changes.pop("num_running", 0))
    return WorkerView(WorkerInfo(**(values | changes)), load, state, last_seen_s, cached)


def prefill(name: str = "p0", **changes: Any) -> WorkerView:
    return make_view(name, WorkerRole.PREFILL, **changes)


def decode(name: str = "d0", **changes: Any) -> WorkerView:
    return make_view(name, WorkerRole.DECODE, **changes)


def snapshot(*views: WorkerView, **changes: Any) -> MeshSnapshot:
    return MeshSnapshot(views=views, model="m", tokenizer_fingerprint="t", **changes)


def query(num_tokens: int = 8, **changes: Any) -> PlacementQuery:
    """A prompt of ids 0, 1, 2, ..."""
    values: dict[str, Any] = {
        "max_total_tokens": num_tokens + 4,
        "chain": PrefixChain(range(num_tokens), "m"),
    } | changes
    return PlacementQuery(num_tokens=num_tokens, **values)


def no_traffic() -> Traffic:
    """No name stands for several revisions."""
    return Traffic(TrafficTable({}), [], lambda model: True)
