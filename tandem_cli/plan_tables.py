"""How `tandem plan` shows a plan: tables, and the lines between them."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from engine.settings import MATRIX_ENCODINGS
from mesh.domain.kv import Span
from tandem_cli.capacity.prediction import PlanResult
from tandem_cli.capacity.roofline import BLOCK_SIZE
from tandem_cli.terminal import FittingTable, figures_table, optional_cell

if TYPE_CHECKING:
    from tandem_cli.capacity.ranks import RankMemory


def show(plan: PlanResult, ranks: Sequence["RankMemory"], console: Console) -> None:
    """Print the tables, and the lines between them."""
    model, device = plan["model"], plan["device"]
    console.print(
        f"{model['name']}: {_number(model['params'])} parameters, {model['num_layers']} layers{_experts(model)}"
    )
    console.print(
        f"{device['name']} ({device['source']}): {_number(device['memory_bytes'])}B, "
        f"{_number(device['bandwidth_bytes_per_s'])}B/s, {_number(device['flops_per_s'])}FLOP/s in "
        f"{plan['precision']['weights']}"
    )
    console.print(
        f"KV: {plan['kv_bytes_per_token']:,.0f} bytes per token; critical batch: {plan['critical_batch']:.0f}; "
        f"arithmetic is the bound above {plan['device_flops_per_byte']:.0f} FLOP/byte\n"
    )
    if model["state_bytes"]:
        blocks = plan["memory"][0]["state_blocks"]
        state = f"a state of {_number(model['state_bytes'])}B, in {blocks:,} KV blocks of {BLOCK_SIZE} tokens"
        console.print(f"each sequence has {state}, beside the KV of its tokens\n")
    if plan["partition"] is not None:
        files, num_bytes = plan["partition"]["files"], plan["partition"]["num_bytes"]
        console.print(f"partitioned: {_number(num_bytes)}B in {files} {'file' if files == 1 else 'files'}\n")
    if plan["quantized_checkpoint"] is not None:
        console.print(f"the checkpoint is quantised ({plan['quantized_checkpoint']}): {_loaded_as(plan)}\n")
    if plan["adapters"] is not None:
        names, num_loaded = plan["adapters"]["names"], plan["adapters"]["num_loaded"]
        num_bytes = _number(plan["adapters"]["num_bytes"])
        console.print(f"adapters: {num_loaded} of {len(names)} in memory at once, {num_bytes}B\n")
    console.print(FittingTable(_memory(plan)))
    for weights, reason in plan["refused"].items():
        console.print(f"not in {weights}: {reason}", markup=False)
    console.print()
    if plan["sequences"]:
        console.print(FittingTable(_sequences(plan)))
        console.print()
    if ranks:
        console.print(FittingTable(_ranks(ranks, plan["context_tokens"])))
        console.print()
    console.print(FittingTable(_predictions(plan)))
    if plan["blended_price_per_million"] is not None:
        console.print(f"blended price, 3 of input to 1 of output: {plan['blended_price_per_million']:.4g} per million")
    console.print()
    console.print(_load(plan))


def _loaded_as(plan: PlanResult) -> str:
    weights = plan["precision"]["weights"]
    return f"computed in {weights}" if weights in MATRIX_ENCODINGS else f"its matrices are loaded as {weights}"


def _experts(model: PlanResult) -> str:
    if model["num_experts"] == 1:
        return ""
    active = f"{_number(model['active_params'])} parameters"
    return f"; each token uses {active}: {model['experts_per_token']} of {model['num_experts']} experts"


def _memory(plan: PlanResult) -> Table:
    columns = ("weights", "rest and KV", "weights bytes", "KV bytes/token", "KV tokens")
    table = figures_table(*columns, f"users of {plan['context_tokens']} tokens")
    for row in plan["memory"]:
        fits = row["kv_tokens"] > 0
        table.add_row(
            row["weights"],
            row["other"] if row["kv"] == row["other"] else f"{row['other']}, {row['kv']}",
            f"{_number(row['weights_bytes'])}B",
            f"{row['kv_bytes_per_token']:,.0f}",
            f"{row['kv_tokens']:,}" if fits else "does not fit",
            f"{row['users']:,}",
        )
    return table


def _sequences(plan: PlanResult) -> Table:
    """The KV of sequences where it is freed behind windows."""
    table = figures_table("tokens of a sequence", "KV bytes", "if all were kept", "sequences that fit")
    for row in plan["sequences"]:
        sizes = (f"{_number(row[name])}B" for name in ("kv_bytes", "all_kv_bytes"))
        table.add_row(f"{row['tokens']:,}", *sizes, f"{row['users']:,}")
    return table


def _ranks(ranks: Sequence["RankMemory"], context_tokens: int) -> Table:
    columns = ("layers", "KV heads", "weights bytes", "KV bytes/token", f"KV of {context_tokens} tokens")
    own_cores = [rank.cores for rank in ranks if rank.cores is not None]
    has_adapters = any(rank.adapter_bytes for rank in ranks)
    table = figures_table("rank", *columns, *(["adapters bytes"] if has_adapters else []), "cores")

    def add(name: str, spans: tuple[Span, ...], sizes: tuple[float, ...], cores: int | None) -> None:
        weights_bytes, kv_bytes, adapter_bytes = sizes
        sizes_text = (f"{_number(weights_bytes)}B", f"{kv_bytes:,.0f}", f"{_number(context_tokens * kv_bytes)}B")
        spans_text = (f"{span.first}..{span.end - 1}" for span in spans)
        adapters = (f"{_number(adapter_bytes)}B",) if has_adapters else ()
        cores_text = "on a GPU" if cores is None else str(cores or "shared")
        table.add_row(name, *spans_text, *sizes_text, *adapters, cores_text)

    for rank in ranks:
        sizes: tuple[float, ...] = (rank.weights_bytes, rank.kv_bytes_per_token, rank.adapter_bytes)
        add(str(rank.rank), (rank.layers, rank.heads), sizes, rank.cores)
    all_spans = Span(0, ranks[-1].layers.end), Span(0, ranks[-1].heads.end)
    from tandem_cli.capacity.ranks import total

    sizes = (*total(ranks), sum(rank.adapter_bytes for rank in ranks))
    add("worker", all_spans, sizes, sum(own_cores) if own_cores else None)
    return table


def _predictions(plan: PlanResult) -> Table:
    rows = plan["predictions"]
    is_measured = any(row["measured_ms"] is not None for row in rows)
    has_prices = rows[0]["price_per_million"] is not None
    columns = ["pass", "FLOP/byte", "ms at best", *(["measured ms", "times longer"] if is_measured else [])]
    columns += ["tokens/s at best", *(["measured"] if is_measured else [])]
    table = figures_table(*columns, *(["price per million"] if has_prices else []))
    for row in rows:
        fits, num_tokens = row["fits"], row["tokens"]
        is_prefill = row["name"] == "prefill_ms"
        cells = [f"prefill of {num_tokens} tokens" if is_prefill else f"decode step of {num_tokens}"]
        cells += [f"{row['flops_per_byte']:.1f}", _ms(row["predicted_ms"]) if fits else ""]
        if is_measured:
            cells += ["" if row["measured_ms"] is None else _ms(row["measured_ms"]), optional_cell(row["ratio"], ".2f")]
        cells.append(f"{row['tokens_per_s']:,.0f}" if fits else "does not fit")
        if is_measured:
            cells.append(optional_cell(row["measured_tokens_per_s"], ",.0f"))
        table.add_row(*cells, *([f"{row['price_per_million']:.4g}" if fits else ""] if has_prices else []))
    return table


def _load(plan: PlanResult) -> str:
    load = plan["load"]
    lines = [
        f"KV of a prompt over {rate} Gbit/s: {_ms(ms)} ms, without overlap" for rate, ms in plan["transfer_ms"].items()
    ]
    demand = f"{load['requests_per_s']:.4g} requests/s, {load['input_tokens']} tokens in, {load['output_tokens']} out"
    if plan["batch"] is None:
        return "\n".join([*lines, f"{demand}: no batch fits into memory"])
    lines.append(f"{demand}, in decode steps of {plan['batch']}, keeps busy")
    for name, need in plan["workers"].items():
        prefill, decode = need["whole"]
        lines.append(
            f"  {name}: {need['prefill']:.3g} prefill and {need['decode']:.3g} decode workers, "
            f"1 : {need['decode_per_prefill']:.2f}; start at least {prefill} + {decode}"
        )
    return "\n".join(lines)


def _ms(value: float) -> str:
    """Format milliseconds with at least three significant digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _number(value: float) -> str:
    """Format with three digits and a unit prefix: 1.24 G."""
    for prefix, factor in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= factor:
            return f"{value / factor:.3g} {prefix}"
    return f"{value:.3g} "
