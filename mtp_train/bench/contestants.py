"""Who is measured: servers that run already, or vLLM started with each head at each K."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mtp_train.answering import read_api_key
from mtp_train.bench.facts import NONE, Contestant
from mtp_train.bench.load import Load, find_out
from mtp_train.bench.prompts import load_questions
from mtp_train.config import Config
from mtp_train.export.record import EXPORT_NAME, ExportRecord
from mtp_train.run_dir import read_json
from mtp_train.serving.engine import parse_argument
from mtp_train.serving.job import EngineLayout, ServingError, vllm_layout
from mtp_train.serving.launch import ServerPlan, start_server
from mtp_train.serving.process import find_python
from mtp_train.serving.target_scope import vllm_layout_for
from runtime.head_spec import CONFIG_NAME


@dataclass(frozen=True)
class Live:
    """A server that answers. ``last_words``: why it is gone, where it was started here and is."""

    url: str
    model: str
    version: str
    last_words: Callable[[], str] = lambda: ""


def make_load(config: Config) -> Load:
    """What is sent. Raises ``ValueError`` for prompts or a key that cannot be read."""
    settings = config.bench
    return Load(
        questions=tuple(load_questions(settings.prompts, limit=settings.num_prompts)),
        max_tokens=settings.max_tokens,
        warm_up_tokens=settings.warm_up_tokens,
        timeout_s=config.engine.timeout_s,
        api_key=read_api_key(config.engine.api_key_env, "engine.api_key_env"),
        model=settings.model if settings.url else "",
    )


def find_contestants(config: Config, load: Load) -> list[Contestant]:
    """Everybody that is to be measured. Running servers are asked for their K here.

    Raises ``ValueError`` for a head that no server loads, :class:`ServingError` for a server that
    is not there.
    """
    settings = config.bench
    if settings.url:
        names = settings.heads or settings.url
        found = []
        for name, url in zip(names, settings.url, strict=True):
            facts = find_out(url, load)
            if name == NONE and facts.k:
                raise ValueError(
                    f"bench.heads calls {url} {NONE}, but by its metrics it drafts K={facts.k}"
                )
            found.append(Contestant(name, facts.k, url=url))
        _refuse_same_names(found)
        return found
    if not config.engine.python:
        raise ValueError(
            "neither bench.url nor engine.python: name servers that run, as in "
            "url=http://localhost:8000/v1, or the interpreter of the environment in which vLLM is "
            "installed, as in engine.python=.venv-vllm/bin/python"
        )
    if not settings.heads:
        raise ValueError(
            "bench.heads=[]: name none and exported directories, as in "
            "heads=none,runs/mine/export/mimo"
        )
    found = []
    for name in settings.heads:
        if name == NONE:
            found.append(Contestant(NONE, 0))
            continue
        directory = Path(name)
        read_head_layout(directory)  # refused before any server is started
        label = _label(directory, settings.heads)
        found += [Contestant(label, k, directory=directory) for k in settings.k]
    return found


@contextmanager
def open_contestant(contestant: Contestant, config: Config, load: Load) -> Iterator[Live]:
    """Its server, started if need be. Raises :class:`ServingError`."""
    if contestant.url:
        facts = find_out(contestant.url, load)
        yield Live(contestant.url, facts.model, facts.version)
        return
    with start_server(make_plan(contestant, config), timeout_s=config.engine.timeout_s) as server:
        facts = find_out(server.url, load)
        if facts.k != contestant.k:
            raise ServingError(
                "load",
                f"{contestant.name}: the server's metrics say K={facts.k}, not K={contestant.k}",
            )
        yield Live(server.url, facts.model, f"vllm {facts.version}", server.last_words)


def make_plan(contestant: Contestant, config: Config) -> ServerPlan:
    """How vLLM is started for it. Raises ``ValueError`` without a target."""
    from mtp_train.features.target import target_directory

    if not config.target.path:
        raise ValueError("target.path: not set; name the model that the heads draft for")
    head = contestant.directory
    target = target_directory(config.target).resolve()
    return ServerPlan(
        python=find_python(config.engine.python),
        target=target,
        dtype=_dtype(config),
        k=contestant.k or 0,
        head=head.resolve() if head else None,
        layout=vllm_layout_for(read_head_format(head), target) if head else None,
        num_threads=config.runtime.num_threads,
        args={name: parse_argument(text) for name, text in config.engine.args},
    )


def read_head_layout(directory: Path) -> EngineLayout:
    """How vLLM is told about the head in ``directory`` beside a plain target."""
    return vllm_layout(read_head_format(directory))


def read_head_format(directory: Path) -> str:
    """The layout of the head in ``directory``: one of ours, or one that its ``config.json`` shows.

    Raises ``ValueError``; a native directory has to be exported first.
    """
    config_file = directory / CONFIG_NAME
    if not config_file.is_file():
        raise ValueError(f"bench.heads: {directory}: no such directory, or it has no {CONFIG_NAME}")
    if (directory / EXPORT_NAME).is_file():
        return ExportRecord.read(directory / EXPORT_NAME).format
    raw = read_json(config_file)
    architectures = [str(name).lower() for name in raw.get("architectures") or []]
    if "speculators_model_type" in raw:
        return "speculators"
    for word, format in (("eagle3", "eagle3"), ("mtp", "mimo"), ("eagle", "eagle")):
        if any(word in name for name in architectures):
            return format
    if not architectures and "kind" in raw:
        raise ValueError(
            f"bench.heads: {directory} is a native head, which no engine loads; run `mtp export` "
            "first and name what it writes, as in heads=none,runs/<name>/export/mimo"
        )
    raise ValueError(
        f"bench.heads: {directory}: {CONFIG_NAME} shows architectures={architectures}; vLLM is "
        "asked for MTP, EAGLE, EAGLE-3 and speculators directories"
    )


def _dtype(config: Config) -> str:
    import torch

    from mtp_train.features.target import target_dtype

    if config.engine.dtype != "auto":
        return config.engine.dtype
    device = torch.device("cpu" if config.target.device == "cpu" else _default_device())
    return str(target_dtype(config.target, device)).removeprefix("torch.")


def _default_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _label(directory: Path, names: tuple[str, ...]) -> str:
    """As short as tells it apart from the others: ``mimo``, ``mine/export/mimo``, …"""
    parts = directory.resolve().parts
    others = [Path(name).resolve().parts for name in names if name != NONE]
    for count in range(1, len(parts)):
        if sum(other[-count:] == parts[-count:] for other in others) == 1:
            return "/".join(parts[-count:])
    return str(directory)


def _refuse_same_names(found: list[Contestant]) -> None:
    names = [one.name for one in found]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"bench.heads: two servers are called {name}; give each its own name")
