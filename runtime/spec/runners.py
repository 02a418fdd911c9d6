"""Makes the runners of one engine: a model, its pool over the shared table, and its graphs."""

from __future__ import annotations

import logging

from runtime.config import EngineConfig
from runtime.cuda_graph import (
    CudaRecorder,
    DraftLoopGraphs,
    ForwardGraphs,
    GraphAttention,
    GraphRecorder,
    GraphSizes,
)
from runtime.kv_cache import SlotTable
from runtime.models.base import DraftModel, Model
from runtime.spec.base import Runner

logger = logging.getLogger(__name__)


class RunnerFactory:
    """With ``config.cuda_graphs`` pools have one page more than the table: the dummy request's."""

    def __init__(
        self, config: EngineConfig, table: SlotTable, recorder: GraphRecorder | None
    ) -> None:
        self._config = config
        self._table = table
        self._recorder = recorder or CudaRecorder()
        self._sizes = GraphSizes.up_to(config.max_running, dummy_page=config.num_pages)

    def make(self, model: Model) -> Runner:
        """Raises ``ValueError`` for graphs of a model that is spread over ranks or that cannot be
        recorded.
        """
        config = self._config
        if config.cuda_graphs and model.group.world_size > 1:
            raise ValueError(
                f"runtime.cuda_graphs=true with a model that is spread over "
                f"{model.group.world_size} ranks: a graph records one process; use "
                "runtime.cuda_graphs=false"
            )
        if config.cuda_graphs and model.not_recorded is not None:
            raise ValueError(
                f"runtime.cuda_graphs=true with such a model: {model.not_recorded}; use "
                "runtime.cuda_graphs=false"
            )
        has_graphs = config.cuda_graphs and isinstance(model.backend, GraphAttention)
        if config.cuda_graphs and not has_graphs:
            logger.warning(
                "runtime.cuda_graphs: no graphs for %s, only FlashInfer's attention is recorded",
                type(model).__name__,
            )
        pool = model.new_pool((config.num_pages + has_graphs) * config.page_size)
        graphs = None
        if has_graphs:
            graphs = ForwardGraphs(
                model,
                table=self._table,
                pool=pool,
                sizes=self._sizes,
                max_rows=max(2, config.num_draft_tokens + 1),
                recorder=self._recorder,
            )
        loop = None
        if has_graphs and isinstance(model, DraftModel):
            loop = DraftLoopGraphs(
                model,
                table=self._table,
                pool=pool,
                sizes=self._sizes,
                num_draft_tokens=config.num_draft_tokens,
                recorder=self._recorder,
            )
        return Runner(model, pool, self._table, graphs, loop)
