"""`mtp data check-render`: the server's prompts beside those that rows are made of."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from mtp_train.config import Config

if TYPE_CHECKING:
    from rich.console import Console

    from data_prep.chat import ChatFormat
    from data_prep.render_check import Difference, Prompt, RenderReport

_SHOWN = 3  # differences in full
_TIMEOUT_S = 60.0
_STYLES = {" ": "dim", "-": "red", "+": "green"}


def run_check_render(config: Config) -> int:
    """Compare, show, record; 1 when a prompt differs.

    Raises ``ValueError`` when the server cannot be asked, or the sources hold no prompt.
    """
    from data_prep.chat import configured_chat_format
    from data_prep.render_check import prompts_to_check
    from mtp_train.console import make_console, setup_logging
    from mtp_train.features.target import load_tokenizer, target_directory
    from mtp_train.run_dir import RunDirectory, write_json_atomic

    if not config.check_render.url:
        raise ValueError(
            "check_render.url is empty: name the server, as in mtp data check-render "
            "url=http://localhost:8000/v1"
        )
    console = make_console()
    setup_logging(console)
    tokenizer = load_tokenizer(config.target, target_directory(config.target))
    chat = configured_chat_format(tokenizer, config.data)
    prompts = prompts_to_check(config.data, chat, limit=config.check_render.rows)
    report = asyncio.run(_ask(config, prompts, chat))
    show(report, console)
    run = RunDirectory.from_config(config)
    write_json_atomic(run.root / "render_check.json", _summary(report))
    return 1 if report.differences else 0


async def _ask(config: Config, prompts: list[Prompt], chat: ChatFormat) -> RenderReport:
    from data_prep.endpoints.endpoint import HopelessError, find_model
    from data_prep.endpoints.http import RefusedError, Server, UnavailableError
    from data_prep.endpoints.rendering import ServedTemplate
    from data_prep.render_check import check_rendering
    from mtp_train.answering import read_api_key

    settings = config.check_render
    key = read_api_key(settings.api_key_env, "check_render.api_key_env")
    server = Server(settings.url, api_key=key, timeout_s=_TIMEOUT_S)
    try:
        model = await find_model(server, settings.model, field="check_render.model")
        template = ServedTemplate(server, model=model, kwargs=chat.kwargs)
        return await check_rendering(prompts, template, chat)
    except (HopelessError, RefusedError, UnavailableError) as error:
        raise ValueError(f"check_render.url={settings.url}: {error}") from error
    finally:
        await server.close()


def show(report: RenderReport, console: Console) -> None:
    """The first differences as diffs, how often each cause occurs, and the verdict."""
    from mtp_train.console import make_table

    for difference in report.differences[:_SHOWN]:
        _show_difference(difference, console)
    num_wrong = len(report.differences)
    if num_wrong > _SHOWN:
        console.print(f"… and {num_wrong - _SHOWN} more")
    kinds = [
        (kind, count, sum(d.prompt.kind == kind for d in report.differences))
        for kind, count in report.kinds.items()
    ]
    console.print(make_table("prompts", ("kind", "compared", "different"), kinds))
    where = f"model {report.model}, asked by {report.way}"
    if num_wrong:
        console.print(
            f"check-render: {num_wrong} of {report.num_prompts} prompts DIFFER ({where})",
            markup=False,
            soft_wrap=True,
        )
        return
    what = "as many tokens" if report.counts_only else "the same token ids"
    console.print(
        f"check-render: all {report.num_prompts} prompts have {what} there as here "
        f"({report.num_tokens:,} tokens; {where})",
        markup=False,
        soft_wrap=True,
    )
    if report.counts_only:
        console.print("The server gives no ids: equal counts do not prove equal prompts.")


def _show_difference(difference: Difference, console: Console) -> None:
    prompt = difference.prompt
    title = f"── {prompt.source} · {prompt.record_id} · message {prompt.turn}"
    console.print(title, style="dim", markup=False, soft_wrap=True)
    headline = f"{difference.cause}: {difference.detail}"
    console.print(headline, style="bold", markup=False, soft_wrap=True)
    if difference.position < 0:
        return
    console.print(
        f"{len(prompt.ids)} tokens here (-), {difference.count} there (+); "
        f"first difference at token {difference.position}",
        markup=False,
    )
    for line in difference.lines:
        text = f"  {line.mark} {line.token:>7}  {line.text!r}"
        console.print(text, style=_STYLES[line.mark], markup=False, soft_wrap=True)


def _summary(report: RenderReport) -> dict[str, object]:
    """What ``render_check.json`` keeps: no text of anybody's."""
    causes = [difference.cause for difference in report.differences]
    return {
        "model": report.model,
        "way": report.way,
        "prompts": report.num_prompts,
        "tokens": report.num_tokens,
        "kinds": report.kinds,
        "different": len(report.differences),
        "causes": {cause: causes.count(cause) for cause in dict.fromkeys(causes)},
    }
