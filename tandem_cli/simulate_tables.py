"""How `tandem simulate` shows its figures."""

from collections.abc import Mapping, Sequence

from rich.console import Console

from tandem_cli.simulation.figures import Figures
from tandem_cli.terminal import FittingTable, figures_table, optional_cell


def show_figures(result: Figures, about: str, console: Console) -> None:
    """Print the figures of one simulation."""
    console.print(f"{about}\n")
    console.print(
        f"{result['num_requests']:,.0f} requests in {result['duration_s']:,.0f} s: {result['num_ok']:,.0f} answered, "
        f"{result['num_refused']:,.0f} refused, {result['num_errors']:,.0f} failed, "
        f"{result['num_replays']:,.0f} replayed"
    )
    if result["num_switches"]:
        console.print(f"workers have changed their roles {result['num_switches']:,.0f} times")
    console.print(
        f"{result['good_requests_per_s']:.4g} good requests/s ({100 * result['slo_share']:.1f} % of all); "
        f"{result['input_tokens_per_s']:,.0f} tokens/s in, {result['output_tokens_per_s']:,.0f} out\n"
    )
    times = figures_table("ms", "p50", "p90", "p99")
    for name in ("ttft", "tpot", "gap", "latency"):
        if f"{name}_p50_ms" in result:
            times.add_row(name, *(f"{result[f'{name}_p{percent}_ms']:,.1f}" for percent in (50, 90, 99)))
    console.print(FittingTable(times))
    console.print()
    workers = figures_table("role", "workers", "busy", "KV in use", "worker hours")
    for role in ("prefill", "decode"):
        shares = (f"{100 * result[f'{role}_{name}']:.1f} %" for name in ("busy", "kv"))
        workers.add_row(role, f"{result[f'{role}_workers']:.4g}", *shares, f"{result[f'{role}_worker_hours']:,.2f}")
    console.print(FittingTable(workers))
    console.print(f"\nin the queue: {result['queued_mean']:.3g} in the mean, {result['queued_max']:,.0f} at most")
    if "cost" in result:
        price = result.get("price_per_million_output_tokens")
        million = "" if price is None else f"; {price:.4g} per million output tokens"
        console.print(f"cost: {result['cost']:,.2f}{million}")


def show_errors(errors: Mapping[str, int], console: Console) -> None:
    """Print why requests were refused or failed."""
    for error, count in errors.items():
        console.print(f"{count:,} x {error}", highlight=False)


def show_hours(hours: Sequence[Figures], console: Console) -> None:
    """Print a row for each hour."""
    table = figures_table("hour", "requests/s", "prefill", "decode", "good", "TTFT p50 ms", "p99 ms")
    for hour in hours:
        workers = (optional_cell(hour.get(f"{role}_workers"), ".3g") for role in ("prefill", "decode"))
        times = (f"{hour[f'ttft_p{percent}_ms']:,.0f}" for percent in (50, 99))
        table.add_row(
            f"{hour['hour']:.0f}", f"{hour['requests_per_s']:.3g}", *workers, f"{100 * hour['slo_share']:.1f} %", *times
        )
    console.print()
    console.print(FittingTable(table))


def show_sweep(rows: Sequence[Figures], best: Figures, about: str, console: Console) -> None:
    """Print a row for each split, and name the best."""
    console.print(f"{about}\n")
    columns = ("good", "good/s", "TTFT p50 ms", "p99 ms", "TPOT p50 ms", "gap p99 ms", "prefill busy", "decode busy")
    table = figures_table("prefill : decode", *columns)
    for row in rows:
        table.add_row(
            _split(row),
            f"{100 * row['slo_share']:.1f} %",
            f"{row['good_requests_per_s']:.4g}",
            *(f"{row[name]:,.1f}" for name in ("ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms")),
            optional_cell(row.get("gap_p99_ms"), ".3g"),
            *(f"{100 * row[f'{role}_busy']:.0f} %" for role in ("prefill", "decode")),
            style="bold" if row is best else "",
        )
    console.print(FittingTable(table))
    console.print(f"\nbest: {_split(best)}, with {100 * best['slo_share']:.1f} % of the requests good")


def _split(row: Figures) -> str:
    return f"{row['prefill']:.0f} : {row['decode']:.0f}"
