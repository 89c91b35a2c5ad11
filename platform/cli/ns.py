"""`remora ns`: namespaces and what they hold."""

from __future__ import annotations

import json
from typing import Any, get_args

import click

from remora.platform.base.config_types import DEVICE_TIER, Tier
from remora.platform.base.errors import NotFound
from remora.platform.cli.client import get_json, make_client, send_json, url_option
from remora.platform.cli.progress import size_text
from remora.platform.cli.table import print_table

_HEADINGS = ["NAMESPACE", "MODEL", "KV", "TIER", "GUARANTEED", "LIMIT", "WEIGHT", "USED", "CACHED", "BORROWED"]


def kv_words(text: str) -> str | dict[str, str]:
    """ "int8" or "int8/int4" (K/V) as the configuration has it."""
    k_word, slash, v_word = text.partition("/")
    return {"k": k_word, "v": v_word} if slash else text


@click.group()
def ns() -> None:
    """Namespaces: shares of the pools."""


@ns.command(name="list")
@url_option
def list_namespaces(url: str | None) -> None:
    """Every namespace with its quota and use in each tier, added up over the pools."""
    with make_client(url) as client:
        found = get_json(client, "/v1/namespaces")["data"]
    print_table(_HEADINGS, [row for each in found for row in _rows(each)])


@ns.command()
@click.argument("name")
@url_option
def show(name: str, url: str | None) -> None:
    """One namespace, as JSON."""
    with make_client(url) as client:
        found = get_json(client, "/v1/namespaces")["data"]
    for each in found:
        if each["id"] == name:
            click.echo(json.dumps(each, indent=2))
            return
    raise NotFound(f"no namespace {name!r}; one of: {', '.join(each['id'] for each in found)}")


@ns.command(name="set")
@click.argument("name")
@click.option("--guaranteed", help="What nobody can take from it, e.g. 512MiB.")
@click.option("--limit", help="What it may hold at most.")
@click.option("--weight", type=float, help="Its part of what is left over, against the others' weights.")
@click.option("--kv", help="KV precision of new requests: a word, or K/V as in int8/int4.")
@click.option(
    "--tier", type=click.Choice(get_args(Tier)), default=DEVICE_TIER, show_default=True, help="Whose quota it is."
)
@url_option
def set_quota(
    name: str,
    guaranteed: str | None,
    limit: str | None,
    weight: float | None,
    kv: str | None,
    tier: str,
    url: str | None,
) -> None:
    """Changes a namespace's quota or precision in every pool, at once; lasts until the platform starts anew."""
    wanted: dict[str, Any] = {"guaranteed": guaranteed, "limit": limit, "weight": weight}
    wanted["kv_precision"] = None if kv is None else kv_words(kv)
    body = {key: value for key, value in wanted.items() if value is not None}
    if not body:
        raise click.UsageError("give at least one of --guaranteed, --limit, --weight and --kv")
    with make_client(url) as client:
        found = send_json(client, "PUT", f"/v1/namespaces/{name}", {**body, "tier": tier})
    print_table(_HEADINGS, _rows(found))


@ns.command()
@click.argument("name")
@click.option("--to", help="What it may keep in each pool, e.g. 64MiB; default: its guarantee.")
@url_option
def trim(name: str, to: str | None, url: str | None) -> None:
    """Gives up a namespace's cache, down to a size, and the extents that become empty."""
    with make_client(url) as client:
        pools = send_json(client, "POST", f"/v1/namespaces/{name}/trim", {} if to is None else {"to": to})["pools"]
    rows = [
        [pool_id, size_text(each["trimmed_bytes"]), each["num_released_extents"]] for pool_id, each in pools.items()
    ]
    print_table(["POOL", "GIVEN UP", "EXTENTS RELEASED"], rows)


@ns.command()
@click.argument("name")
@url_option
def compact(name: str, url: str | None) -> None:
    """Moves the blocks of a namespace's model together, so that whole extents become free for others."""
    with make_client(url) as client:
        pools = send_json(client, "POST", f"/v1/namespaces/{name}/compact", {})["pools"]
    keys = ["num_moved_blocks", "num_moving_blocks", "num_released_extents", "num_extents"]
    rows = [[pool_id, *(each[key] for key in keys)] for pool_id, each in pools.items()]
    print_table(["POOL", "BLOCKS MOVED", "STILL MOVING", "EXTENTS RELEASED", "EXTENTS LEFT"], rows)


@ns.command()
@click.argument("name")
@click.option("--kv", help="A word, or K/V; default: that of new requests, or int8 if it is not quantised.")
@url_option
def quantize(name: str, kv: str | None, url: str | None) -> None:
    """Re-encodes a namespace's cache into a cheaper KV precision, which new requests get too."""
    body = {} if kv is None else {"kv_precision": kv_words(kv)}
    with make_client(url) as client:
        pools = send_json(client, "POST", f"/v1/namespaces/{name}/quantize", body)["pools"]
    counts = ["num_converted_blocks", "num_freed_blocks", "num_left_blocks"]
    sizes = ["before_bytes", "after_bytes"]
    rows = [
        [pool_id, *(each[key] for key in counts), *(size_text(each[key]) for key in sizes)]
        for pool_id, each in pools.items()
    ]
    print_table(["POOL", "BLOCKS WRITTEN", "BLOCKS FREED", "BLOCKS LEFT", "HELD BEFORE", "HELD AFTER"], rows)


@ns.command()
@click.argument("name")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@url_option
def advise(name: str, as_json: bool, url: str | None) -> None:
    """How much memory a namespace could use: its working set, and its hit rate over sizes, in each pool."""
    with make_client(url) as client:
        pools = get_json(client, f"/v1/namespaces/{name}")["pools"]
    if as_json:
        click.echo(json.dumps({pool_id: pool["advice"] for pool_id, pool in pools.items()}, indent=2))
        return
    for pool_id, pool in pools.items():
        advice = pool["advice"]
        held = pool["used_bytes"] + pool["cached_bytes"]
        click.echo(
            f"{pool_id}: {size_text(advice['working_set_bytes'])} used in the last hour, {size_text(held)} held; "
            + _recommendation(advice)
        )
        if advice["curve"]:
            rows = [(size_text(point["size_bytes"]), f"{100 * point['hit_rate']:.1f} %") for point in advice["curve"]]
            print_table(["CACHE", "FOUND"], rows)
            click.echo("")


def _recommendation(advice: dict[str, Any]) -> str:
    if not advice["enough_bytes"]:
        return "nothing has been looked up twice yet"
    return f"more than {size_text(advice['enough_bytes'])} would gain less than 5 % of the hit rate"


def _rows(namespace: dict[str, Any]) -> list[list[object]]:
    """One for each tier."""
    kv = namespace["kv_precision"]
    return [
        [
            namespace["id"],
            namespace["model"],
            kv["k"] if kv["k"] == kv["v"] else f"{kv['k']}/{kv['v']}",
            tier,
            size_text(quota["guaranteed_bytes"]),
            "the arena" if quota["limit_bytes"] is None else size_text(quota["limit_bytes"]),
            quota["weight"],
            *(
                size_text(sum(pool[figure] for pool in namespace["pools"].values() if pool["tier"] == tier))
                for figure in ("used_bytes", "cached_bytes", "borrowed_bytes")
            ),
        ]
        for tier, quota in namespace["tiers"].items()
    ]
